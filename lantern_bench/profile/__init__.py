"""What decode steps cost: measurements, predictions and the search for the fastest tree.

`prediction.py` predicts the speed of a run on another device, with the formulas of `cost_model.py`
and the devices of `device_specs.py`. `step_costs.py` measures steps on this machine, and
`tree_search.py` measures drafts of many sizes.
"""
