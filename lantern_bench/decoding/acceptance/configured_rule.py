"""A rule of methods/rules.py with the values of a cell and the codes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.decisions import (
    Decision,
    decide_by_neighbours,
    decide_by_probability,
    decide_strictly,
)
from lantern_bench.decoding.acceptance.draft_view import Codes, DraftView
from lantern_bench.decoding.acceptance.residual import Residual
from lantern_bench.methods.parameters import Values, load_code
from lantern_bench.methods.rules import RelaxedFunction, Rule


@dataclass(eq=False)
class ConfiguredRule:
    """An acceptance rule with the values of a cell and the codes of a model."""

    rule: Rule
    # the rule's parameters by name; in decoding, floats are tensors of one element
    values: Values = field(default_factory=dict)
    codes: Codes = field(default_factory=Codes)

    def __post_init__(self) -> None:
        # Named functions are imported here and not inside a compiled program.
        self._accept: Callable[[Children, ConfiguredRule], Acceptance] = load_code(
            self.rule.accept_tree or accept_children
        )

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name

    @property
    def function(self) -> RelaxedFunction:
        """The function of a relaxed rule."""
        assert self.rule.function is not None
        return self.rule.function

    @property
    def takes_neighbours(self) -> bool:
        """Whether drafts take neighbour mass; without neighbours such a rule is strict."""
        return self.rule.decide == "by neighbours" and self.codes.neighbours > 0

    def accept(self, children: Children) -> Acceptance:
        """Decide on the children of all nodes of a batch of trees."""
        return self._accept(children, self)

    def decide(self, draft: DraftView) -> Decision:
        """Decide on the drafts of n nodes."""
        if self.takes_neighbours:
            return decide_by_neighbours(draft, self)
        if self.rule.decide == "by probability":
            return decide_by_probability(draft, self)
        return decide_strictly(draft, self)

    def residual(self, children: Children) -> Residual:
        """Return p and q of nodes before the first rejection."""
        return Residual(children, self.codes)
