"""How a step drafts: one file per way to draft; the rows that name them are in methods/draftings.py.

Each returns the `DraftTree` that verification walks and knows nothing of the acceptance rule. Randomness comes in as
noise, and all shapes are known beforehand, so that a whole draft is one program.
"""

from __future__ import annotations

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import DraftMethod, Target
from lantern_bench.methods.code import Code, load_code

__all__ = ["drafting_of"]


def drafting_of(decoding: Decoding, target: Target, batch: int = 1, make: Code | None = None) -> DraftMethod:
    """The drafting of a configuration, its tensors where the target computes; `make` replaces that of its row."""
    row = decoding.drafting_row
    make = make or (row.published if decoding.value("form") == "published" else row.make)
    method: DraftMethod = load_code(make)(decoding, target, batch)
    return method
