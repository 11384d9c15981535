"""What was asked: experiments, plans, seeds, and the names of all columns.

Nothing here imports torch, so that a plan can be printed at once. How anything is computed or measured is elsewhere.
"""
