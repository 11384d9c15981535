"""The registries of all methods, shipped or from other packages, and the parameters of cells.

Every name of a method is looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lantern_bench.methods.draftings import (
    SHIPPED_DRAFTINGS,
    SHIPPED_MODES,
    TREE,
    Drafting,
    Mode,
)
from lantern_bench.methods.metrics import SHIPPED_METRICS, Metric
from lantern_bench.methods.parameters import (
    SAMPLING,
    SHARED,
    Parameter,
    Values,
    word,
)
from lantern_bench.methods.plugins import by_name, find_rows, parameters_of
from lantern_bench.methods.rules import SHIPPED_RULES, Rule
from lantern_bench.methods.static_trees import STATIC_TREES, is_chain
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.text import did_you_mean, listed

_SHIPPED = (*SHIPPED_DRAFTINGS, *SHIPPED_RULES)
_SHIPPED_PARAMETERS = by_name(_SHIPPED)
_TAKEN: dict[str, Parameter | None] = dict.fromkeys(
    ["all", "mode", "drafting", "rule", "bound", *SAMPLING, *(row.name for row in SHIPPED_MODES)]
)
for _row in _SHIPPED:
    _TAKEN.update(dict.fromkeys([_row.name, *_row.parameter_names]))
_TAKEN.update(_SHIPPED_PARAMETERS)
OUTSIDE_DRAFTINGS, _refused_draftings = find_rows("lantern_bench.draftings", Drafting, _TAKEN)
DRAFTINGS: dict[str, Drafting] = {row.name: row for row in SHIPPED_DRAFTINGS} | OUTSIDE_DRAFTINGS

_DRAFTS = [name for name, row in DRAFTINGS.items() if row.drafts]
OUTSIDE_RULES, _refused_rules = find_rows(
    group="lantern_bench.rules", row_class=Rule, taken=_TAKEN, draftings=_DRAFTS
)
REFUSED: dict[str, RefusedError] = _refused_draftings | _refused_rules
RULES: dict[str, Rule] = {row.name: row for row in SHIPPED_RULES} | OUTSIDE_RULES

MODES: dict[str, Mode] = {row.name: row for row in SHIPPED_MODES}
MODES |= {
    name: Mode(name=name, drafting=rule.drafting, rule=name) for name, rule in OUTSIDE_RULES.items()
}
MODES |= {name: Mode(name=name, drafting=name, rule="strict") for name in OUTSIDE_DRAFTINGS}

_OWN_METRICS = {metric.name: metric for metric in SHIPPED_METRICS}
OUTSIDE_METRICS, REFUSED_METRICS = find_rows(
    "lantern_bench.metrics", Metric, dict.fromkeys(_OWN_METRICS)
)
METRICS: dict[str, Metric] = _OWN_METRICS | OUTSIDE_METRICS
REFUSALS = (*_refused_draftings.values(), *_refused_rules.values(), *REFUSED_METRICS.values())
"""Why installed methods and metrics cannot be used; some occur twice."""


def _metrics(is_wanted: Callable[[Metric], bool]) -> tuple[str, ...]:
    return tuple(name for name, metric in METRICS.items() if is_wanted(metric))


OF_IMAGES = _metrics(lambda metric: metric.level == "image")
OF_TOKENS = _metrics(lambda metric: metric.level == "tokens")
OF_DRAFTS = _metrics(lambda metric: metric.level == "drafts")
OF_SETS = _metrics(lambda metric: metric.level == "set")
PAIRED = _metrics(lambda metric: metric.is_paired)
IN_SUMMARY = _metrics(lambda metric: metric.in_summary)
ON_CURVES = _metrics(lambda metric: metric.on_curves)


LOSSLESS = "lossless"
RELAXED = "relaxed"
"""The output of a cell."""

_RULE_NAMES = ", ".join(name for name in RULES if name != "none")
# Every parameter, in the order of the axes of a grid; some occur twice.
_PARAMETERS = (
    Parameter("mode", word(*MODES), "The mode.", in_id="structure"),
    Parameter(
        "drafting",
        word(*DRAFTINGS),
        f"How to draft: {', '.join(_DRAFTS)}.",
        in_id="structure",
    ),
    Parameter("rule", word(*RULES), f"Acceptance rule: {_RULE_NAMES}.", in_id="structure"),
    TREE,
    *SHARED["drafting"],
    *parameters_of(DRAFTINGS.values()),
    *SHARED["neighbours"],
    *parameters_of(RULES.values()),
    *SHARED["relaxed"],
    *SHARED["sampling"],
)
PARAMETERS: dict[str, Parameter] = {parameter.name: parameter for parameter in _PARAMETERS}
_OUTSIDE = by_name([*OUTSIDE_DRAFTINGS.values(), *OUTSIDE_RULES.values()])
OUTSIDE_PARAMETERS = _OUTSIDE.keys() - _SHIPPED_PARAMETERS.keys()
"""The names of parameters that only methods of other packages have."""
_SHARED = ("neighbours", "neighbour_metric", "delta", "lambda", "bound", "residual", *SAMPLING)
METHOD_PARAMETERS = {
    name: parameter
    for name, parameter in PARAMETERS.items()
    if parameter.in_id != "structure" and name not in _SHARED
}
"""The parameters of single rules that are not part of a cell's structure, by name."""


def raise_if_refused(name: object) -> None:
    """Raise the error of an installed rule or drafting of this name that cannot be used."""
    if isinstance(name, str) and name in REFUSED:
        raise REFUSED[name]


def check_modes(flag: str, names: Iterable[str]) -> None:
    """Raise the error of a name that is neither a mode nor `all`."""
    for name in names:
        if name not in MODES and name != "all":
            raise_if_refused(name)
            problem = f"{flag} {name}: unknown mode{did_you_mean(name, MODES)}"
            raise UserError(problem, f"The modes are {', '.join(MODES)}, or all.")


def has_parameter(key: str, drafting: str, rule: str) -> bool:
    """Return whether cells with a drafting and a rule have a parameter.

    Every cell has the mode and the sampling parameters, and every cell that drafts has a drafting
    and a rule. All other parameters belong to a drafting or to a rule.

    Args:
        key: The name of the parameter.
        drafting: The name of the drafting.
        rule: The name of the rule.
    """
    if key in ("drafting", "rule"):
        return DRAFTINGS[drafting].drafts
    if key == "mode" or key in SAMPLING:
        return True
    return key in DRAFTINGS[drafting].parameter_names or key in RULES[rule].parameter_names


def owners_of(key: str) -> str:
    """Return which draftings or rules have a parameter, in words."""
    if key == "mode" or key in SAMPLING:
        return "every cell"
    if key in ("drafting", "rule"):
        return "modes that draft"
    phrases = []
    for noun, rows in (("drafting", DRAFTINGS), ("rule", RULES)):
        names = [name for name, row in rows.items() if key in row.parameter_names]
        if names:
            plural = "s" if len(names) > 1 else ""
            phrases.append(f"the {noun}{plural} {listed(names)}")
    return " and ".join(phrases) or "rules from other packages (none is installed)"


def missing_drafter(mode: str) -> RefusedError:
    """Return the error for a mode whose drafter a model lacks."""
    others = [row.name for row in MODES.values() if not DRAFTINGS[row.drafting].needs_drafter]
    advice = f"Modes without a drafter: {listed(others)}. `lantern-bench train drafter` trains one."
    return RefusedError(f"mode {mode} needs a drafter, and this model has none", advice)


def can_decide(rule: str, drafting: str) -> bool:
    """Whether the rule can decide on some drafts of the drafting."""
    row = DRAFTINGS[drafting]
    if RULES[rule].needs_fresh_drafts and not row.sampled:
        return False
    can_be_chain = row.chain or "tree" in row.parameter_names
    return can_be_chain or not RULES[rule].chains


def lossless_pairs() -> Iterator[tuple[Rule, Drafting]]:
    """Yield every lossless rule with every lossless drafting that it can decide on.

    Two rules with the same function are equal on chains, so chains get only the first of them.
    """
    codes: set[tuple[Any, str]] = set()
    for rule in RULES.values():
        for drafting in DRAFTINGS.values():
            code = (rule.accept_tree, drafting.name)
            drafts = rule.name != "none" and drafting.drafts
            if not (drafts and rule.lossless and drafting.lossless):
                continue
            if can_decide(rule.name, drafting.name) and not (drafting.chain and code in codes):
                codes.add(code)
                yield rule, drafting


def fresh_drafts_problem(rule: str, drafting: str, values: Values) -> str | None:
    """Return why a rule cannot decide on drafts that are coupled between steps, or None.

    A rule that reads deeper drafts changes their distribution. The next drafts must be independent
    of them, or coupled to this distribution (docs/algorithms.md, section 8.8).

    Args:
        rule: The name of the rule.
        drafting: The name of the drafting.
        values: The cell's parameters by name.
    """
    row = DRAFTINGS[drafting]
    if not RULES[rule].needs_fresh_drafts or row.fresh_every_step(values):
        return None
    use = "rule: strict"
    if RULES[rule].gives_visit_probability and row.lookahead:
        if all(values[key] == value for key, value in row.lookahead.items()):
            return None
        wanted = [f"{key}: {value}" for key, value in row.lookahead.items()]
        use = f"{listed(wanted)}, or {use}"
    return (
        f"the rule {rule} needs independent drafts in every step, "
        f"which the drafting {drafting} {row.label(values)} does not give. Use {use}"
    )


def output_of(drafting: str, rule: str) -> str | None:
    """Return the output of a drafting with a rule: lossless or relaxed.

    None if one of the two belongs to a package that is not installed.
    """
    if drafting not in DRAFTINGS or rule not in RULES:
        return None
    is_lossless = DRAFTINGS[drafting].lossless and RULES[rule].lossless
    return LOSSLESS if is_lossless else RELAXED


def emitted_tv_problem(drafting: str, rule: str, values: Values) -> str | None:
    """Return why a cell has no `emitted_tv`, or None (docs/algorithms.md, section 6.3).

    Args:
        drafting: The name of the drafting.
        rule: The name of the rule.
        values: The cell's parameters by name.
    """
    if not values["temperature"]:
        return "temperature 0 has no distribution"
    if rule not in RULES or drafting not in DRAFTINGS:
        return "a package with the rule or the drafting is not installed"
    if RULES[rule].accept_tree:
        return f"the rule {rule} decides on several drafts together"
    if values.get("residual") == "official":
        return "residual official is not the residual of its theorem"
    row = DRAFTINGS[drafting]
    if not row.lossless:
        reason = "does not draw its drafts from its q" if row.drafts else "verifies nothing"
        return f"the drafting {drafting} {reason}"
    return None


def defaults_for(
    drafting: str, rule: str, mode: str, of_model: Values | None = None
) -> dict[str, Any]:
    """Return the default values of a cell; bounds have no default.

    The result may contain parameters that the cell does not have.

    Args:
        drafting: The cell's drafting.
        rule: The cell's rule.
        mode: The cell's mode.
        of_model: The model's defaults. They override the defaults of the drafting and the rule.
    """
    values = {key: row.default for key, row in PARAMETERS.items() if row.default is not None}
    values |= DRAFTINGS[drafting].defaults
    if RULES[rule].neighbours is not None:
        values["neighbours"] = RULES[rule].neighbours
    values |= {key: value for key, value in (of_model or {}).items() if value is not None}
    values |= MODES[mode].defaults

    tree = values.get("tree")
    if RULES[rule].chains and tree is not None:  # the model's own tree may branch
        paths = STATIC_TREES[tree] if isinstance(tree, str) else tree
        if not is_chain(paths):
            values["tree"] = RULES[rule].tree
    return values
