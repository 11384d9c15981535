"""Weight files: how they are opened, and which tensor goes where. No families."""
