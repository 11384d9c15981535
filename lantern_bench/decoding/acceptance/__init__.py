"""How drafts are accepted or rejected; the rows that name the rules are in methods/rules.py."""
