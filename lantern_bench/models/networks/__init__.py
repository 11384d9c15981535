"""The modules of the networks. No file formats."""
