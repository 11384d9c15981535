"""How drafts are accepted or rejected; the rows that name the rules are in methods/rules.py.

`rule.py`: a rule with its values, and what it sees of drafts. `children.py`: the children of a node, one by one, and
the residual. `relaxed_rules.py`: the relaxed rules. `traversal.py`: a tree, or a chain as one block. `walk.py`: the
walk down a draft tree, which decides what a step commits.
"""
