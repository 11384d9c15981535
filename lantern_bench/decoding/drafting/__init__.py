"""How a step drafts: a class for each way to draft; the rows that name their classes are in methods/draftings.py."""

from __future__ import annotations

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.methods.parameters import load_code


def drafting_of(decoding: Decoding, target: Target, batch: int = 1) -> DraftMethod:
    """Return the drafting of a configuration; its tensors are where the target computes."""
    method: DraftMethod = load_code(decoding.drafting_row.make)(decoding, target, batch)
    return method
