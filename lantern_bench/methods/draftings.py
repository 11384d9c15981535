"""Draftings, and modes: names for a drafting together with an acceptance rule. One row each.

The code of a drafting is in `decoding/drafting/`; its row names the module. The shipped modes are
in modes.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ConfigDict

from lantern_bench.methods.parameters import (
    SHARED,
    Importable,
    Kind,
    Parameter,
    Values,
    fingerprint_of,
    read_rows,
)
from lantern_bench.methods.static_trees import MOST_NODES, STATIC_TREES

# The most candidates of a dynamic tree. All are sorted, and each expanded one attends to others.
_MOST_CANDIDATES = 100_000


@dataclass(frozen=True)
class Drafting:
    """A way to draft: which tokens a step proposes."""

    name: str
    # a `DraftMethod` class, called with (decoding, target, batch); "": no drafts
    make: Importable
    about: str
    # without drafts: a class of `Steps` (decoding/orders/), called with (target, decoding, batch)
    steps: Importable = ""
    # its own parameters, and shipped ones
    parameters: tuple[Parameter, ...] = ()
    # default values of its parameters
    defaults: Values = field(default_factory=dict)
    # whether the tokens keep the target's distribution under a strict rule
    lossless: bool = True
    # whether it uses the model's drafter; otherwise models need none
    needs_drafter: bool = True
    # whether drafts are drawn from q; otherwise a draft is deterministic, and its q is 1
    sampled: bool = True
    # whether its drafts never branch (for static trees, the tree decides this)
    chain: bool = False
    # Whether every step draws all drafts with new random numbers. Rules with
    # `needs_fresh_drafts` require it, because they read deeper drafts.
    fresh_every_step: Callable[[Values], bool] = lambda _values: True
    # Values with which `block` and `traversal` do not require it, because drafts are coupled to
    # what these rules leave (`LastStep.visit_probability`); empty: they always require it.
    lookahead: Values = field(default_factory=dict)
    # the label of the drafts in ids and tables
    label: Callable[[Values], str | None] = lambda _values: None
    # (defaults, values that the user gave) -> defaults that fit them
    adapt: Callable[[Values, Values], Values] = lambda defaults, _typed: defaults
    # returns the key and the error message of values that do not fit together
    problem: Callable[[Values], tuple[str, str] | None] = lambda _values: None
    # how many nodes a draft has below the root, at most `MOST_NODES`; unused for static trees
    nodes: Callable[[Values], int] = lambda _values: 0
    # values of a draft that is small enough for exact checks
    small: Values = field(default_factory=dict)

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
        return fingerprint_of(self.make or self.steps)


def _candidates(values: Values) -> int:
    """Return how many candidates a dynamic tree has: `beam`, then `beam` squared in each round."""
    beam = values["beam"]
    rounds = values["depth"] - 1
    return int(beam + rounds * beam**2)


def _dynamic_problem(values: Values) -> tuple[str, str] | None:
    candidates = _candidates(values)
    sizes = f"depth {values['depth']} and beam {values['beam']} make"
    if candidates > _MOST_CANDIDATES:
        most = f"at most {_MOST_CANDIDATES:,} are possible"
        return "beam", f"{sizes} {candidates:,} candidates, and {most}"
    if values["nodes"] > candidates:
        return "nodes", f"{sizes} only {candidates} candidates"
    return None


def _enough_nodes(defaults: Values, typed: Values) -> Values:
    """Return the default number of nodes, or all candidates if depth and beam make fewer."""
    candidates = _candidates({**defaults, **typed})
    return {**defaults, "nodes": min(defaults["nodes"], candidates)}


def _jacobi_label(values: Values) -> str:
    """Return `w16-row-maximal`, or `w16x3x2-row-maximal` with candidates."""
    sizes = [str(values[key]) for key in ("window", "candidates", "branching") if key in values]
    words = ["w" + "x".join(sizes)]
    if values["initial"] != "uniform":
        words.append(values["initial"])
    if values["coupling"] == "threshold":
        words.append(f"threshold{values['tau']:g}")
    elif values["coupling"] != "none":
        words.append(values["coupling"])
    return "-".join(words)


def _tau_problem(values: Values) -> tuple[str, str] | None:
    if values["coupling"] != "threshold" and values["tau"] != _PARAMETERS["tau"].default:
        return "tau", f"coupling {values['coupling']} has no tau; write coupling: threshold"
    return None


def _hybrid_label(values: Values) -> str:
    """Return `w16d2-row-maximal`: a window of 16, the first 2 drafts with the drafter."""
    window, *words = _jacobi_label(values).split("-")
    weight = values["drafter_weight"]
    if weight != 0.5:
        words.insert(0, f"drafter{weight:g}")
    return "-".join([f"{window}d{values['drafted']}", *words])


def _pac_nodes(values: Values) -> int:
    """Return how many nodes a tree with siblings has; if huge, more than `MOST_NODES`."""
    # Deeper branching exceeds `MOST_NODES` anyway, and its number would grow without limit.
    branching = min(values["branching"], values["window"], MOST_NODES.bit_length())
    nodes = values["window"] - branching
    for depth in range(1, branching + 1):
        nodes += values["candidates"] ** depth
    return int(nodes)


TREE = Parameter(
    "tree",
    Kind(type=Any, allowed="must be a tree", dtype="string", choices=tuple(STATIC_TREES)),
    f"Static tree: {', '.join(STATIC_TREES)}; @FILE; or a list of paths.",
    in_id="structure",
)
_PARAMETERS = {row.name: row for row in (TREE, *SHARED["drafting"])}


def _parameters(*names: str) -> tuple[Parameter, ...]:
    return tuple(_PARAMETERS[name] for name in names)


SHIPPED_DRAFTINGS = (
    Drafting(
        "none",
        make="",
        about="no drafts",
        steps="lantern_bench.decoding.orders.plain:PlainSteps",
        needs_drafter=False,
        sampled=False,
    ),
    Drafting(
        "static",
        make="lantern_bench.decoding.drafting.static:StaticDrafting",
        about="fixed tree, sampled",
        parameters=(TREE,),
        defaults={"tree": "eagle1-25"},
        small={"tree": "small-7"},
        label=lambda values: values.get("tree"),
    ),
    Drafting(
        "jacobi",
        make="lantern_bench.decoding.drafting.jacobi:JacobiDrafting",
        about="the target's own last answers",
        parameters=_parameters("window", "initial", "coupling", "tau"),
        defaults={"window": 16},
        small={"window": 4},
        needs_drafter=False,
        chain=True,
        fresh_every_step=lambda values: values["coupling"] == "none",
        lookahead={"coupling": "maximal"},
        label=_jacobi_label,
        problem=_tau_problem,
        nodes=lambda values: values["window"],
    ),
    Drafting(
        "pac",
        make="lantern_bench.decoding.drafting.pac:PacDrafting",
        about="Jacobi drafts with siblings",
        parameters=_parameters("window", "initial", "coupling", "tau", "candidates", "branching"),
        defaults={"window": 16, "coupling": "maximal", "candidates": 3, "branching": 2},
        small={"window": 4, "candidates": 2},
        needs_drafter=False,
        # deeper siblings are the same below all nodes of a depth
        fresh_every_step=lambda values: values["coupling"] == "none" and values["branching"] == 1,
        lookahead={"coupling": "maximal", "branching": 1},
        label=_jacobi_label,
        problem=_tau_problem,
        nodes=_pac_nodes,
    ),
    Drafting(
        "hybrid",
        make="lantern_bench.decoding.drafting.jacobi:HybridDrafting",
        about="Jacobi drafts, the first with a drafter",
        parameters=_parameters("window", "initial", "coupling", "tau", "drafted", "drafter_weight"),
        defaults={"window": 16, "coupling": "maximal", "drafted": 2},
        small={"window": 4, "drafted": 2},
        chain=True,
        fresh_every_step=lambda values: values["coupling"] == "none",
        lookahead={"coupling": "maximal"},
        label=_hybrid_label,
        problem=_tau_problem,
        nodes=lambda values: values["window"],
    ),
    Drafting(
        "dynamic",
        make="lantern_bench.decoding.drafting.dynamic:DynamicDrafting",
        about="best of a beam",
        parameters=_parameters("nodes", "depth", "beam"),
        defaults={"nodes": 58, "depth": 5, "beam": 10},
        small={"nodes": 10, "depth": 2, "beam": 5},
        sampled=False,
        label=lambda values: "{nodes}n{depth}d{beam}b".format_map(values),
        adapt=_enough_nodes,
        problem=_dynamic_problem,
        nodes=lambda values: max(values["nodes"], values["beam"]),
    ),
    Drafting(
        "zipar",
        make="",
        about="no drafts; a row starts before the row above has ended",
        steps="lantern_bench.decoding.orders.zipar:ZiparSteps",
        parameters=_parameters("window"),
        defaults={"window": 4},
        lossless=False,
        needs_drafter=False,
        sampled=False,
        label=lambda values: f"w{values['window']}",
    ),
)


@dataclass(frozen=True)
class Mode:
    """A name for a drafting and a rule; an experiment may override both."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of rows in modes.toml

    name: str
    drafting: str
    rule: str
    colour: str | None = None
    # override the defaults of drafting and rule in cells that have the parameter
    defaults: Values = field(default_factory=dict)
    source: str = ""  # arXiv number of their paper; empty: the rule's
    # further values that `certify --modes` tests (checks/claims.py)
    variants: tuple[Values, ...] = ()


SHIPPED_MODES = read_rows("modes.toml", Mode)["row"]
