"""The cause of an error that this package did not raise: the machine, a user's code, or a bug."""

from __future__ import annotations

import errno
import os
import resource
import site
import sysconfig
import traceback
from importlib import metadata
from pathlib import Path

from lantern_bench.utils.errors import LanternError, RefusedError, UserError
from lantern_bench.utils.text import one_line

PLUGIN_GROUPS = ("draftings", "rules", "metrics", "models")
"""The groups of the entry points of plug-ins, below `lantern_bench.`"""
# Words in messages of libraries, in lower case, where the system gives no more memory.
_NO_MEMORY = (
    "cuda out of memory",
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
    "unable to allocate",
    "can't start new thread",
    "resource temporarily unavailable",
)


def explained(error: Exception) -> LanternError:
    """Return an error as one with its cause: the machine, a user's code, or else a bug."""
    if isinstance(error, LanternError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        message = f"{str(error.filename)[:60]}...: the name is too long for the file system"
        return UserError(message, "Give a shorter path.")
    if isinstance(error, PermissionError) and error.filename:
        return UserError(f"{error.filename}: {error.strerror}", "Change who may read and write it.")
    cause = cause_in_machine(error) or _cause_in_users_code(error)
    if cause is not None:
        return cause
    advice = "This is a bug in lantern-bench; --debug shows where it happened."
    return LanternError(f"internal: {one_line(error)}", advice)


def cause_in_machine(error: BaseException) -> RefusedError | None:
    """Return the error for what the machine lacks: working folder, memory, open files, disk."""
    try:
        Path.cwd()
    except OSError:
        message = "the working folder is gone: it was removed or renamed"
        return RefusedError(message, "Change to another folder: cd PATH.")
    number = getattr(error, "errno", None)
    text = str(error).lower()
    if (
        isinstance(error, MemoryError)
        or number in (errno.ENOMEM, errno.EAGAIN)
        or any(words in text for words in _NO_MEMORY)
    ):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        allowed = ""
        advice = "Stop other programs, or use a smaller model or batch."
        if limit != resource.RLIM_INFINITY:
            allowed = f", and this process may use {limit / 1e9:,.1f} GB of addresses"
            advice = "Raise the limit: `ulimit -v unlimited`, or the limit of the batch system."
        return RefusedError(f"out of memory{allowed}: {one_line(error)}", advice)
    if number in (errno.EMFILE, errno.ENFILE):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        message = f"too many open files: this process may open {files}"
        return RefusedError(message, "Raise the limit: ulimit -n 4096.")
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        message = f"{getattr(error, 'filename', None) or 'a file'}: {os.strerror(number)}"
        return RefusedError(message, "`lantern-bench doctor` lists the folders that are written.")
    return None


def _cause_in_users_code(error: Exception) -> UserError | None:
    """Return the error of code that is neither this package nor one that it depends on."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        paths.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # code that the compiler wrote
    libraries = tuple(os.path.realpath(path) + os.sep for path in paths)
    packages = set()
    for group in PLUGIN_GROUPS:
        for entry_point in metadata.entry_points(group=f"lantern_bench.{group}"):
            packages.add(entry_point.module.split(".")[0])

    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = os.path.realpath(frame.f_code.co_filename)
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        is_users = Path(file).is_file() and not file.startswith(libraries)
        if is_users or package in packages:
            found = f"{file} line {line}, in {frame.f_code.co_name}"
    if found is None:
        return None
    advice = "This is code outside lantern-bench; --debug shows the way there."
    return UserError(f"{found}: {one_line(error)}", advice)
