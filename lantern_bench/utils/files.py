"""Reading JSON, atomic writes, and SHA-256 hashes of files, remembered so that 14 GB are not read at each start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lantern_bench.utils.errors import UserError

# A smaller file is read faster than the index is kept.
_WORTH_REMEMBERING = 32 * 10**6


def user_cache() -> Path:
    """Return the user's cache directory: `$XDG_CACHE_HOME`, or `~/.cache` where it is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder() -> Path:
    """Return the folder of all caches of this package.

    It is `$LANTERN_BENCH_CACHE` where that is set, and `lantern-bench` in the user's cache
    directory otherwise.
    """
    folder = os.environ.get("LANTERN_BENCH_CACHE")
    return Path(folder) if folder else user_cache() / "lantern-bench"


def partial_path(path: Path) -> Path:
    """Where `write_atomically` writes before it renames; a killed process can leave this file."""
    return path.with_name(f".{path.name}.part")


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file so that readers see all of it or none; raises `OSError` and leaves nothing where this fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises `UserError` for one that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The SHA-256 of a file; a large file is read again only when its size or modification time changed."""
    state = path.stat()
    if state.st_size < _WORTH_REMEMBERING:
        return file_sha256(path)
    index = cache_folder() / "hashes.json"
    key = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    try:
        hashes: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        hashes = {}
    if key not in hashes:
        hashes[key] = file_sha256(path)
        # A cache that cannot be written is computed again the next time.
        with contextlib.suppress(OSError):
            write_atomically(index, json.dumps(hashes, indent=1).encode())
    return hashes[key]


def hash_of(paths: Sequence[Path]) -> str:
    """One hash for a part of one file or several."""
    hashes = [remembered_sha256(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def check_writable(folder: Path, flag: str = "--out") -> None:
    """Raise `UserError` for a folder, existing or not, that cannot be written into."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(
            f"{flag} {folder}: {existing} is a file, not a folder",
            "Give a folder that you may write to.",
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise cannot_write(folder, flag=flag)


def cannot_write(folder: Path, error: OSError | None = None, flag: str = "--out") -> UserError:
    """Return the error for a folder that cannot be written."""
    reason = f": {error.strerror or error}" if error is not None else ""
    return UserError(
        f"{flag} {folder}: cannot be written{reason}", "Give a folder that you may write to."
    )
