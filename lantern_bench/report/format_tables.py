"""Tables for reading: what a person wants to see of a table, as text with units and intervals.

`1.74x [1.70, 1.78]` instead of three columns, what is the same in all rows said once, what is missing left blank, notes
below. It is for eyes: files, programs and everything computed take the tables themselves. Drawing is not done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.report.records import NOTE_SEPARATOR
from lantern_bench.schema import CELL_COLUMNS, TABLES

if TYPE_CHECKING:
    import pandas as pd


# How a figure is written: form and unit. What is not listed has four digits and the unit of the schema.
_FORMATS = {
    "speedup": ("{:.2f}", "x"),
    "speedup_published": ("{:.2f}", "x"),
    "speedup_difference": ("{:+.2f}", "x"),
    "mean_accepted_length": ("{:.2f}", ""),
    "mal_uncut": ("{:.2f}", ""),
    "accepted_drafts": ("{:.2f}", ""),
    "step_compression": ("{:.2f}", ""),
    "acceptance_rate": ("{:.3f}", ""),
    "rate": ("{:.3f}", ""),
    "latency_s": ("{:.3g}", " s"),
    "tokens_per_s": ("{:.3g}", ""),
    "target_forwards": ("{:.1f}", ""),
    "drafter_forwards": ("{:.1f}", ""),
    "fid": ("{:.2f}", ""),
    "fid_infinity": ("{:.2f}", ""),
    "clip_score": ("{:.4f}", ""),
    "prompt_accuracy": ("{:.3f}", ""),
    "precision": ("{:.3f}", ""),
    "recall": ("{:.3f}", ""),
    "kid": ("{:.4g}", ""),
    "kid_std": ("{:.4g}", ""),
    "moved_mass": ("{:.4f}", ""),
    "draft_ms": ("{:.2f}", " ms"),
    "target_ms": ("{:.2f}", " ms"),
    "verify_ms": ("{:.2f}", " ms"),
    "other_ms": ("{:.2f}", " ms"),
    "peak_memory_mb": ("{:.0f}", " MB"),
}
_HEADS = {
    "mean_accepted_length": "MAL",
    "mal_uncut": "MAL uncut",
    "fid": "FID",
    "fid_infinity": "FID-infinity",
    "kid": "KID",
    "kid_std": "KID std",
    "clip_score": "CLIP score",
    "cell_id": "cell",
    "precision": "prec.",
    "index": "depth",
    "latency_s": "s / image",
    "tokens_per_s": "tokens / s",
    "target_forwards": "target forwards / image",
    "drafter_forwards": "drafter forwards / image",
    "draft_ms": "draft / step",
    "target_ms": "target / step",
    "verify_ms": "verify / step",
    "other_ms": "other / step",
    "peak_memory_mb": "peak memory",
}
# A quality figure and the column that says what measured it: the two are never apart.
_MEASURED_BY = {"fid": "fid_features", "clip_score": "clip_model"}
# The cell's id holds the other settings; `parameters` holds them in the summary.
_IN_ID = {column.name for column in CELL_COLUMNS} - {"cell_id", "model"}
_SAID_ONCE = (
    "model",
    "images",
    "fid_features",
    "clip_model",
    "reference",
    "n_reference",
    "protocol",
    "protocol_version",
    "kid_subset",
)
# What a summary shows even where it is missing: the notes say why.
_HEADLINE = ("speedup", "mean_accepted_length", "fid", "clip_score")
_NAMED_CELLS = 3
_MAL_NOTE = "MAL counts the target's own token; accepted drafts are one less."


class Readable(NamedTuple):
    """A table as text, and the notes that belong under it."""

    frame: pd.DataFrame
    notes: tuple[str, ...]


def with_interval(value: float, low: float | None, high: float | None, form: str = "{:.2f}", unit: str = "") -> str:
    """Return a figure as people read it: `1.74x [1.70, 1.78]`, without the bracket when there is no interval."""
    text = form.format(value) + unit
    return text if low is None or high is None else f"{text} [{form.format(low)}, {form.format(high)}]"


def written(column: str, value: Any, low: Any = None, high: Any = None) -> str:
    """Return a figure of a column as people read it, with its unit and interval; empty when it is missing."""
    form, mark = _FORMATS.get(column, ("{:.4g}", ""))
    return _text(value, low, high, form, mark)


def readable(table: pd.DataFrame, name: str | None = None) -> Readable:
    """Return a table for reading.

    `name` is its name in the schema. Then what says nothing is left out (empty columns, settings that the id holds),
    what is the same in all rows is said once below, and acceptance is shown by depth. Without a name nothing is known
    of the columns and all of them are kept.
    """
    import pandas as pd

    rows = table[table["axis"] == "depth"].reset_index(drop=True) if name == "acceptance" else table
    shown = [column for column in _figures(rows) if name is None or _worth_showing(rows, column, name)]
    units = {column.name: column.unit for column in TABLES[name]} if name is not None else {}
    if name == "summary":  # as in the papers, for the width of a screen: the speed and quality tables hold the others
        rows = rows.drop(columns=[column for column in rows if _is_end(str(column)) and "speedup" not in str(column)])
    text = {_head(rows, column): _texts(rows, column, units.get(column, "")) for column in shown}
    return Readable(pd.DataFrame(text), tuple(_notes(rows, name)) if name is not None else ())


def _worth_showing(table: pd.DataFrame, column: str, name: str) -> bool:
    if column in _IN_ID or column in ("note", "axis") or (column == "cell_id" and name == "summary"):
        return False
    if table[column].isna().all():
        return name == "summary" and column in _HEADLINE
    if column == "failed":
        return bool((table[column] > 0).any())
    return column not in _SAID_ONCE or table[column].nunique(dropna=False) > 1


def _notes(table: pd.DataFrame, name: str) -> list[str]:
    """What stands under a table: what is the same in all rows, how to read it, and the notes of its rows."""
    notes = [
        f"{column.replace('_', ' ')}: {table[column].iloc[0]}"
        for column in _SAID_ONCE
        if column in table and table[column].nunique(dropna=False) == 1 and table[column].notna().all()
    ]
    if "mean_accepted_length" in table:
        notes.append(_MAL_NOTE)
    if name == "acceptance":
        notes.append("Rates by depth of the tree; those by position in the image are in acceptance.csv.")
    cells: dict[str, list[str]] = {}
    for cell, text in zip(table["cell_id"], table["note"].fillna(""), strict=True):
        for note in filter(None, text.split(NOTE_SEPARATOR)):
            cells.setdefault(note, []).append(cell)
    for note, of in cells.items():
        about = ", ".join(dict.fromkeys(of)) if len(of) <= _NAMED_CELLS else f"{len(of)} of {len(table)} rows"
        notes.append(note if len(of) == len(table) else f"{about}: {note}")
    return notes


def _figures(table: pd.DataFrame) -> list[str]:
    """The columns that stand for themselves: the ends of an interval go with their figure."""
    names = [str(name) for name in table.columns]
    return [name for name in names if not (_is_end(name) and name.rpartition("_")[0] in names)]


def _is_end(column: str) -> bool:
    return column.endswith(("_low", "_high"))


def _head(table: pd.DataFrame, column: str) -> str:
    """The column's name in words; an FID names its features, a CLIP score its model."""
    judge = _MEASURED_BY.get(column)
    there = table[table[column].notna()]
    measured_by = [str(name) for name in there[judge].dropna().unique()] if judge in table else []
    if len(measured_by) == 1:
        # The hash of the weights stands in the notes.
        return f"{_HEADS[column]} ({measured_by[0].partition('@')[0]})"
    figure = next((name for name in _HEADS if column.startswith(f"{name}_") and column not in _HEADS), "")
    words = f"{_HEADS[figure]}{column.removeprefix(figure)}" if figure else _HEADS.get(column, column)
    return words.replace("_", " ")


def _texts(table: pd.DataFrame, column: str, unit: str) -> list[str]:
    form, mark = _FORMATS.get(column, ("{:.4g}", f" {unit}" if unit else ""))
    blank = [None] * len(table)
    ends = [table[name] if (name := f"{column}{end}") in table else blank for end in ("_low", "_high")]
    return [_text(value, low, high, form, mark) for value, low, high in zip(table[column], *ends, strict=True)]


def _text(value: Any, low: Any, high: Any, form: str, unit: str) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    if not isinstance(value, float):
        return str(value)
    return with_interval(value, _number(low), _number(high), form, unit)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, float) and value == value else None
