"""Merge the shards of a run.

Scores of single images are kept. Scores of whole cells, such as FID, need a new scoring.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_bench.config.experiment import KEYS_WITHOUT_EFFECT
from lantern_bench.storage.records import line_of
from lantern_bench.storage.run_directory import (
    MANIFEST,
    RECORDS,
    SCORES,
    read_manifest,
    read_records,
    read_scores,
)
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_atomically

_SHOWN = 300  # characters of a setting that an error message shows


@dataclass(frozen=True)
class _Shard:
    folder: Path
    manifest: dict[str, Any]
    records: list[Row]
    index: int  # from 1
    count: int

    @property
    def name(self) -> str:
        return f"shard {self.index}/{self.count}"


def merge_runs(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Merge shards into one run, after checking that they are all shards of one run.

    Args:
        folders: The run directories of the shards, in any order.
        out: The new run directory, by default named as the first without `-shardIofN`.

    Returns:
        The new run directory.

    Raises:
        UserError: A folder is not a shard, or `out` exists.
        RefusedError: Shards or images are missing, overlap or belong to different runs.
    """
    shards = sorted(map(_read, folders), key=lambda shard: shard.index)
    _check_division(shards)
    for shard in shards:
        _check_complete(shard)
    _check_overlap(shards)
    folder = out or folders[0].with_name(re.sub(r"-shard\d+of\d+$", "", folders[0].name))
    if folder.exists():
        raise UserError(f"--out {folder}: exists already", "Give --out with a new folder.")
    # Renamed when it is complete: an interrupted merge leaves no run.
    partial = folder.with_name(f"{folder.name}.merging")
    shutil.rmtree(partial, ignore_errors=True)
    _write(shards, partial, name=folder.name)
    partial.rename(folder)
    return folder


def _read(folder: Path) -> _Shard:
    manifest = read_manifest(folder)
    shard = manifest.get("shard")
    if not shard:
        raise UserError(
            f"{folder} is not a shard of a run", "`lantern-bench sweep --shard i/n` makes one."
        )
    return _Shard(
        folder=folder,
        manifest=manifest,
        records=read_records(folder),
        index=shard["index"],
        count=shard["count"],
    )


# ---- Checks


def _check_division(shards: Sequence[_Shard]) -> None:
    """Raise `RefusedError` unless these are the shards of one run, each once."""
    first = shards[0]
    folders: dict[int, Path] = {}
    for shard in shards:
        if shard.count != first.count:
            raise RefusedError(
                f"{first.folder} is a shard of {first.count}, {shard.folder} of {shard.count}",
                "Give the shards of one division.",
            )
        if shard.index in folders:
            raise RefusedError(
                f"{shard.name} is given twice: {folders[shard.index]} and {shard.folder}",
                "Leave one of them out.",
            )
        folders[shard.index] = shard.folder
        _check_settings(first, shard)
    indices = range(1, first.count + 1)
    missing = [f"{index}/{first.count}" for index in indices if index not in folders]
    if missing:
        raise RefusedError(
            f"shards are missing: {', '.join(missing)}", "Give all shards of the run."
        )


def _check_settings(first: _Shard, other: _Shard) -> None:
    """Raise `RefusedError` for shards of different runs."""
    ours = _settings(first.manifest)
    theirs = _settings(other.manifest)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) == theirs.get(name):
            continue
        a = json.dumps(ours.get(name), sort_keys=True)
        b = json.dumps(theirs.get(name), sort_keys=True)
        raise RefusedError(
            f"{first.folder} and {other.folder} are shards of different runs: {name} differs\n"
            f"  first   {a[:_SHOWN]}\n"
            f"  second  {b[:_SHOWN]}",
            "Merge shards of one run.",
        )


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal in all shards."""
    experiment = manifest.get("experiment") or {}
    key = manifest.get("key") or {}
    settings = {
        name: value for name, value in experiment.items() if name not in KEYS_WITHOUT_EFFECT
    }
    settings |= {f"key: {name}": value for name, value in key.items()}
    if key.get("device_type") == "cpu":
        # Sums on another number of threads round differently.
        settings["threads"] = manifest.get("threads")
    return settings


def _check_complete(shard: _Shard) -> None:
    """Raise `RefusedError` for missing images or pictures."""
    images = shard.manifest["shard"]["images"]
    if len(shard.records) != images:
        raise RefusedError(
            f"{shard.name} has {len(shard.records)} of {images} images: {shard.folder}",
            "Continue it with the command that started it.",
        )
    for row in shard.records:
        if row["image"] and not (shard.folder / row["image"]).is_file():
            raise RefusedError(
                f"{shard.folder}: the picture {row['image']} is missing",
                "Restore it, or repair the run.",
            )


def _check_overlap(shards: Sequence[_Shard]) -> None:
    """Raise `RefusedError` for an image that two shards have."""
    folders: dict[str, Path] = {}
    for shard in shards:
        for row in shard.records:
            key = row["record_key"]
            other = folders.setdefault(key, shard.folder)
            if other != shard.folder:
                raise RefusedError(
                    f"{other} and {shard.folder} both have the image {key} of {row['cell_id']}",
                    "Their shards overlap: make one of them again.",
                )


# ---- The merged run


def _write(shards: Sequence[_Shard], folder: Path, name: str) -> None:
    records: list[Row] = []
    scores: list[Row] = []
    sessions: list[Row] = []
    processes = 0  # of the shards so far: processes of different shards are different
    for shard in shards:
        sessions += [
            session | {"process": processes + session["process"]}
            for session in shard.manifest.get("sessions", [])
        ]
        for row in shard.records:
            records.append(row | {"process": processes + row["process"]})
            if row["image"]:
                picture = folder / row["image"]
                picture.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(shard.folder / row["image"], picture)
        processes = 1 + max((row["process"] for row in [*sessions, *records]), default=-1)
        scores += [row for row in read_scores(shard.folder) if row["level"] in ("image", "tokens")]
    records.sort(key=lambda row: int(row["order_index"]))
    write_atomically(folder / RECORDS, map(line_of, records))
    write_atomically(folder / SCORES, map(line_of, scores))

    manifests = [shard.manifest for shard in shards]
    manifest = manifests[0] | {
        "run": name,
        "shard": None,
        "merged_shards": len(shards),
        "sessions": sessions,
        "started": min(str(manifest.get("started")) for manifest in manifests),
        "ended": max(str(manifest.get("ended")) for manifest in manifests),
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / MANIFEST, text.encode() + b"\n")
