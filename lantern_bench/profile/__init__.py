"""What decode steps cost: measurements, predictions and the search for the fastest tree.

`prediction.py` predicts the speed of a run on another device, with the devices and formulas of
`cost_model.py`. `step_costs.py` measures steps on this machine, and
`tree_search.py` measures drafts of many sizes.
"""
