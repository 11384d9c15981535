"""Several runs, each under a name that tells it from the others.

The name is the folder's; where two folders have the same name, as copies of one run do, the folder around them is
named too. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lantern_bench.config.methods import MODES, RULES
from lantern_bench.errors import RefusedError
from lantern_bench.runs.store import RunData, latest, read_run
from lantern_bench.schema import CELL_COLUMNS

# ---- Records, sorted into cells: which rows count, which cell they belong to, which cell is the baseline of which


Row: TypeAlias = Mapping[str, Any]

NOTE_SEPARATOR = " | "
"""Between the notes of one row."""

SAMPLING_DEFAULTS = {"temperature": 1, "top_k": 0, "top_p": 1, "batch": 1}
"""Values that need not be named where people read: plain sampling without filters, one image at a time."""

NEIGHBOUR_METRIC = "l2"
"""The metric that need not be named."""

# What an `ar` cell should share with the cell it is compared to, most important first.
_SAMPLING = ("cfg_scale", "batch", "temperature", "top_k", "top_p")
_NUMBERS = ("temperature", "neighbours", "delta", "lambda", "bound", "top_k", "top_p", "cfg_scale", "batch")


@dataclass(frozen=True)
class CellRecords:
    """One cell: its columns, its good records by (prompt, repeat), and how many images failed."""

    columns: Mapping[str, Any]
    good: tuple[Row, ...]
    failed: int

    @property
    def cell_id(self) -> str:
        """The cell's id."""
        return str(self.columns["cell_id"])


def group(records: Iterable[dict[str, Any]]) -> list[CellRecords]:
    """Sort records into cells, in the fixed order of all tables.

    Of rows with one `record_key` the last counts: a failed image that was retried appears again.
    """
    cells: dict[str, list[Row]] = {}
    for row in latest(records):
        cells.setdefault(str(row["cell_id"]), []).append(row)
    grouped = [_cell(rows) for rows in cells.values()]
    return sorted(grouped, key=lambda cell: _order(cell.columns))


def baseline_of(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the `ar` cell a speedup is measured against: same model, closest sampling settings; None without one.

    Guidance doubles the rows of every forward, so a cell with guidance is never compared to one without.
    """
    candidates = [other for other in cells if other.columns["mode"] == "ar" and _comparable(cell, other)]
    return min(candidates, key=lambda other: _distance(cell, other), default=None)


def settings_that_differ(cell: CellRecords, other: CellRecords) -> list[str]:
    """Return the sampling settings in which two cells differ, as `name=value` of the other one."""
    return [f"{name}={other.columns[name]:g}" for name in _SAMPLING if cell.columns[name] != other.columns[name]]


def joined(notes: Iterable[str]) -> str | None:
    """Return a row's notes as its `note`, each once; None without any."""
    return NOTE_SEPARATOR.join(dict.fromkeys(notes)) or None


def _comparable(cell: CellRecords, other: CellRecords) -> bool:
    unguided = [each.columns["cfg_scale"] == 1 for each in (cell, other)]
    return cell.columns["model"] == other.columns["model"] and unguided[0] == unguided[1]


def _distance(cell: CellRecords, other: CellRecords) -> tuple[bool, ...]:
    """Differences in order of weight; False sorts first, so the nearest cell is the least."""
    return tuple(cell.columns[name] != other.columns[name] for name in _SAMPLING)


def _cell(rows: list[Row]) -> CellRecords:
    good = [row for row in rows if row["status"] == "ok"]
    good.sort(key=lambda row: (str(row["prompt_id"]), row["repeat"]))
    columns = {column.name: rows[0].get(column.name) for column in CELL_COLUMNS}
    return CellRecords(columns, tuple(good), len(rows) - len(good))


def _order(columns: Mapping[str, Any]) -> tuple[Any, ...]:
    """Modes as the papers list them, then parameters by value: delta 0.005 stands before 0.02."""
    modes = list(MODES)
    mode = columns["mode"]
    place = modes.index(mode) if mode in modes else len(modes)
    rules = {rule: number for number, rule in enumerate(RULES)}
    words = (str(columns["drafting"] or ""), rules.get(str(columns["rule"]), len(rules)), str(columns["tree"] or ""))
    numbers = tuple((columns[name] is not None, columns[name] or 0) for name in _NUMBERS)
    return (str(columns["model"] or ""), place, *words, numbers, columns["cell_id"])


# ----


def read_named(folders: Sequence[Path]) -> dict[str, RunData]:
    """Read the runs; raises `RefusedError` for one without records and `UserError` for what is no run."""
    found = {}
    for name, folder in zip(run_names(folders), folders, strict=True):
        found[name] = read_run(folder)
        if not found[name].records:
            raise RefusedError(f"{folder} holds no records yet", "The command that began this run continues it.")
    return found


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its own, with as many parents as it takes to differ from the others."""
    whole = [folder.resolve().parts for folder in folders]
    for depth in range(1, max((len(parts) for parts in whole), default=1) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in whole]
