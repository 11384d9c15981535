"""Labels and styles of cells: names of the papers, colours, markers, line styles.

Files, terminal and web page share them, so that a cell looks the same in all of them. Colours are those of Okabe and
Ito, which people with colour vision deficiency can tell apart; markers and line styles differ as well, for grey print.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.errors import UserError
from lantern_bench.methods.tables import METHOD_PARAMETERS, MODES, PARAMETERS, RULES
from lantern_bench.report.records import NEIGHBOUR_METRIC, SAMPLING_DEFAULTS

if TYPE_CHECKING:
    import pandas as pd

CellKey: TypeAlias = tuple[str, str, str]
"""Run, model, cell id."""

CELL = ["run", "model", "cell_id"]
"""The columns of a `CellKey`."""

BOUNDS = {name: one.symbol for name, one in PARAMETERS.items() if one.symbol}
"""Labels of the bounds of relaxed rules."""

GROUPINGS = ("mode", *BOUNDS, "tree", "temperature")
"""Values of --by: what the colours of curves stand for."""

PARAMETER_NAMES = {**BOUNDS, "tree": "draft tree", "temperature": "temperature"}
"""Axis titles of the parameters in `GROUPINGS`."""

_COLOURS = {name: mode.colour for name, mode in MODES.items() if mode.colour}
# The same hues, light enough for a dark background.
_ON_DARK = {
    "#000000": "#F2F0EC", "#0072B2": "#56A8E0", "#D55E00": "#F58549", "#009E73": "#34C99F", "#767676": "#9A9A9A",
}  # fmt: skip
_CATEGORIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Nine and four have no common divisor: marker and line repeat together after 36 cells only.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_LINES = ("-", "--", "-.", ":")
# Cividis without its palest part, which does not print.
_SCALE = ((0, 45, 112), (73, 83, 112), (124, 123, 120), (180, 165, 105), (219, 190, 70))

# A label names these only where cells of one method (tree: of all methods) differ in them; it always names
# a bound.
_SETTINGS = {
    "drafting": "{}", "rule": "{}", "tree": "{}", "neighbours": "k={:g}", "neighbour_metric": "{} neighbours",
    "residual": "{} residual", "temperature": "T={:g}", "cfg_scale": "cfg={:g}", "top_k": "top-k={:g}",
    "top_p": "top-p={:g}", "batch": "batch={:g}", "seed_set": "seeds={:g}",
}  # fmt: skip
_SETTINGS |= {
    name: f"{name}={{}}" if one.column == ("string", "") else f"{name}={{:g}}"
    for name, one in METHOD_PARAMETERS.items()
    if one.column and not one.symbol
}
_UNNAMED = {**SAMPLING_DEFAULTS, "neighbour_metric": NEIGHBOUR_METRIC}
_UNNAMED |= {name: one.default for name, one in METHOD_PARAMETERS.items()}


class Style(NamedTuple):
    """The style of a cell: a hex colour, and matplotlib's names of a marker and a line style."""

    colour: str
    marker: str
    line: str

    @property
    def colour_on_dark(self) -> str:
        """The colour on a dark background."""
        return _ON_DARK.get(self.colour, self.colour)


def check_grouping(by: str) -> None:
    """Raise `UserError` unless `by` is one of `GROUPINGS`."""
    if by not in GROUPINGS:
        raise UserError(f"--by {by}: must be one of {', '.join(GROUPINGS)}")


def cell_key(row: Mapping[Hashable, Any] | pd.Series) -> CellKey:
    """Return the key of a cell among several runs; `row` has the columns run, model, cell_id."""
    run, model, cell_id = (str(row[name]) for name in CELL)
    return run, model, cell_id


def is_given(value: Any) -> bool:
    """Return whether a cell has this parameter."""
    import pandas as pd

    return not pd.isna(value)


def labels(table: pd.DataFrame) -> list[str]:
    """Return a label for each row: `LANTERN++ λ=2`, with run and model in front where there are several."""
    apart = [name for name in ("run", "model") if table[name].nunique() > 1]
    drafts = table[table["tree"].notna()] if "tree" in table else table
    entries = []
    for _, row in table.iterrows():
        own = table[table["mode"] == row["mode"]]
        parts = [f"{row[name]}:" for name in apart]
        by_rule = _lossless_label(str(row["mode"]), str(row.get("rule")))
        parts.append(by_rule or (MODES[row["mode"]].label if row["mode"] in MODES else row["mode"]))
        parts += [f"{word}={row[name]:g}" for name, word in BOUNDS.items() if is_given(row.get(name))]
        for name, form in _SETTINGS.items():
            if name not in table or (name == "rule" and by_rule):
                continue
            # Methods are compared across their trees: a label without the tree would credit the rule with it.
            rivals = drafts if name == "tree" else own
            if rivals[name].nunique(dropna=False) > 1 and is_given(row[name]) and row[name] != _UNNAMED.get(name):
                parts.append("greedy" if name == "temperature" and row[name] == 0 else form.format(row[name]))
        entries.append(" ".join(parts))
    return entries


def _lossless_label(mode: str, rule: str) -> str | None:
    """The label of a lossless rule in a lossless mode, which names the rule already; None for all others."""
    if mode not in MODES or rule not in RULES or rule == "none":
        return None
    if not (RULES[rule].lossless and RULES[MODES[mode].rule].lossless):
        return None
    own = MODES[mode]
    return own.label if rule == own.rule else f"{own.label.removesuffix(f' ({own.rule})')} ({rule})"


def styles(table: pd.DataFrame, by: str = "mode") -> dict[CellKey, Style]:
    """Return the style of every cell of `table` (columns run, model and those of a cell), in order of appearance.

    The colour stands for `by`, one of `GROUPINGS`; cells without the parameter are grey. Marker and line style differ
    between cells.
    """
    cells = table.drop_duplicates(CELL)
    looks = zip(_colours(list(cells[by]), by), cycle(_MARKERS), cycle(_LINES), strict=False)
    return {cell_key(row): Style(*look) for (_, row), look in zip(cells.iterrows(), looks, strict=False)}


def _colours(values: Sequence[Any], by: str) -> list[str]:
    import numpy as np

    if by == "mode":
        return [_COLOURS.get(value, "#CC79A7") for value in values]
    given = sorted({value for value in values if is_given(value)})
    if by == "tree":
        table = dict(zip(given, cycle(_CATEGORIES), strict=False))
    else:
        places = [place / max(1, len(given) - 1) * (len(_SCALE) - 1) for place in range(len(given))]
        mixed = np.column_stack([np.interp(places, range(len(_SCALE)), part) for part in zip(*_SCALE, strict=True)])
        table = {v: "#" + "".join(f"{round(part):02X}" for part in one) for v, one in zip(given, mixed, strict=True)}
    return [table[value] if is_given(value) else "#767676" for value in values]
