"""Files: checkpoints, downloads, model files, caches."""
