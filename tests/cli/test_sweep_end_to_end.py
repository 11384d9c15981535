"""Sweeps on the bundled model end to end: sweep, kill, resume, score, show, generate; a few images each."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from lantern_bench.cli import main as cli
from lantern_bench.methods.tables import MODES
from lantern_bench.runs.store import RESULTS_VARIABLE, read_manifest, read_records, read_scores

CAPTION = "two round red lanterns over a lake at dusk"
EXPERIMENT = """
name: small
model: lanterns
images: 2
compile: false
cells:
  - {mode: ar}
  - {mode: speculative, tree: small-7}
  - {mode: lantern++, neighbours: 10, lambda: 2}
"""
# What the clock says may differ between two runs; nothing else may.
TIMED = {"seconds", "draft_seconds", "target_seconds", "verify_seconds", "other_seconds", "pixel_seconds"}
TIMED |= {"cpu_seconds", "waited_seconds", "involuntary_switches", "steal_seconds", "disturbed", "attempts", "process"}
TIMED |= {"clock_mhz", "checksum"}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One uninterrupted sweep: its folder, exit code and streams."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.yaml").write_text(EXPERIMENT)
    done = subprocess.run(command(folder, "--out", "whole"), cwd=folder, capture_output=True, text=True, check=False)
    return {"at": folder, "run": folder / "whole", "code": done.returncode, "out": done.stdout, "err": done.stderr}


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "lantern_bench", "sweep", str(folder / "small.yaml"), *more]


def untimed(folder: Path) -> dict[str, dict[str, Any]]:
    rows = read_records(folder)
    return {row["record_key"]: {key: value for key, value in row.items() if key not in TIMED} for row in rows}


def test_sweep_writes_all_files_of_a_run(sweep: dict[str, Any]) -> None:
    assert sweep["code"] == 0, sweep["err"]
    lines = sweep["err"].splitlines()
    assert lines[0] == lines[-1] == "run: whole"
    ours = ("run: whole", "images", "scoring", "tables: ", "warning: ", "relaxed cells of lanterns")
    assert [line for line in lines if not line.startswith(ours)] == []
    names = {path.name for path in sweep["run"].iterdir()} - {".lock"}
    tables = {f"{name}.csv" for name in ("speed", "quality", "acceptance", "summary")}
    assert names == {"manifest.json", "records.jsonl", "scores.jsonl", "images"} | tables
    assert sweep["out"] == (sweep["run"] / "summary.csv").read_text()
    listed = pd.read_csv(io.StringIO(sweep["out"]))
    assert listed["method"].tolist() == ["ar", "speculative", "lantern++"]
    assert listed.loc[0, ["speedup", "mean_accepted_length"]].tolist() == [1.0, 1.0]
    assert (listed["failed"] == 0).all() and (listed["images"] == 2).all()
    assert (listed["mean_accepted_length"] >= 1).all()


def test_pictures_and_scores_belong_to_the_records(sweep: dict[str, Any]) -> None:
    rows = read_records(sweep["run"])
    for row in rows:
        with Image.open(sweep["run"] / row["image"]) as picture:
            assert picture.size == (64, 64) and picture.mode == "RGB"
    scores = [score for score in read_scores(sweep["run"]) if score["level"] == "image"]
    assert {score["record_key"] for score in scores} == {row["record_key"] for row in rows}
    assert all(-1 <= score["clip_score"] <= 1 and score["prompt_accuracy"] in (0, 1) for score in scores)


def test_manifest_has_no_paths_and_resolves_again(sweep: dict[str, Any], capsys) -> None:
    manifest = read_manifest(sweep["run"])
    text = json.dumps(manifest)
    assert str(sweep["at"]) not in text and str(Path.home()) + "/" not in text
    assert set(manifest["key"]["weights"]) == {"lanterns/target", "lanterns/drafter", "lanterns/tokenizer"}
    assert all(len(digest) == 64 for digest in manifest["key"]["weights"].values())
    again = sweep["at"] / "again.yaml"
    again.write_text(json.dumps(manifest["experiment"]))
    assert cli.main(["sweep", str(again), "--dry-run", "--out", str(sweep["run"])]) == 0
    assert "6 images, 6 done, 0 to do" in capsys.readouterr().err


@pytest.mark.long
def test_killed_sweep_resumes_to_the_same_records(sweep: dict[str, Any]) -> None:
    at, run = sweep["at"], sweep["at"] / "killed"
    typed = command(at, "--metrics", "speed", "--out", "killed")
    started = subprocess.Popen(typed, cwd=at, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while len((run / "records.jsonl").read_bytes().splitlines() if (run / "records.jsonl").exists() else []) < 2:
        assert time.monotonic() < deadline and started.poll() is None, "no records to be killed after"
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    kept = untimed(run)
    assert 2 <= len(kept) < 6
    # A line cut in the middle is what a kill may leave behind.
    with (run / "records.jsonl").open("a") as file:
        file.write('{"schema_version": 1, "record_k')
    done = subprocess.run(typed, cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} images kept, {6 - len(kept)} to do" in done.stderr
    assert untimed(run) == untimed(sweep["run"])


@pytest.mark.parametrize("table", ["summary", "speed", "quality", "acceptance"])
def test_show_prints_the_tables_of_the_run(sweep: dict[str, Any], capsys, table: str) -> None:
    assert cli.main(["show", str(sweep["run"]), "--table", table]) == 0
    assert capsys.readouterr().out == (sweep["run"] / f"{table}.csv").read_text()


@pytest.mark.long  # test_sweep_run.py has it with a small model
def test_generate_draws_all_modes_side_by_side(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path))
    flags = ["--nodes", "8", "--depth", "2", "--beam", "4"]
    assert cli.main(["generate", CAPTION, "--mode", "all", "--out", "all.png", *flags]) == 0
    listed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    cells = dict(zip(MODES, listed["cell_id"], strict=True))
    assert all(cell.startswith(f"{mode}-") for mode, cell in cells.items())
    assert "delta0.02" in cells["lantern"] and "lambda2" in cells["lantern++"]
    with Image.open("all.png") as picture:
        assert picture.size == (len(MODES) * 64, 64)
    assert [path.name for path in tmp_path.iterdir()] == ["all.png"]


def test_generate_overwrites_only_with_force(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["generate", CAPTION, "--mode", "speculative", "--temperature", "0", "--out", "a.png"]
    assert cli.main(typed) == 0
    before = Path("a.png").read_bytes()
    assert cli.main(typed) == 3
    assert cli.main([*typed, "--force"]) == 0 and Path("a.png").read_bytes() == before
