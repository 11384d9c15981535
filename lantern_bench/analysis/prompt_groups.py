"""The tables of a run by a column of its prompts, such as the category.

The prompts with one value are a group. The tables of a group equal the tables of a run of only
these prompts, so intervals, tests and comparisons with `ar` are over the prompts of the group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from lantern_bench.analysis.cells import run_cells
from lantern_bench.analysis.tables import NAMES, tables_of
from lantern_bench.methods.catalog import OF_SETS
from lantern_bench.storage.run_directory import RunData, without_records
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import listed

NO_VALUE = "(none)"
"""The group of the prompts that lack the column."""

_COUNTED = ("images", "axis")  # `prompts` stands before the first of them

_OF_SCORER = ("level", "protocol", "protocol_version", "cell_id")


def prompt_columns(run: RunData) -> list[str]:
    """Return the columns that the prompts of a run have beside their text."""
    names = dict[str, None]()
    for metadata in run.records["prompt_metadata"].dropna():
        names |= dict.fromkeys(metadata)
    return list(names)


def grouping_columns(run: RunData) -> list[str]:
    """Return the columns by which the prompts of a run fall into groups.

    Such a column has at least two values, and on average at least two prompts for each value. An id
    is no such column.
    """
    prompts = run.records.drop_duplicates("prompt_id")
    names = []
    for name in prompt_columns(run):
        values = _values(prompts, name).nunique()
        if 2 <= values <= len(prompts) / 2:
            names.append(name)
    return names


def split_run(run: RunData, by: str) -> dict[str, RunData]:
    """Return the run of each group of prompts, by its value as text.

    Scores of single images are kept. Scores of all images of a cell are not: they cannot be split.

    Args:
        run: The run, with all columns of its records.
        by: A column of its prompts.

    Raises:
        UserError: The prompts have no such column.
        RefusedError: The run has no records.
    """
    if not len(run.records):
        raise without_records(run.folder)
    known = prompt_columns(run)
    if by not in known:
        advice = f"They have {', '.join(known)}."
        if not known:
            advice = "They have only their text: decode prompts of a file with such a column."
        raise UserError(f"--by {by}: the prompts of {run.folder} have no such column", advice)

    values = _values(run.records, by)
    groups = {}
    for value in sorted(values.unique(), key=lambda value: (value == NO_VALUE, value)):
        records = run.records[values == value].reset_index(drop=True)
        groups[value] = replace(run, records=records, scores=list(_scores_of(records, run.scores)))
    return groups


def _values(records: pd.DataFrame, by: str) -> pd.Series:
    """The value of a column of the prompts as text, of each record."""
    return records["prompt_metadata"].map(lambda metadata: _value(metadata, by))


def _value(metadata: Mapping[str, Any] | None, by: str) -> str:
    """The value of a column of a prompt as text."""
    value = (metadata or {}).get(by)
    if value is None:
        return NO_VALUE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _scores_of(records: pd.DataFrame, scores: Iterable[Row]) -> Iterator[Row]:
    """Yield the scores of records; rows of cells say only that a protocol scored them."""
    keys = set(records["record_key"])
    finished = records[records["status"] == "ok"]["cell_id"].value_counts()
    for row in scores:
        if row["level"] in ("image", "tokens"):
            if row["record_key"] in keys:
                yield row
        elif row["level"] == "cell" and row["cell_id"] in finished:
            note = None
            if row.get("extractor") is not None:
                note = f"{listed(OF_SETS)} compare all images of a cell: none by groups of prompts"
            of_cell = {name: row[name] for name in _OF_SCORER}
            yield of_cell | {"n": int(finished[row["cell_id"]]), "note": note}


def tables_by(run: RunData, by: str) -> dict[str, pd.DataFrame]:
    """Build the tables of `tables_of` of each group, one below the other.

    The column `category` in front is the group. `prompts` counts the prompts behind a row. Holm's
    correction of `distance_p` is over the cells of a group, and here also over the groups.

    Args:
        run: The run, with all columns of its records.
        by: A column of its prompts.

    Raises:
        UserError: The prompts have no such column.
        RefusedError: The run has no records.
    """
    groups = split_run(run, by)
    parts = [_grouped(group, part) for group, part in groups.items()]
    tables = {}
    for name in NAMES:
        table = pd.concat([part[name] for part in parts], ignore_index=True)
        if "distance_p" in table:
            table["distance_p"] = (len(groups) * table["distance_p"]).clip(upper=1.0)
        tables[name] = table
    return tables


def _grouped(group: str, run: RunData) -> dict[str, pd.DataFrame]:
    """The tables of a group, with the columns `category` and `prompts`."""
    prompts = {cell.cell_id: cell.completed["prompt_id"].nunique() for cell in run_cells(run)}
    tables = tables_of(run)
    # The categories of an official scorer are other groups.
    quality = tables["quality"]
    tables["quality"] = quality[quality["category"].isna()].drop(columns="category")
    for table in tables.values():
        place = next(place for place, column in enumerate(table) if column in _COUNTED)
        table.insert(place, "prompts", table["cell_id"].map(prompts))
        table.insert(0, "category", group)
    return tables
