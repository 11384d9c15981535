"""Relaxed rules: the neighbour mass m(x) of a draft token and its bound (docs/algorithms.md, section 4).

Additive (LANTERN, arXiv 2410.03355) and multiplicative (LANTERN++, arXiv 2502.06352). A rule gives the limit of m(x)
and nothing else, as rules of other packages do (`plugins.py`). Residuals are in `tree_acceptance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lantern_bench.config.methods import RULES
from lantern_bench.plugins import DraftView, load_code

Residual: TypeAlias = Literal["exact", "official"]


@dataclass(frozen=True)
class Relaxation:
    """An acceptance rule with its parameters.

    `bound` is the value of the rule's bound (`Rule.bound`: delta, lambda, ...); strict rules ignore it. Compiled
    programs get a 0-dimensional tensor, so that one program serves every value. `neighbours` is k, 0 means strict.
    `residual` after a rejection: `exact` takes out the neighbour mass only, `official` repeats the published code.
    `choices`: tokens behind the first `choices` are forced (None: none is). Raises ValueError for values out of range.
    """

    rule: str = "strict"
    neighbours: int = 0
    bound: float | Tensor = 0.0
    residual: Residual = "exact"
    choices: int | None = None
    # Loaded here, outside compiled programs.
    limit: Callable[..., Tensor] | None = field(default=None, init=False, compare=False, repr=False)
    accept: Callable[..., Any] | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.rule == "none" or self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}")
        if self.residual not in ("exact", "official"):
            raise ValueError(f"unknown residual {self.residual!r}")
        if self.neighbours < 0:
            raise ValueError(f"neighbours must be at least 0, not {self.neighbours}")
        row = RULES[self.rule]
        # The recorded cases of the published code have delta = 1, which an experiment refuses.
        if row.limit is not None and not isinstance(self.bound, Tensor) and not row.low < self.bound <= row.high:
            raise ValueError(f"{row.bound} {self.bound:g}: {row.allowed}")
        object.__setattr__(self, "limit", load_code(row.limit) if row.limit is not None else None)
        object.__setattr__(self, "accept", load_code(row.accept) if row.accept is not None else None)

    @property
    def merges(self) -> bool:
        """Whether drafts can have neighbour mass; False for a lossless rule."""
        return self.limit is not None and self.neighbours > 0

    @property
    def columns(self) -> int:
        """How many columns of the table are read (at most V - 1): k, and one more under `official`."""
        return self.neighbours + (self.residual == "official") if self.merges else 0


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
    """What a rule may look at (`DraftView` of plugins.py); `make_whole` gives p [..., V]."""

    own: Tensor
    near: Tensor
    make_whole: Callable[[], Tensor]

    @property
    def whole(self) -> Tensor:
        return self.make_whole()


def additive_limit(draft: DraftView, delta: float | Tensor) -> Tensor:
    """LANTERN: m(x) <= delta (arXiv 2410.03355; docs/algorithms.md, section 4)."""
    own: Tensor = draft.own
    return torch.as_tensor(delta, dtype=own.dtype, device=own.device).expand_as(own)


def multiplicative_limit(draft: DraftView, lambda_: float | Tensor) -> Tensor:
    """LANTERN++: m(x) <= (lambda - 1) p(x) (arXiv 2502.06352; docs/algorithms.md, section 4)."""
    own: Tensor = draft.own
    return own * torch.as_tensor(lambda_ - 1.0, dtype=own.dtype, device=own.device)


def merge_prefix(
    near_probs: Tensor, token_probs: Tensor, relaxation: Relaxation, whole: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (m(x) [...], taken bool [..., k]): the longest prefix of neighbours whose mass keeps the bound.

    `near_probs` [..., k] are p of the neighbours in table order, `token_probs` [...] is p(x), `whole` gives p [..., V]
    to a rule that asks for it. The sum runs in table order and is compared with the bound in the dtype of p (float32
    in decoding), so m never exceeds the bound by a rounding. Under `exact` a token of probability 0 merges nothing.
    docs/algorithms.md, section 4.
    """
    assert relaxation.limit is not None
    most = relaxation.limit(_View(token_probs, near_probs, whole), relaxation.bound)
    running = near_probs.cumsum(dim=-1)
    # cumprod: nothing after the first neighbour that breaks the bound, even where a parallel scan rounds downwards.
    taken = (running <= most[..., None]).cumprod(dim=-1, dtype=torch.uint8).bool()
    if relaxation.residual == "exact":
        taken &= (token_probs > 0)[..., None]
    return torch.where(taken, running, 0.0).amax(dim=-1), taken


def merged_mass(p: Tensor, tokens: Tensor, table: Tensor | None, relaxation: Relaxation) -> tuple[Tensor, Tensor]:
    """Return (m(x) [...], taken bool [..., k]) for `tokens` [...] under the distributions `p` [..., V].

    With the strict rule or k = 0 nothing is merged: zeros and an empty [..., 0]. docs/algorithms.md, section 4.
    """
    token_probs = p.gather(-1, tokens[..., None]).squeeze(-1)
    if not relaxation.merges:
        return torch.zeros_like(token_probs), token_probs.new_empty(*token_probs.shape, 0, dtype=torch.bool)
    near = neighbour_columns(table, tokens, relaxation)[..., : relaxation.neighbours]
    return merge_prefix(p.gather(-1, near), token_probs, relaxation, lambda: p)


def relaxed(p: Tensor, tokens: Tensor, table: Tensor | None, relaxation: Relaxation) -> tuple[Tensor, Tensor]:
    """Return the relaxed distributions p~ [..., V] of `p` [..., V] for the draft tokens [...], and m(x) [...].

    p~(x) = p(x) + m(x), 0 at the merged neighbours, p elsewhere; TV(p, p~) = m(x). docs/algorithms.md, section 4.
    """
    mass, taken = merged_mass(p, tokens, table, relaxation)
    tilde = p.clone()
    if relaxation.merges:
        near = neighbour_columns(table, tokens, relaxation)[..., : relaxation.neighbours]
        tilde.scatter_(-1, near, torch.where(taken, 0.0, p.gather(-1, near)))
    return tilde.scatter_add_(-1, tokens[..., None], mass[..., None]), mass
