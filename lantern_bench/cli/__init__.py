"""The command line: one file per command, which parses, calls and renders, and holds no logic of its own."""
