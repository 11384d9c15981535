"""Decides which drafts are accepted; the acceptance rules themselves are in methods/rules.py."""
