"""Tables formatted for people.

A figure is one text with its unit and interval, `1.74x [1.70, 1.78]`, in place of three columns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from lantern_bench.analysis.cells import NOTE_SEPARATOR
from lantern_bench.analysis.labels import BOUNDS
from lantern_bench.analysis.quality import OUTSIDE
from lantern_bench.analysis.recommend import MAX_DISTANCE
from lantern_bench.config.paper import FIGURES
from lantern_bench.methods.catalog import LOSSLESS, METRICS, ON_CURVES, PARAMETERS
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import CELL_NAMES, ENDS, TABLES

_WRITTEN = msgspec.toml.decode(
    Path(__file__).with_name("figures.toml").read_bytes(), type=dict[str, dict[str, str]]
)
_FORMATS = _WRITTEN["formats"]
# `z`: no "-0.00"
_FORMATS |= {metric.name: f"{{:z{metric.digits}}}" for metric in METRICS.values()}
for _columns in TABLES.values():
    for _column in _columns:
        _FORMATS.setdefault(_column.name, f"{{:.4g}} {_column.unit}".rstrip())
_HEADS = {metric.name: metric.heading for metric in METRICS.values()} | _WRITTEN["heads"]
BETTER = {metric.name: metric.better for metric in METRICS.values()} | _WRITTEN["better"]
"""Which end of a column is the good one: higher or lower. Other columns have none."""

# The column that names the network of a quality figure, which the head of the figure names too.
_SCORED_BY = {
    name: METRICS[name].scored_by
    for name in ON_CURVES
    if METRICS[name].scored_by not in ("protocol", "model")
}
# Never shown: the cell's id (in the summary, `parameters`) holds its settings, and the notes hold
# the lossless cell.
_HIDDEN = set(CELL_NAMES) - {"cell_id", "model"}
_HIDDEN |= {"axis", "lossless_cell", "note"}

# Shown as a note where all rows share the value.
_OFTEN_SHARED = (
    "model",
    "output",
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
# Not in the summary, whose notes count disturbed images.
_NOT_IN_SUMMARY = ("cell_id", "disturbed", "held_up")
# Shown in the summary even where they are missing, because the notes give the reason.
_HEADLINE = ("speedup", "mean_accepted_length")

# Figures of quality with their extra columns.
_EXTRAS = itertools.chain.from_iterable(metric.extras for metric in METRICS.values())
_OF_QUALITY = {*METRICS, *(extra[0] for extra in _EXTRAS)}


class Readable(NamedTuple):
    """A table formatted for people."""

    frame: pd.DataFrame  # texts
    notes: tuple[str, ...]  # sentences below it


def format_figure(column: str, value: Any, low: Any = None, high: Any = None) -> str:
    """Return a figure as text, `1.74x [1.70, 1.78]`.

    Args:
        column: The column of the figure.
        value: The figure; a missing one is empty text.
        low: Lower end of its interval, or None.
        high: Upper end of its interval, or None.
    """
    if pd.isna(value):
        return ""
    if not isinstance(value, float):
        return str(value)
    number, brace, suffix = _FORMATS.get(column, "{:.4g}").partition("}")
    form = number + brace
    text = form.format(value) + suffix
    if pd.isna(low) or pd.isna(high):
        return text
    return f"{text} [{form.format(low)}, {form.format(high)}]"


def readable(table: pd.DataFrame, name: str | None = None, *, intervals: bool = False) -> Readable:
    """Return a table formatted for people.

    With `name`, its name in the schema, empty columns and settings that the id holds are left out,
    values that all rows share become notes, and acceptance is shown by depth only.

    Args:
        table: The table.
        name: Its name in the schema.
        intervals: The summary has all its intervals and the p-value of the distance. Otherwise it
            has intervals of speedup only, as in the papers, to fit the screen.
    """
    rows = _shown_rows(table, name)
    texts = {}
    for column in _shown_columns(rows, name):
        is_bare = name == "summary" and column != "speedup" and not intervals
        texts[_head(rows, column)] = figure_texts(rows, column, intervals=not is_bare)
        if column == "distance" and intervals and "distance_p" in rows:
            texts[head_of("distance_p")] = figure_texts(rows, "distance_p")
    return Readable(pd.DataFrame(texts), tuple(_notes(rows, name)))


def _shown_rows(table: pd.DataFrame, name: str | None) -> pd.DataFrame:
    if name != "acceptance":
        return table
    return table[table["axis"] == "depth"].reset_index(drop=True)


def _shown_columns(rows: pd.DataFrame, name: str | None) -> list[str]:
    shown = []
    for column in map(str, rows):
        is_end = column.endswith(ENDS[1:]) and column.rpartition("_")[0] in rows
        if not is_end and (name is None or worth_showing(rows, column, name)):
            shown.append(column)
    return shown


def figure_texts(rows: pd.DataFrame, column: str, *, intervals: bool = True) -> list[str]:
    """Return the figures of a column as texts.

    Args:
        rows: The table, with the ends of intervals.
        column: The column.
        intervals: Whether a figure has its interval behind it.
    """
    ends: Sequence[str] = ENDS if intervals else ENDS[:1]
    figures = rows.reindex(columns=[f"{column}{end}" for end in ends])
    return [format_figure(column, *figure) for figure in figures.itertuples(index=False)]


def worth_showing(table: pd.DataFrame, column: str, name: str = "") -> bool:
    """Return whether a column says something that its table shows nowhere else.

    Args:
        table: The table.
        column: The column.
        name: The name of the table in the schema.
    """
    is_summary = name == "summary"
    if column in _HIDDEN or column.endswith(("_verdict", "_detectable")):
        return False
    if is_summary and column in _NOT_IN_SUMMARY:
        return False
    if table[column].isna().all():
        return is_summary and column in _HEADLINE
    if is_summary and column in _OF_QUALITY:
        return column in _summary_figures(table)
    if column == "measured":
        beside = table.filter(["distance", "emitted_tv"])
        return not any(table[column].equals(beside[name]) for name in beside)
    if column in ("failed", "disturbed", "held_up"):
        return bool((table[column] > 0).any())
    return column not in _OFTEN_SHARED or table[column].nunique(dropna=False) > 1


def _summary_figures(table: pd.DataFrame) -> list[str]:
    """The quality figures that the summary shows: the metrics for the screen, else all metrics."""
    measured = [METRICS[str(name)] for name in table.filter([*METRICS]).dropna(how="all", axis=1)]
    for_screen = [metric for metric in measured if metric.on_screen]
    if all(metric.level == "drafts" for metric in for_screen):
        return list(METRICS)
    return [metric.name for metric in for_screen]


def _notes(table: pd.DataFrame, name: str | None) -> list[str]:
    """Return at most three notes: shared values, how to read the table, the notes of its rows."""
    if name is None:
        return []
    shared = "; ".join(_shared_values(table))
    reading = " ".join(_how_to_read(table, name))
    of_rows = ". ".join(_notes_of_rows(table))
    return [note for note in (shared, reading, of_rows) if note]


def _shared_values(table: pd.DataFrame) -> Iterator[str]:
    for column in map(str, table.filter(_OFTEN_SHARED)):
        values = table[column].unique()
        if len(values) == 1 and pd.notna(values[0]):
            yield f"{column.replace('_', ' ')}: {values[0]}"


def _how_to_read(table: pd.DataFrame, name: str) -> Iterator[str]:
    if "mean_accepted_length" in table:
        yield (
            "MAL: tokens committed per step, the target's own (bonus) token included, the prefill "
            "and its token left out: 15 tokens of a prefill and 11 steps have MAL 14 / 11."
        )
    if _has_values(table, "speedup_low"):
        yield (
            "Speed intervals: 95% of repeats on this machine in the same state; others: 95% "
            "confidence."
        )
    if _has_values(table, "lossless_cell"):
        fastest = ", ".join(table["lossless_cell"].dropna().unique())
        yield (
            "Over lossless: over the fastest lossless cell of the run with the same sampling, "
            f"{fastest}."
        )
    if "cell_id" in table:
        yield from _against_ar(table)
    if name == "acceptance":
        yield "Rates by depth of the tree; acceptance.csv also has rates by position."


def _has_values(table: pd.DataFrame, column: str) -> bool:
    return column in table and bool(table[column].notna().any())


def _notes_of_rows(table: pd.DataFrame) -> Iterator[str]:
    """Yield the notes of the rows, each once, with the cells that it is about."""
    if "note" not in table:
        return
    notes = table["note"].str.split(NOTE_SEPARATOR, regex=False)
    of_rows = table.assign(note=notes, row=_row_names(table)).explode("note")
    for note, rows in of_rows.groupby("note", sort=False)["row"]:
        about = f"{len(rows)} of {len(table)} rows: "
        if len(rows) == len(table):
            about = ""
        elif len(rows) <= 3:
            about = f"{', '.join(rows.unique())}: "
        yield f"{about}{note}"


def _row_names(table: pd.DataFrame) -> pd.Series:
    """The cell of each row, after its run and its category where the table has them."""
    parts = table.filter(["run", "category", "cell_id"])
    return parts.apply(lambda row: " ".join(row.dropna()), axis="columns")


def _against_ar(table: pd.DataFrame) -> Iterator[str]:
    """Yield which figures of which cells lie outside the spread of ar, in words."""
    verdicts = table.filter(regex="_verdict$").dropna(how="all", axis=1)
    names = [str(column).removesuffix("_verdict") for column in verdicts]
    if not names:
        return
    cells = []
    for name_of_row, row in zip(_row_names(table), rows_of(table), strict=True):
        outside = [name for name in names if row[f"{name}_verdict"] == OUTSIDE]
        if outside:
            cells.append(f"{name_of_row} ({', '.join(outside)})")
    largest = table[[f"{name}_detectable" for name in names]].max()
    shifts = [
        f"{name} {shift:.2g}" for name, shift in zip(names, largest, strict=True) if pd.notna(shift)
    ]
    result = f"outside are {', '.join(cells)}; of all others" if cells else "of all cells"
    yield (
        f"{', '.join(names)} against ar's own spread (same prompts, other seeds): {result} no "
        f"shift is detected at {table['images'].max()} images; 80% power detects "
        f"{', '.join(shifts) or 'an unknown shift'}. Outside is drift, even where the figure "
        "improves; by chance one in 20 figures of a lossless cell is outside."
    )


def head_of(column: str) -> str:
    """Return the name of a column in words."""
    if not column.isidentifier():
        return column  # it is in words
    known = [figure for figure in _HEADS if f"{column}_".startswith(f"{figure}_")]
    figure = max(known, key=len, default="")
    return f"{_HEADS.get(figure, '')}{column.removeprefix(figure)}".replace("_", " ")


def _head(table: pd.DataFrame, column: str) -> str:
    """The name of a column, and of the scorer of a quality figure if all rows share it."""
    scorer = _SCORED_BY.get(column)
    if scorer in table:
        scorers = table.loc[table[column].notna(), scorer].dropna().unique()
        if len(scorers) == 1:
            name, _, _ = scorers[0].partition("@")  # the notes hold the hash of the weights
            return f"{_HEADS[column]} ({name})"
    return head_of(column)


# ---- Several runs

_OF_RUNS = ("speedup", "mean_accepted_length", "distance")
_NOT_OF_RUNS = [
    "lossless_cell",
    "fid_features",
    "clip_model",
]  # notes on figures that are not shown


def join_runs(summaries: Mapping[str, pd.DataFrame]) -> Readable:
    """Return a row for each cell, with a group of columns for each run.

    Args:
        summaries: The table `summary` of each run, by its name.
    """
    several = pd.concat(summaries.values())
    keys = [name for name in ("category", "model", "cell_id") if name in several]
    cells = several[keys].drop_duplicates(ignore_index=True)
    texts = {head_of(name): cells[name].tolist() for name in keys if worth_showing(cells, name)}
    notes: dict[str, list[str]] = {}
    for run, summary in summaries.items():
        # A cell has a row for each protocol, with the same figures of speed and tokens.
        of_run = cells.merge(summary.drop_duplicates(keys), how="left", on=keys)
        for figure in _OF_RUNS:
            column = figure_texts(of_run, figure, intervals=figure == "speedup")
            if any(column):
                texts[f"{run}: {head_of(figure)}"] = column
        for note in _notes(summary.drop(columns=_NOT_OF_RUNS, errors="ignore"), "summary"):
            notes.setdefault(note, []).append(run)
    lines = [
        note if len(runs) == len(summaries) else f"{', '.join(runs)}: {note}"
        for note, runs in notes.items()
    ]
    return Readable(pd.DataFrame(texts), tuple(lines))


# ---- LaTeX

_SYMBOLS = {PARAMETERS[name].short or name: symbol for name, symbol in BOUNDS.items()}

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "δ": r"$\delta$",
    "λ": r"$\lambda$",
    "η": r"$\eta$",
    "ε": r"$\epsilon$",
}
_ESCAPES |= {character: f"\\{character}" for character in "&%$#_{}"}
_LATEX = str.maketrans(_ESCAPES)


def latex(
    table: pd.DataFrame, name: str | None = None, title: str | None = None, more: Sequence[str] = ()
) -> str:
    """Return a table for LaTeX with booktabs.

    Empty columns are left out, figures are right-aligned, and the best figure of a column among
    `may_be_best` is bold.

    Args:
        table: The table.
        name: Its name in the schema, as in `readable`.
        title: A comment above it.
        more: Further comments.
    """
    rows = _shown_rows(table, name)
    alignment = ""
    columns: dict[str, list[str]] = {}
    for column in _shown_columns(rows, name):
        texts = figure_texts(rows, column)
        if not any(texts):
            continue
        kind = "l"
        heading = _in_latex(_head(rows, column))
        cells = [_in_latex(text) for text in texts]
        if pd.api.types.is_numeric_dtype(rows[column]):
            kind = "r"
            cells = _figures(texts, _best_of_groups(rows, column, texts))
        if any(" & " in cell for cell in cells):
            kind = "r@{ }l"
            heading = rf"\multicolumn{{2}}{{c}}{{{heading}}}"
            cells = [cell if " & " in cell else f"{cell} & " for cell in cells]
        alignment += kind
        columns[heading] = cells
    comments = [
        *(title or "").splitlines(),
        r"needs \usepackage{booktabs}",
        *_notes(rows, name),
        BEST_NOTE,
        *more,
    ]
    lines = [f"% {comment}" for comment in comments if comment]
    tabular = pd.DataFrame(columns).to_latex(index=False, escape=False, column_format=alignment)
    return "\n".join([*lines, tabular.rstrip()])


BEST_NOTE = (
    f"Bold: the best figure of a column among cells with a distance of at most {MAX_DISTANCE:g} "
    "(its whole interval); of cells without a distance, among the lossless ones."
)


def may_be_best(table: pd.DataFrame) -> list[bool]:
    """Return which rows may hold the best figure of a column, as `BEST_NOTE` says."""
    distance = table.reindex(columns=["output", "distance", "distance_high"])
    highest = distance["distance_high"].fillna(distance["distance"]).astype(float)
    is_lossless = distance["output"].eq(LOSSLESS).fillna(value=False)
    return (highest.le(MAX_DISTANCE) | (highest.isna() & is_lossless)).tolist()


def best_of(column: str, texts: Sequence[str], among: Sequence[bool]) -> list[bool]:
    """Return which texts hold the best figure of a column; none where all figures look alike.

    Figures that are 0 in every lossless cell have no best one: the smallest is sampling noise.

    Args:
        column: The column.
        texts: Its figures as `figure_texts` writes them.
        among: Which of them may be the best.
    """
    better = BETTER.get(column)
    if column in METRICS and METRICS[column].against_ar == "none":
        better = None
    numbers = pd.Series(texts, dtype=object).str.extract(r"^([+-]?[\d.]+)")[0].astype(float)
    is_comparable = better is not None and numbers.nunique() > 1
    numbers = numbers.where(pd.Series(among, dtype=bool))
    best = numbers.max() if better == "higher" else numbers.min()
    return (numbers.eq(best) & is_comparable).tolist()


def _best_of_groups(rows: pd.DataFrame, column: str, texts: Sequence[str]) -> list[bool]:
    """`best_of` within each run and category, whose figures do not compete with others."""
    groups = ["table", *rows.filter(["run", "category"])]
    among = may_be_best(rows)
    best = [False] * len(rows)
    for places in rows.assign(table="").groupby(groups, dropna=False).indices.values():
        marks = best_of(
            column, [texts[place] for place in places], among=[among[place] for place in places]
        )
        for place, mark in zip(places, marks, strict=True):
            best[place] = mark
    return best


def _figures(texts: Sequence[str], best: Sequence[bool]) -> list[str]:
    """The cells of a column of figures; intervals are cells of their own, for the alignment."""
    cells = []
    for text, is_best in zip(texts, best, strict=True):
        value, _, interval = _in_latex(text).replace("-", "$-$").partition(" [")
        cell = re.sub(r"(?<=\d)x$", r"$\\times$", value)
        if is_best:
            cell = rf"\textbf{{{cell}}}"
        cells.append(f"{cell} & [{interval}" if interval else cell)
    return cells


def _in_latex(text: str) -> str:
    """Text escaped, with the symbols of bounds: `delta=0.1` begins with a Greek letter."""
    if text in _SYMBOLS:
        text = _SYMBOLS[text]
    else:
        text = re.sub(r"\b\w+(?==)", lambda match: _SYMBOLS.get(match[0], match[0]), text)
    return text.translate(_LATEX)


# ---- Published figures


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `reproduction` as text, with a line for each row of the paper and cell.

    Without published rows there is a line for each cell.
    """
    published = table[table["paper_row"].notna()]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of(published if len(published) else table):
        theirs = row["paper_row"] or ""
        ours = " ".join(filter(None, [row["method"], row["parameters"]])) or "(none)"
        line = lines.setdefault((theirs, ours), {"published row": theirs, "ours": ours})
        figure = row["figure"]
        head = head_of(figure)
        ending = " official" if row["residual"] == "official" else ""
        line |= {
            f"{head} published": format_figure(figure, row["published"]),
            f"{head}{ending}": format_figure(figure, row["ours"]),
        }

    text = pd.DataFrame(list(lines.values()))
    text = text.where(text != "").dropna(axis="columns", how="all").fillna("")
    names = ["published row"]
    for head in map(head_of, FIGURES):
        if head in text:
            names += [head, f"{head} official", f"{head} published"]
    # The cell comes last: a narrow terminal repeats the names before the figures.
    return text.filter([*names, "ours"])
