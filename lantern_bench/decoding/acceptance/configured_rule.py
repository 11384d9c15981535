"""A rule of methods/rules.py with the values of a cell and the codebook of a model.

It decides on each draft as if its earlier siblings had been rejected.

    strictly          accept x with min(1, p(x) / q(x))
    by neighbours     accept x with min(1, (p(x) + m(x)) / q(x)), where m(x) is at most a limit
    by probability    accept x with f(x)

m(x) is the neighbour mass of x: the summed probability of its nearest codes, added nearest first
while the sum is at most the limit. docs/algorithms.md, sections 3, 4 and 8.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import (
    Acceptance,
    Children,
    Residual,
    accept_children,
)
from lantern_bench.decoding.acceptance.draft_view import Codebook, Decision, DraftView, Neighbours
from lantern_bench.methods.parameters import Values, load_code
from lantern_bench.methods.rules import RelaxedFunction, Rule


@dataclass(eq=False)
class ConfiguredRule:
    """An acceptance rule with the values of a cell and the codebook of a model."""

    row: Rule
    # the rule's parameters by name; in decoding, floats are tensors of one element
    values: Values = field(default_factory=dict)
    codebook: Codebook = field(default_factory=Codebook)

    residual_class = Residual

    def __post_init__(self) -> None:
        # Named functions are imported here and not inside a compiled program.
        self._accept: Callable[[Children, ConfiguredRule], Acceptance] = load_code(
            self.row.accept_tree or accept_children
        )

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.row.name

    @property
    def function(self) -> RelaxedFunction:
        """The function of a relaxed rule."""
        assert self.row.function is not None
        return self.row.function

    @property
    def takes_neighbours(self) -> bool:
        """Whether drafts take neighbour mass; without neighbours such a rule is strict."""
        return self.row.kind == "by neighbours" and self.codebook.neighbours > 0

    def accept(self, children: Children) -> Acceptance:
        """Decide on the children of all nodes of a batch of trees."""
        return self._accept(children, self)

    def decide(self, draft: DraftView) -> Decision:
        """Decide on the drafts of n nodes."""
        if self.takes_neighbours:
            return self.decide_by_neighbours(draft)
        if self.row.kind == "by probability":
            return self._decide_by_probability(draft)
        mass = torch.zeros_like(draft.p_x)
        return Decision(probability=draft.accept_probability(mass), neighbour_mass=mass)

    def decide_by_neighbours(self, draft: DraftView) -> Decision:
        """Decide with the mass of neighbours added; a draft of probability 0 takes none."""
        cumulative_mass, within_limit = self.neighbour_masses(draft)
        taken = within_limit & (draft.p_x > 0)[:, None]
        mass = torch.where(taken, cumulative_mass, 0.0).amax(dim=1)
        return Decision(
            probability=draft.accept_probability(mass),
            neighbour_mass=mass,
            neighbours=Neighbours(tokens=draft.neighbour_tokens, taken=taken),
        )

    def neighbour_masses(self, draft: DraftView) -> tuple[Tensor, Tensor]:
        """Return the cumulative mass of the neighbours, nearest first, and which are in the limit.

        Both are [n, k].
        """
        limit = self.function(draft, self.values)
        cumulative_mass = draft.neighbour_p.cumsum(dim=1)
        # cumprod stops at the first neighbour over the limit, even if a parallel scan rounds down
        # behind it. int32, because Triton cannot scan unsigned numbers.
        is_within = cumulative_mass <= limit[:, None]
        return cumulative_mass, is_within.cumprod(dim=1, dtype=torch.int32).bool()

    def _decide_by_probability(self, draft: DraftView) -> Decision:
        """Decide with f(x), which says for every token how much of q acceptance uses up."""
        p = draft.p
        q = draft.q
        f = self.function(draft, self.values).to(p.dtype).expand_as(p)
        if q is not None:
            f = torch.where(q > 0, f, 0.0)  # 0 for tokens that cannot be drawn
        f = f.clamp(0.0, 1.0)
        probability = f.gather(1, draft.token[:, None]).squeeze(1)
        accepted = probability if draft.q_x is None else draft.q_x * probability
        return Decision(
            probability=probability,
            neighbour_mass=(accepted - draft.p_x).clamp_min(0.0),
            removal=f,
        )
