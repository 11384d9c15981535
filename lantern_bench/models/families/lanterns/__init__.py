"""The bundled miniature model family."""
