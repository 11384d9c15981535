"""Train an EAGLE drafter for any target."""
