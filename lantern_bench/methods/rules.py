"""Acceptance rules. A rule is one function below one decorator: that is all there is to know about it.

The strict rule accepts a draft x, drawn from q, with probability min(1, p(x) / q(x)); p is the target's distribution. A
relaxed rule accepts more, in one of two ways (docs/algorithms.md, sections 4 and 8.4):

- `@neighbour_rule`: x also takes the probability of codes near it, its neighbour mass m(x), and is accepted with
  min(1, (p(x) + m(x)) / q(x)). The function returns the most that m(x) may be.
- `@probability_rule`: the function returns the probability of acceptance itself.

Commands read the rows of this module before they need torch, whose import takes seconds. So nothing here imports it:
the functions compute with the methods of the tensors that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench.methods.parameters import (
    ABOVE_0,
    ABOVE_1,
    BETWEEN_0_AND_1,
    NOT_NEGATIVE,
    SEVERAL,
    Parameter,
    fingerprint_of,
    rare,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lantern_bench.decoding.acceptance.children import Acceptance, Children
    from lantern_bench.decoding.acceptance.draft_view import DraftView
    from lantern_bench.decoding.acceptance.rule import AcceptanceRule

RelaxedFunction: TypeAlias = "Callable[[DraftView, Mapping[str, Any]], Tensor]"
"""(drafts, the rule's parameters by name) -> a number for each draft."""
TreeFunction: TypeAlias = "Callable[[Children, AcceptanceRule], Acceptance]"


@dataclass(frozen=True)
class Rule:
    """An acceptance rule: its function, its parameters and what tables and legends call it.

    At most one of `mass_limit`, `acceptance_probability` and `accept_tree` is given; the strict rule has none.
    """

    name: str
    about: str = "a rule from another package"
    mass_limit: RelaxedFunction | None = None  # of a `neighbour_rule`
    acceptance_probability: RelaxedFunction | None = None  # of a `probability_rule`
    accept_tree: TreeFunction | None = None  # of a `tree_rule`

    # What a cell of an experiment can set
    bound: str = "bound"  # the parameter that every cell must give
    example: float = 0.1  # a bound to begin with
    parameters: tuple[
        Parameter, ...
    ] = ()  # its own; the bound first, unless it is a shipped parameter
    neighbours: int | None = None  # the default k; None: the rule reads no neighbours

    # What it needs, and of which drafts
    codebook: bool = False  # reads `codebook` or `distances` of the drafts
    tensor_bound: bool = (
        False  # takes tensors for its float parameters: one compiled program serves all values
    )
    chains: bool = False  # decides only on chains of sampled drafts
    tree: str | None = None  # the default tree of a rule for chains
    needs_fresh_drafts: bool = (
        False  # it reads deeper drafts, so each step must draw all anew (section 8.1)
    )

    # With `residual: official`, how much of q the authors' code takes out of p after a rejection: 1 all, 0 nothing.
    # None: q f(x), as `residual: exact` does; cells of such a probability rule have no `residual`.
    official_removal: float | None = None

    # How it is shown
    in_id: bool = True  # cell ids name the rule where the mode does not imply it
    source: str = ""  # arXiv number of the paper
    drafting: str = "static"  # of the mode that a rule from another package brings
    label: str | None = None  # of that mode, in legends

    @property
    def lossless(self) -> bool:
        """Whether the tokens keep the target's distribution: the rule is not relaxed."""
        return self.mass_limit is None and self.acceptance_probability is None

    @property
    def greedy_rule(self) -> str:
        """The rule that replaces it at temperature 0."""
        needs_sampling = self.accept_tree is not None or self.acceptance_probability is not None
        return "strict" if needs_sampling else self.name

    @cached_property
    def value_names(self) -> tuple[str, ...]:
        """The names of the parameters that its function gets: the bound first."""
        if self.lossless:
            return ()
        names = [self.bound]
        names += [parameter.name for parameter in self.parameters]
        return tuple(dict.fromkeys(names))

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of all parameters that cells of this rule have."""
        names = list(self.value_names)
        if self.neighbours is not None:
            names = ["neighbours", "neighbour_metric", *names]
        if self.mass_limit is not None or self.official_removal is not None:
            names.append("residual")
        return tuple(names)

    def fingerprint(self) -> str:
        """16 hex digits that change when the file of its function changes."""
        return fingerprint_of(
            self.mass_limit or self.acceptance_probability or self.accept_tree or self.name
        )


def neighbour_rule(
    name: str, *, neighbours: int = 10, **fields: Any
) -> Callable[[RelaxedFunction], Rule]:
    """Make a rule of a function that limits the neighbour mass m(x) of drafts.

    Args:
        name: The rule's name in experiments and on the command line.
        neighbours: How many nearest codes a draft may take mass from, unless a cell says.
        **fields: Other fields of `Rule`.
    """
    return lambda function: Rule(name, mass_limit=function, neighbours=neighbours, **fields)


def probability_rule(name: str, **fields: Any) -> Callable[[RelaxedFunction], Rule]:
    """Make a rule of a function that returns f(x), the probability to accept each token that a draft could have been.

    Args:
        name: The rule's name in experiments and on the command line.
        **fields: Other fields of `Rule`.
    """
    return lambda function: Rule(name, acceptance_probability=function, **fields)


def tree_rule(name: str, **fields: Any) -> Callable[[TreeFunction], Rule]:
    """Make a lossless rule of a function that decides on the drafts of whole trees at once.

    Args:
        name: The rule's name in experiments and on the command line.
        **fields: Other fields of `Rule`.
    """
    return lambda function: Rule(name, accept_tree=function, needs_fresh_drafts=True, **fields)


# ---- Lossless rules

NONE = Rule("none", about="nothing is accepted", in_id=False)
STRICT = Rule("strict", about="accepts with p / q", in_id=False)


def _accept_traversal(children: Children, rule: AcceptanceRule) -> Acceptance:
    from lantern_bench.decoding.acceptance.traversal import accept_traversal

    return accept_traversal(children, rule)


block = tree_rule(
    "block", about="decides on a chain as a whole", chains=True, tree="chain-5", source="2403.10444"
)(_accept_traversal)

traversal = tree_rule(
    "traversal", about="decides on a tree from its leaves to its root", source="2505.12398"
)(_accept_traversal)


# ---- Rules that let a draft take the mass of its neighbours

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
ENTROPY_SCALE = Parameter(
    "entropy_scale",
    BETWEEN_0_AND_1,
    "Bound of the entropy rule: the most neighbour mass where p is uniform, between 0 and 1.",
    short="scale",
    symbol="η",
)


@neighbour_rule(
    "additive",
    about="neighbour mass of at most delta",
    bound="delta",
    example=0.02,
    parameters=(DELTA,),
    neighbours=20,
    tensor_bound=True,
    in_id=False,
)
def additive(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN: m(x) <= delta (arXiv 2410.03355)."""
    return draft.number(values["delta"]).expand_as(draft.p_x)


@neighbour_rule(
    "multiplicative",
    about="probability of at most lambda times the draft's own",
    bound="lambda",
    example=2.0,
    parameters=(LAMBDA,),
    tensor_bound=True,
    in_id=False,
)
def multiplicative(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN++: p(x) + m(x) <= lambda p(x) (arXiv 2502.06352)."""
    return draft.p_x * draft.number(values["lambda"] - 1.0)


@neighbour_rule(
    "entropy",
    about="neighbour mass that grows with the entropy of p",
    bound="entropy_scale",
    parameters=(ENTROPY_SCALE,),
    neighbours=20,
    tensor_bound=True,
)
def entropy(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """m(x) <= entropy_scale H(p) / log V: nothing where the target is certain."""
    largest_entropy = math.log(draft.p.shape[-1])
    return draft.entropy * draft.number(values["entropy_scale"] / largest_entropy)


# ---- Rules that give the probability of acceptance

STRENGTH = Parameter(
    "strength",
    ABOVE_0,
    "w of the first draft in Cool-SD, which accepts with w p / q: 1 is strict.",
    symbol="w",
)
DECAY = rare(
    "decay",
    NOT_NEGATIVE,
    "How fast Cool-SD's w falls: by the factor exp(-decay) with each depth.",
    default=0.7,
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
EPSILON = Parameter(
    "epsilon",
    BETWEEN_0_AND_1,
    "Typical acceptance: a draft of a higher probability is accepted; between 0 and 1.",
    symbol="ε",
)
ALPHA = rare(
    "alpha",
    ABOVE_0,
    "Typical acceptance: so is one above alpha * exp(-entropy), Medusa's delta.",
    default=0.3,
)


@probability_rule(
    "cool-sd",
    about="accepts with w p / q, w falls with depth",
    bound="strength",
    example=1.1,
    parameters=(STRENGTH, DECAY),
    tensor_bound=True,
    source="2601.09212",
)
def cool_sd(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Cool-SD: f = min(1, w p(x) / q(x)), w = strength exp(-decay (depth - 1)) (arXiv 2601.09212)."""
    levels_below_first = (draft.depth - 1).to(draft.p_x.dtype)
    w = (
        draft.number(values["strength"])
        * (-draft.number(values["decay"]) * levels_below_first).exp()
    )
    return w * draft.strict_ratio


@probability_rule(
    "gsd",
    about="accepts with p / q of the draft's cluster of codes",
    bound="cluster",
    example=14,
    parameters=(CLUSTER, PROBABILITY_GAP, CODE_GAP),
    codebook=True,
    official_removal=1.0,
    source="2508.07747",
)
def gsd(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """GSD: f = min(1, p(C) / q(C)), sums over the cluster C of x (arXiv 2508.07747).

    C holds the tokens whose rank in descending order of p is at most `cluster` // 2 behind that of x or
    (`cluster` - 1) // 2 before it, without those whose p differs by `probability_gap` or more, or whose code is
    `code_gap` or more away (squared Euclidean; 0: any distance). A deterministic draft has q(C) = 1.
    """
    size = values["cluster"]
    p, order = draft.p_x.sort(dim=-1, descending=True, stable=True)

    def clusters(ranked: Tensor, outside: float) -> Tensor:
        """Return the values [..., V, size] around each rank of `ranked` [..., V]."""
        padded = ranked.new_full((*ranked.shape[:-1], ranked.shape[-1] + size - 1), outside)
        before = (size - 1) // 2
        padded[..., before : before + ranked.shape[-1]] = ranked
        return padded.unfold(-1, size, 1)

    # One operation over all ranks of a cluster: a loop would give compiled programs a part for each of them.
    cluster_p = clusters(p, outside=math.inf)  # infinitely far from every p, so never inside
    inside = (cluster_p - p[..., None]).abs() < values["probability_gap"]
    if values["code_gap"] > 0:
        codes = draft.codebook[order].movedim(-1, 0)
        squared_distance = (clusters(codes, outside=0.0) - codes[..., None]).square().sum(dim=0)
        inside &= squared_distance < values["code_gap"]
    ratio = cluster_p.where(inside, 0.0).sum(dim=-1)
    if draft.q_x is not None:
        q = draft.q_x.gather(-1, order)
        ratio = ratio / clusters(q, outside=0.0).where(inside, 0.0).sum(dim=-1)
    return ratio.new_empty(ratio.shape).scatter_(-1, order, ratio)


@probability_rule(
    "typical",
    about="accepts what is not improbable for the entropy of p",
    bound="epsilon",
    example=0.09,
    parameters=(EPSILON, ALPHA),
    tensor_bound=True,
    official_removal=0.0,
    source="2401.10774",
)
def typical(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Medusa: f = 1 where p(x) > min(epsilon, alpha exp(-H(p))), else 0 (arXiv 2401.10774, section 2.3.1)."""
    threshold = draft.number(values["alpha"]) * (-draft.entropy).exp()
    is_typical = draft.p_x > threshold.minimum(draft.number(values["epsilon"]))
    return is_typical.to(draft.p_x.dtype)


SHIPPED_RULES = (
    NONE,
    STRICT,
    block,
    traversal,
    additive,
    multiplicative,
    cool_sd,
    gsd,
    entropy,
    typical,
)
