"""Rows that other packages bring, through entry points such as `lantern_bench.rules` and `lantern_bench.draftings`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from importlib import metadata
from typing import Any, Protocol, TypeVar

from lantern_bench.errors import RefusedError
from lantern_bench.methods.draftings import SHIPPED_DRAFTINGS, Drafting
from lantern_bench.methods.metrics import Metric
from lantern_bench.methods.rules import SHIPPED_RULES, Rule

RULE_GROUP, DRAFTING_GROUP = "lantern_bench.rules", "lantern_bench.draftings"
METRIC_GROUP = "lantern_bench.metrics"
_NAME, _KEY = r"[a-z][a-z0-9_-]*", r"[a-z][a-z0-9_]*"
_SHIPPED_PARAMETERS = [parameter for row in (*SHIPPED_DRAFTINGS, *SHIPPED_RULES) for parameter in row.parameters]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Row = TypeVar("_Row", bound=_Named)
_MethodRow = TypeVar("_MethodRow", Rule, Drafting)


def load_rows(
    group: str,
    row_class: type[_Row],
    fault: Callable[[_Row], str | None],
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> tuple[dict[str, _Row], dict[str, RefusedError]]:
    """Return the usable rows of other packages by name, and an error for each row that cannot be used, by its name.

    `fault` says why a row cannot be used. `entry_points` are by default the installed ones of the group.
    """
    rows: dict[str, _Row] = {}
    refused: dict[str, RefusedError] = {}
    for entry_point in sorted(entry_points or metadata.entry_points(group=group), key=lambda entry: entry.name):
        package = entry_point.dist.name if entry_point.dist else "unknown"
        title = f"the {row_class.__name__.lower()} {entry_point.name} of the package {package}"
        row: Any = None
        try:
            row = entry_point.load()
            if isinstance(row, row_class):
                reason = fault(row) or (f"the name {row.name} is taken" if row.name in rows else None)
            else:
                reason = f"its entry point is no lantern_bench.methods.{row_class.__name__} but {type(row).__name__}"
            problem = reason and f"{title} cannot be used: {reason}"
        except Exception as error:  # whatever another package raises when it is imported or read
            problem = f"{title} cannot be loaded: {type(error).__name__}: {error}"
        if problem:
            refusal = RefusedError(problem, f"Mend the package {package}, or remove it.")
            refused |= dict.fromkeys({entry_point.name, str(getattr(row, "name", entry_point.name))}, refusal)
        else:
            rows[row.name] = row
    return rows, refused


def find_metrics(
    taken: Collection[str], entry_points: Iterable[metadata.EntryPoint] | None = None
) -> tuple[dict[str, Metric], dict[str, RefusedError]]:
    """Return the metrics of other packages, as `load_rows`; `taken` are names that they may not have."""

    def fault(row: Metric) -> str | None:
        if not re.fullmatch(_KEY, row.name):
            return f"its name {row.name!r} must be lower-case letters, digits and _"
        return f"the name {row.name} is taken" if row.name in taken else None

    return load_rows(METRIC_GROUP, Metric, fault, entry_points)


def find_rows(
    group: str,
    row_class: type[_MethodRow],
    taken: Collection[str],
    draftings: Collection[str] = (),
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> tuple[dict[str, _MethodRow], dict[str, RefusedError]]:
    """Return the rules or draftings of other packages, as `load_rows`.

    `taken` are names that neither a row nor its parameters may have, `draftings` those that a rule may name.
    """
    taken = set(taken)

    def fault(row: _MethodRow) -> str | None:
        reason = _fault(row, taken, draftings)
        if reason is None:
            taken.update([row.name, *(parameter.name for parameter in row.parameters)])
        return reason

    return load_rows(group, row_class, fault, entry_points)


def _fault(row: Rule | Drafting, taken: Collection[str], draftings: Collection[str]) -> str | None:
    """Return why a row cannot be used, or None."""
    if not re.fullmatch(_NAME, row.name):
        return f"its name {row.name!r} must be lower-case letters, digits, _ and -"
    if row.name in taken:
        return f"the name {row.name} is taken"
    for parameter in row.parameters:
        if not re.fullmatch(_KEY, parameter.name):
            return f"its parameter {parameter.name!r} must be lower-case letters, digits and _"
        if parameter.name in taken and parameter not in _SHIPPED_PARAMETERS:
            return f"the name of its parameter {parameter.name} is taken"
        if any(type(text) is not str for text in (parameter.kind.allowed, parameter.help)):
            return f"its parameter {parameter.name} needs texts for what is allowed and for `help`"
    if isinstance(row, Rule):
        return _rule_fault(row, draftings)
    return None


def _rule_fault(rule: Rule, draftings: Collection[str]) -> str | None:
    if rule.drafting not in draftings:
        return f"its drafting {rule.drafting!r} must be one of {', '.join(draftings)}"
    if sum(code is not None for code in (rule.limit, rule.chance, rule.accept)) > 1:
        return "it has more than one of `limit`, `chance` and `accept`"
    if not rule.lossless and rule.neighbours is not None and rule.neighbours < 1:
        return f"its neighbours {rule.neighbours} must be at least 1"
    return None
