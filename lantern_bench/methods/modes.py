"""The shipped modes: names for a drafting together with an acceptance rule."""

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
    # replace those of drafting and rule, if a cell has the parameter
    defaults: Values = field(default_factory=dict)
    source: str = ""  # arXiv number of their paper; empty: the rule's
    # further values that `certify --modes` tests (checks/claims.py)
    variants: tuple[Values, ...] = ()


SHIPPED_MODES = (
    Mode(name="ar", drafting="none", rule="none", label="AR", colour="#000000"),
    Mode(
        name="speculative",
        drafting="static",
        rule="strict",
        label="speculative (strict)",
        colour="#0072B2",
        source="2401.15077",
    ),
    Mode(
        name="lantern",
        drafting="dynamic",
        rule="additive",
        label="LANTERN",
        colour="#D55E00",
        source="2410.03355",
    ),
    Mode(
        name="lantern++",
        drafting="static",
        rule="multiplicative",
        label="LANTERN++",
        colour="#009E73",
        source="2502.06352",
    ),
    Mode(
        name="sjd",
        drafting="jacobi",
        rule="strict",
        label="SJD",
        colour="#332288",
        source="2410.01699",
        variants=({"initial": "left"}, {"initial": "row"}),
    ),
    Mode(
        name="scd",
        drafting="jacobi",
        rule="strict",
        label="SCD",
        colour="#882255",
        defaults={"coupling": "maximal"},
        source="2510.24211",
        variants=({"coupling": "gumbel"},),
    ),
    Mode(
        name="sjd-pac",
        drafting="pac",
        rule="strict",
        label="SJD-PAC",
        colour="#44AA99",
        source="2603.18599",
        variants=({"coupling": "gumbel"},),
    ),
    Mode(
        name="hybrid",
        drafting="hybrid",
        rule="strict",
        label="hybrid",
        colour="#999933",
        variants=({"coupling": "none"}, {"coupling": "gumbel"}),
    ),
    Mode(name="cool-sd", drafting="static", rule="cool-sd", label="Cool-SD", colour="#56B4E9"),
    Mode(
        name="gsd",
        drafting="static",
        rule="gsd",
        label="GSD",
        colour="#E69F00",
        variants=({"drafting": "jacobi"},),
    ),
    Mode(name="entropy", drafting="static", rule="entropy", label="by entropy", colour="#CC79A7"),
    Mode(
        name="typical",
        drafting="static",
        rule="typical",
        label="typical",
        colour="#F0E442",
        variants=({"drafting": "jacobi"}, {"alpha": 0.1}),
    ),
)
