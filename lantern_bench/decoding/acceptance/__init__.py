"""How drafts are accepted or rejected."""
