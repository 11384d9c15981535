"""Relaxed rules: what they see of drafts, the neighbour mass m(x) and its bound (docs/algorithms.md, section 4).

Additive (LANTERN, arXiv 2410.03355) and multiplicative (LANTERN++, arXiv 2502.06352). A rule gives the limit of m(x),
or the probability f that a draft is accepted, as rules of other packages do (docs/adding-a-rule.md). Residuals are in
`tree_acceptance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.code import load_code
from lantern_bench.methods.draft_view import DraftView
from lantern_bench.methods.tables import RULES

Residual: TypeAlias = Literal["exact", "official"]
Number: TypeAlias = float | Tensor


@dataclass(frozen=True)
class Relaxation:
    """An acceptance rule with its parameters.

    `bound` is the value of the rule's bound (`Rule.bound`: delta, lambda, ...), `others` are those of its other
    parameters (left out: their defaults); strict rules ignore both. Compiled programs get 0-dimensional tensors, so
    that one program serves every value. `neighbours` is k, 0 means none. `residual` after a rejection: `exact` takes
    out what drafts took beyond p only, `official` repeats the published code. `choices`: tokens behind the first
    `choices` are forced (None: none is). `codes`: `DraftView.codebook`. Raises ValueError for values out of range.
    """

    rule: str = "strict"
    neighbours: int = 0
    bound: Number = 0.0
    residual: Residual = "exact"
    choices: int | None = None
    others: tuple[tuple[str, Any], ...] = ()
    codes: Tensor | None = field(default=None, compare=False, repr=False)
    # Loaded here, outside compiled programs.
    values: Mapping[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    limit: Callable[..., Tensor] | None = field(default=None, init=False, compare=False, repr=False)
    chance: Callable[..., Tensor] | None = field(default=None, init=False, compare=False, repr=False)
    accept: Callable[..., Any] | None = field(default=None, init=False, compare=False, repr=False)
    published: str = field(default="exact", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.rule == "none" or self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}")
        if self.residual not in ("exact", "official"):
            raise ValueError(f"unknown residual {self.residual!r}")
        if self.neighbours < 0:
            raise ValueError(f"neighbours must be at least 0, not {self.neighbours}")
        row = RULES[self.rule]
        # The recorded cases of the published code have delta = 1, which an experiment refuses.
        if not row.lossless and not isinstance(self.bound, Tensor) and not row.low < self.bound <= row.high:
            raise ValueError(f"{row.bound} {self.bound:g}: {row.allowed}")
        for name, code in (("limit", row.limit), ("chance", row.chance), ("accept", row.accept)):
            object.__setattr__(self, name, load_code(code) if code is not None else None)
        given = {key: value for key, value in row.default_values.items() if key in row.value_names}
        object.__setattr__(self, "values", {**given, row.bound: self.bound, **dict(self.others)})
        object.__setattr__(self, "published", row.published if self.residual == "official" else "exact")

    @property
    def merges(self) -> bool:
        """Whether drafts can have neighbour mass; False for a lossless rule and one of `chance`."""
        return self.limit is not None and self.neighbours > 0

    @property
    def columns(self) -> int:
        """How many columns of the table are read (at most V - 1): k, and one more where `official` deletes codes."""
        reads = self.merges or self.chance is not None
        return self.neighbours + (self.residual == "official" and self.merges) if reads else 0


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
class Place:
    """Where the drafts of a rule's rows stand: row `slot * B + image` holds the children of `tree.layout.nodes[slot]`.

    Without a tree the rows are B roots. `start`: int64 [B], the place in the image of the root's children; None where
    it is not known.
    """

    tree: DraftTree | None = None
    start: Tensor | None = None

    def depth(self, rows: Tensor) -> Tensor:
        """Depth int64 [n] of the children of the first n = len(rows) rows."""
        if self.tree is None:
            return torch.ones(len(rows), dtype=torch.int64, device=rows.device)
        return self.tree.rows(self.tree.depths)[: len(rows)] + 1

    def position(self, rows: Tensor) -> Tensor:
        """Place in the image int64 [n] of the same children; raises ValueError where it is not known."""
        if self.start is None:
            raise ValueError("the place in the image is not known here")
        slots = 1 if self.tree is None else len(self.tree.layout.nodes)
        return self.start.repeat(slots)[: len(rows)] + self.depth(rows) - 1


ROOTS = Place()


@dataclass(frozen=True)
class _View:
    """`DraftView` of the drafts `token`: one for each row, [n], or every token, [V], with p [n, 1, V].

    `scaled_p` [n, V] or [n, 1, V] is of the scale `mass` (None: normalised), `p_x` and `q_x` [n] or [n, V] are.
    """

    relaxation: Relaxation
    table: Tensor | None
    scaled_p: Tensor
    mass: Tensor | None
    token: Tensor
    p_x: Tensor
    q_x: Tensor | None
    place: Place

    @property
    def strict_ratio(self) -> Tensor:
        return self.p_x if self.q_x is None else self.p_x / self.q_x

    @property
    def p(self) -> Tensor:
        return self.scaled_p if self.mass is None else self.scaled_p / self.mass

    @property
    def neighbour_tokens(self) -> Tensor:
        if self.relaxation.neighbours == 0:
            return self.token.new_empty(*self.token.shape, 0)
        return neighbour_columns(self.table, self.token, self.relaxation)[..., : self.relaxation.neighbours]

    @property
    def neighbour_p(self) -> Tensor:
        near = self.neighbour_tokens
        lead = self.p_x.shape  # [n], or [n, V] of every token
        found = self.scaled_p.expand(*lead, -1).gather(-1, near.expand(*lead, -1))
        return found if self.mass is None else found / self.mass

    @property
    def distances(self) -> Tensor:
        apart: Tensor = self.codebook[self.neighbour_tokens] - self.codebook[self.token][..., None, :]
        return apart.square().sum(dim=-1).sqrt()

    @property
    def codebook(self) -> Tensor:
        if self.relaxation.codes is None:
            raise ValueError(f"the row of the rule {self.relaxation.rule} does not say that it reads the codebook")
        return self.relaxation.codes

    @property
    def depth(self) -> Tensor:
        return self._by_row(self.place.depth(self.scaled_p))

    @property
    def position(self) -> Tensor:
        return self._by_row(self.place.position(self.scaled_p))

    def _by_row(self, values: Tensor) -> Tensor:
        return values[:, None] if self.scaled_p.dim() > 2 else values


def every_token(
    p: Tensor, mass: Tensor | None, q: Tensor | None, relaxation: Relaxation, table: Tensor | None, place: Place = ROOTS
) -> _View:
    """Return the view of all tokens that the drafts of n rows could have been: `p` and `q` [n, V], `mass` [n, 1]."""
    whole, scale = p[:, None], None if mass is None else mass[:, None]
    own = p if mass is None else p / mass
    return _View(relaxation, table, whole, scale, torch.arange(p.shape[1], device=p.device), own, q, place)


def chances(view: _View) -> Tensor:
    """Return f [n, V] of a rule of `chance`: the probability that a draft of each row and token is accepted.

    `view` is of `every_token`. Tokens that cannot be drawn (q = 0) get 0, whatever the rule says of them.
    """
    assert view.relaxation.chance is not None
    found = view.relaxation.chance(view, view.relaxation.values).to(view.p_x.dtype).expand_as(view.p_x)
    return (found if view.q_x is None else torch.where(view.q_x > 0, found, 0.0)).clamp(0.0, 1.0)


def additive_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN: m(x) <= delta (arXiv 2410.03355; docs/algorithms.md, section 4)."""
    own: Tensor = draft.p_x
    return torch.as_tensor(values["delta"], dtype=own.dtype, device=own.device).expand_as(own)


def multiplicative_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN++: m(x) <= (lambda - 1) p(x) (arXiv 2502.06352; docs/algorithms.md, section 4)."""
    own: Tensor = draft.p_x
    return own * torch.as_tensor(values["lambda"] - 1.0, dtype=own.dtype, device=own.device)


def merge_prefix(view: _View) -> tuple[Tensor, Tensor]:
    """Return (m(x) [...], taken bool [..., k]): the longest prefix of neighbours whose mass keeps the bound.

    The sum runs in table order and is compared with the bound in the dtype of p (float32 in decoding), so m never
    exceeds the bound by a rounding. Under `exact` a token of probability 0 merges nothing. docs/algorithms.md,
    section 4.
    """
    relaxation = view.relaxation
    assert relaxation.limit is not None
    most = relaxation.limit(view, relaxation.values)
    running = view.neighbour_p.cumsum(dim=-1)
    # cumprod: nothing after the first neighbour that breaks the bound, even where a parallel scan rounds downwards.
    # int32: Triton cannot scan unsigned numbers.
    taken = (running <= most[..., None]).cumprod(dim=-1, dtype=torch.int32).bool()
    if relaxation.residual == "exact":
        taken &= (view.p_x > 0)[..., None]
    return torch.where(taken, running, 0.0).amax(dim=-1), taken


def merged_mass(
    p: Tensor,
    tokens: Tensor,
    table: Tensor | None,
    relaxation: Relaxation,
    place: Place = ROOTS,
    mass: Tensor | None = None,
    q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (m(x) [...], taken bool [..., k]) for `tokens` [...] under the distributions `p` [..., V].

    `mass` [..., 1] is the sum of `p` (None: 1), `q` [...] what the tokens were drawn with. With the strict rule or
    k = 0 nothing is merged: zeros and an empty [..., 0]. docs/algorithms.md, section 4.
    """
    own = p.gather(-1, tokens[..., None])
    own = (own if mass is None else own / mass).squeeze(-1)
    if not relaxation.merges:
        return torch.zeros_like(own), own.new_empty(*own.shape, 0, dtype=torch.bool)
    return merge_prefix(_View(relaxation, table, p, mass, tokens, own, q, place))


def relaxed(
    p: Tensor, tokens: Tensor, table: Tensor | None, relaxation: Relaxation, place: Place = ROOTS
) -> tuple[Tensor, Tensor]:
    """Return the relaxed distributions p~ [..., V] of `p` [..., V] for the draft tokens [...], and m(x) [...].

    p~(x) = p(x) + m(x), 0 at the merged neighbours, p elsewhere; TV(p, p~) = m(x). docs/algorithms.md, section 4.
    """
    mass, taken = merged_mass(p, tokens, table, relaxation, place)
    tilde = p.clone()
    if relaxation.merges:
        near = neighbour_columns(table, tokens, relaxation)[..., : relaxation.neighbours]
        tilde.scatter_(-1, near, torch.where(taken, 0.0, p.gather(-1, near)))
    return tilde.scatter_add_(-1, tokens[..., None], mass[..., None]), mass
