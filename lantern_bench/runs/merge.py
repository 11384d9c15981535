"""Merge the shards of a run (`sweep --shard i/n`) into one run directory, after checking that they are one run.

Records and pictures are those of the shards. Scores of single pictures are kept; those of whole cells, such as FID, are
made by scoring the merged run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_bench.config.plan import Shard
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.runs.store import MANIFEST, RECORDS, SCORES, RunData, line_of, read_run

# Keys of an experiment that may differ between shards: they change no image.
_MAY_DIFFER = (
    "name",
    "description",
    "paper",
    "protocol",
    "reference",
    "metrics",
    "processes",
    "threads",
    "pool_devices",
)


@dataclass(frozen=True)
class Merged:
    """A merged run: its directory, its images, those of them that failed, and whether quality was measured."""

    folder: Path
    images: int
    failed: int
    scored: bool


def merge_runs(folders: Sequence[Path], out: Path | None = None) -> Merged:
    """Merge shards into the run directory `out`; by default the name of the first without `-shardIofN`.

    Raises `RefusedError` for shards that do not belong together, that are missing, double or not finished, and
    `UserError` for a run that is no shard and for an `out` that exists.
    """
    runs = [read_run(folder) for folder in folders]
    shards = {shard.index: run for run, shard in zip(runs, _check_shards(runs), strict=True)}
    for run in runs[1:]:
        _check_same_run(runs[0], run)
    ordered = [shards[index] for index in sorted(shards)]
    for run in ordered:
        _check_whole(run)
    _check_no_doubles(ordered)
    folder = out or folders[0].with_name(re.sub(r"-shard\d+of\d+$", "", folders[0].name))
    if folder.exists():
        raise UserError(f"--out {folder}: exists already", "Give --out with a new folder.")
    # Renamed when it is whole: an interrupted merge leaves no run.
    made = folder.with_name(f"{folder.name}.merging")
    shutil.rmtree(made, ignore_errors=True)
    records = _write(ordered, made, folder.name)
    made.rename(folder)
    failed = sum(row["status"] != "ok" for row in records)
    return Merged(folder, len(records), failed, any(run.scores for run in runs))


def _check_shards(runs: Sequence[RunData]) -> list[Shard]:
    """Return the shard of each run; raises as `merge_runs`."""
    shards = []
    for run in runs:
        about = run.manifest.get("shard")
        if not about:
            what = f"{run.folder} is not a shard of a run"
            raise UserError(what, "`lantern-bench sweep --shard i/n` makes one.")
        shards.append(Shard(about["index"], about["count"]))
    count, first = shards[0].count, runs[0].folder
    given: dict[int, Path] = {}
    for run, shard in zip(runs, shards, strict=True):
        if shard.count != count:
            what = f"{first} is a shard of {count}, {run.folder} of {shard.count}"
            raise RefusedError(what, "Give the shards of one division.")
        if shard.index in given:
            what = f"shard {shard.index}/{count} is given twice: {given[shard.index]} and {run.folder}"
            raise RefusedError(what, "Leave one of them out.")
        given[shard.index] = run.folder
    if missing := [f"{index}/{count}" for index in range(1, count + 1) if index not in given]:
        raise RefusedError(f"shards are missing: {', '.join(missing)}", "Give all shards of the run.")
    return shards


def _check_same_run(first: RunData, other: RunData) -> None:
    """Raise `RefusedError` naming the first setting in which two shards differ."""
    facts = [_facts(run.manifest) for run in (first, other)]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        a, b = (json.dumps(one.get(name), sort_keys=True) for one in facts)
        if a != b:
            what = f"{first.folder} and {other.folder} are shards of different runs: {name} differs"
            raise RefusedError(f"{what}\n  first   {a[:300]}\n  second  {b[:300]}", "Merge shards of one run.")


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    experiment, key = manifest.get("experiment") or {}, manifest.get("key") or {}
    facts = {name: value for name, value in experiment.items() if name not in _MAY_DIFFER}
    facts |= {f"key: {name}": value for name, value in key.items()}
    if key.get("device_type") == "cpu":
        facts["threads"] = manifest.get("threads")  # sums of other numbers of threads round differently
    return facts


def _check_whole(run: RunData) -> None:
    about = run.manifest["shard"]
    if len(run.records) != about["images"]:
        what = (
            f"shard {about['index']}/{about['count']} has {len(run.records)} of {about['images']} images: {run.folder}"
        )
        raise RefusedError(what, "Continue it with the command that started it.")
    for row in run.records:
        if row["status"] == "ok" and row["image"] and not (run.folder / row["image"]).is_file():
            raise RefusedError(f"{run.folder}: the picture {row['image']} is missing", "Restore it, or repair the run.")


def _check_no_doubles(runs: Sequence[RunData]) -> None:
    where: dict[str, Path] = {}
    for run in runs:
        for row in run.records:
            if (other := where.setdefault(row["record_key"], run.folder)) != run.folder:
                what = f"{other} and {run.folder} both have the image {row['record_key']} of {row['cell_id']}"
                raise RefusedError(what, "Their shards overlap: make one of them again.")


def _write(runs: Sequence[RunData], folder: Path, name: str) -> list[dict[str, Any]]:
    """Write the merged run into a new folder; return its records."""
    records: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    sessions: list[dict[str, Any]] = []
    for run in runs:
        # Processes of different shards are different processes.
        first = 1 + max((one["process"] for one in [*sessions, *records]), default=-1)
        records += [row | {"process": first + row["process"]} for row in run.records]
        for session in run.manifest.get("sessions", []):
            sessions.append(session | {"process": first + session["process"]})
        scores += [row for row in run.scores if row["level"] == "image"]
        for row in run.records:
            if row["image"]:
                _link(run.folder / row["image"], folder / row["image"])
    records.sort(key=lambda row: row["order_index"])
    for file, rows in ((RECORDS, records), (SCORES, scores)):
        write_atomically(folder / file, map(line_of, rows))
    manifests = [run.manifest for run in runs]
    started, ended = ([str(one.get(name)) for one in manifests] for name in ("started", "ended"))
    times = {"started": min(started), "ended": max(ended)}
    facts = {"run": name, "shard": None, "merged_shards": len(runs), "sessions": sessions, **times}
    text = json.dumps(manifests[0] | facts, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / MANIFEST, text.encode() + b"\n")
    return records


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that is impossible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
