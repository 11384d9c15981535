"""A run directory: manifest, records, scores and images; one process at a time writes, reading needs no lock."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageKey
from lantern_bench.storage.records import (
    read_frame,
    read_rows,
)
from lantern_bench.storage.schema import READABLE, Row
from lantern_bench.utils.errors import RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
SCORES = "scores.jsonl"
# in a manifest: true where a run was copied without them (scripts/commit_run.py)
PICTURES_LEFT_OUT = "pictures_left_out"
# What a resumed run needs of its records.
_SCANNED = ("cell_id", "prompt_id", "repeat", "seconds", "pixel_seconds", "disturbed")
RESULTS_VARIABLE = "LANTERN_BENCH_RESULTS"

# ---- Finding and reading runs


@dataclass(frozen=True, eq=False)
class RunData:
    """The contents of a run directory."""

    folder: Path
    manifest: dict[str, Any]
    records: pd.DataFrame  # one row an image, as `records.read_frame`
    scores: list[Row]


def results_root() -> Path:
    """Return the folder of run directories, which need not exist."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")


def known_runs() -> list[str]:
    """Return the names of the runs under `results_root()`."""
    return sorted(path.parent.name for path in results_root().glob(f"*/{MANIFEST}"))


def find_run(name: str | Path) -> Path:
    """Return a run directory by path, by name under `results_root()`, or by the start of a name that only one has."""
    root = results_root()
    for folder in (Path(name), root / name):
        if (folder / MANIFEST).is_file():
            return folder
    runs = known_runs()
    close = [run for run in runs if run.startswith(str(name))]
    if len(close) == 1:
        return root / close[0]
    wrong = "several runs start with this" if close else "no such run"
    raise UserError(
        f"{name}: {wrong}", f"The runs in {root}: {', '.join(close or runs) or 'none yet'}."
    )


def run_folder(
    experiment: ResolvedExperiment, out: Path | None = None, *, resume: bool = True
) -> Path:
    """Return `out` or `results/<run name>`; without `resume` the first of -2, -3, ... that is free."""
    folder = out if out is not None else results_root() / experiment.run_name
    if resume or not (folder / RECORDS).is_file():
        return folder
    later = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in later if not (path / RECORDS).exists())


def read_run(folder: Path, wanted: Collection[str] | None = None) -> RunData:
    """Return the contents of a run directory, with the `wanted` columns of its records (None: all)."""
    return RunData(
        folder=folder,
        manifest=read_manifest(folder),
        records=_latest(folder, wanted),
        scores=read_scores(folder),
    )


def without_records(folder: Path) -> RefusedError:
    """Return the error for a run directory that holds no records."""
    if any(folder.glob("*.csv")):
        return RefusedError(
            f"{folder} holds tables only, no records", "`show` and `curves` read its tables."
        )
    return RefusedError(
        f"{folder} holds no records yet", "Resume the run with the command that started it."
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest; raises `UserError` without one, `RefusedError` for another schema version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{folder}: not a run directory, it has no {MANIFEST}"
        raise UserError(message, "Give one that a sweep wrote.") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON", "Restore it, or start a new run.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version not in READABLE:
        message = f"{path}: schema version {version}, and this program reads {' and '.join(map(str, READABLE))}"
        raise RefusedError(message, "Use the release that wrote the run.")
    return dict(manifest)


def read_records(folder: Path) -> list[Row]:
    """Return the last record of every image, also of failed ones."""
    rows = (msgspec.structs.asdict(row) for row in read_rows(folder / RECORDS, "records"))
    return list({row["record_key"]: row for row in rows}.values())


def read_scores(folder: Path) -> list[Row]:
    """Return all scores of a run in the order they were written."""
    return [msgspec.structs.asdict(row) for row in read_rows(folder / SCORES, "scores")]


def _latest(folder: Path, wanted: Collection[str] | None) -> pd.DataFrame:
    """The last record of every image as a DataFrame (`records.read_frame`)."""
    records = read_frame(folder / RECORDS, "records", wanted)
    replaced = records["record_key"].duplicated(keep="last")
    return records[~replaced].reset_index(drop=True) if replaced.any() else records


@functools.lru_cache(maxsize=1)
def _finished(folder: Path, _state: tuple[int, int, int]) -> pd.DataFrame:
    records = _latest(folder, _SCANNED)
    return records[records["status"] == "ok"]


def finished_records(folder: Path) -> pd.DataFrame:
    """Return `_SCANNED` of the records with status `ok`; an unchanged file is not read again."""
    path = folder / RECORDS
    state = path.stat() if path.is_file() else None
    return _finished(
        folder.absolute(), (state.st_ino, state.st_size, state.st_mtime_ns) if state else (0, 0, 0)
    )


def done_images(folder: Path) -> set[ImageKey]:
    """Return the key of every image with status `ok`."""
    finished = finished_records(folder)
    return set(zip(finished["cell_id"], finished["prompt_id"], finished["repeat"], strict=True))


NO_SPEED = "speed cannot be measured now"  # where most images were disturbed


def disturbance(finished: pd.DataFrame) -> str | None:
    """Say in one line how many of these records are of disturbed images; None without any."""
    marks = finished["disturbed"].dropna()
    timed = len(marks)
    count = int(marks.sum())
    if count == 0:
        return None
    text = f"{count} of {timed} images disturbed: their threads lacked a core for more than 5 % of the time"
    return f"{NO_SPEED}: {text}" if 2 * count > timed else text


def load_runs(
    directories: Sequence[Path],
    wanted: Collection[str] | None = None,
    *,
    tables_suffice: bool = False,
) -> dict[str, RunData]:
    """Load runs by name as `read_run`; raises `RefusedError` for a run without records.

    With `tables_suffice` a run may have CSV files instead, which `tables_of` reads.
    """
    read = (read_run(directory, wanted) for directory in directories)
    runs = dict(zip(run_names(directories), read, strict=True))
    for run in runs.values():
        if not len(run.records) and not (tables_suffice and (run.folder / "speed.csv").is_file()):
            raise without_records(run.folder)
    return runs


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return a name for each run directory: its own, or its path below the folder they share."""
    paths = [directory.resolve() for directory in directories]
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    common = os.path.commonpath(paths)
    return [path.relative_to(common).as_posix() for path in paths]
