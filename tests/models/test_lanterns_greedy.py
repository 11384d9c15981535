"""Greedy speculative decoding of the bundled model equals greedy decoding, token for token, in float32.

Where rounding between a forward of one node and of many changes a choice, the first difference must be a near-tie:
top-1 minus top-2 guided logit below 1e-4 under teacher forcing (docs/algorithms.md, section 6). This set has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lantern_bench.models.lanterns import GUIDANCE, HELD_OUT

CAPTIONS = [item.caption() for item in HELD_OUT[:2]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "cfg_scale": GUIDANCE}


@pytest.mark.parametrize(
    "drafting", [{"tree": "eagle1-25"}, {"drafting": "dynamic", "nodes": 24, "depth": 4, "beam": 6}]
)
def test_greedy_speculation_equals_greedy_decoding(
    decode_lanterns: Callable[..., list[Any]], drafting: dict[str, Any]
) -> None:
    plain = decode_lanterns({"mode": "ar", **GREEDY}, CAPTIONS)
    for image, expected in zip(
        decode_lanterns({"mode": "speculative", **drafting, **GREEDY}, CAPTIONS), plain, strict=True
    ):
        assert image.trace.mean_accepted_length > 1.5
        assert torch.equal(image.tokens, expected.tokens)
