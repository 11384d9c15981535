"""Helpers that every folder may use. They import nothing from the folders above."""
