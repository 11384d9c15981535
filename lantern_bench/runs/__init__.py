"""Runs: from a checked sweep to records, images and scores on the disk."""
