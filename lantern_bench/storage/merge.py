"""Merge the shards of a run.

Scores of single images are kept. Scores of whole cells, such as FID, need a new scoring.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from lantern_bench.config.experiment import KEYS_WITHOUT_EFFECT
from lantern_bench.storage.records import line_of, rows_of, shown
from lantern_bench.storage.run_directory import (
    MANIFEST,
    MERGING,
    RECORDS,
    SCORES,
    RunData,
    is_empty_shard,
    manifest_bytes,
    read_run,
)
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_atomically


def merge_runs(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Merge shards into one run, after checking that they are the complete shards of one run.

    Args:
        folders: The run directories of the shards, in any order.
        out: The new run directory, by default named as the first without `-shardIofN`.

    Returns:
        The new run directory.

    Raises:
        UserError: A folder is not a shard, or `out` exists.
        RefusedError: Shards or images are missing, overlap or belong to different runs.
    """
    shards = sorted(map(_read, folders), key=_index)
    _check_division(shards)
    for shard in shards:
        _check_complete(shard)
    _check_overlap(shards)
    folder = out or folders[0].with_name(re.sub(r"-shard\d+of\d+$", "", folders[0].name))
    if folder.exists():
        raise UserError(f"--out {folder}: exists already", "Give --out with a new folder.")
    # Renamed when it is complete: an interrupted merge leaves no run.
    partial = folder.with_name(folder.name + MERGING)
    shutil.rmtree(partial, ignore_errors=True)
    _write(shards, partial, name=folder.name)
    partial.rename(folder)
    return folder


def _read(folder: Path) -> RunData:
    shard = read_run(folder)
    if not shard.manifest.get("shard"):
        raise UserError(
            f"{folder} is not a shard of a run", "`lantern-bench sweep --shard i/n` makes one."
        )
    return shard


def _index(shard: RunData) -> int:
    """Return the number of a shard, from 1."""
    index: int = shard.manifest["shard"]["index"]
    return index


# ---- Checks


def _check_division(shards: Sequence[RunData]) -> None:
    """Raise `RefusedError` unless these are the shards of one run, each once."""
    first = shards[0]
    count = first.manifest["shard"]["count"]
    for before, shard in pairwise(shards):
        other_count = shard.manifest["shard"]["count"]
        if other_count != count:
            raise RefusedError(
                f"{first.folder} is a shard of {count}, {shard.folder} of {other_count}",
                "Give the shards of one division.",
            )
        if _index(shard) == _index(before):
            raise RefusedError(
                f"shard {_index(shard)}/{count} is given twice: {before.folder} and {shard.folder}",
                "Leave one of them out.",
            )
        _check_settings(first, shard)
    missing = sorted({*range(1, count + 1)} - {*map(_index, shards)})
    if missing:
        names = ", ".join(f"{index}/{count}" for index in missing)
        raise RefusedError(f"shards are missing: {names}", "Give all shards of the run.")


def _check_settings(first: RunData, other: RunData) -> None:
    """Raise `RefusedError` for shards of different runs."""
    ours = _settings(first.manifest)
    theirs = _settings(other.manifest)
    for name in ours | theirs:
        if ours.get(name) == theirs.get(name):
            continue
        if name == "threads" and not (name in ours and name in theirs):
            continue  # one of them has no images
        raise RefusedError(
            f"{first.folder} and {other.folder} are shards of different runs: {name} differs\n"
            f"  first   {shown(ours.get(name))}\n"
            f"  second  {shown(theirs.get(name))}",
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
    if key.get("device_type") == "cpu" and not is_empty_shard(manifest):
        # Sums on another number of threads round differently.
        settings["threads"] = manifest.get("threads")
    return settings


def _check_complete(shard: RunData) -> None:
    """Raise `RefusedError` for missing images or pictures."""
    part = shard.manifest["shard"]
    images = part["images"]
    if len(shard.records) != images:
        raise RefusedError(
            f"shard {part['index']}/{part['count']} has {len(shard.records)} of {images} images: "
            f"{shard.folder}",
            "Continue it with the command that started it.",
        )
    for image in shard.records["image"].dropna():
        if not (shard.folder / image).is_file():
            raise RefusedError(
                f"{shard.folder}: the picture {image} is missing",
                "Restore it, or repair the run.",
            )


def _check_overlap(shards: Sequence[RunData]) -> None:
    """Raise `RefusedError` for an image that two shards have."""
    for one, other in combinations(shards, 2):
        in_both = set(one.records["record_key"]) & set(other.records["record_key"])
        if in_both:
            raise RefusedError(
                f"{one.folder} and {other.folder} both have the image {min(in_both)}",
                "Their shards overlap: make one of them again.",
            )


# ---- The merged run


def _write(shards: Sequence[RunData], folder: Path, name: str) -> None:
    import pandas as pd

    records: list[pd.DataFrame] = []
    scores: list[Row] = []
    sessions: list[Row] = []
    commands: list[str] = []
    for shard in shards:
        commands += shard.manifest.get("commands", [])
        before = len(sessions)  # processes of different shards are different
        for session in shard.manifest.get("sessions", []):
            sessions.append(session | {"process": before + session["process"]})
        records.append(shard.records.assign(process=before + shard.records["process"]))
        scores += [row for row in shard.scores if row["level"] in ("image", "tokens")]
        for image in shard.records["image"].dropna():
            picture = folder / image
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(shard.folder / image, picture)
    in_order = pd.concat(records).sort_values("order_index")
    write_atomically(folder / RECORDS, map(line_of, rows_of(in_order)))
    write_atomically(folder / SCORES, map(line_of, scores))

    manifests = [shard.manifest for shard in shards]
    manifest = manifests[0] | {
        "run": name,
        "shard": None,
        "merged_shards": len(shards),
        "sessions": sessions,
        "commands": list(dict.fromkeys(commands)),
        "started": min(str(manifest.get("started")) for manifest in manifests),
        "ended": max(str(manifest.get("ended")) for manifest in manifests),
    }
    write_atomically(folder / MANIFEST, manifest_bytes(manifest))
