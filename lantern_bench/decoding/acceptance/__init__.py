"""How drafts are accepted or rejected; the rows that name the rules are in methods/rules.py.

`tree_acceptance.py`: the children of a node, one by one. `traversal.py`: a tree, or a chain as one block.
`relaxation.py`: neighbour mass and its bounds; what rules see. `cool_sd.py`, `gsd.py`, `by_entropy.py`: other relaxed
rules. `walk.py`: the walk down a draft tree, which decides what a step commits.
"""
