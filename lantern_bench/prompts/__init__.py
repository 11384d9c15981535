"""Prompts and prompt sets. No torch."""
