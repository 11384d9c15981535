"""Files written whole, and their SHA-256, which is remembered so that 14 GB are not read again at each start.

What is remembered is keyed by path, size and time of change, in one small index in the user's cache folder; a folder
that cannot be written costs time and nothing else. What a hash is compared with is `weights`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_CHUNK = 1 << 22
# Below this a file is read faster than an index is kept.
_WORTH_REMEMBERING = 32 * 10**6


def cache_folder() -> Path:
    """The folder of what can be made again: `$XDG_CACHE_HOME/lantern-bench`, else `~/.cache/lantern-bench`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lantern-bench"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file in hex; `on_bytes` hears how many bytes were read since it was last called."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def remembered_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file, from memory where path, size and time of change are those it was made of."""
    state = path.stat()
    if state.st_size < _WORTH_REMEMBERING:
        return file_sha256(path, on_bytes)
    index = cache_folder() / "hashes.json"
    key = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    known = _read_index(index)
    if key not in known:
        known[key] = file_sha256(path, on_bytes)
        _keep_index(index, known)
    return known[key]


def _read_index(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _keep_index(index: Path, known: dict[str, str]) -> None:
    try:
        write_atomically(index, json.dumps(known, indent=1).encode())
    except OSError:
        # A cache that cannot be kept is made again the next time.
        return


def hash_of(paths: Sequence[Path]) -> str:
    """One hash for a part of one file or several."""
    hashes = [remembered_sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
