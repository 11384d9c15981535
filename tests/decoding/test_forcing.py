"""Teacher forcing through the sessions: what it says is what decoding saw."""

from __future__ import annotations

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import drafter_logits_along, proposer_at, teacher_forced
from lantern_bench.models.lanterns import HELD_OUT, Lanterns
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
    images = decode(model, condition, decoding, streams, tokens=LENGTH, keep_logits=True)
    tokens = torch.stack([image.tokens for image in images]).long()
    forced = teacher_forced(model.target, condition, tokens, guided=True)
    logits = guide(forced.logits.cond, forced.logits.uncond, 1.5)
    torch.testing.assert_close(logits, torch.stack([image.logits for image in images]), atol=1e-3, rtol=0)

    along = [
        guide(drafts.cond, drafts.uncond, 1.5)[:, 0].clone() for drafts in drafter_logits_along(model.drafter, forced)
    ]
    assert len(along) == LENGTH - 1
    positions = torch.tensor([1, 9])
    proposer = proposer_at(model.drafter, forced, positions, 4, decoding)
    for image, position in enumerate(positions.tolist()):
        q = decoding_probabilities(along[position - 1][image], decoding)
        torch.testing.assert_close(proposer.root_q[image, 0], q, atol=1e-3, rtol=0)
    # The drafter goes on from there as in a step: an extension is behind each position, not behind the longest image.
    zero = torch.zeros(2, 1, dtype=torch.int64)
    deeper = proposer.extend(zero, zero, torch.ones(2, 1, 1, dtype=torch.bool)).clone()
    first = teacher_forced(model.target, model.condition(CAPTIONS[:1]), tokens[:1], True)
    alone = proposer_at(model.drafter, first, positions[:1], 4, decoding)
    again = alone.extend(zero[:1], zero[:1], torch.ones(1, 1, 1, dtype=torch.bool))
    torch.testing.assert_close(deeper[:1], again, atol=1e-3, rtol=0)
    assert not proposer.broken.any()
