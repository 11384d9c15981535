"""The commands that read several runs: curves, compare, report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest

from lantern_bench.cli import main as cli
from lantern_bench.runs.store import RESULTS_VARIABLE
from tests.made_up_run import make_records, make_scores, write_run


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, first and second; in the second everything takes half as long."""
    root = tmp_path / "results"
    monkeypatch.setenv(RESULTS_VARIABLE, str(root))
    records = make_records()
    write_run(root / "first", records, make_scores(records))
    faster = [row | {"seconds": row["seconds"] and row["seconds"] / 2} for row in records]
    write_run(root / "second", faster, make_scores(records))
    return root


def test_compare_prints_effects_and_verdicts(results, capsys):
    assert cli.main(["compare", "first", "second"]) == 0
    written = capsys.readouterr()
    table = pd.read_csv(io.StringIO(written.out))
    seconds = table[table["quantity"] == "latency_s"]
    assert seconds["effect"].tolist() == pytest.approx([2.0, 2.0, 2.0])
    assert "Holm" in written.err
    assert cli.main(["compare", "first", "second", "--format", "table"]) == 0
    assert "not distinguishable" in capsys.readouterr().out


def test_compare_needs_across_for_other_weights(results, capsys):
    manifest = json.loads((results / "second" / "manifest.json").read_text())
    for name, digest in (("first", "aa"), ("second", "bb")):
        written = manifest | {"key": {"weights": {"lanterns/target": digest}}}
        (results / name / "manifest.json").write_text(json.dumps(written))
    assert cli.main(["compare", "first", "second"]) == 3
    written = capsys.readouterr()
    assert written.out == "" and "--across weights" in written.err
    assert cli.main(["compare", "first", "second", "--across", "weights"]) == 0
    assert "warning: the runs differ in weights of lanterns/target" in capsys.readouterr().err


def test_report_writes_one_html_file(results, capsys):
    assert cli.main(["report", "first"]) == 0
    written = capsys.readouterr()
    assert written.out.strip() == str(results / "first" / "report.html") and "MB" in written.err
    out = results / "both.html"
    assert cli.main(["-q", "report", "first", "second", "--out", str(out)]) == 0
    assert capsys.readouterr().err == "" and "second: AR" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (["compare", "first"], "Missing argument"),
        (["compare", "first", "nope"], "nope"),
        (["compare", "first", "first"], "same run"),
        (["compare", "first", "second", "--across", "all"], "--across all"),
        (["compare", "first", "second", "--format", "yaml"], "--format yaml"),
        (["curves", "first", "--by", "colour"], "--by colour"),
        (["curves", "first", "second"], "--out is missing"),
        (["report", "first", "second"], "--out is missing"),
        (["report", "first", "--out", "."], "is a directory"),
    ],
)
def test_usage_errors_exit_2_and_write_nothing(results, capsys, typed, wrong):
    assert cli.main(typed) == 2
    written = capsys.readouterr()
    assert wrong in written.err and written.out == "" and "Traceback" not in written.err
    assert not list(results.glob("*/figures")) and not list(results.glob("*/report.html"))
