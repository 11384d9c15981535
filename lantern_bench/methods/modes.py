"""Modes: one row each, a name for a drafting and a rule."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    source: str = ""  # arXiv number of their paper; empty: the rule's
    variants: tuple[Values, ...] = ()  # further values that `certify --modes` (certify/run.py) tests
    # Values that make the form of the authors' code where ours differs: the claim that is tested is theirs alone.
    published: tuple[Values, ...] = ()


SHIPPED_MODES = (
    Mode("ar", "none", "none", "AR", "#000000"),
    Mode("speculative", "static", "strict", "speculative (strict)", "#0072B2", source="2401.15077"),
    Mode("lantern", "dynamic", "additive", "LANTERN", "#D55E00", source="2410.03355"),
    Mode("lantern++", "static", "multiplicative", "LANTERN++", "#009E73", source="2502.06352"),
    Mode(
        "sjd",
        "jacobi",
        "strict",
        "SJD",
        "#332288",
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
        source="2510.24211",
        variants=({"coupling": "gumbel"},),
        published=({"drafting": "scd-published"},),
    ),
    Mode(
        "sjd-pac",
        "pac",
        "strict",
        "SJD-PAC",
        "#44AA99",
        source="2603.18599",
        variants=({"coupling": "gumbel"},),
        published=({"drafting": "sjd-pac-published"},),
    ),
    Mode("hybrid", "hybrid", "strict", "hybrid", "#999933", variants=({"coupling": "none"}, {"coupling": "gumbel"})),
    Mode("cool-sd", "static", "cool-sd", "Cool-SD", "#56B4E9"),
    Mode("gsd", "static", "gsd", "GSD", "#E69F00", variants=({"drafting": "jacobi"},)),
    Mode("entropy", "static", "entropy", "by entropy", "#CC79A7"),
    Mode("typical", "static", "typical", "typical", "#F0E442", variants=({"drafting": "jacobi"}, {"alpha": 0.1})),
)
