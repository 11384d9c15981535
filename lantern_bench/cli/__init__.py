"""The command line: one file per command, which parses, calls and renders.

No command holds logic of its own, and none imports anything heavy before it runs; `main.py` joins them.
"""
