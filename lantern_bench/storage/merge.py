"""Merge the shards of a run; scores of whole cells, such as FID, need a new scoring."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class _Shard:
    folder: Path
    manifest: dict[str, Any]
    records: list[Row]
    index: int  # from 1
    count: int


def merge_runs(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Merge shards into `out`, by default the name of the first without `-shardIofN`; raises what is wrong."""
    shards = sorted(map(_read, folders), key=lambda shard: shard.index)
    _check_division(shards)
    _check_images(shards)
    folder = out or folders[0].with_name(re.sub(r"-shard\d+of\d+$", "", folders[0].name))
    if folder.exists():
        raise UserError(f"--out {folder}: exists already", "Give --out with a new folder.")
    # Renamed when it is complete: an interrupted merge leaves no run.
    partial = folder.with_name(f"{folder.name}.merging")
    shutil.rmtree(partial, ignore_errors=True)
    scores = [row for shard in shards for row in read_scores(shard.folder)]
    _write(
        shards=shards,
        scores=[row for row in scores if row["level"] in ("image", "tokens")],
        folder=partial,
        name=folder.name,
    )
    partial.rename(folder)
    return folder


def _read(folder: Path) -> _Shard:
    manifest = read_manifest(folder)
    if not (shard := manifest.get("shard")):
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


def _check_division(shards: Sequence[_Shard]) -> None:
    """Raise `RefusedError` unless these are the shards of one run, each once."""
    first = shards[0]
    folders = dict[int, Path]()
    for shard in shards:
        if shard.count != first.count:
            message = f"{first.folder} is a shard of {first.count}, {shard.folder} of {shard.count}"
            raise RefusedError(message, "Give the shards of one division.")
        if shard.index in folders:
            message = f"shard {shard.index}/{shard.count} is given twice: {folders[shard.index]} and {shard.folder}"
            raise RefusedError(message, "Leave one of them out.")
        folders[shard.index] = shard.folder
        settings = _settings(first.manifest)
        others = _settings(shard.manifest)
        for name in dict.fromkeys([*settings, *others]):
            a, b = (
                json.dumps(values.get(name), sort_keys=True)[:300] for values in (settings, others)
            )
            if settings.get(name) != others.get(name):
                message = f"{first.folder} and {shard.folder} are shards of different runs: {name} differs"
                raise RefusedError(
                    f"{message}\n  first   {a}\n  second  {b}", "Merge shards of one run."
                )
    if missing := [
        f"{index}/{first.count}" for index in range(1, first.count + 1) if index not in folders
    ]:
        raise RefusedError(
            f"shards are missing: {', '.join(missing)}", "Give all shards of the run."
        )


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal in all shards."""
    experiment = manifest.get("experiment") or {}
    key = manifest.get("key") or {}
    settings = {name: value for name, value in experiment.items() if name not in _MAY_DIFFER}
    settings |= {f"key: {name}": value for name, value in key.items()}
    if key.get("device_type") == "cpu":
        # sums of other numbers of threads round differently
        settings["threads"] = manifest.get("threads")
    return settings


def _check_images(shards: Sequence[_Shard]) -> None:
    """Raise `RefusedError` for missing images, and for one that two shards have."""
    folders: dict[str, Path] = {}
    for shard in shards:
        if len(shard.records) != (images := shard.manifest["shard"]["images"]):
            counts = f"{len(shard.records)} of {images} images"
            message = f"shard {shard.index}/{shard.count} has {counts}: {shard.folder}"
            raise RefusedError(message, "Continue it with the command that started it.")
        for row in shard.records:
            if row["image"] and not (shard.folder / row["image"]).is_file():
                message = f"{shard.folder}: the picture {row['image']} is missing"
                raise RefusedError(message, "Restore it, or repair the run.")
            if (other := folders.setdefault(row["record_key"], shard.folder)) != shard.folder:
                message = f"{other} and {shard.folder} both have the image {row['record_key']} of {row['cell_id']}"
                raise RefusedError(message, "Their shards overlap: make one of them again.")


def _write(shards: Sequence[_Shard], scores: Sequence[Row], folder: Path, name: str) -> None:
    records: list[Row] = []
    sessions: list[Row] = []
    for shard in shards:
        # Processes of different shards are different processes.
        first = 1 + max((entry["process"] for entry in [*sessions, *records]), default=-1)
        sessions += [
            row | {"process": first + row["process"]} for row in shard.manifest.get("sessions", [])
        ]
        for row in shard.records:
            records.append(row | {"process": first + row["process"]})
            if row["image"]:
                picture = folder / row["image"]
                picture.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(shard.folder / row["image"], picture)
    records.sort(key=lambda row: int(row["order_index"]))
    write_atomically(folder / RECORDS, map(line_of, records))
    write_atomically(folder / SCORES, map(line_of, scores))
    manifests = [shard.manifest for shard in shards]
    merged = {
        "run": name,
        "shard": None,
        "merged_shards": len(shards),
        "sessions": sessions,
        "started": min(str(manifest.get("started")) for manifest in manifests),
        "ended": max(str(manifest.get("ended")) for manifest in manifests),
    }
    text = json.dumps(manifests[0] | merged, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / MANIFEST, text.encode() + b"\n")
