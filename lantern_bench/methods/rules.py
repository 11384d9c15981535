"""Acceptance rules. A rule is one function below one decorator.

The strict rule accepts a draft x, drawn from q, with probability min(1, p(x) / q(x)); p is the
target's distribution. A relaxed rule accepts more, in one of two ways (docs/algorithms.md, sections
4 and 8.4):

- `@neighbour_rule`: x also takes the probability of codes near it, its neighbour mass m(x), and is
  accepted with min(1, (p(x) + m(x)) / q(x)). The function returns the most that m(x) may be.
- `@probability_rule`: the function returns the probability of acceptance itself.

A third decorator, `@tree_rule`, is for lossless rules that decide on the drafts of a whole tree.

Commands read the rows of this module before they need torch, whose import takes seconds. So nothing
here imports it: the functions compute with the methods of the tensors that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lantern_bench.methods.parameters import (
    ABOVE_0,
    ABOVE_1,
    BETWEEN_0_AND_1,
    NOT_NEGATIVE,
    SEVERAL,
    Importable,
    Parameter,
    Values,
    fingerprint_of,
    rare,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lantern_bench.decoding.acceptance.draft_view import DraftView

RelaxedFunction: TypeAlias = "Callable[[DraftView, Values], Tensor]"
"""(drafts, the rule's parameters by name) -> numbers; floats come as tensors of one element."""


@dataclass(frozen=True)
class Rule:
    """An acceptance rule: its function, its parameters and its name."""

    name: str
    about: str = "a rule from another package"

    # how the rule decides on a draft (acceptance/configured_rule.py); None: `accept_tree` decides
    kind: Literal["strictly", "by neighbours", "by probability"] | None = "strictly"
    # returns the limit of m(x) [n] (by neighbours), or f [n, V] (by probability)
    function: RelaxedFunction | None = None
    # (Children, ConfiguredRule) -> Acceptance: decides on the drafts of whole trees
    accept_tree: Importable | None = None

    # name of the parameter that every cell must set
    bound: str = "bound"
    # a value of the bound to try first, shown in error messages
    example: float = 0.1
    # the rule's own parameters; the bound first, unless it is a shipped parameter
    parameters: tuple[Parameter, ...] = ()
    # the default k; None: the rule reads no neighbours
    neighbours: int | None = None

    # whether the function reads `embeddings` or `distances` of the drafts
    codebook: bool = False
    # whether the rule decides only on chains of sampled drafts
    chains: bool = False
    # if `chains`: the default tree
    tree: str | None = None
    # whether the rule reads deeper drafts, so that every step must draw independent drafts, or
    # couple them with what the rule leaves (docs/algorithms.md, sections 8.1 and 8.8)
    needs_fresh_drafts: bool = False

    # `residual: official` of a probability rule: after a rejection p loses this fraction of q.
    # None: p loses f(x) q, as with `residual: exact`, and cells have no parameter `residual`.
    official_removal: float | None = None

    # whether the cell id names the rule if it is not the usual rule of its mode
    in_id: bool = True
    # arXiv number of the paper
    source: str = ""
    # A rule from another package adds a mode with the rule's name. The drafting of that mode:
    drafting: str = "static"

    @property
    def lossless(self) -> bool:
        """Whether the tokens keep the target's distribution: the rule is not relaxed."""
        return self.function is None

    @property
    def gives_visit_probability(self) -> bool:
        """Whether its verdict has the visit probabilities that coupled drafts then need."""
        return self.accept_tree == _ACCEPT_TRAVERSAL

    @property
    def greedy_rule(self) -> str:
        """The name of the rule used in its place at temperature 0."""
        has_greedy_form = self.kind in ("strictly", "by neighbours")
        return self.name if has_greedy_form else "strict"

    @cached_property
    def value_names(self) -> tuple[str, ...]:
        """The names of the parameters that its function gets, the bound first."""
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
        if self.kind == "by neighbours" or self.official_removal is not None:
            names.append("residual")
        return tuple(names)

    def fingerprint(self) -> str:
        """16 hex digits that change when the file of its function changes."""
        return fingerprint_of(self.function or self.accept_tree or self.name)


def neighbour_rule(
    name: str, *, neighbours: int = 10, **fields: Any
) -> Callable[[RelaxedFunction], Rule]:
    """Make a rule of a function that limits the neighbour mass m(x) of drafts.

    Args:
        name: The rule's name in experiments and on the command line.
        neighbours: The default number of nearest codes that a draft may take mass from.
        **fields: Other fields of `Rule`.
    """
    return lambda function: Rule(
        name, kind="by neighbours", function=function, neighbours=neighbours, **fields
    )


def probability_rule(name: str, **fields: Any) -> Callable[[RelaxedFunction], Rule]:
    """Make a rule of a function that returns f [n, V], the probability to accept each token.

    Args:
        name: The rule's name in experiments and on the command line.
        **fields: Other fields of `Rule`.
    """
    return lambda function: Rule(name, kind="by probability", function=function, **fields)


def tree_rule(name: str, **fields: Any) -> Callable[[Importable], Rule]:
    """Make a lossless rule of a function that decides on the drafts of whole trees at once.

    Args:
        name: The rule's name in experiments and on the command line.
        **fields: Other fields of `Rule`.
    """
    return lambda function: Rule(
        name, kind=None, accept_tree=function, needs_fresh_drafts=True, **fields
    )


# ---- Lossless rules

# As text: the function needs torch.
_ACCEPT_TRAVERSAL = "lantern_bench.decoding.acceptance.traversal:accept_traversal"

block = tree_rule(
    "block",
    about="decides on a chain as a whole",
    chains=True,
    tree="chain-5",
    source="2403.10444",
)(_ACCEPT_TRAVERSAL)

traversal = tree_rule(
    "traversal",
    about="decides on a tree from its leaves to its root",
    source="2505.12398",
)(_ACCEPT_TRAVERSAL)


# ---- Rules that let a draft take the mass of its neighbours


@neighbour_rule(
    "additive",
    about="neighbour mass of at most delta",
    bound="delta",
    example=0.02,
    parameters=(
        Parameter(
            "delta",
            BETWEEN_0_AND_1,
            "Bound of the additive rule: the most neighbour mass of a draft, between 0 and 1.",
            symbol="δ",
        ),
    ),
    neighbours=20,
    in_id=False,
)
def additive(draft: DraftView, values: Values) -> Tensor:
    """LANTERN: m(x) <= delta (arXiv 2410.03355)."""
    return draft.number(values["delta"]).expand_as(draft.p_x)


@neighbour_rule(
    "multiplicative",
    about="probability of at most lambda times the draft's own",
    bound="lambda",
    example=2.0,
    parameters=(
        Parameter(
            "lambda",
            ABOVE_1,
            "Bound of the multiplicative rule: the most by which a draft's probability may grow, "
            "above 1.",
            symbol="λ",
        ),
    ),
    in_id=False,
)
def multiplicative(draft: DraftView, values: Values) -> Tensor:
    """LANTERN++: p(x) + m(x) <= lambda p(x) (arXiv 2502.06352)."""
    return draft.p_x * draft.number(values["lambda"] - 1.0)


@neighbour_rule(
    "entropy",
    about="neighbour mass that grows with the entropy of p",
    bound="entropy_scale",
    parameters=(
        Parameter(
            "entropy_scale",
            BETWEEN_0_AND_1,
            "Bound of the entropy rule: the most neighbour mass where p is uniform, between 0 "
            "and 1.",
            short="scale",
            symbol="η",
        ),
    ),
    neighbours=20,
)
def entropy(draft: DraftView, values: Values) -> Tensor:
    """m(x) <= entropy_scale H(p) / log V: nothing where the target is certain."""
    largest_entropy = math.log(draft.p.shape[-1])
    return draft.entropy * draft.number(values["entropy_scale"] / largest_entropy)


# ---- Rules that give the probability of acceptance


@probability_rule(
    "cool-sd",
    about="accepts with w p / q, w falls with depth",
    bound="strength",
    example=1.1,
    parameters=(
        Parameter(
            "strength",
            ABOVE_0,
            "w of the first draft in Cool-SD, which accepts with w p / q: 1 is strict.",
            symbol="strength",
        ),
        rare(
            "decay",
            NOT_NEGATIVE,
            "How fast Cool-SD's w falls: by the factor exp(-decay) with each depth.",
            default=0.7,
        ),
    ),
    source="2601.09212",
)
def cool_sd(draft: DraftView, values: Values) -> Tensor:
    """Cool-SD: f = min(1, w p / q), w = strength exp(-decay (depth - 1)) (arXiv 2601.09212)."""
    ratio = draft.ratio
    levels_below_first = (draft.depth - 1).to(ratio.dtype)
    decay = (-draft.number(values["decay"]) * levels_below_first).exp()
    w = draft.number(values["strength"]) * decay
    return w[:, None] * ratio


@probability_rule(
    "gsd",
    about="accepts with p / q of the draft's cluster of codes",
    bound="cluster",
    example=14,
    parameters=(
        Parameter(
            "cluster",
            SEVERAL,
            "Number of tokens in a cluster of GSD: a draft and its neighbours in order of p.",
            symbol="G",
            unit="tokens",
            bounded_by="codes",
        ),
        rare(
            "probability_gap",
            ABOVE_0,
            "GSD: tokens whose probability differs by this much or more are in no cluster with the "
            "draft.",
            default=0.15,
        ),
        rare(
            "code_gap",
            NOT_NEGATIVE,
            "GSD: codes at this squared Euclidean distance or more are in no cluster; 0: no limit.",
            default=0.5,
        ),
    ),
    codebook=True,
    official_removal=1.0,
    source="2508.07747",
)
def gsd(draft: DraftView, values: Values) -> Tensor:
    """GSD: f = min(1, p(C) / q(C)), sums over the cluster C of x (arXiv 2508.07747).

    C holds tokens near x in descending order of p: at most `cluster` // 2 ranks behind x and
    (`cluster` - 1) // 2 before x. Tokens whose p differs by `probability_gap` or more are left out,
    and tokens whose code is `code_gap` or more away (squared Euclidean; 0: any distance). A
    deterministic draft has q(C) = 1.
    """
    size = values["cluster"]
    code_gap = draft.number(values["code_gap"])
    p, order = draft.p.sort(dim=-1, descending=True, stable=True)

    def clusters(ranked: Tensor, outside: float) -> Tensor:
        """Return the values [..., V, size] around each rank of `ranked` [..., V]."""
        padded = ranked.new_full((*ranked.shape[:-1], ranked.shape[-1] + size - 1), outside)
        before = (size - 1) // 2
        padded[..., before : before + ranked.shape[-1]] = ranked
        return padded.unfold(-1, size, 1)

    # One operation over all ranks of a cluster, because a loop would compile a part for each rank.
    cluster_p = clusters(p, outside=math.inf)  # infinitely far from every p, so never inside
    inside = (cluster_p - p[..., None]).abs() < draft.number(values["probability_gap"])
    codes = draft.embeddings[order].movedim(-1, 0)
    # In place, because the differences [d, ..., V, size] are by far the largest tensor.
    squared_distance = (clusters(codes, outside=0.0) - codes[..., None]).square_().sum(dim=0)
    inside &= (squared_distance < code_gap) | (code_gap == 0)
    ratio = cluster_p.where(inside, 0.0).sum(dim=-1)
    q = draft.q
    if q is not None:
        cluster_q = clusters(q.gather(-1, order), outside=0.0)
        ratio = ratio / cluster_q.where(inside, 0.0).sum(dim=-1)
    return ratio.new_empty(ratio.shape).scatter_(-1, order, ratio)


@probability_rule(
    "typical",
    about="accepts what is not improbable for the entropy of p",
    bound="epsilon",
    example=0.09,
    parameters=(
        Parameter(
            "epsilon",
            BETWEEN_0_AND_1,
            "Typical acceptance: a draft of a higher probability is accepted; between 0 and 1.",
            symbol="ε",
        ),
        rare(
            "alpha",
            ABOVE_0,
            "Typical acceptance: also accept when p(x) > alpha * exp(-H(p)) (Medusa's delta).",
            default=0.3,
        ),
    ),
    official_removal=0.0,
    source="2401.10774",
)
def typical(draft: DraftView, values: Values) -> Tensor:
    """Medusa: f = 1 where p(x) > min(epsilon, alpha exp(-H(p))), otherwise 0.

    arXiv 2401.10774, section 2.3.1.
    """
    p = draft.p
    threshold = draft.number(values["alpha"]) * (-draft.entropy).exp()
    is_typical = p > threshold.minimum(draft.number(values["epsilon"]))[:, None]
    return is_typical.to(p.dtype)


@probability_rule(
    "csd",
    about="adds a share of the entropy of p where p and q are close",
    bound="tv_limit",
    example=0.65,
    parameters=(
        Parameter(
            "tv_limit",
            BETWEEN_0_AND_1,
            "CSD accepts more where the total variation of p and q is below this, between 0 and 1.",
            short="tv",
            symbol="δ",
        ),
        rare(
            "entropy_weight",
            ABOVE_0,
            "What CSD adds to the probability of acceptance for each nat of the entropy of p.",
            default=0.5,
            short="weight",
        ),
    ),
    source="2606.27829",
)
def csd(draft: DraftView, values: Values) -> Tensor:
    """CSD: f = min(1, p / q) + entropy_weight H(p) where TV(p, q) < tv_limit (arXiv 2606.27829)."""
    is_close = draft.total_variation < draft.number(values["tv_limit"])
    added = draft.entropy * draft.number(values["entropy_weight"])
    return draft.ratio.clamp_max(1.0) + (added * is_close)[:, None]


@probability_rule(
    "addition",
    about="adds the same to every probability of acceptance",
    bound="added",
    parameters=(
        Parameter(
            "added",
            BETWEEN_0_AND_1,
            "Bound of the rule addition: what it adds to the probability of acceptance, between 0 "
            "and 1.",
            symbol="ε",
        ),
    ),
    source="2606.27829",
)
def addition(draft: DraftView, values: Values) -> Tensor:
    """CSD's baseline: f = min(1, p / q) + added (arXiv 2606.27829)."""
    return draft.ratio.clamp_max(1.0) + draft.number(values["added"])


SHIPPED_RULES = (
    Rule("none", about="nothing is accepted", in_id=False),
    Rule("strict", about="accepts with p / q", in_id=False),
    block,
    traversal,
    additive,
    multiplicative,
    cool_sd,
    gsd,
    entropy,
    typical,
    csd,
    addition,
)
