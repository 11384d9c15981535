"""The only place that knows an architecture.

It has transformer, drafter, tokenizer and conditions, the families, and their files. `registry.py`
finds a model by name, and `load.py` loads the models of an experiment.
"""
