"""`make bench-load` on a small run."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run_goes_through_every_stage(tmp_path: Path) -> None:
    """Five cells of four prompts: each stage finds all of them, within its limit.

    In a process of its own, because the limit of memory is for a process.
    """
    small = ["--out", str(tmp_path / "run"), "--cells", "5", "--prompts", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.load", *small],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["stage"]: row["rows"] for row in rows} == {
        "tables": "5",
        "resume scan": "20",
        "report": "5",
        "whole resume": "20",
    }
    assert {row["kept"] for row in rows} == {"True", ""}
