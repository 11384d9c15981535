"""What is asked: experiments, from a YAML file and flags to a plan. Imports no torch."""
