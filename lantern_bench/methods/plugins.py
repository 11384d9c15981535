"""Find the rules, draftings, metrics and models that installed packages register."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from typing import Any, TypeVar

from lantern_bench.methods.draftings import Drafting
from lantern_bench.methods.metrics import Metric
from lantern_bench.methods.parameters import Parameter
from lantern_bench.methods.rules import Rule
from lantern_bench.utils.errors import RefusedError

_NAME = r"[a-z][a-z0-9_-]*"
# of metrics and parameters, which name columns
_KEY = r"[a-z][a-z0-9_]*"
_Row = TypeVar("_Row")
# The pattern that names must match, and its characters in words. Models may have any name.
_NAMES: dict[type, tuple[str, str]] = {
    Rule: (_NAME, "digits, _ and -"),
    Drafting: (_NAME, "digits, _ and -"),
    Metric: (_KEY, "digits and _"),
}


def find_rows(
    group: str,
    row_class: type[_Row],
    taken: dict[str, Parameter | None],
    *,
    draftings: Collection[str] = (),
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> tuple[dict[str, _Row], dict[str, RefusedError]]:
    """Return the usable rows of other packages by name, and errors for the others.

    Args:
        group: The entry point group.
        row_class: The type of the rows.
        taken: Names that no row may have. The names of parameters, which rows may share, have
            their parameters. Usable rows and their parameters are added.
        draftings: The draftings that a rule may name.
        entry_points: Replaces the installed entry points, for tests.
    """
    rows: dict[str, _Row] = {}
    refused: dict[str, RefusedError] = {}
    found = entry_points or metadata.entry_points(group=group)
    for entry_point in sorted(found, key=lambda entry: entry.name):
        package = entry_point.dist.name if entry_point.dist else "unknown"
        title = f"the {row_class.__name__.lower()} {entry_point.name} of the package {package}"
        row: Any = None
        problem = ""
        try:
            row = entry_point.load()
            fault = _fault(row, row_class, taken)
            if fault is None and isinstance(row, Rule):
                fault = _rule_fault(row, draftings)
            if fault is not None:
                problem = f"{title} cannot be used: {fault}"
        except Exception as error:  # another package can raise anything when it is imported or read
            problem = f"{title} cannot be loaded: {type(error).__name__}: {error}"
        if problem:
            refusal = RefusedError(problem, f"Fix the package {package}, or uninstall it.")
            refused[entry_point.name] = refusal
            refused[str(getattr(row, "name", entry_point.name))] = refusal
        else:
            rows[row.name] = row
            taken[row.name] = None
            taken.update(by_name([row]))
    return rows, refused


def _fault(row: Any, row_class: type[Any], taken: Mapping[str, Parameter | None]) -> str | None:
    """Return why a row cannot be used, or None."""
    if not isinstance(row, row_class):
        return f"its entry point is a {type(row).__name__}, not a {row_class.__name__}"
    pattern, characters = _NAMES.get(row_class, (".+", ""))
    if not re.fullmatch(pattern, row.name):
        return f"its name {row.name!r} must be lower-case letters, {characters}"
    if row.name in taken:
        return f"the name {row.name} is taken"
    for parameter in parameters_of([row]):
        fault = _parameter_fault(parameter, taken)
        if fault is not None:
            return fault
    return None


def parameters_of(rows: Iterable[Any]) -> list[Parameter]:
    """Return the parameters of draftings and rules; other rows have none."""
    parameters: list[Parameter] = []
    for row in rows:
        # The `parameters` of a model are a number of weights.
        if isinstance(row, Rule | Drafting):
            parameters += row.parameters
    return parameters


def by_name(rows: Iterable[Any]) -> dict[str, Parameter]:
    """Return the parameters of draftings and rules by name."""
    return {parameter.name: parameter for parameter in parameters_of(rows)}


def _parameter_fault(parameter: Parameter, taken: Mapping[str, Parameter | None]) -> str | None:
    if not re.fullmatch(_KEY, parameter.name):
        return f"its parameter {parameter.name!r} must be lower-case letters, digits and _"
    if taken.get(parameter.name, parameter) is not parameter:
        return (
            f"the name of its parameter {parameter.name} is taken "
            "(rules of one package may share one Parameter object)"
        )
    texts = (parameter.kind.allowed, parameter.help)
    if any(type(text) is not str for text in texts):
        return f"its parameter {parameter.name} needs texts for what is allowed and for `help`"
    return None


def _rule_fault(rule: Rule, draftings: Collection[str]) -> str | None:
    if rule.drafting not in draftings:
        return f"its drafting {rule.drafting!r} must be one of {', '.join(draftings)}"
    needs_function = rule.kind in ("by neighbours", "by probability")
    if needs_function != (rule.function is not None):
        return f"its kind {rule.kind!r} does not fit its function"
    if (rule.kind is None) != (rule.accept_tree is not None):
        return f"its kind {rule.kind!r} does not fit its accept_tree"
    if not rule.lossless and rule.neighbours is not None and rule.neighbours < 1:
        return f"its neighbours {rule.neighbours} must be at least 1"
    return None
