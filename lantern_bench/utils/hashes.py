"""SHA-256 hashes of large files, which are kept in an index."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from lantern_bench.utils.files import (
    cache_folder,
    file_sha256,
    fingerprint,
    write_atomically,
)
from lantern_bench.utils.progress import slow_task

# Bytes. Hashing a smaller file takes less time than keeping its hash in the index.
_WORTH_REMEMBERING = 32 * 10**6
_HASHED_BYTES = 1 << 24  # between two reports of progress


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
