"""How drafts are accepted or rejected; the rows that name the rules are in methods/rules.py.

`rule.py`: a rule with its values, what it sees of drafts, and the relaxed rules. `children.py`: the children of a node,
one by one, and the residual. `traversal.py`: a tree, or a chain as one block. `walk.py`: the path that a step commits.
"""
