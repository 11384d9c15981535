"""The records of runs, grouped into cells, and the baseline that each cell is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, count
from typing import Any

import numpy as np
import pandas as pd

from lantern_bench.methods.catalog import LOSSLESS, MODES, PARAMETERS, RULES, output_of
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import CELL_NAMES, Row

NOTE_SEPARATOR = " | "

# Settings that an `ar` cell should share with the cell it is compared with, most important first.
_SAMPLING = ("cfg_scale", "batch", "temperature", "top_k", "top_p", "seed_set")

# Settings with numbers, in the order in which they sort cells.
_NUMBERS = ["temperature"]
_NUMBERS += [
    name for name, row in PARAMETERS.items() if row.in_id == "always" and name not in SAMPLING
]
_NUMBERS += ["top_k", "top_p", "cfg_scale", "batch"]

# Figures of a record that are numbers.
_RECORDED = (
    "decoded_together",
    "seconds",
    "tokens",
    "target_forwards",
    "drafter_forwards",
    "mal_uncut",
    "neighbour_mass",
    "emitted_tv",
    "peak_memory_bytes",
    "process",
    "disturbed",
    "draft_seconds",
    "target_seconds",
    "verify_seconds",
    "other_seconds",
)

COLUMNS_READ = (
    *CELL_NAMES,
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


def _images_of(completed: pd.DataFrame) -> pd.DataFrame:
    """Return the figures of completed images of all cells: the rows of `CellRecords.images`."""
    by_prompt = completed.set_index(["prompt_id", "repeat"])
    lists = by_prompt[["committed_per_step", "accepted_per_step"]].map(lambda counts: counts or ())
    images = by_prompt[list(_RECORDED)].assign(
        committed=lists["committed_per_step"].map(sum),
        accepted=lists["accepted_per_step"].map(sum),
        steps=lists["committed_per_step"].map(len),
        count=1,
    )
    images = images.astype(float)
    images["uncut"] = images["mal_uncut"] * images["steps"]
    images["process"] = images["process"].fillna(0.0)  # not recorded: one process
    kept = _kept_fraction(images, by_prompt["cell_id"])
    images["kept_fraction"] = kept
    images["seconds"] *= kept
    for phase in ("draft", "target", "verify", "other"):
        images[f"{phase}_ms"] = 1000.0 * images[f"{phase}_seconds"] * kept
    for name in ("record_key", "device_id"):
        images[name] = by_prompt[name].fillna("")
    return images.copy()  # in one piece: columns of many pieces are slow to read


def _kept_fraction(images: pd.DataFrame, cell_ids: pd.Series[str]) -> pd.Series[float]:
    """Return by how much to shorten the seconds of each image: min(1, limit / pace).

    `pace` is the image's seconds per step. `median` is the lower median of the pace in the same
    cell and process, over the images that are not flagged as disturbed. `limit` is
    `HELD_UP * median`, and `median` for a flagged image. If over half of a process's images are
    flagged, the flag carries no information, and these images count as not flagged.

    Args:
        images: Columns `seconds`, `steps`, `process` and `disturbed` of each image.
        cell_ids: The cell of each image.
    """
    pace = images["seconds"] / images["steps"].clip(lower=1.0)
    together = [cell_ids, images["process"]]
    is_disturbed = images["disturbed"] == 1.0
    mostly_calm = is_disturbed.groupby(together).transform("mean") <= 0.5
    left_out = is_disturbed & mostly_calm
    calm_pace = pace.where(~left_out).groupby(together)
    median = calm_pace.transform("quantile", 0.5, interpolation="lower")
    limit = median.where(left_out, HELD_UP * median)
    return (limit / pace).clip(upper=1.0).fillna(1.0)


def timed_images(cell: CellRecords, base: CellRecords | None = None) -> pd.DataFrame:
    """Return the images that `statistics.timing` needs.

    With a base, its seconds are divided by the seconds of the cell, for images that both decoded on
    one device. Without a base, the figure is seconds per image.

    Returns:
        Columns `numerator`, `denominator`, `numerator_steps`, `denominator_steps` and `process`,
        indexed by `prompt_id` and `repeat`.
    """
    images = cell.timed
    of_base = (base or cell).timed.reindex(images.index)
    if base is None:
        images = images.assign(seconds=1.0, steps=1.0)
    both = pd.DataFrame(
        np.hstack([of_base[["seconds", "steps"]], images[["seconds", "steps", "process"]]]),
        index=images.index,
        columns=["numerator", "numerator_steps", "denominator", "denominator_steps", "process"],
    )
    # An image that the base lacks has no device there.
    return both[images["device_id"] == of_base["device_id"]]


@dataclass(frozen=True)
class CellRecords:
    """The records of one cell.

    Attributes:
        columns: The values of `CELL_COLUMNS`.
        completed: The completed records without the cell's settings, by prompt and repeat.
        images: The figures of each completed image, indexed by (prompt_id, repeat). They are
            floats, nan where not recorded. Besides the recorded figures there are:

            - `count`: 1
            - `steps`, and `committed` and `accepted` summed over the steps
            - `uncut`: tokens with the last step uncut
            - `kept_fraction`: see `_kept_fraction`; `seconds` and `*_ms` are multiplied by it
            - `record_key` and `device_id`: text, empty where not recorded
        failed: How many images failed.
    """

    columns: Row
    completed: pd.DataFrame
    images: pd.DataFrame
    failed: int

    @property
    def cell_id(self) -> str:
        """The cell's id."""
        return str(self.columns["cell_id"])

    @property
    def output(self) -> str | None:
        """`lossless` or `relaxed`, as drafting and rule claim; None if they are not installed."""
        return output_of(self.columns["drafting"], self.columns["rule"])

    @property
    def is_lossless(self) -> bool:
        """Whether the cell decodes losslessly, as its drafting and its rule claim."""
        return self.output == LOSSLESS

    def ratio(self, columns: Sequence[str]) -> float | None:
        """Return sum over sum of two columns of `images`, over the images that have both."""
        figures = self.images[[*columns]].to_numpy()
        numerator, denominator = figures[~np.isnan(figures).any(axis=1)].sum(axis=0)
        return float(numerator / denominator) if denominator else None

    @cached_property
    def offers(self) -> pd.DataFrame:
        """How many steps offered and accepted a draft, by depth, position and child rank.

        The child ranks of a step end with -1 where all children of a node were rejected. Siblings
        count as one draft. The draft at depth d of a step that starts at position s fills position
        s + d - 1 (docs/algorithms.md, section 7).
        """
        recorded = self.completed[["start_per_step", "child_rank_per_step"]].dropna()
        starts, ranks = (chain.from_iterable(recorded[name]) for name in recorded)
        of_steps = map(lambda start, own: zip(count(1), count(start), own), starts, ranks)
        # Counted one by one: the drafts of a large run would not fit in memory.
        counts = Counter(chain.from_iterable(of_steps))
        offers = pd.DataFrame([*counts], columns=["depth", "position", "rank"], dtype=int)
        offered = np.array([*counts.values()], dtype=int)
        return offers.assign(offered=offered, accepted=offered * (offers["rank"] >= 0))

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Seconds, steps, process and `device_id` of the images that have them all."""
        return self.images[["seconds", "steps", "process", "device_id"]].dropna()

    @cached_property
    def devices(self) -> Counter[str]:
        """Completed images by the name of their device; images without a device are left out."""
        return Counter(self.completed["device"].dropna())


@lru_cache(maxsize=8)  # slow for a large run
def run_cells(run: RunData) -> list[CellRecords]:
    """Return the cells of a loaded run, in the fixed order of all tables.

    Images of a run that is not timed have no seconds.
    """
    records = run.records
    if not run.is_timed:
        seconds = records.filter(regex="seconds$")
        records = records.assign(**dict.fromkeys(map(str, seconds), np.nan))
    # The settings of a cell are kept once, which saves half of the room of a large run.
    kept = [name for name in records if name == "cell_id" or name not in CELL_NAMES]
    completed = records.loc[records["status"] == "ok", kept]
    completed = completed.sort_values(["prompt_id", "repeat"], ignore_index=True)
    images = _images_of(completed)
    recorded = records["cell_id"].value_counts()
    places = completed.groupby("cell_id").indices
    cells = []
    for columns in rows_of(records.drop_duplicates("cell_id")[CELL_NAMES]):
        cell_id = columns["cell_id"]
        own = places.get(cell_id, [])
        cell = CellRecords(
            columns,
            completed=completed.iloc[own].reset_index(drop=True),
            images=images.iloc[own],
            failed=int(recorded[cell_id]) - len(own),
        )
        cells.append(cell)
    return sorted(cells, key=lambda cell: _order(cell.columns))


def _order(columns: Row) -> tuple[Any, ...]:
    """Sort greedy cells last, modes as the papers list them, and parameters by value."""
    numbers = [(columns[name] is not None, columns[name] or 0) for name in _NUMBERS]
    return (
        columns["model"],
        columns["temperature"] == 0,
        _place(columns["mode"], MODES),
        columns["drafting"],
        _place(columns["rule"], RULES),
        columns["tree"] or "",
        numbers,
        columns["cell_id"],
    )


def _place(name: str, registry: Iterable[str]) -> int:
    """The place of a name; names of packages that are not installed come last."""
    return [*registry, name].index(name)


def baseline_of(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the `ar` cell of the same model and the closest sampling settings; None without one.

    Guidance doubles the rows of a forward, so cells with and without it are never compared.
    """
    columns = cell.columns

    def is_comparable(other: CellRecords) -> bool:
        is_ar = other.columns["mode"] == "ar" and other.columns["model"] == columns["model"]
        return is_ar and (other.columns["cfg_scale"] == 1) == (columns["cfg_scale"] == 1)

    def unlike(ar: CellRecords) -> list[bool]:
        return [columns[name] != ar.columns[name] for name in _SAMPLING]

    return min(filter(is_comparable, cells), key=unlike, default=None)


def fastest_lossless(cell: CellRecords, cells: Sequence[CellRecords]) -> CellRecords | None:
    """Return the lossless cell of the same model and sampling with the fewest seconds per image.

    None if no lossless cell was timed.
    """

    def is_rival(other: CellRecords) -> bool:
        is_alike = all(other.columns[name] == cell.columns[name] for name in ("model", *_SAMPLING))
        return is_alike and other.is_lossless and not other.timed.empty

    return min(
        filter(is_rival, cells), key=lambda rival: rival.timed["seconds"].mean(), default=None
    )


def settings_that_differ(cell: CellRecords, other: CellRecords) -> list[str]:
    """Return the sampling settings in which two cells differ, as `name=value` of the other cell."""
    values = other.columns
    return [f"{name}={values[name]:g}" for name in _SAMPLING if cell.columns[name] != values[name]]


def join_notes(notes: Iterable[str | None]) -> str | None:
    """Return notes as one `note`, each part once; None without any."""
    parts = NOTE_SEPARATOR.join(note for note in notes if note)
    return NOTE_SEPARATOR.join(dict.fromkeys(parts.split(NOTE_SEPARATOR))) or None
