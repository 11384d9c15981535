"""Names of cells: labels of legends and tables, and their settings as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from lantern_bench.methods.catalog import (
    METHOD_PARAMETERS,
    MODES,
    PARAMETERS,
    output_of,
)
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import Row

CELL = ["run", "model", "cell_id"]
CellKey: TypeAlias = tuple[str, str, str]  # the values of these columns

BOUNDS = {name: parameter.symbol for name, parameter in PARAMETERS.items() if parameter.symbol}

GROUPINGS = ("mode", *BOUNDS, "tree", "temperature")  # values of --by

# How settings are written.
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

_SETTINGS = ("run", "model", "mode", *_FORMATS)

# Names have these wherever a cell has them, and other settings where cells differ in them.
_ALWAYS = {"drafting", "rule", *BOUNDS}

# Values that names leave out: plain sampling of one image at a time, and the defaults of methods.
_USUAL = {name: parameter.default for name, parameter in PARAMETERS.items()}
_USUAL |= {"batch": 1, "cfg_scale": None}  # the usual guidance depends on the model


def labels(table: pd.DataFrame) -> list[str]:
    """Return a label for each row, its name and its output: `lantern++ lambda=2 (relaxed)`."""
    texts = []
    for name, (_, row) in zip(cell_names(table), table.iterrows(), strict=True):
        output = output_of(str(row["drafting"]), str(row["rule"]))
        texts.append(name if row["mode"] == "ar" or output is None else f"{name} ({output})")
    return texts


def cell_names(table: pd.DataFrame) -> list[str]:
    """Return a name for each row: `lantern++ lambda=2`, after run and model where needed.

    A name is the mode and the words of `parameters`, without the words that tell no cells apart:
    a tree that all cells share, and other settings that all cells of the mode share.
    """
    prefixes = [name for name in ("run", "model") if name in table and table[name].nunique() > 1]
    rows = rows_of(table.filter(_SETTINGS))
    cells = {tuple(row.values()): row for row in rows}
    names = {}
    for key, cell in cells.items():
        names[key] = " ".join(_words(cell, list(cells.values()), prefixes))
    return [names[tuple(row.values())] for row in rows]


def _words(cell: Row, cells: Sequence[Row], prefixes: Sequence[str]) -> Iterator[str]:
    """Yield the words of the name of a cell among others."""
    for name in prefixes:
        yield f"{cell[name]}:"
    yield cell["mode"]
    same_mode = [other for other in cells if other["mode"] == cell["mode"]]
    for name in _of_methods(cell):
        # Methods are compared across trees: a name without the tree would credit the rule with it.
        rivals = [other for other in cells if other["tree"]] if name == "tree" else same_mode
        if name in _ALWAYS or len({other[name] for other in rivals}) > 1:
            yield _FORMATS[name].format(cell[name])
    yield from sampling(cell, same_mode)


def parameters(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings of a cell beyond its mode as text: `small-7 k=10 lambda=2`.

    Sampling settings are named where `cells` differ in them.
    """
    words = [_FORMATS[name].format(cell[name]) for name in _of_methods(cell)]
    return " ".join([*words, *sampling(cell, cells)])


def sampling(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the unusual sampling settings in which `cells` differ, in words: `T=0`, `batch=8`."""
    words = []
    for name, form in _SAMPLING.items():
        is_usual = cell.get(name) in (None, _USUAL.get(name))
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
    if cell.get("neighbour_metric") not in (None, _USUAL["neighbour_metric"]):
        names.append("neighbour_metric")
    if cell.get("residual") == "official":
        names.append("residual")
    return names
