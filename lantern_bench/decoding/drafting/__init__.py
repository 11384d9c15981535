"""How a step drafts."""
