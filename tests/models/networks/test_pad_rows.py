"""Padded prefix positions, whose rows LlamaGen's published drafters read, against the published
arithmetic.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lantern_bench.models.networks.eagle import published_drafter, untrained_drafter
from lantern_bench.models.networks.target import (
    CaptionFeatures,
    Condition,
    TransformerTarget,
    prefix_mask,
    prefix_seen,
)
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.training.drafter_task import target_features

PREFIX = 7
DIM = 32
VALID = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1], [1] * PREFIX], dtype=torch.bool)


@pytest.fixture(scope="module")
def target() -> TransformerTarget:
    config = TransformerConfig(
        vocab_size=19, dim=DIM, layers=3, heads=2, ffn_dim=48, prefix=PREFIX, grid=(3, 4)
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)  # fresh layers draw from torch's own stream
        target = TransformerTarget(config, CaptionFeatures(PREFIX, 6, DIM))
        return target.eval().requires_grad_(requires_grad=False)


def condition() -> Condition:
    values = torch.randn(len(VALID), PREFIX, 6, generator=torch.Generator().manual_seed(3))
    return Condition(values * VALID[..., None], VALID)


def published_mask(valid: Tensor) -> Tensor:
    """The LANTERN code's mask of a prefix in bfloat16, [B, 1, P, P]: two sums of very negative
    numbers.
    """
    later = torch.full((PREFIX, PREFIX), torch.finfo(torch.float32).min).triu(1)
    padded = torch.zeros(valid.shape, dtype=torch.bfloat16).masked_fill(
        ~valid, torch.finfo(torch.bfloat16).min
    )
    return later + padded[:, None, None, :]


def test_padding_sees_what_the_published_mask_lets_it_see() -> None:
    weights = published_mask(VALID).softmax(-1)[:, 0]
    seen = prefix_seen(VALID, PREFIX)
    assert torch.equal(seen, weights > 0)
    assert seen[0, 3, :5].tolist() == [True, True, True, True, False]
    assert not seen[0, 5, 3]


def test_prefix_features_equal_those_under_the_published_mask(target: TransformerTarget) -> None:
    """Of both rows of guidance, padded rows too: conditional padding is zero, unconditional padding
    is not.
    """
    both = torch.cat([VALID, VALID])
    prefix = target.prefix(condition(), guided=True)
    positions = torch.arange(prefix.shape[1])[None]
    wanted = target.transformer(prefix, published_mask(both), positions)
    features = target.session(len(VALID), guided=True, nodes=1).prefill(condition()).features
    assert (features - wanted).abs().max() < 1e-5
    assert features[: len(VALID)][~VALID].abs().max() == 0
    assert features[len(VALID) :][~VALID].abs().max() > 0.1


def test_training_features_follow_the_same_rule(target: TransformerTarget) -> None:
    tokens = torch.randint(19, (len(VALID), 12), generator=torch.Generator().manual_seed(4))
    for dropped in (True, False):
        target_output = target_features(
            target=target,
            condition=condition(),
            tokens=tokens,
            dropped=torch.full((len(VALID),), dropped),
        )
        rows = (
            target.session(len(VALID), guided=True, nodes=1)
            .prefill(condition())
            .features.chunk(2)[dropped]
        )
        assert (target_output.hidden[:, :PREFIX] - rows).abs().max() < 1e-5
    assert prefix_mask(VALID, PREFIX + 2)[0, 0, -1].tolist() == [-torch.inf] * 4 + [0.0] * 5


def test_only_drafters_that_read_padding_depend_on_it(target: TransformerTarget) -> None:
    """`mask_padding` of a drafter decides. LlamaGen's published drafters have it off."""
    with torch.random.fork_rng():
        torch.manual_seed(5)  # fresh layers draw from torch's own stream
        published = published_drafter(target.config, target).eval()
        ours = untrained_drafter(target).eval()
    assert not published.mask_padding
    assert ours.mask_padding
    features = target.session(len(VALID), guided=True, nodes=1).prefill(condition()).features
    moved = torch.where(torch.cat([VALID, VALID])[..., None], features, features + 1)
    root = torch.zeros(len(VALID), 1, dtype=torch.int64)
    ones = torch.ones(len(VALID), dtype=torch.int64)
    for drafter, reads in ((published, True), (ours, False)):
        logits = []
        for tokens_so_far in (features, moved):
            session = drafter.session(len(VALID), guided=True, nodes=2)
            with torch.no_grad():
                session.prefill(condition(), tokens_so_far)
                logits.append(session.observe(root, tokens_so_far[:, -1:], ones).cond[0])
        assert ((logits[0] - logits[1]).abs().max() > 1e-3) == reads
