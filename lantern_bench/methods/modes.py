"""Modes: one row each, a name for a drafting and a rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lantern_bench.methods.parameters import Values


@dataclass(frozen=True)
class Mode:
    """A name for a drafting and a rule; an experiment may override both."""

    name: str
    drafting: str
    rule: str
    label: str  # in legends
    colour: str | None = None
    defaults: Values = field(default_factory=dict)  # replace those of drafting and rule, if a cell has the parameter
    claim: Literal["lossless", "relaxed"] | None = None  # what its authors say of its tokens; None: as its rule
    source: str = ""  # arXiv number of their paper; empty: the rule's
    variants: tuple[Values, ...] = ()  # further values that `certify --modes` (certify/trials.py) tests
    # Values that make the form of the authors' code where ours differs: the claim that is tested is theirs alone.
    published: tuple[Values, ...] = ()


SHIPPED_MODES = (
    Mode("ar", "none", "none", "AR", "#000000", claim="lossless"),
    Mode("speculative", "static", "strict", "speculative (strict)", "#0072B2", claim="lossless", source="2401.15077"),
    Mode("lantern", "dynamic", "additive", "LANTERN", "#D55E00", claim="relaxed", source="2410.03355"),
    Mode("lantern++", "static", "multiplicative", "LANTERN++", "#009E73", claim="relaxed", source="2502.06352"),
    Mode(
        "sjd",
        "jacobi",
        "strict",
        "SJD",
        "#332288",
        claim="lossless",
        source="2410.01699",
        variants=({"initial": "left"}, {"initial": "row"}),
    ),
    Mode(
        "scd",
        "jacobi",
        "strict",
        "SCD",
        "#882255",
        {"coupling": "maximal"},
        claim="lossless",
        source="2510.24211",
        variants=({"coupling": "gumbel"},),
        published=({"form": "published"},),
    ),
    Mode(
        "sjd-pac",
        "pac",
        "strict",
        "SJD-PAC",
        "#44AA99",
        claim="lossless",
        source="2603.18599",
        variants=({"coupling": "gumbel"},),
        published=({"form": "published"},),
    ),
    Mode(
        "hybrid",
        "hybrid",
        "strict",
        "hybrid",
        "#999933",
        claim="lossless",
        variants=({"coupling": "none"}, {"coupling": "gumbel"}),
    ),
    Mode("cool-sd", "static", "cool-sd", "Cool-SD", "#56B4E9", claim="relaxed"),
    Mode("gsd", "static", "gsd", "GSD", "#E69F00", claim="relaxed", variants=({"drafting": "jacobi"},)),
    Mode("entropy", "static", "entropy", "by entropy", "#CC79A7", claim="relaxed"),
    Mode(
        "typical",
        "static",
        "typical",
        "typical",
        "#F0E442",
        claim="relaxed",
        variants=({"drafting": "jacobi"}, {"alpha": 0.1}),
    ),
)
