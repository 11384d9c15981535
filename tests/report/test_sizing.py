"""Hours of large runs from the seconds of small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import make_scale
from lantern_bench.cli.main import main
from lantern_bench.errors import RefusedError
from lantern_bench.report.cost_model import devices
from lantern_bench.report.predict import prediction_rows
from lantern_bench.report.sizing import measured_seconds, predicted_seconds, sizing_rows
from lantern_bench.report.tables import build_tables, tables_of
from lantern_bench.runs.store import read_run
from tests.made_up_run import make_records, write_run

SECONDS = {"ar": 3.0, "speculative": 1.0}


def test_hours_by_hand() -> None:
    rows = list(sizing_rows(SECONDS, "here", {"ten": 10}, (1, 4, 64)))
    # A prompt takes 4 s; four devices have 3, 3, 2 and 2 prompts; of 64 devices most have none.
    assert [row["hours"] * 3600 for row in rows] == pytest.approx([40, 12, 4])
    assert [row["device_hours"] * 3600 for row in rows] == pytest.approx([40, 48, 256])
    assert [row["images_per_hour"] for row in rows] == pytest.approx(
        [20 / (40 / 3600), 20 / (12 / 3600), 20 / (4 / 3600)]
    )
    assert {row["images"] for row in rows} == {20} and {row["s_per_image"] for row in rows} == {2.0}


def test_more_cells_take_the_mean_of_those_measured() -> None:
    (row,) = sizing_rows(SECONDS, "here", {"ten": 10}, (1,), cells=12)
    assert row["images"] == 120 and row["hours"] * 3600 == pytest.approx(240)


def test_measured_seconds_are_those_of_the_table() -> None:
    speed = build_tables(make_records())["speed"]
    assert measured_seconds(speed) == pytest.approx(dict(zip(speed["cell_id"], speed["latency_s"], strict=True)))
    with pytest.raises(RefusedError, match="no seconds"):
        measured_seconds(speed.assign(latency_s=None))


def test_predicted_seconds_are_close_to_those_of_predict(tmp_path: Path) -> None:
    run, device = read_run(write_run(tmp_path / "run", make_records(), [])), devices()["h100"]
    # Of another model: there `predict`, too, takes whole images, and these made-up ones are cut short.
    large = "llamagen-t2i-stage1"
    predicted = {row["cell_id"]: row["latency_s"] for row in prediction_rows(run, device, "compiled", large)}
    assert predicted_seconds(tables_of(run)["speed"], device, "compiled", large) == pytest.approx(predicted, rel=0.01)


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", make_records(), [])
    arguments = ["size", str(run), "--prompts", "100", "--devices", "1", "--devices", "8", "--cells", "12"]
    assert main([*arguments, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["devices"], row["images"]) for row in rows] == [(1, 1200), (8, 1200)]
    assert main([*arguments, "--device", "h100", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["where"] == "h100"
    assert main([*arguments, "--model", "lanterns"]) == 2
    assert "--model lanterns: only predictions take another model" in capsys.readouterr().err


def test_the_page_shows_the_tables_of_the_committed_run() -> None:
    page = make_scale.PAGE.read_text(encoding="utf-8")
    assert page == make_scale.render(page), "run: python -m docs.make_scale"
