"""End a process without destroying its objects.

Python destroys the objects of a process before it ends, one by one: 0.6 s where torch is imported,
1.3 s where its compiler is. The operating system takes their memory back at once.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

_codes: list[int] = []


def exit_quickly(code: int) -> NoReturn:
    """Exit with this code, even if the `SystemExit` is caught: the last act of a program.

    Threads and exit handlers come to their end before. Handlers do not run that were registered
    before `lantern_bench` was imported.
    """
    _codes.append(code)
    sys.exit(code)


@atexit.register
def _end() -> None:
    """Run after all other exit handlers: the package registers it when it is imported itself."""
    if not _codes:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python tries again, reports what it cannot write, and changes the code
    os._exit(_codes[0])
