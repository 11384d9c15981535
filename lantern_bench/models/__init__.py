"""The only place that knows an architecture.

It has transformer, drafter, tokenizer and conditions, the families, and their files. `registry.py`
finds a model by name, `load.py` loads the models of an experiment, and `random_weights.py` makes
models without files.
"""
