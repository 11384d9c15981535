"""The records of runs, grouped into cells, and the baseline that each cell is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd

from lantern_bench.methods.catalog import DRAFTINGS, MODES, PARAMETERS, RULES
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import CELL_COLUMNS, Row

NOTE_SEPARATOR = " | "

# Settings that an `ar` cell should share with the cell it is compared with, most important first.
_SAMPLING = ("cfg_scale", "batch", "temperature", "top_k", "top_p", "seed_set")

_OF_METHODS = [
    name for name, row in PARAMETERS.items() if row.in_id == "always" and name not in SAMPLING
]

# Settings with numbers, in the order in which they sort cells.
_NUMBERS = ("temperature", *_OF_METHODS, "top_k", "top_p", "cfg_scale", "batch")

_CELL = [column.name for column in CELL_COLUMNS]

_PHASES = ("draft", "target", "verify", "other")

# Figures of a record that are numbers.
_RECORDED = (
    "seconds",
    "tokens",
    "target_forwards",
    "drafter_forwards",
    "mal_uncut",
    "neighbour_mass",
    "peak_memory_bytes",
    "process",
    "disturbed",
    "draft_seconds",
    "target_seconds",
    "verify_seconds",
    "other_seconds",
)

COLUMNS_READ = (
    *_CELL,
    "record_key",
    "status",
    "prompt_id",
    "repeat",
    "device",
    "device_id",
    "start_per_step",
    "child_rank_per_step",
    "committed_per_step",
    "accepted_per_step",
    *_RECORDED,
)
"""The columns of records that tables are built from."""

HELD_UP = 1.25
"""Held up: seconds per step above 1.25 times the cell's median in that process."""


def _kept_fraction(images: pd.DataFrame) -> pd.Series[float]:
    """Return the fraction of its seconds that each image would have taken undisturbed; mostly 1.

    Seconds per step above the limit count as the limit: `HELD_UP` times the lower median of the
    cell in that process, or the median itself for a disturbed image. Where more than half of these
    images are disturbed, none of them is treated as disturbed.
    """
    pace = images["seconds"] / images["steps"].clip(lower=1.0)
    process = images["process"]
    is_disturbed = images["disturbed"] == 1.0
    mostly_calm = is_disturbed.groupby(process).transform("mean") <= 0.5
    left_out = is_disturbed & mostly_calm
    calm_pace = pace.where(~left_out).groupby(process)
    median = calm_pace.transform("quantile", 0.5, interpolation="lower")
    limit = median * left_out.map({True: 1.0, False: HELD_UP})
    return (limit / pace).clip(upper=1.0).fillna(1.0)


def timed_images(cell: CellRecords, base: CellRecords | None = None) -> pd.DataFrame:
    """Return the images that `statistics.timing` needs.

    With a base, its seconds are divided by the seconds of the cell, for images that both decoded on
    one device. Without a base, the figure is seconds per image.

    Returns:
        Columns `numerator`, `denominator`, `numerator_steps`, `denominator_steps` and `process`,
        indexed by `prompt_id` and `repeat`.
    """
    if base is None:
        names = {"seconds": "numerator", "steps": "numerator_steps"}
        seconds = cell.timed.rename(columns=names).drop(columns="device_id")
        return seconds.assign(denominator=1.0, denominator_steps=1.0)
    names = {"seconds": "numerator", "steps": "numerator_steps", "device_id": "base_device_id"}
    of_base = base.timed.drop(columns="process").rename(columns=names)
    of_cell = cell.timed.rename(columns={"seconds": "denominator", "steps": "denominator_steps"})
    both = of_cell.join(of_base, how="inner")
    on_one_device = both[both["device_id"] == both["base_device_id"]]
    return on_one_device.drop(columns=["device_id", "base_device_id"])


@dataclass(frozen=True)
class CellRecords:
    """The records of one cell."""

    columns: Row  # the values of CELL_COLUMNS
    completed: pd.DataFrame  # completed records, by prompt and repeat
    failed: int  # images that failed

    @property
    def cell_id(self) -> str:
        """The cell's id."""
        return str(self.columns["cell_id"])

    @property
    def is_lossless(self) -> bool:
        """Whether the cell decodes losslessly, as its drafting and its rule claim."""
        drafting = DRAFTINGS.get(str(self.columns["drafting"]))
        rule = RULES.get(str(self.columns["rule"]))
        if drafting is None or rule is None:
            return False  # of a package that is not installed
        return drafting.lossless and rule.lossless

    @cached_property
    def images(self) -> pd.DataFrame:
        """The figures of each completed image, indexed by (prompt_id, repeat).

        The figures are floats, nan where not recorded. Besides the recorded figures there are:

        - `count`: 1
        - `steps`, and `committed` and `accepted` summed over the steps
        - `uncut`: tokens with the last step uncut
        - `kept_fraction`: see `_kept_fraction`; `seconds` and `*_ms` are multiplied by it
        - `record_key` and `device_id`: text, empty where not recorded
        """
        completed = self.completed
        keys = [list(completed["prompt_id"]), list(completed["repeat"])]
        index = pd.MultiIndex.from_arrays(keys, names=["prompt_id", "repeat"])
        figures: dict[str, Any] = {
            name: completed[name].to_numpy(float, na_value=np.nan) for name in _RECORDED
        }
        figures["committed"] = _sums(completed["committed_per_step"])
        figures["accepted"] = _sums(completed["accepted_per_step"])
        figures["steps"] = [len(counts or ()) for counts in completed["committed_per_step"]]
        images = pd.DataFrame(figures, index=index).astype(float)
        images["count"] = 1.0
        images["uncut"] = images["mal_uncut"] * images["steps"]
        images["process"] = images["process"].fillna(0.0)  # not recorded: one process
        kept = _kept_fraction(images)
        images["kept_fraction"] = kept
        images["seconds"] *= kept
        for phase in _PHASES:
            images[f"{phase}_ms"] = 1000.0 * images[f"{phase}_seconds"] * kept
        for name in ("record_key", "device_id"):
            images[name] = [str(text or "") for text in completed[name]]
        return images

    @cached_property
    def offers(self) -> pd.DataFrame:
        """How many steps offered and accepted a draft: columns depth, position, offered, accepted.

        The child ranks of a step end with -1 where all children of a node were rejected. Siblings
        count as one draft. The draft at depth d of a step that starts at position s fills position
        s + d - 1 (docs/algorithms.md, section 7).
        """
        starts_per_image = self.completed["start_per_step"]
        ranks_per_image = self.completed["child_rank_per_step"]
        counts: Counter[tuple[int, int, bool]] = Counter()
        for starts, ranks_per_step in zip(starts_per_image, ranks_per_image, strict=True):
            for start, ranks in zip(starts or (), ranks_per_step or (), strict=False):
                for depth, rank in enumerate(ranks, start=1):
                    counts[depth, start + depth - 1, rank >= 0] += 1
        rows = [(*offer, count) for offer, count in counts.items()]
        table = pd.DataFrame(rows, columns=["depth", "position", "is_accepted", "offered"])
        is_accepted = table.pop("is_accepted").astype(bool)
        return table.assign(accepted=table["offered"].where(is_accepted, 0))

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Seconds, steps, process and `device_id` of the images that have them all."""
        return self.images[["seconds", "steps", "process", "device_id"]].dropna()

    @cached_property
    def devices(self) -> Counter[str]:
        """Completed images by the name of their device; images without a device are left out."""
        return Counter(str(device) for device in self.completed["device"] if device)


def _sums(counts_per_step: Iterable[Sequence[int] | None]) -> list[int]:
    return [sum(counts or ()) for counts in counts_per_step]


@lru_cache(maxsize=8)  # slow for a large run
def run_cells(run: RunData) -> list[CellRecords]:
    """Return the cells of a loaded run, in the fixed order of all tables.

    Of records with the same key the last one counts.
    """
    records = run.records
    is_last = ~records["record_key"].duplicated(keep="last")
    last = records.loc[is_last, ["cell_id", "prompt_id", "repeat"]]
    by_cell = last.sort_values(["prompt_id", "repeat"]).groupby("cell_id")
    cells = []
    for places in by_cell.groups.values():
        rows = records.loc[places]
        (columns,) = rows_of(rows[_CELL].iloc[:1])
        is_completed = rows["status"] == "ok"
        cell = CellRecords(
            columns=columns,
            completed=rows[is_completed].reset_index(drop=True),
            failed=int((~is_completed).sum()),
        )
        cells.append(cell)
    return sorted(cells, key=lambda cell: _order(cell.columns))


def _order(columns: Row) -> tuple[Any, ...]:
    """Sort modes as the papers list them, then parameters by value: delta 0.005 before 0.02."""
    numbers = [(columns[name] is not None, columns[name] or 0) for name in _NUMBERS]
    return (
        str(columns["model"] or ""),
        _place(columns["mode"], list(MODES)),
        str(columns["drafting"] or ""),
        _place(columns["rule"], list(RULES)),
        str(columns["tree"] or ""),
        numbers,
        columns["cell_id"],
    )


def _place(name: str, names: list[str]) -> int:
    return names.index(name) if name in names else len(names)


def baseline_of(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the `ar` cell of the same model and the closest sampling settings; None without one.

    Guidance doubles the rows of a forward, so cells with and without it are never compared.
    """
    columns = cell.columns
    candidates = []
    for other in cells:
        if other.columns["mode"] != "ar" or other.columns["model"] != columns["model"]:
            continue
        if (other.columns["cfg_scale"] == 1) == (columns["cfg_scale"] == 1):
            candidates.append(other)

    def unlike(ar: CellRecords) -> list[bool]:
        return [columns[name] != ar.columns[name] for name in _SAMPLING]

    return min(candidates, key=unlike, default=None)


def fastest_lossless(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the lossless cell of the same model and sampling with the fewest seconds per image.

    None if no lossless cell was timed.
    """
    fastest = None
    fewest = np.inf
    for other in cells:
        is_alike = all(other.columns[name] == cell.columns[name] for name in ("model", *_SAMPLING))
        if not (is_alike and other.is_lossless):
            continue
        seconds = float(other.timed["seconds"].mean())  # nan without images
        if 0 < seconds < fewest:
            fastest = other
            fewest = seconds
    return fastest


def settings_that_differ(cell: CellRecords, other: CellRecords) -> list[str]:
    """Return the sampling settings in which two cells differ, as `name=value` of the other cell."""
    differing = []
    for name in _SAMPLING:
        value = other.columns[name]
        if cell.columns[name] != value:
            differing.append(f"{name}={value:g}")
    return differing


def join_notes(notes: Iterable[str | None]) -> str | None:
    """Return notes as one `note`, each part once; None without any."""
    parts = NOTE_SEPARATOR.join(note for note in notes if note)
    return NOTE_SEPARATOR.join(dict.fromkeys(parts.split(NOTE_SEPARATOR))) or None
