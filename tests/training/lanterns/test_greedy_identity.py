"""Greedy speculative decoding of the bundled model equals greedy decoding, token for token, in float32.

Where rounding between a forward of one node and of many changes a choice, the first difference must be a near-tie:
top-1 minus top-2 guided logit below 1e-4 under teacher forcing (docs/algorithms.md, section 6). This set has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.models.lanterns import GUIDANCE
from lantern_bench.models.lanterns.captions import HELD_OUT
from lantern_bench.models.lanterns.family import Lanterns
from lantern_bench.models.loaded_model import LoadedModel

CAPTIONS = [item.caption() for item in HELD_OUT[:6]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "cfg_scale": GUIDANCE}
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return Lanterns().load(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> tuple[Tensor, Tensor]:
    """AR greedy tokens [B, N] and the guided logits [B, N, V] they came from: teacher forcing along them."""
    made = decode(model, model.condition(CAPTIONS), Decoding(mode="ar", **GREEDY), streams(), keep_logits=True)
    return torch.stack([one.tokens for one in made]), torch.stack([one.logits for one in made])


def streams() -> list[torch.Generator]:
    return [torch.Generator() for _ in CAPTIONS]


@pytest.mark.parametrize(
    "drafting",
    [{"tree": "small-7"}, {"tree": "eagle1-25"}, {"drafting": "dynamic", "nodes": 24, "depth": 4, "beam": 6}],
)
def test_greedy_speculation_equals_greedy_decoding(
    model: LoadedModel, plain: tuple[Tensor, Tensor], drafting: dict[str, Any]
) -> None:
    decoding = Decoding(mode="speculative", **drafting, **GREEDY)
    made = decode(model, model.condition(CAPTIONS), decoding, streams())
    wanted, logits = plain
    ties = 0
    for image, one in enumerate(made):
        assert one.trace.mean_accepted_length > 1.5
        different = (one.tokens != wanted[image]).nonzero().flatten()
        if len(different):
            best = logits[image, different[0]].topk(2).values
            assert best[0] - best[1] < NEAR_TIE, f"image {image} differs at token {int(different[0])}"
            ties += 1
    print(f"{decoding.cell_id}: near-ties {ties} of {len(made)}")
    assert ties == 0
