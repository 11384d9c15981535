"""Train the bundled model family."""
