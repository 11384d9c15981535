"""The command line: each command parses flags, calls the package and renders the result. `main.py` joins them."""
