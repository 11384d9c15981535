"""Every column of every table, declared once, in the order of the files.

A quantity has one name in code, flag, column, axis and documentation: the one declared here.
columns.toml lists them; docs/results-format.md is made from both.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.methods.catalog import (
    DRAFTINGS,
    IN_SUMMARY,
    METRICS,
    MODES,
    OF_DRAFTS,
    OF_IMAGES,
    OF_SETS,
    OF_TOKENS,
    OUTSIDE_METRICS,
    OUTSIDE_PARAMETERS,
    PARAMETERS,
    RULES,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import write_file
from lantern_bench.utils.text import listed

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.methods.metrics import Metric


SCHEMA_VERSION = 2
"""The version of runs that this program reads, in every record key: a run never mixes two."""

Row: TypeAlias = dict[str, Any]
"""A row of a table: values by column."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    dtype: str  # string, int, float, bool, object, list[int], list[list[int]] or list[float]
    unit: str
    meaning: str


_INTERVALS = {
    "figure": "95% interval",
    "timing": "95% prediction interval for a repeat on this machine",
    "estimates": "two estimates",
}
"""Types of uncertain figures, and what their intervals are. 95% intervals are over prompts."""


def _figure(
    name: str, unit: str, meaning: str, *, interval: str = _INTERVALS["figure"]
) -> Iterator[Column]:
    """Yield the columns of an uncertain figure and of the two ends of its interval."""
    yield Column(name, "float", unit, meaning=meaning)
    for side, end in {"low": "lower", "high": "upper"}.items():
        yield Column(
            f"{name}_{side}", "float", unit, meaning=f"{end} end of the {interval} of {name}"
        )


def _parameter_columns() -> Iterator[Column]:
    for name, parameter in PARAMETERS.items():
        if parameter.column is not None:
            dtype, unit = parameter.column
            yield Column(name, dtype, unit, meaning=parameter.help.rstrip("."))


def _quality_columns(names: Iterable[str]) -> Iterator[Column]:
    """Yield each quality figure with its interval and its comparison with ar."""
    for name in names:
        metric = METRICS[name]
        yield from _figure(name, "", metric.meaning)
        if metric.has_spread:
            yield from _read(["ar_spread"], metric=name)
        if metric.is_paired:
            yield from _read(["vs_ar"], metric=name)
        yield from _extras(metric)


def _extras(metric: Metric) -> Iterator[Column]:
    """Yield the other columns of a metric. Their texts are taken as they are."""
    for name, dtype, unit, meaning in metric.extras:
        yield Column(name, dtype, unit, meaning=meaning)


def _score_columns() -> Iterator[Column]:
    """Yield the columns of metrics of sets.

    A row of level cell holds the figure and its interval, a row of level ar_spread the centre and
    the ends of the spread.
    """
    for name in OF_SETS:
        metric = METRICS[name]
        levels = "levels cell and ar_spread"
        if metric.image_meaning:
            levels += f"; of an image: {metric.image_meaning}"
        yield from _figure(name, "", f"{metric.meaning} ({levels})")
        yield from _extras(metric)


def _summary_of_quality() -> Iterator[Column]:
    """Yield the metrics of the summary; a scorer follows its first metric."""
    of_sets = listed([name for name in IN_SUMMARY if name in OF_SETS])
    of_images = listed([name for name in IN_SUMMARY if name in OF_IMAGES])
    scorers = {
        "fid_features": f"feature extractor behind {of_sets}",
        "clip_model": f"CLIP model behind {of_images}",
    }
    for name in IN_SUMMARY:
        metric = METRICS[name]
        yield from _figure(name, "", metric.meaning)
        if metric.has_spread:
            yield from _read(["verdict"], metric=name)
        if name in OF_TOKENS:
            yield from _extras(metric)
        if metric.scored_by in scorers:
            yield Column(metric.scored_by, "string", "", meaning=scorers.pop(metric.scored_by))


def _image_scores() -> Iterator[Column]:
    for name in OF_IMAGES:
        yield Column(name, "float", "", meaning=f"{METRICS[name].image_meaning} (level image)")


# Groups of columns that the registered parameters and metrics decide.
_DERIVED: dict[str, Callable[[], Iterator[Column]]] = {
    "parameters": _parameter_columns,
    "image_scores": _image_scores,
    "set_scores": _score_columns,
    "quality_of_tokens": lambda: _quality_columns((*OF_TOKENS, *OF_DRAFTS)),
    "quality_of_sets": lambda: _quality_columns(OF_SETS),
    "quality_of_images": lambda: _quality_columns(OF_IMAGES),
    "summary_of_quality": _summary_of_quality,
}
# The words in braces of columns.toml.
_WORDS = {
    "modes": ", ".join(MODES),
    "draftings": ", ".join(f"{name} ({row.about})" for name, row in DRAFTINGS.items()),
    "rules": ", ".join(RULES),
    "of_sets": listed(OF_SETS),
}
_DECLARED = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))


def _read(entries: Iterable[str | Sequence[str]], metric: str = "") -> Iterator[Column]:
    """Yield the columns of a list in columns.toml: names of groups, and entries of four words."""
    for entry in entries:
        if not isinstance(entry, str):
            name, dtype, unit, meaning = (text.format(metric=metric, **_WORDS) for text in entry)
            if dtype in _INTERVALS:
                yield from _figure(name, unit, meaning, interval=_INTERVALS[dtype])
            else:
                yield Column(name, dtype, unit, meaning=meaning)
        elif entry in _DERIVED:
            yield from _DERIVED[entry]()
        else:
            yield from _read(_DECLARED["groups"][entry], metric)


CELL_COLUMNS: tuple[Column, ...] = tuple(_read(["cell"]))
CELL_NAMES = [column.name for column in CELL_COLUMNS]

TABLES: dict[str, tuple[Column, ...]] = {
    name: tuple(_read(entries)) for name, entries in _DECLARED["tables"].items()
}


def columns(table: str) -> tuple[Column, ...]:
    """Return the columns of a table; an unknown one raises `UserError`."""
    if table not in TABLES:
        raise UserError(f"unknown table '{table}'", f"The tables are {', '.join(TABLES)}.")
    return TABLES[table]


_OF_METRICS = {column.name for column in _quality_columns(OUTSIDE_METRICS)}
OUTSIDE_COLUMNS = _OF_METRICS | OUTSIDE_PARAMETERS
"""Columns from other packages. Files without values in them lack them: an installed package changes
no run that does not use it."""

_OF_TOKENS = [name for name in (*OF_TOKENS, *OF_DRAFTS) if name in IN_SUMMARY]
_ALWAYS = {column.name for column in _quality_columns(_OF_TOKENS)}
_DECIDED = [*_parameter_columns(), *_quality_columns(METRICS), *_summary_of_quality()]
OPTIONAL_COLUMNS = {"category", *(column.name for column in _DECIDED)} - _ALWAYS
"""Columns of parameters, metrics and categories, which a table lacks if nothing in it has one."""

ENDS = ("", "_low", "_high")  # endings of the names of a figure and of its interval

# ---- Tables as DataFrames and as files

_DTYPES = {"string": "string", "int": "Int64", "float": "float64"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # begin a text that spreadsheets run as a formula


def frame(table: str, rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a DataFrame with exactly the declared columns and types.

    A row may leave columns out. A key that is no column raises `ValueError`.
    """
    import pandas as pd

    values = pd.DataFrame(list(rows), dtype=object)
    unknown = values.columns.difference([column.name for column in columns(table)])
    if len(unknown):
        raise ValueError(f"not in the schema of {table}: {', '.join(unknown)}")
    return typed(table, values)


def typed(table: str, values: pd.DataFrame) -> pd.DataFrame:
    """Return the declared columns of a table with their types; missing columns are empty."""
    dtypes = {column.name: _DTYPES[column.dtype] for column in columns(table)}
    # Copied in one piece: pandas warns where columns are added to many pieces.
    return values.reindex(columns=list(dtypes)).astype(dtypes).copy()


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as `csv_text`, whole or not at all; raises `UserError` if it cannot."""
    write_file(path, csv_text(table).encode())


def without_unused(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table without the columns of parameters and metrics that have no values in it."""
    unused = [name for name in table if name in OPTIONAL_COLUMNS and table[name].isna().all()]
    return table.drop(columns=unused)


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV with 6 significant digits; missing values are empty.

    A text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    safe = without_unused(table)
    for name, values in safe.items():
        if values.dtype.kind == "O":
            safe[name] = values.map(_no_formula)
    return str(safe.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def _no_formula(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
