"""Names of cells: labels of legends and tables, and their settings as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from lantern_bench.methods.catalog import (
    METHOD_PARAMETERS,
    MODES,
    PARAMETERS,
    RULES,
    output_of,
)
from lantern_bench.methods.parameters import SAMPLING

CELL = ["run", "model", "cell_id"]
CellKey: TypeAlias = tuple[str, str, str]  # the values of these columns

BOUNDS = {name: parameter.symbol for name, parameter in PARAMETERS.items() if parameter.symbol}

GROUPINGS = ("mode", *BOUNDS, "tree", "temperature")  # values of --by

# How settings are written, in the order of labels.
_METHODS = {
    "drafting": "{}",
    "rule": "{}",
    "tree": "{}",
    "neighbours": "k={:g}",
    "neighbour_metric": "{} neighbours",
    "residual": "{} residual",
}
_SAMPLING = {
    "temperature": "T={:g}",
    "cfg_scale": "cfg={:g}",
    "top_k": "top_k={:g}",
    "top_p": "top_p={:g}",
    "batch": "batch={:g}",
    "seed_set": "seeds={:g}",
}
_FORMATS = _METHODS | _SAMPLING
for _name, _parameter in PARAMETERS.items():
    if _name not in _FORMATS and _parameter.column:
        _value = "{}" if _parameter.column == ("string", "") else "{:g}"
        _FORMATS[_name] = f"{_parameter.short or _name}={_value}"

FAMILY = ("run", "model", "mode", *_METHODS, *BOUNDS, *_SAMPLING)
"""Columns that tell cells apart; without a parameter, the family in which that parameter varies."""

# Labels write bounds with their symbols, in front of the other settings.
_IN_LABELS = [name for name in _FORMATS if name not in BOUNDS]

# Values that labels leave out: plain sampling of one image at a time, and the defaults of methods.
_USUAL = {name: parameter.default for name, parameter in PARAMETERS.items()}
_USUAL |= {"batch": 1, "cfg_scale": None}  # the usual guidance depends on the model


def labels(table: pd.DataFrame) -> list[str]:
    """Return a label for each row, its name and its output: `LANTERN++ λ=2 (relaxed)`."""
    texts = []
    for name, (_, row) in zip(cell_names(table), table.iterrows(), strict=True):
        output = output_of(str(row["drafting"]), str(row["rule"]))
        texts.append(name if row["mode"] == "ar" or output is None else f"{name} ({output})")
    return texts


def cell_names(table: pd.DataFrame) -> list[str]:
    """Return a name for each row: `LANTERN++ λ=2`, after run and model where needed.

    The tree is named where cells differ in it, other settings where cells of the same mode differ.
    """
    prefixes = [name for name in ("run", "model") if name in table and table[name].nunique() > 1]
    return [" ".join(_words(row, table, prefixes)) for _, row in table.iterrows()]


def _words(row: pd.Series, table: pd.DataFrame, prefixes: Sequence[str]) -> Iterator[str]:
    """Yield the words of the name of a row."""
    mode = str(row["mode"])
    of_mode = MODES[mode].label if mode in MODES else mode
    of_rule = _lossless_label(mode, str(row.get("rule")))
    for name in prefixes:
        yield f"{row[name]}:"
    yield of_rule or of_mode
    for name, symbol in BOUNDS.items():
        if pd.notna(row.get(name)):
            yield f"{symbol}={row[name]:g}"

    same_mode = table[table["mode"] == mode]
    for name in _IN_LABELS:
        value = row.get(name)
        is_named = name == "rule" and of_rule is not None
        if is_named or pd.isna(value) or value == _USUAL.get(name):
            continue
        # Methods are compared across trees: a label without the tree would credit the rule with it.
        rivals = table[name].dropna() if name == "tree" else same_mode[name]
        if rivals.nunique(dropna=False) <= 1:
            continue
        is_greedy = name == "temperature" and value == 0
        yield "greedy" if is_greedy else _FORMATS[name].format(value)


def _lossless_label(mode: str, rule: str) -> str | None:
    """The label of a lossless rule in a lossless mode; None for all others."""
    if mode not in MODES or rule not in RULES or rule == "none":
        return None
    row = MODES[mode]
    if not (RULES[rule].lossless and RULES[row.rule].lossless):
        return None
    if rule == row.rule:
        return row.label
    return f"{row.label.removesuffix(f' ({row.rule})')} ({rule})"


def parameters(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings of a cell beyond its mode as text: `small-7 k=10 lambda=2`.

    Sampling settings are named where `cells` differ in them.
    """
    names = _of_methods(cell)
    if cell["neighbour_metric"] not in (None, _USUAL["neighbour_metric"]):
        names.append("neighbour_metric")
    if cell["residual"] == "official":
        names.append("residual")
    words = [_FORMATS[name].format(cell[name]) for name in names]
    return " ".join([*words, *sampling(cell, cells)])


def sampling(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the unusual sampling settings in which `cells` differ, in words: `T=0`, `batch=8`."""
    words = []
    for name, form in _SAMPLING.items():
        is_usual = cell[name] in (None, _USUAL.get(name))
        if not is_usual and len({other[name] for other in cells}) > 1:
            words.append(form.format(cell[name]))
    return words


def _of_methods(cell: Mapping[str, Any]) -> list[str]:
    """The settings of methods that differ from the mode or from their defaults."""
    names = []
    mode = MODES.get(cell["mode"])
    if mode is not None:
        names = [name for name in ("drafting", "rule") if cell[name] != getattr(mode, name)]
    if cell["tree"]:
        names.append("tree")
    for name, parameter in PARAMETERS.items():
        if name in SAMPLING or cell.get(name) is None:
            continue
        is_changed = name in METHOD_PARAMETERS and cell[name] != parameter.default
        if parameter.in_id == "always" or is_changed:
            names.append(name)
    return names
