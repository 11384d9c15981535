"""The records of runs, grouped into cells, and the baseline that each cell is compared to."""

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

# Settings that an `ar` cell should share with the cell it is compared to, most important first.
_SAMPLING = ("cfg_scale", "batch", "temperature", "top_k", "top_p", "seed_set")
_OF_METHODS = [
    name for name, row in PARAMETERS.items() if row.in_id == "always" and name not in SAMPLING
]
_NUMBERS = ("temperature", *_OF_METHODS, "top_k", "top_p", "cfg_scale", "batch")
_PHASES = ("draft", "target", "verify", "other")
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
    *(f"{phase}_seconds" for phase in _PHASES),
)

COLUMNS_READ = (
    *(column.name for column in CELL_COLUMNS),
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
"""The columns of records that tables are made from."""

HELD_UP = 1.25
"""An image is held up when its seconds a step are above so many times the median of its cell in its process."""


def _usual_share(images: pd.DataFrame) -> pd.Series[float]:
    """Return the share of its seconds that each image would have taken had nothing held it up; 1 for most.

    Seconds a step above `HELD_UP` times the (lower) median of cell and process count as that much; those of a disturbed
    image as the median, if at least half of these images are not disturbed.
    """
    pace = images["seconds"] / images["steps"].clip(lower=1.0)
    disturbed = images["disturbed"] == 1.0
    by_process = images["process"]
    calm = disturbed.groupby(by_process).transform("mean") <= 0.5
    usual = (
        pace.where(~(disturbed & calm))
        .groupby(by_process)
        .transform("quantile", 0.5, interpolation="lower")
    )
    limit = usual * (disturbed & calm).map({True: 1.0, False: HELD_UP})
    return (limit / pace).clip(upper=1.0).fillna(1.0)


def timed_images(cell: CellRecords, base: CellRecords | None = None) -> pd.DataFrame:
    """Return what `stats.timing` needs, by image: columns over, under, over_steps, under_steps and process.

    Seconds of the base over those of the cell, for images that both have from one device; without `base` seconds an
    image.
    """
    if base is None:
        seconds = cell.timed.rename(columns={"seconds": "over", "steps": "over_steps"})
        return seconds.drop(columns="device_id").assign(under=1.0, under_steps=1.0)
    names = {"seconds": "over", "steps": "over_steps", "device_id": "base_device_id"}
    of_base = base.timed.drop(columns="process").rename(columns=names)
    both = cell.timed.rename(columns={"seconds": "under", "steps": "under_steps"}).join(
        of_base, how="inner"
    )
    return both[both["device_id"] == both["base_device_id"]].drop(
        columns=["device_id", "base_device_id"]
    )


@dataclass(frozen=True)
class CellRecords:
    """The records of one cell."""

    columns: Row  # those of a cell
    completed: pd.DataFrame  # completed records, by prompt and repeat
    failed: int  # images that failed

    @property
    def cell_id(self) -> str:
        """The cell's id."""
        return str(self.columns["cell_id"])

    @property
    def is_lossless(self) -> bool:
        """Whether the cell decodes losslessly, as `Decoding.lossless` says before it is decoded."""
        drafting = DRAFTINGS.get(str(self.columns["drafting"]))
        rule = RULES.get(str(self.columns["rule"]))
        if drafting is None or rule is None:
            return False  # of a package that is not installed
        return drafting.lossless and rule.lossless

    @cached_property
    def images(self) -> pd.DataFrame:
        """The figures of each completed image as floats, indexed by (prompt_id, repeat); nan where not recorded.

        `count` is 1, `device_id` a text (empty where not recorded); `steps`, `committed` and `accepted` count over the
        steps, `uncut` is the tokens with the last step uncut. Seconds and `*_ms` are those of `_usual_share`.
        """
        completed = self.completed
        names = ["prompt_id", "repeat"]
        index = pd.MultiIndex.from_arrays(
            [list(completed["prompt_id"]), list(completed["repeat"])], names=names
        )
        figures: dict[str, Any] = {
            name: completed[name].to_numpy(float, na_value=np.nan) for name in _RECORDED
        }
        for name in ("committed", "accepted"):
            figures[name] = [sum(counts or ()) for counts in completed[f"{name}_per_step"]]
        figures["steps"] = [len(counts or ()) for counts in completed["committed_per_step"]]
        images = pd.DataFrame(figures, index=index).astype(float).assign(count=1.0)
        images["uncut"] = images["mal_uncut"] * images["steps"]
        images["process"] = images["process"].fillna(0.0)  # not recorded: one process
        images["kept_share"] = _usual_share(images)
        images["seconds"] *= images["kept_share"]
        for phase in _PHASES:
            images[f"{phase}_ms"] = 1000.0 * images[f"{phase}_seconds"] * images["kept_share"]
        texts = {
            name: [str(text or "") for text in completed[name]]
            for name in ("record_key", "device_id")
        }
        return images.assign(**texts)

    @cached_property
    def offers(self) -> pd.DataFrame:
        """What the steps of the completed images offered and accepted: columns depth, position, offered, accepted.

        A step's list of child ranks ends with -1 where all children of a node were rejected. The draft at depth d of a
        step that starts at position s fills position s + d - 1 (docs/algorithms.md, section 7). Siblings count as one.
        """
        counts = Counter(
            (depth, start + depth - 1, rank >= 0)
            for starts, walks in zip(
                self.completed["start_per_step"], self.completed["child_rank_per_step"], strict=True
            )
            if starts and walks
            for start, ranks in zip(starts, walks, strict=False)
            for depth, rank in enumerate(ranks, start=1)
        )
        names = ["depth", "position", "accepted", "offered"]
        table = pd.DataFrame([(*offer, count) for offer, count in counts.items()], columns=names)
        return table.assign(accepted=table["offered"].where(table["accepted"].astype(bool), 0))

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Seconds, steps, process and `device_id` of the images that have them all."""
        return self.images[["seconds", "steps", "process", "device_id"]].dropna()

    @cached_property
    def devices(self) -> Counter[str]:
        """Completed images by the name of their device; images whose device was not recorded are not counted."""
        return Counter(str(device) for device in self.completed["device"] if device)


@lru_cache(maxsize=8)  # slow for a large run
def run_cells(run: RunData) -> list[CellRecords]:
    """Return the cells of a loaded run, in the fixed order of all tables; of records with one key the last counts."""
    records = run.records
    last = records.loc[
        ~records["record_key"].duplicated(keep="last"), ["cell_id", "prompt_id", "repeat"]
    ]
    cells = []
    for places in last.sort_values(["prompt_id", "repeat"]).groupby("cell_id").groups.values():
        rows = records.loc[places]
        (columns,) = rows_of(rows[[column.name for column in CELL_COLUMNS]].iloc[:1])
        is_good = rows["status"] == "ok"
        cells.append(
            CellRecords(columns, rows[is_good].reset_index(drop=True), int((~is_good).sum()))
        )
    return sorted(cells, key=lambda cell: _order(cell.columns))


def baseline_of(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the `ar` cell of the same model and the closest sampling settings; None without one.

    Guidance doubles the rows of a forward: cells with and without it are never compared.
    """
    columns = cell.columns
    candidates = [
        other
        for other in cells
        if other.columns["mode"] == "ar"
        and other.columns["model"] == columns["model"]
        and (other.columns["cfg_scale"] == 1) == (columns["cfg_scale"] == 1)
    ]
    return min(
        candidates,
        key=lambda ar: [columns[name] != ar.columns[name] for name in _SAMPLING],
        default=None,
    )


def fastest_lossless(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the lossless cell of the same model and sampling with the fewest seconds an image; None without one."""
    timed = [
        other
        for other in cells
        if other.is_lossless
        and all(other.columns[name] == cell.columns[name] for name in ("model", *_SAMPLING))
        and other.timed["seconds"].mean() > 0  # the mean of no images is nan
    ]
    return min(timed, key=lambda other: float(other.timed["seconds"].mean()), default=None)


def settings_that_differ(cell: CellRecords, other: CellRecords) -> list[str]:
    """Return the sampling settings in which two cells differ, as `name=value` of the other one."""
    return [
        f"{name}={other.columns[name]:g}"
        for name in _SAMPLING
        if cell.columns[name] != other.columns[name]
    ]


def join_notes(notes: Iterable[str | None]) -> str | None:
    """Return a row's notes as its `note`, each once; None without any."""
    single = (part for note in notes if note for part in note.split(NOTE_SEPARATOR))
    return NOTE_SEPARATOR.join(dict.fromkeys(single)) or None


def _order(columns: Row) -> tuple[Any, ...]:
    """Sort modes as the papers list them, then parameters by value: delta 0.005 comes before 0.02."""
    modes = list(MODES)
    rules = list(RULES)
    mode = modes.index(columns["mode"]) if columns["mode"] in modes else len(modes)
    rule = rules.index(columns["rule"]) if columns["rule"] in rules else len(rules)
    words = (str(columns["drafting"] or ""), rule, str(columns["tree"] or ""))
    numbers = tuple((columns[name] is not None, columns[name] or 0) for name in _NUMBERS)
    return (str(columns["model"] or ""), mode, *words, numbers, columns["cell_id"])
