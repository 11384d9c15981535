"""Drafting, acceptance and the decode loop.

The specification is docs/algorithms.md; functions that follow a formula cite its section.
"""
