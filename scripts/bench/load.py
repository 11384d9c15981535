"""`make bench-load`: tables, resuming and report of a run with 200 cells and 5,000 prompts.

A sweep decodes a few images of every cell, with a model of one token per image. `load_run.py`
repeats their records for the other prompts, with the keys, seeds and order of the run's plan, and
other seconds. Each stage is measured in a new process. Use an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lantern_bench.cli.console import Console
from lantern_bench.storage.run_directory import RECORDS, finished_records
from lantern_bench.utils.clock import now

CELLS = 200
PROMPTS = 5_000
LOAD = (sys.executable, "-m", "scripts.bench.load")


class Limit(NamedTuple):
    """The most that a stage may take; figures without a limit are only reported."""

    seconds: float | None = None
    memory_gb: float | None = None
    file_mb: float | None = None


def _tables(folder: Path) -> dict[str, Any]:
    from lantern_bench.analysis.tables import write_tables

    return {"rows": len(write_tables(folder)["summary"])}


def _resume_scan(folder: Path) -> dict[str, Any]:
    return {"rows": len(finished_records(folder))}


def _resume(folder: Path) -> dict[str, Any]:
    """Run the command of the complete run: plan, checks, scan of the records, nothing to decode."""
    from lantern_bench.sweeps.events import Started
    from lantern_bench.sweeps.run import run
    from scripts.bench.load_run import request_of, use_family

    use_family()
    events: list[object] = []
    run(request_of(folder), events.append)
    started = next(event for event in events if isinstance(event, Started))
    assert not any(started.to_do.values()), "the repeated records have other keys than the plan"
    return {"rows": started.finished}


def _report(folder: Path) -> dict[str, Any]:
    from lantern_bench.api import write_report

    page = write_report([folder], folder / "report.html")
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    data = re.search(pattern, page.read_text("utf-8"), re.DOTALL)
    shown = json.loads(data[1])  # type: ignore[index]
    prompts = finished_records(folder)["prompt_id"].nunique()
    assert shown["left_out"] + len(shown["prompts"]) == prompts
    return {"rows": len(shown["cells"]), "file_mb": page.stat().st_size / 1e6}


STAGES = {
    "tables": (_tables, Limit(60.0, 2.0)),
    "resume scan": (_resume_scan, Limit(10.0)),
    "report": (_report, Limit(file_mb=20.0)),
    "whole resume": (_resume, Limit()),
}


def measure(stage: str, folder: Path) -> dict[str, Any]:
    """Run a stage in a new process; return its figures, seconds, CPU seconds and peak memory."""
    command = [*LOAD, "--out", str(folder), "--stage", stage]
    finished_process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(finished_process.stdout.splitlines()[-1])
    limit = STAGES[stage][1]
    bounds = {name: most for name, most in limit._asdict().items() if most is not None}
    figures["limit"] = ", ".join(f"{name} {most:g}" for name, most in bounds.items())
    figures["kept"] = None
    if bounds:
        figures["kept"] = all(figures[name] <= most for name, most in bounds.items())
    return {"stage": stage, **figures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the run if it is missing, measure, print a table; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description="Measure tables, resuming and the report of a large run."
    )
    parser.add_argument("--out", type=Path, default=Path("build/load/run"))
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--new", action="store_true", help="build the run again")
    parser.add_argument("--build", action="store_true", help="only build the run")
    parser.add_argument("--stage", choices=STAGES, help="measure one stage in this process")
    flags = parser.parse_args(arguments)
    if flags.build:
        from scripts.bench.load_run import build

        build(flags.out, flags.cells, flags.prompts)
        return 0
    if flags.stage:
        began = now()
        figures = STAGES[flags.stage][0](flags.out)
        used = resource.getrusage(resource.RUSAGE_SELF)
        figures |= {
            "seconds": round(now() - began, 2),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        }
        unit = 1 if sys.platform == "darwin" else 1024
        print(json.dumps(figures | {"memory_gb": round(used.ru_maxrss * unit / 1e9, 3)}))
        return 0
    console = Console()
    if flags.new:
        shutil.rmtree(flags.out, ignore_errors=True)
    if not (flags.out / RECORDS).exists():
        # In another process, since its peak memory would count for the stages.
        command = [*LOAD, "--out", str(flags.out), "--build"]
        command += ["--cells", str(flags.cells), "--prompts", str(flags.prompts)]
        began = now()
        subprocess.run(command, check=True)
        console.say(f"the run is built, in {now() - began:.0f} s")
    console.say(f"{flags.out / RECORDS}: {os.path.getsize(flags.out / RECORDS) / 1e6:.0f} MB")
    rows = [measure(stage, flags.out) for stage in STAGES]
    names = ["stage", "rows", "seconds", "cpu_seconds", "memory_gb", "file_mb", "limit", "kept"]
    console.table(pd.DataFrame(rows, columns=names))
    return int(any(row["kept"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
