"""The command line: every command parses flags, calls the package and shows the result."""
