"""Teacher forcing: what target and drafter predict along given tokens.

It runs through the sessions that decoding uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import Drafter, DrafterLogits, Logits, Target
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.tree import index_along


class TeacherForced(NamedTuple):
    """The target along given tokens of B images."""

    # the given tokens, int64 [B, N]
    tokens: Tensor
    condition: Any
    # the result of the prefill
    prefix: Logits
    # [B, N, V] that predict the tokens; features [rows, N, width] of the positions of the tokens
    logits: Logits


def teacher_forced(
    target: Target, condition: Any, tokens: Tensor, *, guided: bool
) -> TeacherForced:
    """Score whole sequences in one forward, as if every token were a draft of one chain.

    Args:
        target: The target.
        condition: What the images are conditioned on.
        tokens: The sequences, [B, N].
        guided: Whether to compute unconditional logits too.
    """
    batch, length = tokens.shape
    session = target.session(batch, guided=guided, nodes=length)
    prefix = session.prefill(condition)
    chain = tokens.new_ones(length, length, dtype=torch.bool).tril()
    depths = index_along(tokens, 1)
    after = session.score(tokens, depths.expand(batch, -1), chain.expand(batch, -1, -1))
    cond = torch.cat([prefix.cond, after.cond[:, :-1]], dim=1)
    uncond = after.uncond
    if prefix.uncond is not None and uncond is not None:
        uncond = torch.cat([prefix.uncond, uncond[:, :-1]], dim=1)
    return TeacherForced(
        tokens=tokens,
        condition=condition,
        prefix=prefix,
        logits=Logits(cond, uncond, after.features),
    )


def drafter_logits_along(drafter: Drafter, forced: TeacherForced) -> DrafterLogits:
    """Return the drafter's logits [B, N - 1, V] of tokens 1 to N - 1, given the true features."""
    tokens = forced.tokens
    # The features that predicted each of the tokens.
    features = torch.cat([forced.prefix.features[:, -1:], forced.logits.features[:, :-1]], dim=1)
    session = drafter.session(len(tokens), guided=forced.prefix.uncond is not None, nodes=1)
    session.prefill(forced.condition, forced.prefix.features)
    return session.observe_all(tokens[:, :-1], features[:, :-1])


def drafted_along(drafter: Drafter, forced: TeacherForced, decoding: Decoding) -> Tensor:
    """Return the distributions q [B, N - 1, V] that tokens 1 to N - 1 are drafted from.

    Args:
        drafter: The drafter.
        forced: The target along the tokens.
        decoding: How q is made of the drafter's logits.
    """
    drafts = drafter_logits_along(drafter, forced)
    return decoding_probabilities(guide(drafts.cond, drafts.uncond, decoding.cfg_scale), decoding)
