"""Prompts of a run: files, published sets, captioned pictures."""
