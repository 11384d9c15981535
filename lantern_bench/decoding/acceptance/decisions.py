"""How a rule decides on drafts, each as if its earlier siblings had been rejected.

    strictly          accept x with min(1, p(x) / q(x))
    by neighbours     accept x with min(1, (p(x) + m(x)) / q(x)), where m(x) is at most a limit
    by probability    accept x with f(x)

m(x) is the neighbour mass of x: the summed probability of its nearest codes, added nearest first
while the sum is at most the limit. docs/algorithms.md, sections 3, 4 and 8.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.draft_view import DraftView

if TYPE_CHECKING:
    from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule


@dataclass(frozen=True)
class Lenders:
    """The codes near the drafts of n nodes, and which of them lend their probability."""

    tokens: Tensor  # int64 [n, k], nearest first
    taken: Tensor  # bool [n, k]


@dataclass(frozen=True)
class Decision:
    """How a rule decides on the drafts x of n nodes, and what a rejection of x has to know."""

    probability: Tensor  # [n], of accepting x
    neighbour_mass: Tensor  # [n], m(x): what x takes from other tokens
    lenders: Lenders | None = None  # by neighbours: whom x takes it from
    # which part of each token's q acceptance uses up: [n, V], or one number for all
    removal: Tensor | float = 1.0


def decide_strictly(draft: DraftView, rule: ConfiguredRule) -> Decision:
    """Decide as speculative sampling does."""
    del rule
    mass = torch.zeros_like(draft.p_x)
    return Decision(probability=accept_probability(draft, mass), neighbour_mass=mass)


def decide_by_neighbours(draft: DraftView, rule: ConfiguredRule) -> Decision:
    """Decide with the mass of neighbours added; a draft of probability 0 takes none."""
    cumulative_mass, within_limit = neighbour_masses(draft, rule)
    taken = within_limit & (draft.p_x > 0)[:, None]
    mass = torch.where(taken, cumulative_mass, 0.0).amax(dim=1)
    return Decision(
        probability=accept_probability(draft, mass),
        neighbour_mass=mass,
        lenders=Lenders(tokens=draft.neighbour_tokens, taken=taken),
    )


def decide_by_probability(draft: DraftView, rule: ConfiguredRule) -> Decision:
    """Decide with f(x), which says for every token how much of q acceptance uses up."""
    f = every_probability(draft, rule)
    probability = f.gather(1, draft.token[:, None]).squeeze(1)
    accepted = probability if draft.q_x is None else draft.q_x * probability
    return Decision(
        probability=probability,
        neighbour_mass=(accepted - draft.p_x).clamp_min(0.0),
        removal=f,
    )


def accept_probability(draft: DraftView, mass: Tensor) -> Tensor:
    """Return min(1, (p(x) + m(x)) / q(x)) [n]."""
    boosted = draft.p_x + mass
    ratio = boosted if draft.q_x is None else boosted / draft.q_x
    return ratio.clamp(max=1.0)


def neighbour_masses(draft: DraftView, rule: ConfiguredRule) -> tuple[Tensor, Tensor]:
    """Return the cumulative mass of the neighbours, nearest first, and which keep the limit.

    Both [n, k].
    """
    limit = rule.function(draft, rule.values)
    cumulative_mass = draft.neighbour_p.cumsum(dim=1)
    # cumprod stops at the first neighbour over the limit, even if a parallel scan rounds down
    # behind it. int32, because Triton cannot scan unsigned numbers.
    is_within = cumulative_mass <= limit[:, None]
    return cumulative_mass, is_within.cumprod(dim=1, dtype=torch.int32).bool()


def every_probability(draft: DraftView, rule: ConfiguredRule) -> Tensor:
    """Return f [n, V], clamped to [0, 1]; 0 for tokens that cannot be drawn."""
    p = draft.p
    q = draft.q
    f = rule.function(draft, rule.values).to(p.dtype).expand_as(p)
    if q is not None:
        f = torch.where(q > 0, f, 0.0)
    return f.clamp(0.0, 1.0)


def relaxed_distribution(draft: DraftView, decision: Decision) -> Tensor:
    """Return p~ [n, V]: p(x) + m(x) at x, 0 at the lenders, p elsewhere."""
    relaxed = draft.p.clone()
    if decision.lenders is not None:
        tokens = decision.lenders.tokens
        left = torch.where(decision.lenders.taken, 0.0, relaxed.gather(1, tokens))
        relaxed.scatter_(1, tokens, left)
    return relaxed.scatter_add_(1, draft.token[:, None], decision.neighbour_mass[:, None])
