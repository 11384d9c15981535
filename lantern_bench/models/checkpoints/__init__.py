"""Weight files: downloads, formats, and maps from file tensors to ours. No families."""
