"""Teacher forcing through the sessions: what it says is what decoding saw."""

from __future__ import annotations

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import drafts_along, drafts_at, teacher_forced
from lantern_bench.models.lanterns.captions import HELD_OUT
from lantern_bench.models.lanterns.family import Lanterns
from lantern_bench.models.loaded_model import LoadedModel

CAPTIONS = [item.caption() for item in HELD_OUT[:2]]
LENGTH = 12


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return Lanterns().load(torch.device("cpu"), torch.float32)


@torch.inference_mode()
def test_forced_logits_and_drafts_are_those_of_decoding(model: LoadedModel) -> None:
    decoding = Decoding(mode="ar", cfg_scale=1.5)
    streams = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    condition = model.condition(CAPTIONS)
    made = decode(model, condition, decoding, streams, tokens=LENGTH, keep_logits=True)
    tokens = torch.stack([one.tokens for one in made]).long()
    forced = teacher_forced(model.target, condition, tokens, guided=True)
    found = guide(forced.scores.cond, forced.scores.uncond, 1.5)
    torch.testing.assert_close(found, torch.stack([one.logits for one in made]), atol=1e-3, rtol=0)

    along = [guide(drafts.cond, drafts.uncond, 1.5)[:, 0].clone() for drafts in drafts_along(model.drafter, forced)]
    assert len(along) == LENGTH - 1
    positions = torch.tensor([1, 9])
    session, drafts = drafts_at(model.drafter, forced, positions, 4)
    there = guide(drafts.cond, drafts.uncond, 1.5)[:, 0]
    for image, position in enumerate(positions.tolist()):
        torch.testing.assert_close(there[image], along[position - 1][image], atol=1e-3, rtol=0)
    # The session goes on from there as a step does: an extension is of the place, not of the longest image.
    one = torch.zeros(2, 1, dtype=torch.int64)
    deeper = session.extend(one, one, torch.ones(2, 1, 1, dtype=torch.bool)).cond[:, 0].clone()
    alone, _ = drafts_at(
        model.drafter, teacher_forced(model.target, model.condition(CAPTIONS[:1]), tokens[:1], True), positions[:1], 4
    )
    again = alone.extend(one[:1], one[:1], torch.ones(1, 1, 1, dtype=torch.bool)).cond[:, 0]
    torch.testing.assert_close(deeper[:1], again, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_positions_below_1_are_refused(model: LoadedModel) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    forced = teacher_forced(model.target, model.condition(CAPTIONS[:1]), tokens, guided=True)
    with pytest.raises(ValueError, match="positions must be at least 1"):
        drafts_at(model.drafter, forced, torch.tensor([0]), 1)
