"""Curves in the terminal: the same points as text, in ASCII where blocks cannot be written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lantern_bench.config.decoding import Decoding
from lantern_bench.console import Console
from lantern_bench.console.charts import plain, terminal_curves
from lantern_bench.errors import RefusedError
from lantern_bench.report.curves import curve_tables
from lantern_bench.runs.store import RunData
from tests.made_up_run import AR, WALKS, make_record, make_records, make_scores


def tables_from(records):
    return curve_tables(RunData(Path("run"), {}, records, make_scores(records)))


def test_charts_show_the_figures_of_the_tables():
    depths, lengths, clip, accuracy = terminal_curves({"run": tables_from(make_records())})
    assert depths.splitlines()[2].split() == ["speculative", "(strict)", "▅", "0.67", "▄", "0.50"]
    assert lengths.splitlines()[3].split() == ["LANTERN++", "λ=2", "0%", "0%", "█", "100%", "3.00"]
    assert "CLIP score" in clip and "prompt accuracy" in accuracy
    assert all(len(line) <= 100 for chart in (depths, lengths, clip, accuracy) for line in chart.splitlines())


def test_dominated_points_are_small_letters():
    records = make_records()
    scores = [row | {"clip_score": 0.2} if "speculative" in row["cell_id"] else row for row in make_scores(records)]
    tables = curve_tables(RunData(Path("run"), {}, records, scores))
    chart = next(chart for chart in terminal_curves({"run": tables}) if chart.startswith("CLIP"))
    marks = [line.split()[0] for line in chart.splitlines() if line.startswith("  ") and "0.2" in line]
    assert "b" in marks and "B" not in marks
    assert "(dominated)" in next(line for line in chart.splitlines() if line.startswith("  b"))


def test_bars_by_a_bound_begin_at_one():
    cells = [AR] + [
        Decoding.model_validate({"mode": "lantern++", "lambda": x, "neighbours": 5, "cfg_scale": 2, "cfg_default": 2})
        for x in (2, 5)
    ]
    records = [make_record(c, n, WALKS if c is not AR else [[]], 1.0) for c in cells for n in range(2)]
    chart = next(c for c in terminal_curves({"run": tables_from(records)}) if c.startswith("mean accepted length"))
    assert [line.split()[1] for line in chart.splitlines()[1:]] == ["λ=2", "λ=5"]
    assert all("2.00 │█" in line for line in chart.splitlines()[1:])


def test_plain_is_ascii():
    text = "\n".join(terminal_curves({"run": tables_from(make_records())}))
    assert plain(text).isascii()
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert not Console(stdout=latin).writes_blocks and Console(stdout=io.StringIO()).writes_blocks


def test_nothing_to_draw():
    records = [make_record(AR, n, [[]], 1.0) for n in range(2)]
    with pytest.raises(RefusedError, match="nothing to draw"):
        terminal_curves({"run": curve_tables(RunData(Path("run"), {}, records, []))})
