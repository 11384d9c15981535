"""Find and read run directories: manifest, records, scores.

One process at a time writes a run (`run_store.py`); reading it needs no lock.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageKey
from lantern_bench.storage.records import read_frame, read_rows, rows_of
from lantern_bench.storage.schema import SCHEMA_VERSION, Row
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import fingerprint, path_of_variable
from lantern_bench.utils.text import listed

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
SCORES = "scores.jsonl"
MERGING = ".merging"  # ends the name of a run that is being merged
# in a manifest: true where a run was copied without them (scripts/commit_run.py)
PICTURES_LEFT_OUT = "pictures_left_out"
# in a manifest: the models whose pictures are maps of codes, which show no pixels
MAPS_OF_CODES = "maps_of_codes"
# columns of records that resuming and planning need
_SCANNED = ("cell_id", "prompt_id", "repeat", "seconds", "pixel_seconds", "disturbed")
RESULTS_VARIABLE = "LANTERN_BENCH_RESULTS"
NO_SPEED = "speed cannot be measured now"  # said where most images were disturbed


@dataclass(frozen=True, eq=False)
class RunData:
    """The contents of a run directory."""

    folder: Path
    manifest: dict[str, Any]
    records: pd.DataFrame  # one row per image, with the columns of `records.read_frame`
    scores: list[Row]

    @property
    def is_timed(self) -> bool:
        """Whether the run measures speed: it has the metric `speed`."""
        return "speed" in self.manifest.get("experiment", {}).get("metrics", ("speed",))

    @property
    def images(self) -> str:
        """How many images are finished, in words: `24 of 288 images, 2 failed`."""
        failed = len(self.records) - self._finished
        plan = f" of {planned_images(self.manifest)}" if self._lacks_images else ""
        text = f"{self._finished}{plan} images"
        return f"{text}, {failed} failed" if failed else text

    @property
    def _finished(self) -> int:
        return int((self.records["status"] == "ok").sum())

    @property
    def _lacks_images(self) -> bool:
        """Whether the plan has more images. A run without records is read from its tables."""
        return len(self.records) > 0 and self._finished < planned_images(self.manifest)

    @property
    def incomplete(self) -> str | None:
        """What is missing in the files of the run, in words; None for a complete run."""
        missing = []
        if self._lacks_images:
            missing.append(self.images)
        for name in (RECORDS, SCORES):
            if _ends_within_a_line(self.folder / name):
                missing.append(f"the last line of {name} is cut off and left out")
        if not missing:
            return None
        return f"{'; '.join(missing)}. The command that started the run continues it."


def planned_images(manifest: Mapping[str, Any]) -> int:
    """Return how many images a run has when it is complete; 0 where its manifest says nothing."""
    if manifest.get("shard"):
        return int(manifest["shard"]["images"])
    experiment = manifest.get("experiment") or {}
    prompts = manifest.get("prompts") or {}
    images = experiment.get("images") or prompts.get("prompts") or 0
    batches = experiment.get("batch")
    sizes = len(batches) if isinstance(batches, list) else 1
    return int(images * experiment.get("repeats", 1) * len(experiment.get("cells", ())) * sizes)


def no_pixels(manifest: Mapping[str, Any]) -> str | None:
    """Say which pictures of a run are maps of codes; None if all show pixels."""
    models = manifest.get(MAPS_OF_CODES)
    if not models:
        return None
    return f"the pictures of {listed(models)} are maps of codes: no decoder here makes pixels"


def _ends_within_a_line(path: Path) -> bool:
    """Return whether the last line of a file is being written, or was cut off."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


# ---- Finding runs


def results_root() -> Path:
    """Return the folder of run directories, which need not exist."""
    return path_of_variable(RESULTS_VARIABLE) or Path("results")


def known_runs() -> list[str]:
    """Return the names of the runs under `results_root()`."""
    return sorted(path.parent.name for path in results_root().glob(f"*/{MANIFEST}"))


def find_run(name: str | Path) -> Path:
    """Return the run directory that a path, a name or the start of a name means.

    Names are those under `results_root()`. Raises `UserError` where none or several fit.
    """
    root = results_root()
    places = (Path(name), root / name)
    for folder in places:
        if (folder / MANIFEST).is_file():
            return folder
    runs = known_runs()
    close = [run for run in runs if run.startswith(str(name))]
    if len(close) == 1:
        return root / close[0]
    for place in places:
        if place.exists() and not close:
            raise without_manifest(place)
    wrong = "several runs start with this" if close else "no such run"
    raise UserError(
        f"{name}: {wrong}", f"The runs in {root}: {', '.join(close or runs) or 'none yet'}."
    )


def run_folder(
    experiment: ResolvedExperiment, out: Path | None = None, *, resume: bool = True
) -> Path:
    """Return the run directory of a sweep, which need not exist.

    Args:
        experiment: Names the directory where `out` does not.
        out: The directory, by default `results/<run name>`.
        resume: Whether a directory that has records is continued. Otherwise the first of the names
            with -2, -3, ... that has no records is taken.
    """
    folder = out or results_root() / experiment.run_name
    if resume or not (folder / RECORDS).is_file():
        return folder
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in numbered if not (path / RECORDS).exists())


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return a name for each run directory: its own, or its path below the folder they share."""
    paths = [directory.resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise UserError(
            f"{', '.join(map(str, directories))}: a run is given twice", "Give each run once."
        )
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    common = os.path.commonpath(paths)
    return [path.relative_to(common).as_posix() for path in paths]


# ---- Reading runs


def load_runs(
    directories: Sequence[Path],
    wanted: Collection[str] | None = None,
    *,
    tables_suffice: bool = False,
    empty_shards: bool = False,
) -> dict[str, RunData]:
    """Load runs by name. Warns of runs that are not complete.

    Args:
        directories: The run directories.
        wanted: The columns of records to read, by default all.
        tables_suffice: Whether a run without records may have CSV files instead.
        empty_shards: Whether a shard that got no prompt is a run without records.

    Raises:
        UserError: A directory is not a run, or a file of it is damaged.
        RefusedError: A run has no records.
    """
    runs = {}
    for name, directory in zip(run_names(directories), directories, strict=True):
        run = read_run(directory, wanted)
        has_tables = tables_suffice and (directory / "speed.csv").is_file()
        is_empty = empty_shards and is_empty_shard(run.manifest)
        if not len(run.records) and not has_tables and not is_empty:
            raise without_records(directory)
        if run.incomplete:
            warnings.warn(f"{directory}: {run.incomplete}", stacklevel=2)
        runs[name] = run
    return runs


def read_run(folder: Path, wanted: Collection[str] | None = None) -> RunData:
    """Return the contents of a run directory, by default with all columns of its records."""
    return RunData(
        folder=folder,
        manifest=read_manifest(folder),
        records=_latest_records(folder, wanted),
        scores=read_scores(folder),
    )


def is_empty_shard(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run is a shard that got no prompt, as the last of many shards may."""
    part = manifest.get("shard")
    return part is not None and part["images"] == 0


def without_records(folder: Path) -> RefusedError:
    """Return the error for a run directory that holds no records."""
    if is_empty_shard(read_manifest(folder)):
        message = f"{folder} is a shard that got no prompt: it has no images"
        return RefusedError(message, "Merge all shards: lantern-bench merge SHARD...")
    if any(folder.glob("*.csv")):
        return RefusedError(
            f"{folder} holds tables only, no records", "`show` and `curves` read its tables."
        )
    return RefusedError(
        f"{folder} holds no records yet", "Resume the run with the command that started it."
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run.

    Raises `UserError` for a folder without one, `RefusedError` for another schema version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if path.exists():
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        raise without_manifest(folder) from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON", "Restore it, or start a new run.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise RefusedError(
            f"{path}: schema version {version}, and this program reads {SCHEMA_VERSION}",
            "Use the release that wrote the run.",
        )
    return dict(manifest)


def without_manifest(path: Path) -> UserError:
    """Return the error for an existing path that is no run: what is there, and what helps."""
    for parent in path.absolute().parents:
        if (parent / MANIFEST).is_file():
            return UserError(f"{path}: is a part of a run", f"Give the run: {parent}.")
    if not path.is_dir():
        what = "is a file, not a run directory" if path.exists() else "no such folder"
        return UserError(f"{path}: {what}", "Give the folder of a run.")
    names = [file.name for file in sorted(path.iterdir()) if not file.name.startswith(".")]
    runs = [name for name in names if (path / name / MANIFEST).is_file()]
    if runs:
        advice = f"Give one of them, for example {path / runs[0]}"
        return UserError(f"{path}: not a run directory, it has the runs {first_of(runs)}", advice)

    advice = "Give a folder that `lantern-bench sweep` wrote."
    records = path / RECORDS
    if path.suffix == MERGING:
        advice = f"A merge was interrupted. Remove it (rm -r {path}), and merge again."
    elif records.is_file() and not records.stat().st_size:
        advice = f"A sweep was stopped as it began. Start it again with --out {path}"
    elif records.is_file() or "speed.csv" in names:
        advice = f"The copy is incomplete. Copy this file too: cp ORIGINAL/{MANIFEST} {path}"
    found = f"it has {first_of(names)}" if names else "it is empty"
    return UserError(f"{path}: not a run directory, it has no {MANIFEST}; {found}", advice)


def first_of(names: Sequence[str], most: int = 6) -> str:
    """Return the first of many names in words."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest's file."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode() + b"\n"


def _latest_records(folder: Path, wanted: Collection[str] | None = None) -> pd.DataFrame:
    """Return the records of a run; where an image has several, the last one."""
    records = read_frame(folder / RECORDS, "records", wanted)
    return records.drop_duplicates("record_key", keep="last", ignore_index=True)


def read_records(folder: Path) -> list[Row]:
    """Return the record of every image, also of failed ones."""
    return rows_of(_latest_records(folder))


def read_scores(folder: Path) -> list[Row]:
    """Return all scores of a run in the order they were written."""
    return [msgspec.structs.asdict(row) for row in read_rows(folder / SCORES, "scores")]


# ---- What is done


def finished_records(folder: Path) -> pd.DataFrame:
    """Return the records with status `ok`, with the columns that planning needs.

    An unchanged file is not read again.
    """
    path = folder / RECORDS
    return _finished(folder, fingerprint(path) if path.is_file() else "")


@functools.lru_cache(maxsize=1)
def _finished(folder: Path, _fingerprint: str) -> pd.DataFrame:
    records = _latest_records(folder, _SCANNED)
    return records[records["status"] == "ok"]


def done_images(folder: Path) -> set[ImageKey]:
    """Return the key of every image with status `ok`."""
    finished = finished_records(folder)
    return set(zip(finished["cell_id"], finished["prompt_id"], finished["repeat"], strict=True))


def disturbance(finished: pd.DataFrame) -> str | None:
    """Say in one line how many images of these records were disturbed; None without any."""
    marks = finished["disturbed"].dropna()
    timed = len(marks)
    count = int(marks.sum())
    if count == 0:
        return None
    reason = "their threads lacked a core, or were stopped, for more than 5% of the time"
    text = f"{count} of {timed} images disturbed: {reason}"
    return f"{NO_SPEED}: {text}" if 2 * count > timed else text
