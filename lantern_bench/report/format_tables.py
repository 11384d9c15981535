"""Tables formatted for people: text with units and intervals, `1.74x [1.70, 1.78]` in place of three columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from lantern_bench.analysis.cells import NOTE_SEPARATOR
from lantern_bench.analysis.labels import BOUNDS
from lantern_bench.analysis.published import FROM_SPEED
from lantern_bench.analysis.quality import OUTSIDE
from lantern_bench.analysis.speed import SPEEDUPS
from lantern_bench.methods.catalog import METRICS, ON_CURVES, PARAMETERS
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import CELL_COLUMNS, TABLES

FORMATS = {
    **dict.fromkeys(
        ("speedup", "speedup_over_lossless", "speedup_measured"),
        ("{:.2f}", "x"),
    ),
    "speedup_error": ("{:+.1%}", ""),
    **dict.fromkeys(
        ("mean_accepted_length", "mal_uncut", "accepted_drafts", "step_compression"), ("{:.2f}", "")
    ),
    **{metric.name: (f"{{:{metric.digits}}}", "") for metric in METRICS.values()},
    **dict.fromkeys(("acceptance_rate", "rate"), ("{:.3f}", "")),
    **dict.fromkeys(("target_forwards", "drafter_forwards"), ("{:.1f}", "")),
    "fid_infinity": ("{:.2f}", ""),
    "neighbour_mass": ("{:.4f}", ""),
    **dict.fromkeys(
        ("draft_ms", "target_ms", "verify_ms", "other_ms", "ar_ms", "step_ms"), ("{:.2f}", " ms")
    ),
    **dict.fromkeys(("latency_s", "latency_p50_s", "latency_p95_s"), ("{:.3g}", " s")),
    "tokens_per_s": ("{:.3g}", ""),
    "peak_memory_mb": ("{:.0f}", " MB"),
    **dict.fromkeys(
        ("p_first", "p_joint", "p_later", "p_images", "p_holm", "power_p", "distance_p"),
        ("{:.2g}", ""),
    ),
    "table_tv": ("{:.3f}", ""),
}
"""Number format and unit of a figure. Other figures have four digits and the unit of the schema."""

_HEADS = {
    **{metric.name: metric.heading for metric in METRICS.values()},
    "mean_accepted_length": "MAL",
    "mal_uncut": "MAL uncut",
    "fid_infinity": "FID-infinity",
    "kid_std": "KID std",
    "cell_id": "cell",
    "index": "depth",
    "latency_s": "s / image",
    "latency_p50_s": "s / image, median",
    "latency_p95_s": "s / image, p95",
    "tokens_per_s": "tokens / s",
    "speedup_over_lossless": "over lossless",
    "target_forwards": "target forwards / image",
    "drafter_forwards": "drafter forwards / image",
    "draft_ms": "draft / step",
    "target_ms": "target / step",
    "verify_ms": "verify / step",
    "other_ms": "other / step",
    "peak_memory_mb": "peak memory",
}
# A quality figure and the column that names its network: the head of the figure names both.
_SCORED_BY = {
    name: METRICS[name].scored_by
    for name in ON_CURVES
    if METRICS[name].scored_by not in ("protocol", "model")
}
# The cell's id holds the other settings (`parameters` in the summary), and the notes hold the last two.
_HIDDEN = {column.name for column in CELL_COLUMNS} - {"cell_id", "model"} | {
    "axis",
    "lossless_cell",
    "note",
}
_OFTEN_SHARED = (
    "model",
    "images",
    "fid_features",
    "clip_model",
    "reference",
    "n_reference",
    "protocol",
    "protocol_version",
    "kid_subset",
    "device",
    "stack",
)
# The summary shows these even where they are missing: the notes give the reason.
_HEADLINE = ("speedup", "mean_accepted_length")
_OF_QUALITY = {
    name
    for metric in METRICS.values()
    for name in (metric.name, *(extra[0] for extra in metric.extras))
}


class Readable(NamedTuple):
    """A table formatted for people."""

    frame: pd.DataFrame  # texts
    notes: tuple[str, ...]  # sentences below it


def format_figure(
    column: str, value: Any, low: Any = None, high: Any = None, *, unit: str = ""
) -> str:
    """Return a figure as text, `1.74x [1.70, 1.78]`; `unit` is for columns without a format."""
    if pd.isna(value):
        return ""
    if not isinstance(value, float):
        return str(value)
    form, unit = FORMATS.get(column, ("{:.4g}", f" {unit}" if unit else ""))
    text = form.format(value) + unit
    return (
        text
        if pd.isna(low) or pd.isna(high)
        else f"{text} [{form.format(low)}, {form.format(high)}]"
    )


def readable(table: pd.DataFrame, name: str | None = None) -> Readable:
    """Return a table formatted for people.

    With `name`, its name in the schema, empty columns and settings that the id holds are left out, values that all rows
    share are notes, and acceptance is by depth.
    """
    rows, texts = _texts(table, name)
    notes = tuple(_notes(rows, name)) if name is not None else ()
    return Readable(pd.DataFrame(dict(texts.values())), notes)


def _texts(
    table: pd.DataFrame, name: str | None
) -> tuple[pd.DataFrame, dict[str, tuple[str, list[str]]]]:
    """The rows that are shown, and for each column that is shown its head and texts."""
    rows = table[table["axis"] == "depth"].reset_index(drop=True) if name == "acceptance" else table
    names = [str(column) for column in rows.columns]
    intervals = [column for column in names if column.endswith(("_low", "_high"))]
    ends = {column for column in intervals if column.rpartition("_")[0] in names}
    shown = [c for c in names if c not in ends and (name is None or worth_showing(rows, c, name))]
    units = {column.name: column.unit for column in TABLES[name]} if name is not None else {}
    # As in the papers, to fit the screen: the speed and quality tables hold the other intervals.
    if name == "summary":
        rows = rows.drop(
            columns=[
                column for column in intervals if column not in ("speedup_low", "speedup_high")
            ]
        )
    texts = {}
    for column in shown:
        cells = (rows.get(f"{column}{end}", [None] * len(rows)) for end in ("", "_low", "_high"))
        figures = map(partial(format_figure, column, unit=units.get(column, "")), *cells)
        texts[column] = _head(rows, column), list(figures)
    return rows, texts


def worth_showing(table: pd.DataFrame, column: str, name: str = "") -> bool:
    """Return whether a column says something that its table (`name` in the schema) shows nowhere else."""
    if (
        column in _HIDDEN
        or column.endswith(("_verdict", "_detectable"))
        or (column == "cell_id" and name == "summary")
    ):
        return False
    if table[column].isna().all():
        return name == "summary" and column in _HEADLINE
    if name == "summary" and column in _OF_QUALITY:
        filled = table.columns[table.notna().any()]
        return column in (
            [name for name in filled if name in METRICS and METRICS[name].on_screen] or METRICS
        )
    if column in ("failed", "disturbed", "held_up"):
        # the notes of the rows count these images
        is_noted = name == "summary" and column != "failed"
        return bool((table[column] > 0).any()) and not is_noted
    return column not in _OFTEN_SHARED or table[column].nunique(dropna=False) > 1


def _notes(table: pd.DataFrame, name: str) -> list[str]:
    """The notes below a table: values that all rows share, how to read it, and the notes of its rows."""
    notes = [
        f"{column.replace('_', ' ')}: {table[column].iloc[0]}"
        for column in _OFTEN_SHARED
        if column in table
        and table[column].nunique(dropna=False) == 1
        and table[column].notna().all()
    ]
    if "mean_accepted_length" in table:
        notes.append("MAL counts the target's own token; accepted drafts are one less.")
    if "speedup_low" in table and table["speedup_low"].notna().any():
        notes.append(
            "Speed intervals: 95 % of repeats on this machine in the same state; others: 95 % confidence."
        )
    if "lossless_cell" in table and table["lossless_cell"].notna().any():
        fastest = ", ".join(table["lossless_cell"].dropna().unique())
        notes.append(
            f"Over lossless: over the fastest lossless cell of the run with the same sampling, {fastest}."
        )
    if "cell_id" in table:
        notes += _against_ar(table)
    if name == "acceptance":
        notes.append(
            "Rates by depth of the tree; those by position in the image are in acceptance.csv."
        )
    if "note" not in table:
        return notes
    of_rows = table["note"].dropna().str.split(NOTE_SEPARATOR, regex=False).explode()
    for note, rows in of_rows[of_rows != ""].groupby(of_rows, sort=False).groups.items():
        cells = table.loc[rows, "cell_id"]
        about = (
            ", ".join(cells.unique()) if len(cells) <= 3 else f"{len(cells)} of {len(table)} rows"
        )
        notes.append(str(note) if len(cells) == len(table) else f"{about}: {note}")
    return notes


def _against_ar(table: pd.DataFrame) -> list[str]:
    """Which cells' figures lie outside ar's own spread, in words."""
    verdicts = (
        table.set_index("cell_id")
        .filter(regex="_verdict$")
        .dropna(how="all", axis=1)
        .dropna(how="all")
    )
    if verdicts.empty:
        return []
    verdicts.columns = verdicts.columns.str.removesuffix("_verdict")
    is_outside = (verdicts == OUTSIDE).fillna(value=False)
    cells = [
        f"{cell} ({', '.join(row.index[row])})" for cell, row in is_outside.iterrows() if row.any()
    ]
    detectable = {name: table[f"{name}_detectable"].max() for name in verdicts}
    shifts = ", ".join(
        f"{name} {shift:.2g}" for name, shift in detectable.items() if pd.notna(shift)
    )
    result = f"outside are {', '.join(cells)}; of all others" if cells else "of all cells"
    return [
        f"{', '.join(map(str, verdicts))} against AR's own spread (same prompts, other seeds): {result} no shift is "
        f"detected at {table['images'].max()} images; seen with probability .8 would be {shifts or 'unknown'}. "
        "Outside is drift, also where the figure gains; by chance one in 20 figures of a lossless cell is outside."
    ]


def head_of(column: str) -> str:
    """Return the name of a column in words."""
    figure = next(
        (name for name in _HEADS if column.startswith(f"{name}_") and column not in _HEADS), ""
    )
    words = (
        f"{_HEADS[figure]}{column.removeprefix(figure)}" if figure else _HEADS.get(column, column)
    )
    return words.replace("_", " ")


def _head(table: pd.DataFrame, column: str) -> str:
    """The name of a column, and for a quality figure that of its scorer, where it is one for all rows."""
    scorer = _SCORED_BY.get(column)
    scored_by = set(table[scorer][table[column].notna()].dropna()) if scorer in table else set()
    # The notes hold the hash of the weights.
    return (
        f"{_HEADS[column]} ({str(*scored_by).partition('@')[0]})"
        if len(scored_by) == 1
        else head_of(column)
    )


# ---- LaTeX

_BETTER = {metric.name: metric.better for metric in METRICS.values()} | {"latency_s": "lower"}
_BETTER |= dict.fromkeys((*SPEEDUPS, "mean_accepted_length", "tokens_per_s"), "higher")
_SYMBOLS = {PARAMETERS[name].short or name: symbol for name, symbol in BOUNDS.items()}
_GREEK = {"δ": r"$\delta$", "λ": r"$\lambda$", "η": r"$\eta$", "ε": r"$\epsilon$"}
_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX = str.maketrans(_GREEK | _ESCAPES | {character: f"\\{character}" for character in "&%$#_{}"})


def latex(
    table: pd.DataFrame, name: str | None = None, title: str | None = None, more: Sequence[str] = ()
) -> str:
    """Return a table for LaTeX with booktabs: no empty columns, figures right-aligned, the best of a column bold."""
    rows, texts = _texts(table, name)
    alignment = ""
    columns = dict[str, list[str]]()
    for column, (head, column_texts) in texts.items():
        if not any(column_texts):
            continue
        heading = _in_latex(head)
        kind = "l"
        cells = list(map(_in_latex, column_texts))
        if pd.api.types.is_numeric_dtype(rows[column]):
            kind = "r"
            cells = _figures(pd.Series(column_texts), _BETTER.get(column))
        if any(" & " in cell for cell in cells):
            kind = "r@{ }l"
            heading = rf"\multicolumn{{2}}{{c}}{{{heading}}}"
            cells = [cell if " & " in cell else f"{cell} & " for cell in cells]
        alignment += kind
        columns[heading] = cells
    notes = _notes(rows, name) if name is not None else ()
    remarks = [
        f"% {note}" for note in (title, r"needs \usepackage{booktabs}", *notes, *more) if note
    ]
    tabular = pd.DataFrame(columns).to_latex(index=False, escape=False, column_format=alignment)
    return "\n".join([*remarks, tabular.rstrip()])


def _figures(texts: pd.Series, better: str | None) -> list[str]:
    """The cells of a column of figures; an interval is a cell of its own, so that the figures stay aligned."""
    values, _, intervals = texts.str.partition(" [").T.to_numpy()
    numbers = pd.Series(values).str.extract(r"^([+-]?[\d.]+)")[0].astype(float)
    best = {"higher": numbers.max(), "lower": numbers.min()}.get(better or "")
    cells = []
    for value, number, interval in zip(values, numbers, intervals, strict=True):
        cell = _in_latex(value.removesuffix("x")).replace(
            "-", "$-$"
        ) + r"$\times$" * value.endswith("x")
        cell = rf"\textbf{{{cell}}}" if number == best and numbers.nunique() > 1 else cell
        cells.append(f"{cell} & [{interval.replace('-', '$-$')}" if interval else cell)
    return cells


def _in_latex(text: str) -> str:
    """Text escaped, with the symbols of bounds: `delta=0.1` begins with a Greek letter."""
    text = _SYMBOLS.get(
        text, re.sub(r"\b\w+(?==)", lambda match: _SYMBOLS.get(match[0], match[0]), text)
    )
    return text.translate(_LATEX)


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """Return text: a line for each row of the paper and the cell beside it; without a paper, for each cell."""
    published = table[table["paper_row"].notna()]
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows_of(published if len(published) else table):
        ours = " ".join(filter(None, [row["method"], row["parameters"]])) or "(none)"
        line = lines.setdefault(
            (row["paper_row"], ours), {"published row": row["paper_row"] or "", "ours": ours}
        )
        head = head_of(row["figure"])
        name = row["figure"]
        line[f"{head} published"] = format_figure(name, row["published"])
        line[f"{head} official" if row["residual"] == "official" else head] = format_figure(
            name, row["ours"]
        )
    text = pd.DataFrame(list(lines.values())).fillna("")
    measured = [
        head for head in map(head_of, (*FROM_SPEED, *METRICS)) if head in text and text[head].any()
    ]
    heads = [f"{head}{end}" for head in measured for end in ("", " official", " published")]
    # The cell comes last: a narrow terminal repeats the names before the figures.
    return text[
        [name for name in ("published row", *heads, "ours") if name in text and text[name].any()]
    ]
