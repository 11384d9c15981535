"""Several runs, each under a name that tells it from the others.

The name is the folder's; where two folders have the same name, as copies of one run do, the folder around them is
named too. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lantern_bench.errors import RefusedError
from lantern_bench.runs.store import RunData, read_run

__all__ = ["read_named", "run_names"]


def read_named(folders: Sequence[Path]) -> dict[str, RunData]:
    """Read the runs; raises `RefusedError` for one without records and `UserError` for what is no run."""
    found = {}
    for name, folder in zip(run_names(folders), folders, strict=True):
        found[name] = read_run(folder)
        if not found[name].records:
            raise RefusedError(f"{folder} holds no records yet", "The command that began this run continues it.")
    return found


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its own, with as many parents as it takes to differ from the others."""
    whole = [folder.resolve().parts for folder in folders]
    for depth in range(1, max((len(parts) for parts in whole), default=1) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in whole]
