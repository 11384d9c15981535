"""Teacher forcing: what target and drafter predict along given tokens, through the decode sessions.

Measurements need the distributions that decoding sees, so they come from the same sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.protocol import Drafter, DrafterLogits, DrafterSession, Logits, Target


class Forced(NamedTuple):
    """The target along tokens int64 [B, N].

    start: scores of the prefill. scores: logits [B, N, V] that predict the tokens, and features [rows, N, width] of
    the positions of the tokens (feature j predicts token j + 1).
    """

    tokens: Tensor
    condition: Any
    start: Logits
    scores: Logits


def teacher_forced(target: Target, condition: Any, tokens: Tensor, guided: bool) -> Forced:
    """Score whole sequences [B, N] in one forward: a chain on the prefix, as if every token had been drafted."""
    batch, length = tokens.shape
    session = target.session(batch, guided, length)
    start = session.prefill(condition)
    chain = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
    after = session.score(tokens, torch.arange(length, device=tokens.device).expand(batch, -1), chain)
    cond = torch.cat([start.cond, after.cond[:, :-1]], dim=1)
    uncond = after.uncond
    if start.uncond is not None and uncond is not None:
        uncond = torch.cat([start.uncond, uncond[:, :-1]], dim=1)
    return Forced(tokens, condition, start, Logits(cond, uncond, after.features))


def drafts_along(drafter: Drafter, forced: Forced) -> Iterator[DrafterLogits]:
    """Yield what the drafter proposes for tokens 1 to N - 1, one after the other, fed the true features (n = 1)."""
    tokens = forced.tokens
    session = drafter.session(len(tokens), forced.start.uncond is not None, 1)
    ones = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
    session.prefill(forced.condition, forced.start.features)
    feature = forced.start.features[:, -1:]
    for position in range(tokens.shape[1] - 1):
        yield session.observe(tokens[:, position : position + 1], feature, ones)
        feature = forced.scores.features[:, position : position + 1]


def drafts_at(drafter: Drafter, forced: Forced, positions: Tensor, nodes: int) -> tuple[DrafterSession, DrafterLogits]:
    """Return a drafter session of `nodes` nodes at a position of each sequence, and its drafts for the token there.

    `positions` int64 [B], at least 1, is the number of committed tokens. The session is as at the start of a step: its
    cache holds committed tokens and true features only.
    """
    tokens, most = forced.tokens, int(positions.max())
    if int(positions.min()) < 1:
        raise ValueError("positions must be at least 1")
    session = drafter.session(len(tokens), forced.start.uncond is not None, nodes)
    session.prefill(forced.condition, forced.start.features)
    features = torch.cat([forced.start.features[:, -1:], forced.scores.features[:, : most - 1]], dim=1)
    return session, session.observe(tokens[:, :most], features, positions)
