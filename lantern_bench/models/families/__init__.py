"""One file for each model family. No networks."""
