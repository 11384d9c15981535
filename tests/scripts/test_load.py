"""`make bench-load` on a small run."""

from __future__ import annotations

import csv
import io

from scripts.bench import load


def test_a_small_run_goes_through_every_stage(tmp_path, capfd):
    """Five cells of four prompts: each stage finds all of them, within its limit."""
    assert load.main(["--out", str(tmp_path / "run"), "--cells", "5", "--prompts", "4"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
    assert {row["stage"]: row["rows"] for row in rows} == {
        "tables": "5",
        "resume scan": "20",
        "report": "5",
        "whole resume": "20",
    }
    assert {row["kept"] for row in rows} == {"True", ""}
