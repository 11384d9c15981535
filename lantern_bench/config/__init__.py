"""The tables of methods, and experiments from a YAML file to a plan. Imports no torch."""
