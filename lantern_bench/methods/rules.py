"""Acceptance rules: one row each. The code is in `decoding/acceptance/`; a row names its module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lantern_bench.methods.parameters import (
    ABOVE_0,
    ABOVE_1,
    BETWEEN_0_AND_1,
    NOT_NEGATIVE,
    SEVERAL,
    Code,
    Parameter,
    fingerprint_of,
    rare,
)


@dataclass(frozen=True)
class Rule:
    """An acceptance rule; one with neither `limit`, `chance` nor `accept` accepts child after child, strictly.

    `limit` and `chance` are functions of (`DraftView`, values of its parameters by name).
    """

    name: str
    about: str = "a rule from another package"
    limit: Code | None = None  # -> the most neighbour mass m(x) [...] of a draft x (docs/algorithms.md, section 4)
    # -> f [n, V], the probability that a draft is accepted, for every token that it could have been (section 8.4)
    chance: Code | None = None
    accept: Code | None = None  # decides on whole trees, as `accept_children` of decoding/acceptance/children.py
    bound: str = "bound"  # the parameter that every cell must give
    example: float = 0.1  # a bound to begin with
    parameters: tuple[Parameter, ...] = ()  # its own; the bound first, unless it is a shipped parameter
    neighbours: int | None = None  # the default k; None: `chance` reads no neighbours, `limit` has 10
    codebook: bool = False  # reads `codebook` or `distances`
    tensor_bound: bool = False  # the functions take tensors for its float parameters: one program serves all values
    # What replaces p after a rejection under `residual: official`, of a rule with `chance`: max(p - q f, 0) ("exact";
    # then cells have no `residual`), max(p - q, 0) ("plain") or p itself ("none").
    published: Literal["exact", "plain", "none"] = "exact"
    chains: bool = False  # decides only on chains of sampled drafts
    tree: str | None = None  # the default tree of a rule for chains
    needs_fresh_drafts: bool = False  # it reads deeper drafts, so all must be drawn anew (docs/algorithms.md, 8.1)
    in_id: bool = True  # cell ids name the rule where the mode does not imply it
    source: str = ""  # arXiv number of the paper
    drafting: str = "static"  # of the mode that a rule from another package brings
    label: str | None = None  # of that mode, in legends

    def __post_init__(self) -> None:
        if self.limit is not None and self.neighbours is None:
            object.__setattr__(self, "neighbours", 10)

    @property
    def lossless(self) -> bool:
        """Whether the tokens keep the target's distribution: the rule is not relaxed."""
        return self.limit is None and self.chance is None

    @property
    def greedy_rule(self) -> str:
        """The rule that replaces it at temperature 0."""
        return "strict" if self.accept is not None or self.chance is not None else self.name

    @cached_property
    def value_names(self) -> tuple[str, ...]:
        """The names of the parameters that `limit` and `chance` get: the bound first."""
        names = (parameter.name for parameter in self.parameters)
        return () if self.lossless else tuple(dict.fromkeys((self.bound, *names)))

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters that cells of this rule have."""
        neighbours = () if self.neighbours is None else ("neighbours", "neighbour_metric")
        two_residuals = self.limit is not None or (self.chance is not None and self.published != "exact")
        return (*neighbours, *self.value_names, *(("residual",) if two_residuals else ()))

    def fingerprint(self) -> str:
        """16 hex digits that change when the file of its code changes."""
        return fingerprint_of(self.limit or self.chance or self.accept or self.name)


DELTA = Parameter(
    "delta",
    BETWEEN_0_AND_1,
    "Bound of the additive rule: the most neighbour mass of a draft, between 0 and 1.",
    symbol="δ",
)
LAMBDA = Parameter(
    "lambda",
    ABOVE_1,
    "Bound of the multiplicative rule: the most by which a draft's probability may grow, above 1.",
    symbol="λ",
)
STRENGTH = Parameter(
    "strength", ABOVE_0, "w of the first draft in Cool-SD, which accepts with w p / q: 1 is strict.", symbol="w"
)
DECAY = rare(
    "decay", NOT_NEGATIVE, "How fast Cool-SD's w falls: by the factor exp(-decay) with each depth.", default=0.7
)
CLUSTER = Parameter(
    "cluster",
    SEVERAL,
    "Number of tokens in a cluster of GSD: a draft and its neighbours in order of p.",
    symbol="G",
    unit="tokens",
    bounded_by="codes",
)
PROBABILITY_GAP = rare(
    "probability_gap",
    ABOVE_0,
    "GSD: tokens whose probability differs by this much or more are in no cluster with the draft.",
    default=0.15,
)
CODE_GAP = rare(
    "code_gap",
    NOT_NEGATIVE,
    "GSD: codes at this squared Euclidean distance or more are in no cluster; 0: no limit.",
    default=0.5,
)
ENTROPY_SCALE = Parameter(
    "entropy_scale",
    BETWEEN_0_AND_1,
    "Bound of the entropy rule: the most neighbour mass where p is uniform, between 0 and 1.",
    short="scale",
    symbol="η",
)
EPSILON = Parameter(
    "epsilon",
    BETWEEN_0_AND_1,
    "Typical acceptance: a draft of a higher probability is accepted; between 0 and 1.",
    symbol="ε",
)
ALPHA = rare(
    "alpha", ABOVE_0, "Typical acceptance: so is one above alpha * exp(-entropy), Medusa's delta.", default=0.3
)

_ACCEPTANCE = "lantern_bench.decoding.acceptance"
SHIPPED_RULES = (
    Rule("none", about="nothing is accepted", in_id=False),
    Rule("strict", about="accepts with p / q", in_id=False),
    Rule(
        "block",
        about="decides on a chain as a whole",
        accept=f"{_ACCEPTANCE}.traversal:accept_traversal",
        chains=True,
        needs_fresh_drafts=True,
        tree="chain-5",
        source="2403.10444",
    ),
    Rule(
        "traversal",
        about="decides on a tree from its leaves to its root",
        accept=f"{_ACCEPTANCE}.traversal:accept_traversal",
        needs_fresh_drafts=True,
        source="2505.12398",
    ),
    Rule(
        "additive",
        about="neighbour mass of at most delta",
        limit=f"{_ACCEPTANCE}.rule:additive_limit",
        bound="delta",
        parameters=(DELTA,),
        example=0.02,
        tensor_bound=True,
        neighbours=20,
        in_id=False,
    ),
    Rule(
        "multiplicative",
        about="probability of at most lambda times the draft's own",
        limit=f"{_ACCEPTANCE}.rule:multiplicative_limit",
        bound="lambda",
        parameters=(LAMBDA,),
        example=2.0,
        tensor_bound=True,
        in_id=False,
    ),
    Rule(
        "cool-sd",
        about="accepts with w p / q, w falls with depth",
        chance=f"{_ACCEPTANCE}.rule:annealed_chance",
        bound="strength",
        parameters=(STRENGTH, DECAY),
        example=1.1,
        tensor_bound=True,
        source="2601.09212",
    ),
    Rule(
        "gsd",
        about="accepts with p / q of the draft's cluster of codes",
        chance=f"{_ACCEPTANCE}.rule:grouped_chance",
        bound="cluster",
        parameters=(CLUSTER, PROBABILITY_GAP, CODE_GAP),
        example=14,
        codebook=True,
        published="plain",
        source="2508.07747",
    ),
    Rule(
        "entropy",
        about="neighbour mass that grows with the entropy of p",
        limit=f"{_ACCEPTANCE}.rule:entropy_limit",
        bound="entropy_scale",
        parameters=(ENTROPY_SCALE,),
        tensor_bound=True,
        neighbours=20,
    ),
    Rule(
        "typical",
        about="accepts what is not improbable for the entropy of p",
        chance=f"{_ACCEPTANCE}.rule:typical_chance",
        bound="epsilon",
        parameters=(EPSILON, ALPHA),
        example=0.09,
        tensor_bound=True,
        published="none",
        source="2401.10774",
    ),
)
