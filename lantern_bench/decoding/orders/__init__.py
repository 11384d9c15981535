"""Orders of decoding without drafts, one class each, which rows in methods/draftings.py name."""
