"""Atomic writes, JSON, cache folders, and files of weights by name."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lantern_bench.utils.errors import UserError

_PARTS = 256  # of a file that its fingerprint reads
_PART_BYTES = 4096


def path_of_variable(name: str) -> Path | None:
    """Return the path that an environment variable names, None where it is not set.

    A `~` is the home folder also where no shell has expanded it: in quotes and in job files.
    """
    value = os.environ.get(name)
    return Path(os.path.expanduser(value)) if value else None


def user_cache() -> Path:
    """Return the user's cache directory: `$XDG_CACHE_HOME`, or `~/.cache` where it is not set.

    A user without a home folder, as in some containers, gets the temporary folder.
    """
    folder = path_of_variable("XDG_CACHE_HOME")
    if folder is not None:
        return folder
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return temporary_cache("HOME is not set and this user has no home folder")


def cache_folder() -> Path:
    """Return the folder of all caches of this package, which need not exist and can be written.

    It is `$LANTERN_BENCH_CACHE` where that is set, and `lantern-bench` in the user's cache
    directory otherwise. Where it cannot be written, it is the temporary folder.
    """
    return _usable(path_of_variable("LANTERN_BENCH_CACHE") or user_cache() / "lantern-bench")


@functools.cache
def _usable(folder: Path) -> Path:
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        return temporary_cache(f"the cache {folder} cannot be written: {error.strerror or error}")
    return folder


cache_problems: list[str] = []
"""Why caches are in a temporary folder; empty where they are not."""
_temporary: list[Path] = []


def is_temporary(path: Path) -> bool:
    """Return whether a path is in a temporary cache, which is removed when this process ends."""
    return any(path.is_relative_to(folder) for folder in _temporary)


@functools.cache
def temporary_cache(reason: str) -> Path:
    """Warn once, and return a new folder for caches, which is removed when this process ends.

    Programs in the cache are executed, so the folder belongs to this user alone. Processes that
    this one starts use it too.
    """
    folder = Path(tempfile.mkdtemp(prefix="lantern-bench-cache-"))
    os.environ["LANTERN_BENCH_CACHE"] = str(folder)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    cache_problems.append(reason)
    _temporary.append(folder)
    message = f"{reason}. Nothing is kept for later runs; set LANTERN_BENCH_CACHE to a folder."
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    return folder


# ---- Writing


def partial_path(path: Path) -> Path:
    """Return where `write_atomically` writes first; a killed process can leave this file."""
    return path.with_name(f".{path.name}.part")


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file so that readers see either all of it or none.

    Folders above the file are made. Raises `OSError` and leaves no partial file when writing fails.
    """
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


def write_file(path: Path, content: bytes | Iterable[bytes], *, flag: str = "") -> None:
    """Write a file that the user asked for, as `write_atomically` does.

    Args:
        path: The file. Folders above it are made.
        content: The bytes of the file, in one or several parts.
        flag: The flag that names the file or its folder, for the message.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise cannot_write(path, error, flag=flag) from error


def write_json(path: Path, content: Any) -> None:
    """Write plain data as JSON, as `write_file` does."""
    write_file(path, json.dumps(content, indent=1).encode() + b"\n")


def check_writable(folder: Path, flag: str = "--out") -> None:
    """Raise `UserError` if nothing can be written into a folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(
            f"{flag} {folder}: {existing} is a file, not a folder",
            "Give a folder that you may write to.",
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise cannot_write(folder, flag=flag)


def cannot_write(path: Path, error: OSError | None = None, *, flag: str = "") -> UserError:
    """Return the error for a file or folder that cannot be written.

    Args:
        path: The file or folder.
        error: What the system said; None if writing was not tried.
        flag: The flag that names the path, for the message.
    """
    place = f"{flag} {path}".lstrip()
    reason = f": {error.strerror or error}" if error is not None else ""
    return UserError(f"{place}: cannot be written{reason}", "Give a folder that you may write to.")


# ---- Reading


# Files that are not plain text, by their first bytes in lower case.
_NOT_PLAIN = {
    "compressed": (b"\x1f\x8b", b"bzh91ay", b"\xfd7zxz", b"\x28\xb5\x2f\xfd"),
    "a ZIP archive, as .xlsx and .docx files are": (b"pk\3\4",),
    "an Office file": (b"\xd0\xcf\x11\xe0",),
    "a Parquet file": (b"par1",),
    "a PDF": (b"%pdf-",),
    "RTF": (b"{\\rtf",),
    "a web page or XML": (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml", b"<!--"),
    "a picture": (b"\x89png", b"\xff\xd8\xff", b"gif8"),
    "a Git LFS pointer, for which `git lfs pull` fetches the file": (b"version https://git-lfs",),
}
_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


def kind_of(content: bytes) -> str:
    """Return what a file is that begins so and is not plain text; empty where that is unknown."""
    head = content[:1000].removeprefix(codecs.BOM_UTF8).lstrip().lower()
    kinds = (kind for kind, marks in _NOT_PLAIN.items() if head.startswith(marks))
    return next(kinds, "")


def read_text(path: Path, name: str = "") -> str:
    """Return the text of a file in UTF-8, without its byte order mark.

    All lines end with a newline character, also where the file has carriage returns.

    Args:
        path: The file.
        name: The file in messages, by default its path.

    Raises:
        UserError: The file is not plain text, or not in UTF-8. The advice converts it.
        OSError: The file cannot be read.
    """
    content = path.read_bytes()
    kind = kind_of(content)
    if kind:
        raise UserError(f"{name or path}: is {kind}, not text", "Unpack or export it first.")

    encoding = next((word for word, marks in _MARKS.items() if content.startswith(marks)), "")
    # Without a mark, every second byte of English text in UTF-16 is 0.
    if not encoding and content[:1000].count(0) > len(content[:1000]) // 4:
        encoding = "UTF-16LE" if content[1:2] == b"\0" else "UTF-16BE"
    problem = f"{name or path} line 1: the file is in {encoding}, not in UTF-8"
    text = ""
    if not encoding:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            byte = f"byte 0x{content[error.start]:02x}"
            problem = f"{name or path} line {line}: {byte} is not UTF-8; Windows writes CP1252"
            encoding = "CP1252"
    if encoding:
        quoted = shlex.quote(str(path))
        command = f"iconv -f {encoding} -t UTF-8 {quoted} > NEW{path.suffix}"
        raise UserError(problem, f"Convert it from the encoding that it was written in: {command}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises `UserError` if it cannot be read, or states a key twice with different values.
    """
    try:
        return json.loads(read_text(path), object_pairs_hook=without_doubles)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as a hook of `json`. Raises `ValueError` for a key with two values."""
    content = dict(pairs)
    for key, value in pairs:
        if value is not content[key] and value != content[key]:
            raise ValueError(f"{key} stands there twice, as {value} and as {content[key]}")
    return content


WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The usual names of weights in a folder, in the order in which transformers looks for them."""


def weights_in(folder: Path) -> list[str]:
    """Return which of `WEIGHT_FILES` a folder has, links to files that are gone included."""
    return [name for name in WEIGHT_FILES if os.path.lexists(folder / name)]


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


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
