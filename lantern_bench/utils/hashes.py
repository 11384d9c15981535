"""SHA-256 hashes of large files, which are kept in an index."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from lantern_bench.utils.files import cache_folder, file_sha256, write_atomically
from lantern_bench.utils.progress import slow_task

# Bytes. Hashing a smaller file takes less time than keeping its hash in the index.
_WORTH_REMEMBERING = 32 * 10**6
_PARTS = 256  # of a file that its fingerprint reads
_PART_BYTES = 4096
_HASHED_BYTES = 1 << 24  # between two reports of progress


def fingerprint(path: Path) -> str:
    """Return what changes when a file changes, without reading all of it.

    Programs that copy a file can keep its size and its times, so parts of the content count too.
    """
    state = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for part in range(_PARTS):
            file.seek(state.st_size * part // _PARTS)
            digest.update(file.read(_PART_BYTES))
        file.seek(max(0, state.st_size - _PART_BYTES))
        digest.update(file.read(_PART_BYTES))
    facts = (
        path.resolve(),
        state.st_size,
        state.st_mtime_ns,
        state.st_ctime_ns,
        state.st_dev,
        state.st_ino,
        digest.hexdigest(),
    )
    return "|".join(map(str, facts))


def remembered_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex, from an index where possible.

    A checkpoint of 14 GB is hashed once. It is read again only when its `fingerprint` has changed.
    """
    if path.stat().st_size < _WORTH_REMEMBERING:
        return file_sha256(path)
    index = cache_folder() / "hashes.json"
    key = fingerprint(path)
    try:
        hashes: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        hashes = {}
    if key in hashes:
        return hashes[key]
    found = _large_sha256(path)
    # A file that was written meanwhile is not remembered.
    if key == fingerprint(path):
        hashes[key] = found
        # Without a writable cache, the hash is computed again next time.
        with contextlib.suppress(OSError):
            write_atomically(index, json.dumps(hashes, indent=1).encode())
    return found


def _large_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex, and show the progress."""
    digest = hashlib.sha256()
    hashed = slow_task(f"hashing {path.name}", path.stat().st_size)
    with path.open("rb") as file:
        while part := file.read(_HASHED_BYTES):
            digest.update(part)
            hashed(len(part))
    return digest.hexdigest()


def hash_of(paths: Sequence[Path]) -> str:
    """Return one hash for all files of a part of a model."""
    hashes = [remembered_sha256(path) for path in paths]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
