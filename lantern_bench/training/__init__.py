"""Training: one loop, and what is trained with it: an EAGLE drafter for any target."""
