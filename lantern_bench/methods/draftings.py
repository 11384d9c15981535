"""Draftings: one row each. The code is in `decoding/drafting/`; a row names its module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lantern_bench.methods.parameters import (
    FROM_0_TO_1,
    Code,
    Kind,
    Parameter,
    Values,
    fingerprint_of,
    structure,
    whole_number,
    word,
)
from lantern_bench.methods.static_trees import MOST_NODES, STATIC_TREES

# of a dynamic tree: each is sorted, and the expanded ones see each other
_MOST_CANDIDATES = 100_000


@dataclass(frozen=True)
class Drafting:
    """A way to draft: which tokens a step proposes."""

    name: str
    # a `DraftMethod` class (decoding/drafting/draft_method.py), called with (decoding, target,
    # batch)
    make: Code
    about: str
    parameters: tuple[Parameter, ...] = ()  # its own, and shipped ones
    defaults: Values = field(default_factory=dict)  # of its parameters
    lossless: bool = True  # whether the tokens keep the target's distribution under a strict rule
    needs_drafter: bool = True  # whether it uses the model's drafter; without it, models need none
    sampled: bool = True  # drafts are drawn from q; False: a draft is deterministic, and its q is 1
    chain: bool = False  # its drafts never branch; the shape of a static tree says that itself
    # Whether every step draws all drafts with new random numbers, which rules that look behind a
    # draft need
    fresh_every_step: Callable[[Values], bool] = lambda _values: True
    # how ids and tables write the drafts
    label: Callable[[Values], str | None] = lambda _values: None
    # (defaults, values that the user gave) -> defaults that fit them
    adapt: Callable[[Values, Values], Values] = lambda defaults, _typed: defaults
    # key and sentence of values that clash
    problem: Callable[[Values], tuple[str, str] | None] = lambda _values: None
    # how many nodes a draft has below the root, at most `MOST_NODES`; not needed for static trees
    nodes: Callable[[Values], int] = lambda _values: 0
    # values of a draft that is small enough for exact checks
    small: Values = field(default_factory=dict)
    legend: str | None = None  # of the mode that a drafting from another package brings

    @property
    def drafts(self) -> bool:
        """Whether there are drafts at all."""
        return bool(self.make)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """The names of its parameters."""
        return frozenset(parameter.name for parameter in self.parameters)

    def fingerprint(self) -> str:
        """16 hex digits that change when the file of its code changes."""
        return fingerprint_of(self.make)


def _most_nodes(values: Values) -> int:
    """Return how many candidates a dynamic tree has: `beam`, then `beam` squared in each round."""
    return int(values["beam"] + (values["depth"] - 1) * values["beam"] ** 2)


def _dynamic_problem(values: Values) -> tuple[str, str] | None:
    candidates = _most_nodes(values)
    sizes = f"depth {values['depth']} and beam {values['beam']}"
    if candidates > _MOST_CANDIDATES:
        return (
            "beam",
            f"{sizes} make {candidates:,} candidates, "
            f"and at most {_MOST_CANDIDATES:,} are possible",
        )
    return (
        None
        if values["nodes"] <= candidates
        else ("nodes", f"{sizes} make only {candidates} candidates")
    )


def _enough_nodes(defaults: Values, typed: Values) -> Values:
    """Return the default number of nodes, or all candidates if depth and beam make fewer."""
    return {**defaults, "nodes": min(defaults["nodes"], _most_nodes({**defaults, **typed}))}


def _jacobi_label(values: Values) -> str:
    """Return `w16-left-maximal`, or `w16x3x2-maximal` with candidates."""
    sizes = (values[key] for key in ("window", "candidates", "branching") if key in values)
    words = [
        setting
        for setting in (values["initial"], values["coupling"])
        if setting not in ("uniform", "none")
    ]
    return "-".join(["w" + "x".join(map(str, sizes)), *words])


def _hybrid_label(values: Values) -> str:
    """Return `w16d2-row-maximal`: a window of 16, the first 2 drafts with the drafter."""
    window, *words = _jacobi_label(values).split("-")
    weight = values["drafter_weight"]
    if weight != 0.5:
        words.insert(0, f"drafter{weight:g}")
    return "-".join([f"{window}d{values['drafted']}", *words])


def _pac_nodes(values: Values) -> int:
    """Return how many nodes a tree with siblings has; more than are possible if it is huge."""
    branching = min(values["branching"], values["window"], MOST_NODES.bit_length())
    return int(
        sum(values["candidates"] ** depth for depth in range(1, branching + 1))
        + values["window"]
        - branching
    )


TREE = structure(
    "tree",
    Kind(type=Any, allowed="must be a tree", dtype="string", choices=tuple(STATIC_TREES)),
    f"Static tree: {', '.join(STATIC_TREES)}; @FILE; or a list of paths.",
)
_SIZE = whole_number(1, MOST_NODES)
NODES = structure(
    "nodes", _SIZE, "Nodes of a dynamic tree, not counting the root.", remark="root not counted"
)
DEPTH = structure("depth", _SIZE, "Depth of a dynamic tree.", bounded_by="tokens")
BEAM = structure("beam", _SIZE, "Beam width of a dynamic tree.", bounded_by="codes")
WINDOW = structure(
    "window", _SIZE, "Draft tokens of a step in Jacobi drafting.", bounded_by="tokens"
)
INITIAL = structure(
    "initial",
    word("uniform", "left", "above", "row"),
    "First Jacobi draft of a position: uniform, left, above (copies of that token), row (last p).",
    default="uniform",
    rare=True,
)
COUPLING = structure(
    "coupling",
    word("none", "maximal", "gumbel"),
    "How consecutive Jacobi drafts of a position share randomness: none, maximal or gumbel.",
    default="none",
    sampled_only=True,
)
CANDIDATES = structure(
    "candidates",
    _SIZE,
    "Candidates of a position in the drafting pac.",
    rare=True,
    bounded_by="codes",
)
BRANCHING = structure(
    "branching", _SIZE, "At how many depths the drafting pac has several candidates.", rare=True
)
DRAFTED = structure(
    "drafted", _SIZE, "At how many first places of a hybrid window the drafter is asked.", rare=True
)
DRAFTER_WEIGHT = structure(
    "drafter_weight",
    FROM_0_TO_1,
    "Weight of the drafter's distribution in the mixture that a hybrid window's first drafts have.",
    default=0.5,
    rare=True,
)

JACOBI = Drafting(
    "jacobi",
    make="lantern_bench.decoding.drafting.jacobi:JacobiDrafting",
    about="the target's own last answers",
    parameters=(WINDOW, INITIAL, COUPLING),
    defaults={"window": 16},
    small={"window": 4},
    needs_drafter=False,
    chain=True,
    fresh_every_step=lambda values: values["coupling"] == "none",
    label=_jacobi_label,
    nodes=lambda values: values["window"],
)
PAC = Drafting(
    "pac",
    make="lantern_bench.decoding.drafting.pac:PacDrafting",
    about="Jacobi drafts with siblings",
    parameters=(WINDOW, INITIAL, COUPLING, CANDIDATES, BRANCHING),
    defaults={"window": 16, "coupling": "maximal", "candidates": 3, "branching": 2},
    small={"window": 4, "candidates": 2},
    needs_drafter=False,
    fresh_every_step=lambda _values: False,
    label=_jacobi_label,
    nodes=_pac_nodes,
)
SHIPPED_DRAFTINGS = (
    Drafting("none", make="", about="no drafts", needs_drafter=False, sampled=False),
    Drafting(
        "static",
        make="lantern_bench.decoding.drafting.static:StaticDrafting",
        about="fixed tree, sampled",
        parameters=(TREE,),
        defaults={"tree": "eagle1-25"},
        small={"tree": "small-7"},
        label=lambda values: values.get("tree"),
    ),
    JACOBI,
    PAC,
    Drafting(
        "hybrid",
        make="lantern_bench.decoding.drafting.jacobi:HybridDrafting",
        about="Jacobi drafts, the first with a drafter",
        parameters=(WINDOW, INITIAL, COUPLING, DRAFTED, DRAFTER_WEIGHT),
        defaults={"window": 16, "initial": "row", "coupling": "maximal", "drafted": 2},
        small={"window": 4, "drafted": 2},
        chain=True,
        fresh_every_step=lambda values: values["coupling"] == "none",
        label=_hybrid_label,
        nodes=lambda values: values["window"],
    ),
    Drafting(
        "dynamic",
        make="lantern_bench.decoding.drafting.dynamic:DynamicDrafting",
        about="best of a beam",
        parameters=(NODES, DEPTH, BEAM),
        defaults={"nodes": 58, "depth": 5, "beam": 10},
        small={"nodes": 10, "depth": 2, "beam": 5},
        sampled=False,
        label=lambda values: "{nodes}n{depth}d{beam}b".format_map(values),
        adapt=_enough_nodes,
        problem=_dynamic_problem,
        nodes=lambda values: max(values["nodes"], values["beam"]),
    ),
)
