"""Labels and styles of cells; markers and line styles differ as colours do, for grey print and colour blindness."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from lantern_bench.methods.catalog import METHOD_PARAMETERS, MODES, PARAMETERS, RULES
from lantern_bench.methods.parameters import SAMPLING

CELL = ["run", "model", "cell_id"]
CellKey: TypeAlias = tuple[str, str, str]  # the values of these columns

BOUNDS = {name: parameter.symbol for name, parameter in PARAMETERS.items() if parameter.symbol}

GROUPINGS = ("mode", *BOUNDS, "tree", "temperature")  # values of --by

_SAMPLING = ("temperature", "cfg_scale", "top_k", "top_p", "batch", "seed_set")

FAMILY = (
    "run",
    "model",
    "mode",
    "drafting",
    "rule",
    "tree",
    "neighbours",
    "neighbour_metric",
    "residual",
    *BOUNDS,
    *_SAMPLING,
)
"""Columns that tell cells apart; without a parameter they name the family in which that parameter varies."""

# How settings are written, in the order of labels. Bounds are written with their symbols in labels.
_WORDS = {
    "drafting": "{}",
    "rule": "{}",
    "tree": "{}",
    "neighbours": "k={:g}",
    "neighbour_metric": "{} neighbours",
    "residual": "{} residual",
    "temperature": "T={:g}",
    "cfg_scale": "cfg={:g}",
    "top_k": "top_k={:g}",
    "top_p": "top_p={:g}",
    "batch": "batch={:g}",
    "seed_set": "seeds={:g}",
}
_WORDS |= {
    name: f"{parameter.short or name}={{{':g' if parameter.column != ('string', '') else ''}}}"
    for name, parameter in PARAMETERS.items()
    if name not in _WORDS and parameter.column
}
_IN_LABELS = [name for name in _WORDS if name not in BOUNDS]
# Labels leave these out: plain sampling without filters, one image at a time, and what methods do by default.
_UNNAMED = {
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "batch": 1,
    "seed_set": 0,
    "neighbour_metric": "l2",
}
_UNNAMED |= {name: parameter.default for name, parameter in METHOD_PARAMETERS.items()}


def cell_key(row: Mapping[Hashable, Any] | pd.Series) -> CellKey:
    """Return the key of a cell among several runs; `row` has the columns run, model, cell_id."""
    run, model, cell_id = (str(row[name]) for name in CELL)
    return run, model, cell_id


def labels(table: pd.DataFrame) -> list[str]:
    """Return a label for each row: `LANTERN++ λ=2`, with run and model in front where there are several.

    The tree is named where cells differ in it, other settings where cells of the same mode do.
    """
    prefixes = [name for name in ("run", "model") if table[name].nunique() > 1]
    texts = []
    for _, row in table.iterrows():
        same_mode = table[table["mode"] == row["mode"]]
        by_rule = _lossless_label(str(row["mode"]), str(row.get("rule")))
        words = [f"{row[name]}:" for name in prefixes]
        words.append(by_rule or (MODES[row["mode"]].label if row["mode"] in MODES else row["mode"]))
        words += [
            f"{symbol}={row[name]:g}" for name, symbol in BOUNDS.items() if pd.notna(row.get(name))
        ]
        for name in _IN_LABELS:
            if (
                pd.isna(row.get(name))
                or row[name] == _UNNAMED.get(name)
                or (name == "rule" and by_rule)
            ):
                continue
            # Methods are compared across their trees: a label without the tree would credit the rule with it.
            rivals = table[name].dropna() if name == "tree" else same_mode[name]
            if rivals.nunique(dropna=False) > 1:
                is_greedy = name == "temperature" and row[name] == 0
                words.append("greedy" if is_greedy else _WORDS[name].format(row[name]))
        texts.append(" ".join(words))
    return texts


def parameters(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a cell's settings beyond its mode as text: `small-7 k=10 lambda=2`; of sampling where `cells` differ."""
    mode = MODES.get(str(cell["mode"]))
    names = [name for name in ("drafting", "rule") if mode and cell[name] != getattr(mode, name)]
    names += ["tree"] if cell["tree"] else []
    for name, parameter in PARAMETERS.items():
        is_named = parameter.in_id == "always" or (
            name in METHOD_PARAMETERS and cell.get(name) != parameter.default
        )
        if name not in SAMPLING and cell.get(name) is not None and is_named:
            names.append(name)
    names += ["neighbour_metric"] if cell.get("neighbour_metric") not in (None, "", "l2") else []
    names += ["residual"] if cell["residual"] == "official" else []
    for name in _SAMPLING:
        if (
            cell[name] not in (None, _UNNAMED.get(name))
            and len({other[name] for other in cells}) > 1
        ):
            names.append(name)
    return " ".join(_WORDS[name].format(cell[name]) for name in names)


def _lossless_label(mode: str, rule: str) -> str | None:
    """The label of a lossless rule in a lossless mode; None for all others."""
    if mode not in MODES or rule not in RULES or rule == "none":
        return None
    if not (RULES[rule].lossless and RULES[MODES[mode].rule].lossless):
        return None
    row = MODES[mode]
    return row.label if rule == row.rule else f"{row.label.removesuffix(f' ({row.rule})')} ({rule})"
