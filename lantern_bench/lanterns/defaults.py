"""How the embedded model is decoded where nobody says otherwise, chosen by measurement; no torch."""

from __future__ import annotations

__all__ = ["GUIDANCE", "TREE"]

GUIDANCE = 2.0
TREE = "small-7"
