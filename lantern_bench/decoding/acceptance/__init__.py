"""How drafts are accepted or rejected; the rows that name the rules are in config/methods.py.

`tree_acceptance.py`: the children of a node, one by one. `block_acceptance.py`: a chain as one block. `relaxation.py`:
neighbour mass and its bounds. `walk.py`: the walk down a draft tree, which decides what a step commits.
"""
