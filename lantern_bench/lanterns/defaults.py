"""How the embedded model is decoded where nobody says otherwise, chosen by measurement; no torch."""

from __future__ import annotations

__all__ = ["GUIDANCE", "TREE"]

GUIDANCE = 2.0
# As fast as any chain or small tree for the strict rule on two cores (docs/engine.md); relaxed ones gain by longer.
TREE = "chain-4"
