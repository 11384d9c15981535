"""How the acceptance rule of one decoding decides on a draft: strictly, by neighbours, or by a probability.

The rules themselves are in `methods/rules.py`; here a rule meets the values of a cell and the codes of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.draft_view import DraftView
from lantern_bench.decoding.protocol import DecodableModel
from lantern_bench.methods.rules import RelaxedFunction, Rule, TreeFunction


@dataclass(frozen=True)
class Neighbours:
    """The codes near drafts, and which of them the drafts take mass from."""

    tokens: Tensor  # int64 [n, k], nearest first
    taken: Tensor  # bool [n, k]


@dataclass(frozen=True)
class Decision:
    """How a rule decides on the drafts x of n nodes, and what a rejection of x has to know."""

    probability: Tensor  # [n] of accepting x
    neighbour_mass: Tensor  # [n], m(x): what x takes from other tokens
    neighbours: Neighbours | None = None  # of a neighbour rule: whom x takes it from
    removal: Tensor | None = (
        None  # [n, V], how much of q acceptance has used up, by token; None: all
    )


@dataclass(frozen=True, eq=False)
class AcceptanceRule:
    """The strict rule, which accepts x with min(1, p(x) / q(x)), and the base of the others."""

    name: str = "strict"
    values: Mapping[str, Any] = field(
        default_factory=dict
    )  # parameters by name: numbers, or tensors of one element
    official: bool = (
        False  # after a rejection do what the authors' code does (`residual: official`)
    )
    n_codes: int | None = None  # tokens from this number on are forced; None: none is
    codebook: Tensor | None = None  # [V, d] embeddings of the codes
    neighbours: int = 0  # k: how many nearest codes the rule looks at
    nearest_codes: Tensor | None = None  # int [V, >= k], nearest first

    def decide(self, draft: DraftView) -> Decision:
        """Decide on the drafts of n nodes."""
        return Decision(
            probability=draft.strict_ratio.clamp(max=1.0),
            neighbour_mass=torch.zeros_like(draft.p_x),
        )

    def nearest(self, tokens: Tensor, extra: int = 0) -> Tensor:
        """Return the `neighbours + extra` nearest codes int64 [..., k] of `tokens` [...], at most V - 1."""
        if self.nearest_codes is None:
            raise ValueError(f"the {self.name} rule needs a table of nearest codes")
        columns = min(self.neighbours + extra, len(self.nearest_codes) - 1)
        return self.nearest_codes[tokens, :columns].long()


@dataclass(frozen=True, eq=False)
class NeighbourRule(AcceptanceRule):
    """Accepts x with min(1, (p(x) + m(x)) / q(x)); `mass_limit` says how large m(x) may be."""

    mass_limit: RelaxedFunction = field(kw_only=True)

    def decide(self, draft: DraftView) -> Decision:
        """Decide on drafts with the mass of their neighbours added."""
        mass, taken = self.neighbour_mass(draft)
        boosted = draft.p_x + mass
        return Decision(
            probability=(boosted if draft.q_x is None else boosted / draft.q_x).clamp(max=1.0),
            neighbour_mass=mass,
            neighbours=self._rejected_with(draft, taken),
        )

    def neighbour_mass(self, draft: DraftView) -> tuple[Tensor, Tensor]:
        """Return m(x) [...], and which neighbours x takes it from, bool [..., k].

        Neighbours are taken in order of distance while their summed probability keeps the rule's limit. With the exact
        residual a draft of probability 0 takes nothing.
        """
        limit = self.mass_limit(draft, self.values)
        running_sum = draft.neighbour_p.cumsum(dim=-1)
        # cumprod: stop at the first neighbour over the limit, even where a parallel scan rounds downwards behind it.
        # int32: Triton cannot scan unsigned numbers.
        taken = (running_sum <= limit[..., None]).cumprod(dim=-1, dtype=torch.int32).bool()
        if not self.official:
            taken &= (draft.p_x > 0)[..., None]
        return torch.where(taken, running_sum, 0.0).amax(dim=-1), taken

    def relaxed_distribution(self, draft: DraftView) -> tuple[Tensor, Tensor]:
        """Return p~ [n, V] and m(x) [n]: p~ is p(x) + m(x) at x, 0 at the neighbours taken, p elsewhere."""
        mass, taken = self.neighbour_mass(draft)
        neighbours = draft.neighbour_tokens
        relaxed = draft.p.clone()
        relaxed.scatter_(-1, neighbours, torch.where(taken, 0.0, relaxed.gather(-1, neighbours)))
        relaxed.scatter_add_(-1, draft.token[..., None], mass[..., None])
        return relaxed, mass

    def _rejected_with(self, draft: DraftView, taken: Tensor) -> Neighbours:
        """Return the neighbours that are rejected with x: those taken.

        The authors' code treats one code more, and all of them alike as soon as one is taken (section 9.A).
        """
        if not self.official:
            return Neighbours(tokens=draft.neighbour_tokens, taken=taken)
        tokens = self.nearest(draft.token, extra=1)
        return Neighbours(tokens=tokens, taken=taken[..., :1].expand_as(tokens))


@dataclass(frozen=True, eq=False)
class ProbabilityRule(AcceptanceRule):
    """Accepts x with the probability f(x) that `acceptance_probability` returns."""

    acceptance_probability: RelaxedFunction = field(kw_only=True)
    official_removal: float | None = None  # as of `Rule`, where the residual is the authors'

    def decide(self, draft: DraftView) -> Decision:
        """Decide on drafts with f(x), which says for every token how much of q acceptance uses up."""
        f = self._every_probability(draft.every_token())
        probability = f.gather(1, draft.token[:, None]).squeeze(1)
        accepted = probability if draft.q_x is None else draft.q_x * probability
        removal = f if self.official_removal is None else torch.full_like(f, self.official_removal)
        return Decision(
            probability=probability,
            neighbour_mass=(accepted - draft.p_x).clamp_min(0.0),
            removal=removal,
        )

    def _every_probability(self, draft: DraftView) -> Tensor:
        """Return f [n, V], clamped to [0, 1]; 0 for tokens that cannot be drawn."""
        f = self.acceptance_probability(draft, self.values).to(draft.p_x.dtype).expand_as(draft.p_x)
        if draft.q_x is not None:
            f = torch.where(draft.q_x > 0, f, 0.0)
        return f.clamp(0.0, 1.0)


@dataclass(frozen=True, eq=False)
class TreeRule(AcceptanceRule):
    """Decides on all drafts of a tree at once, with a function in place of `accept_children`."""

    accept_tree: TreeFunction = field(kw_only=True)


def bind(row: Rule, **values: Any) -> AcceptanceRule:
    """Return the rule of a row.

    Args:
        row: The rule's row in `methods/rules.py`.
        **values: Fields of `AcceptanceRule`.
    """
    if row.accept_tree is not None:
        return TreeRule(name=row.name, accept_tree=row.accept_tree, **values)
    if row.acceptance_probability is not None:
        return ProbabilityRule(
            name=row.name,
            acceptance_probability=row.acceptance_probability,
            official_removal=row.official_removal if values.get("official") else None,
            **values,
        )
    if row.mass_limit is not None and values.get("neighbours"):
        return NeighbourRule(name=row.name, mass_limit=row.mass_limit, **values)
    return AcceptanceRule(name=row.name, **values)  # without neighbours, a neighbour rule is strict


def rule_of(decoding: Decoding, model: DecodableModel) -> AcceptanceRule:
    """Return the acceptance rule of a decoding.

    Raises as `DecodableModel.table` and `DecodableModel.codes`.
    """
    row = decoding.rule_row
    if row.lossless:
        return bind(row) if decoding.drafts else AcceptanceRule()
    official = decoding.residual == "official"
    neighbours = decoding.neighbours or 0
    # With the official residual a rejection of a draft with neighbour mass touches one code more.
    columns = (
        neighbours + 1 if official and neighbours and row.mass_limit is not None else neighbours
    )
    return bind(
        row,
        values={key: decoding.value(key) for key in row.value_names},
        official=official,
        n_codes=model.target.n_codes,
        codebook=model.codes if row.codebook else None,
        neighbours=neighbours,
        nearest_codes=model.table(columns, decoding.neighbour_metric) if columns else None,
    )
