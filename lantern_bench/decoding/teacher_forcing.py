"""Teacher forcing: what target and drafter predict along given tokens, through the sessions that decoding uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import Drafter, DrafterLogits, Logits, Target
from lantern_bench.decoding.sampling import decoding_probabilities, guide


class Forced(NamedTuple):
    """The target along given tokens of B images."""

    tokens: Tensor  # int64 [B, N]
    condition: Any
    prefix: Logits  # of the prefill
    # [B, N, V] that predict the tokens; features [rows, N, width] of the positions of the tokens
    logits: Logits


def teacher_forced(target: Target, condition: Any, tokens: Tensor, guided: bool) -> Forced:
    """Score whole sequences [B, N] in one forward: a chain on the prefix, as if every token had been drafted."""
    batch, length = tokens.shape
    session = target.session(batch, guided=guided, nodes=length)
    prefix = session.prefill(condition)
    chain = (
        torch.ones(length, length, dtype=torch.bool, device=tokens.device)
        .tril()
        .expand(batch, -1, -1)
    )
    after = session.score(
        tokens, torch.arange(length, device=tokens.device).expand(batch, -1), chain
    )
    cond = torch.cat([prefix.cond, after.cond[:, :-1]], dim=1)
    uncond = after.uncond
    if prefix.uncond is not None and uncond is not None:
        uncond = torch.cat([prefix.uncond, uncond[:, :-1]], dim=1)
    return Forced(
        tokens=tokens,
        condition=condition,
        prefix=prefix,
        logits=Logits(cond, uncond, after.features),
    )


def drafter_logits_along(drafter: Drafter, forced: Forced) -> Iterator[DrafterLogits]:
    """Yield the drafter's logits of tokens 1 to N - 1, one after the other, fed the true features (n = 1)."""
    tokens = forced.tokens
    # The features that predicted each of the tokens.
    features = torch.cat([forced.prefix.features[:, -1:], forced.logits.features[:, :-1]], dim=1)
    guided = forced.prefix.uncond is not None
    session = drafter.session(len(tokens), guided=guided, nodes=1)
    ones = torch.ones(len(tokens), dtype=torch.int64, device=tokens.device)
    session.prefill(forced.condition, forced.prefix.features)
    for position in range(tokens.shape[1] - 1):
        now = slice(position, position + 1)
        yield session.observe(tokens[:, now], features[:, now], ones)


def drafted_along(drafter: Drafter, forced: Forced, decoding: Decoding) -> Tensor:
    """Return the distributions q [B, N - 1, V] that tokens 1 to N - 1 are drafted from."""
    drafts = drafter_logits_along(drafter, forced)
    guided = torch.cat(
        [guide(draft.cond, draft.uncond, decoding.cfg_scale) for draft in drafts], dim=1
    )
    return decoding_probabilities(guided, decoding)
