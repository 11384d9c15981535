"""The files of a run. No statistics."""
