"""Where runs are: the results folder, and a run given by path or by name.

The folder is `results` where the command is typed, or the one that `LANTERN_BENCH_RESULTS` names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["RESULTS_VARIABLE", "RUN_HELP", "locate", "locate_all", "results_root"]

RESULTS_VARIABLE = "LANTERN_BENCH_RESULTS"
RUN_HELP = "A run's folder, its name under results/, or the beginning of the name."


def results_root() -> Path:
    """Return the folder that holds runs; it need not exist."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")


def locate(run: str) -> Path:
    """Return a run's folder by path or name; raises `UserError` with the runs there are."""
    from lantern_bench.runs.store import find_run

    return find_run(run, results_root())


def locate_all(runs: Sequence[str]) -> list[Path]:
    """Return the folders of several runs, each once; raises as `locate`."""
    return list(dict.fromkeys(locate(run) for run in runs))
