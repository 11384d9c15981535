"""Ways to draft, one class each; the rows that name the classes are in methods/draftings.py."""
