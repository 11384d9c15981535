"""Teacher forcing through the sessions: what it says is what decoding saw."""

from __future__ import annotations

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Proposer
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.teacher_forcing import drafted_along, teacher_forced
from lantern_bench.models.families.lanterns.description import HELD_OUT
from lantern_bench.models.families.lanterns.family import Lanterns
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
    images = decode(
        model=model,
        condition=condition,
        decoding=decoding,
        generators=streams,
        tokens=LENGTH,
        keep_logits=True,
    )
    tokens = torch.stack([image.tokens for image in images]).long()
    forced = teacher_forced(model.target, condition, tokens, guided=True)
    logits = guide(forced.logits.cond, forced.logits.uncond, 1.5)
    torch.testing.assert_close(
        logits, torch.stack([image.logits for image in images]), atol=1e-3, rtol=0
    )

    q = drafted_along(model.drafter, forced, decoding)
    for position in (1, 9):  # the drafter of a step that begins behind so many tokens
        session = model.drafter.session(2, guided=True, nodes=1)
        session.prefill(condition, forced.prefix.features)
        features = torch.cat(
            [forced.prefix.features[:, -1:], forced.logits.features[:, : position - 1]], dim=1
        )
        proposer = Proposer(
            session=session,
            decoding=decoding,
            tokens=tokens[:, :position],
            features=features,
            counts=torch.full((2,), position),
        )
        torch.testing.assert_close(proposer.root_q[:, 0], q[:, position - 1], atol=1e-3, rtol=0)
        assert not proposer.broken.any()
