"""The relaxed rules: how much probability the neighbours of a draft token lend it, and within which bound.

Strict, additive (LANTERN, arXiv 2410.03355) and multiplicative (LANTERN++, arXiv 2502.06352); algorithms.md, section 4.
Rules from outside the package (`plugins.py`) bring another limit of m(x); all else is the same for all of them.
Probabilities in, probabilities out: accepting, rejecting and residuals are `judge.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lantern_bench.config.methods import LOSSLESS_RULES, OUTSIDE_RULES, RULES

Residual: TypeAlias = Literal["exact", "official"]


@dataclass(frozen=True)
class Relaxation:
    """A rule with its parameters.

    `bound` is delta (additive: m(x) <= delta, delta > 0) or lambda (multiplicative: p~(x) <= lambda p(x), lambda > 1);
    the strict rule ignores it, and a rule from outside says what it means. `neighbours` is k, 0 means strict.
    `residual` says what a rejection leaves: `exact` takes out the merged mass only, `official` repeats the published
    code. `choices`: how many tokens, the first of the vocabulary, are ever chosen; the others stand where they must
    (None: all are). Values outside the ranges raise ValueError. `margin`, a tensor of no dimensions, stands for the
    bound of a published rule where it is given: delta, or lambda - 1. A program that reads it serves every bound.
    """

    rule: str = "strict"
    neighbours: int = 0
    bound: float = 0.0
    residual: Residual = "exact"
    choices: int | None = None
    margin: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.rule == "none" or self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}")
        if self.residual not in ("exact", "official"):
            raise ValueError(f"unknown residual {self.residual!r}")
        if self.neighbours < 0:
            raise ValueError(f"neighbours must be at least 0, not {self.neighbours}")
        if self.rule == "additive" and not self.bound > 0.0:
            raise ValueError(f"delta must be above 0, not {self.bound}")
        if self.rule == "multiplicative" and not self.bound > 1.0:
            raise ValueError(f"lambda must be above 1, not {self.bound}")
        if self.rule in OUTSIDE_RULES and not OUTSIDE_RULES[self.rule].allows(self.bound):
            raise ValueError(f"bound {self.bound:g}: {OUTSIDE_RULES[self.rule].allowed}")

    @property
    def merges(self) -> bool:
        """Whether any neighbour can lend probability; False is a lossless rule."""
        return self.rule not in LOSSLESS_RULES and self.neighbours > 0

    @property
    def columns(self) -> int:
        """How many columns of the table are read (at most V - 1): k, and one more under `official`."""
        if not self.merges:
            return 0
        return self.neighbours + (self.residual == "official")


STRICT = Relaxation()


def neighbour_columns(table: Tensor | None, tokens: Tensor, relaxation: Relaxation) -> Tensor:
    """Return int64 [..., w]: the nearest codes of `tokens` [...], as many as the rule reads (w is at most V - 1).

    `table` [V, >= min(columns, V - 1)] comes from `nearest_codes`; a narrower or missing one raises ValueError.
    """
    if table is None:
        raise ValueError(f"the {relaxation.rule} rule needs a table of nearest codes")
    width = min(relaxation.columns, table.shape[0] - 1)
    if table.shape[1] < width:
        raise ValueError(f"the table has {table.shape[1]} neighbours, the rule reads {width}")
    return table[tokens, :width].long()


@dataclass(frozen=True)
class _View:
    """What a rule may look at (`spec.rules.DraftView`); `make_whole` gives p [..., V]."""

    own: Tensor
    near: Tensor
    make_whole: Callable[[], Tensor]

    @property
    def whole(self) -> Tensor:
        return self.make_whole()


def _limit(draft: _View, relaxation: Relaxation) -> Tensor:
    """The most m(x) [...] that the rule lets the draft borrow."""
    if relaxation.rule in OUTSIDE_RULES:
        limit: Tensor = OUTSIDE_RULES[relaxation.rule].limit(draft, relaxation.bound)
        return limit
    margin = relaxation.margin
    if relaxation.rule == "additive":
        return torch.full_like(draft.own, relaxation.bound) if margin is None else margin.expand_as(draft.own)
    return draft.own * (relaxation.bound - 1.0 if margin is None else margin)


def merge_prefix(
    near_probs: Tensor, token_probs: Tensor, relaxation: Relaxation, whole: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (m(x) [...], taken bool [..., k]): the longest prefix of neighbours whose mass keeps the bound.

    `near_probs` [..., k] are p of the neighbours in table order, `token_probs` [...] is p(x), `whole` gives p [..., V]
    to a rule that asks for it. The sum runs in table order and is compared with the bound in the dtype of p (float32
    in decoding), so m never exceeds the bound by a rounding. Under `exact` a token of probability 0 merges nothing.
    algorithms.md, section 4.
    """
    bound = _limit(_View(token_probs, near_probs, whole), relaxation)
    running = near_probs.cumsum(dim=-1)
    # cumprod: nothing after the first neighbour that breaks the bound, even where a parallel scan rounds downwards.
    taken = (running <= bound[..., None]).cumprod(dim=-1, dtype=torch.uint8).bool()
    if relaxation.residual == "exact":
        taken &= (token_probs > 0)[..., None]
    mass = torch.where(taken, running, 0.0).amax(dim=-1)
    return mass, taken


def merged_mass(p: Tensor, tokens: Tensor, table: Tensor | None, relaxation: Relaxation) -> tuple[Tensor, Tensor]:
    """Return (m(x) [...], taken bool [..., k]) for `tokens` [...] under the distributions `p` [..., V].

    With the strict rule or k = 0 nothing is merged: zeros and an empty [..., 0]. algorithms.md, section 4.
    """
    token_probs = p.gather(-1, tokens[..., None]).squeeze(-1)
    if not relaxation.merges:
        return torch.zeros_like(token_probs), token_probs.new_empty(*token_probs.shape, 0, dtype=torch.bool)
    near = neighbour_columns(table, tokens, relaxation)[..., : relaxation.neighbours]
    return merge_prefix(p.gather(-1, near), token_probs, relaxation, lambda: p)


def relaxed(p: Tensor, tokens: Tensor, table: Tensor | None, relaxation: Relaxation) -> tuple[Tensor, Tensor]:
    """Return the relaxed distributions p~ [..., V] of `p` [..., V] for the draft tokens [...], and m(x) [...].

    p~(x) = p(x) + m(x), 0 at the merged neighbours, p elsewhere; TV(p, p~) = m(x). algorithms.md, section 4.
    """
    mass, taken = merged_mass(p, tokens, table, relaxation)
    tilde = p.clone()
    if relaxation.merges:
        near = neighbour_columns(table, tokens, relaxation)[..., : relaxation.neighbours]
        tilde.scatter_(-1, near, torch.where(taken, 0.0, p.gather(-1, near)))
    return tilde.scatter_add_(-1, tokens[..., None], mass[..., None]), mass
