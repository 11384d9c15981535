"""An acceptance rule with its parameter values, the view of drafts that relaxed rules decide on, and those rules.

A limit says how much neighbour mass m(x) a draft may take; a chance is the probability f(x) to accept each token that a
draft could have been (docs/algorithms.md, sections 4 and 8.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import DecodableModel
from lantern_bench.methods.parameters import load_code

_OFFICIAL_SHARES = {"exact": None, "plain": 1.0, "none": 0.0}  # by `Rule.published`


@dataclass(frozen=True, eq=False)
class AcceptanceRule:
    """How draft tokens are accepted in one decoding (docs/algorithms.md, section 4).

    The strict rule sets nothing, a relaxed one `limit` or `chance`, and one that decides on whole trees `accept`, which
    has the signature of `accept_children`.
    """

    name: str = "strict"
    values: Mapping[str, Any] = field(default_factory=dict)  # parameters by name: numbers, or tensors of one element
    limit: Callable[[DraftView, Mapping[str, Any]], Tensor] | None = None
    chance: Callable[[DraftView, Mapping[str, Any]], Tensor] | None = None
    accept: Callable[..., Any] | None = None
    neighbours: int = 0  # k: how many nearest codes a draft may take mass from
    official_residual: bool = False  # after a rejection do what the authors' code does
    official_share: float | None = None  # share of q that the authors' residual removes, of a rule with `chance`
    n_codes: int | None = None  # tokens from this number on are forced; None: none is
    nearest_codes: Tensor | None = None  # int [V, >= k], nearest first
    codebook: Tensor | None = None  # [V, d] embeddings of the codes

    @property
    def uses_neighbours(self) -> bool:
        """Whether drafts can take neighbour mass."""
        return self.limit is not None and self.neighbours > 0

    def nearest(self, tokens: Tensor, extra: int = 0) -> Tensor:
        """Return the `neighbours + extra` nearest codes int64 [..., k] of `tokens` [...], at most V - 1."""
        if self.nearest_codes is None:
            raise ValueError(f"the {self.name} rule needs a table of nearest codes")
        columns = min(self.neighbours + extra, len(self.nearest_codes) - 1)
        return self.nearest_codes[tokens, :columns].long()


def rule_of(decoding: Decoding, model: DecodableModel) -> AcceptanceRule:
    """Return the acceptance rule of a decoding; raises as `DecodableModel.table` and `DecodableModel.codes`."""
    row = decoding.rule_row
    if row.lossless:
        name = decoding.rule if decoding.drafts else "strict"
        return AcceptanceRule(name, accept=None if row.accept is None else load_code(row.accept))
    official, neighbours = decoding.residual == "official", decoding.neighbours or 0
    # With the official residual a rejection of a draft with neighbour mass touches one code more.
    columns = neighbours + 1 if official and neighbours and row.limit is not None else neighbours
    return AcceptanceRule(
        name=decoding.rule,
        values={key: decoding.value(key) for key in row.value_names},
        limit=None if row.limit is None else load_code(row.limit),
        chance=None if row.chance is None else load_code(row.chance),
        neighbours=neighbours,
        official_residual=official,
        official_share=_OFFICIAL_SHARES[row.published] if official else None,
        n_codes=model.target.n_codes,
        nearest_codes=model.table(columns, decoding.neighbour_metric) if columns else None,
        codebook=model.codes if row.codebook else None,
    )


@dataclass(frozen=True)
class DraftView:
    """Draft tokens x as a relaxed rule sees them.

    `limit` sees the drafts of n nodes, one each, shapes [n]; `chance` sees every token that they could have been,
    shapes that broadcast to [n, V]. p and q are the current distributions: after a rejection p is the residual, and q
    has lost the rejected draft. Properties are computed when a rule asks for them.
    """

    rule: AcceptanceRule
    token: Tensor  # x, int64
    p_x: Tensor  # p(x)
    q_x: Tensor | None  # q(x); None: deterministic draft, q(x) = 1
    unnormalised_p: Tensor  # [n, V], or [n, 1, V] for every token
    p_sum: Tensor | float  # its sum [n, 1] or [n, 1, 1]
    depth: Tensor  # of x in the draft tree, from 1
    position: Tensor  # how many tokens of the image come before x, int64

    @property
    def p(self) -> Tensor:
        """The target distribution p [..., V]."""
        return self.unnormalised_p / self.p_sum

    @property
    def strict_ratio(self) -> Tensor:
        """p(x) / q(x): what the strict rule accepts with."""
        return self.p_x if self.q_x is None else self.p_x / self.q_x

    @property
    def neighbour_tokens(self) -> Tensor:
        """The k nearest codes of x, int64 [..., k], nearest first."""
        return self.rule.nearest(self.token)

    @property
    def neighbour_p(self) -> Tensor:
        """Their probabilities under p [..., k]."""
        shape = self.p_x.shape
        return self.unnormalised_p.expand(*shape, -1).gather(-1, self.neighbour_tokens.expand(*shape, -1)) / self.p_sum

    @property
    def distances(self) -> Tensor:
        """Their Euclidean distances from x [..., k], between rows of `codebook`."""
        difference = self.codebook[self.neighbour_tokens] - self.codebook[self.token][..., None, :]
        return difference.square().sum(dim=-1).sqrt()

    @property
    def codebook(self) -> Tensor:
        """Embeddings of the codes [V, d], in the space that neighbours are measured in; zeros for forced tokens."""
        if self.rule.codebook is None:
            raise ValueError(f"the row of the rule {self.rule.name} does not say that it reads the codebook")
        return self.rule.codebook


def neighbour_mass(drafts: DraftView) -> tuple[Tensor, Tensor]:
    """Return m(x) [...] and the neighbours that x takes mass from, bool [..., k].

    Neighbours are taken in order of distance while their summed probability keeps the rule's limit. With the exact
    residual a draft of probability 0 takes nothing.
    """
    assert drafts.rule.limit is not None
    limit = drafts.rule.limit(drafts, drafts.rule.values)
    running_sum = drafts.neighbour_p.cumsum(dim=-1)
    # cumprod: stop at the first neighbour over the limit, even where a parallel scan rounds downwards behind it.
    # int32: Triton cannot scan unsigned numbers.
    taken = (running_sum <= limit[..., None]).cumprod(dim=-1, dtype=torch.int32).bool()
    if not drafts.rule.official_residual:
        taken &= (drafts.p_x > 0)[..., None]
    return torch.where(taken, running_sum, 0.0).amax(dim=-1), taken


def relaxed_distribution(drafts: DraftView) -> tuple[Tensor, Tensor]:
    """Return p~ [n, V] of drafts x [n] and m(x) [n]: p~(x) = p(x) + m(x), 0 at the neighbours taken, p elsewhere."""
    mass, taken = neighbour_mass(drafts)
    relaxed, neighbours = drafts.p.clone(), drafts.neighbour_tokens
    relaxed.scatter_(-1, neighbours, torch.where(taken, 0.0, relaxed.gather(-1, neighbours)))
    return relaxed.scatter_add_(-1, drafts.token[..., None], mass[..., None]), mass


def acceptance_chance(drafts: DraftView) -> Tensor:
    """Return f(x) [n, V] of a rule with `chance`, clamped to [0, 1]; 0 for tokens that cannot be drawn."""
    assert drafts.rule.chance is not None
    f = drafts.rule.chance(drafts, drafts.rule.values).to(drafts.p_x.dtype).expand_as(drafts.p_x)
    return (f if drafts.q_x is None else torch.where(drafts.q_x > 0, f, 0.0)).clamp(0.0, 1.0)


def as_number(value: Any, like: Tensor) -> Tensor:
    """Return a parameter value as a tensor of the dtype and on the device of `like`."""
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


# ---- The relaxed rules that ship


def additive_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN: m(x) <= delta (arXiv 2410.03355)."""
    return as_number(values["delta"], draft.p_x).expand_as(draft.p_x)


def multiplicative_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN++: m(x) <= (lambda - 1) p(x) (arXiv 2502.06352)."""
    return draft.p_x * as_number(values["lambda"] - 1.0, draft.p_x)


def entropy_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """m(x) <= entropy_scale H(p) / log V: nothing where the target is certain."""
    p = draft.p
    return entropy(p) * as_number(values["entropy_scale"] / math.log(p.shape[-1]), p)


def annealed_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Cool-SD: f = min(1, w p(x) / q(x)), w = strength exp(-decay (depth - 1)) (arXiv 2601.09212)."""
    ratio = draft.strict_ratio
    strength, decay = as_number(values["strength"], ratio), as_number(values["decay"], ratio)
    w = strength * torch.exp(-decay * (draft.depth - 1).to(ratio.dtype))
    return w * ratio


def typical_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Medusa: f = 1 where p(x) > min(epsilon, alpha exp(-H(p))), else 0 (arXiv 2401.10774, section 2.3.1)."""
    p = draft.p
    epsilon, alpha = as_number(values["epsilon"], p), as_number(values["alpha"], p)
    return (draft.p_x > torch.minimum(epsilon, alpha * torch.exp(-entropy(p)))).to(p.dtype)


def grouped_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """GSD: f = min(1, p(C) / q(C)), sums over the cluster C of x (arXiv 2508.07747).

    C holds the tokens whose rank in descending order of p is at most `cluster` // 2 behind that of x or
    (`cluster` - 1) // 2 before it, without those whose p differs by `probability_gap` or more, or whose code is
    `code_gap` or more away (squared Euclidean; 0: any distance). A deterministic draft has q(C) = 1.
    """
    behind, before = values["cluster"] // 2, (values["cluster"] - 1) // 2
    p, order = torch.sort(draft.p_x, dim=-1, descending=True, stable=True)
    q = torch.ones_like(p) if draft.q_x is None else draft.q_x.gather(-1, order)

    def windows(values: Tensor, outside: float) -> Tensor:
        """Show the `cluster` values around each rank, [..., V, cluster]."""
        return pad(values, (before, behind), value=outside).unfold(-1, before + behind + 1, 1)

    # One operation over all ranks of a cluster: a loop would give compiled programs a part for each of them.
    other_p = windows(p, torch.inf)  # infinitely far from every p, so never in a cluster
    inside = (other_p - p[..., None]).abs() < values["probability_gap"]
    if values["code_gap"] > 0:
        codes = draft.codebook[order].movedim(-1, 0)
        inside &= (windows(codes, 0.0) - codes[..., None]).square().sum(dim=0) < values["code_gap"]
    cluster_p = torch.where(inside, other_p, 0.0).sum(dim=-1)
    cluster_q = torch.where(inside, windows(q, 0.0), 0.0).sum(dim=-1)
    ratio = cluster_p if draft.q_x is None else cluster_p / cluster_q
    return torch.empty_like(ratio).scatter_(-1, order, ratio)


def entropy(p: Tensor) -> Tensor:
    """Return H(p) [...] in nats of distributions [..., V]."""
    return -(p * p.clamp_min(1e-30).log()).sum(dim=-1)
