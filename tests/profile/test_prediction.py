"""Predictions of a run: from its recorded steps, with sizes of its model or another one."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from lantern_bench.analysis.tables import tables_of
from lantern_bench.cli import main as cli
from lantern_bench.config.decoding import Decoding
from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Workload,
    devices,
    named_draft,
    step_seconds,
)
from lantern_bench.profile.prediction import (
    measured_elsewhere,
    measured_times,
    predict_run,
    with_hours,
)
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData, load_runs
from lantern_bench.storage.schema import columns
from lantern_bench.utils.errors import RefusedError
from scripts.docs import sizing as make_scale
from tests.helpers.made_up_run import frame_of, make_record, make_records, make_scores, write_run

A100 = devices()["a100"]


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    records = make_records()
    (data,) = load_runs([write_run(tmp_path / "run", records, make_scores(records))]).values()
    return data


def test_table_has_the_columns_of_the_schema_and_the_measured_speedup(run: RunData):
    table = predict_run(run, A100, "compiled")
    assert list(table.columns) == [column.name for column in columns("prediction")]
    assert table["mode"].tolist() == ["ar", "speculative", "lantern++"]
    assert table["speedup"][0] == pytest.approx(1.0)
    assert table["speedup_measured"].tolist() == pytest.approx([1.0, 2.0930, 3.25], abs=1e-3)
    assert table["speedup_error"].isna().all()  # the run was made elsewhere
    parts = table[["draft_ms", "target_ms", "verify_ms", "other_ms"]].sum(axis=1)
    assert parts.tolist() == pytest.approx(table["step_ms"].tolist())


@pytest.mark.parametrize(
    "about, compiled", [("Some CPU, 1 threads", True), ("Some CPU, 2 threads", True), ("", False)]
)
def test_error_is_only_of_a_run_with_the_same_device_and_code(
    run: RunData, about: str, *, compiled: bool
):
    facts = {
        "device": "cpu",
        "machine": {"cpu": {"model": "Some CPU"}},
        "threads": 1,
        "compile": compiled,
    }
    there = dataclasses.replace(run, manifest=run.manifest | facts)
    device = A100.model_copy(update={"name": "mine", "about": about or "Some CPU, 1 threads"})
    same = about == "Some CPU, 1 threads"
    assert predict_run(there, device, "compiled")["speedup_error"].notna().all() == same
    warning = measured_elsewhere(there, device, "compiled")
    assert (warning is None) is same
    other = measured_elsewhere(
        run=there, device=device, stack="compiled", model="llamagen-t2i-stage1"
    )
    assert other is not None
    assert "measured on lanterns on Some CPU" in other
    eager = device.model_copy(update={"code": "eager", "about": "Some CPU, 1 threads"})
    assert (measured_elsewhere(there, eager, "compiled") is None) is not compiled
    assert same or f"Some CPU, 1 threads, {'compiled' if compiled else 'eager'}; predicted" in str(
        warning
    )


def test_speedup_is_accepted_length_over_relative_cost_of_a_step(run: RunData):
    # STRICT has the walks [0, 1], [0, -1], [-1]: 2 tokens a step from the positions 1, 4 and 6 of 7
    # tokens.
    row = rows_of(predict_run(run, A100, "eager"))[1]
    sizes = model_of("lanterns").sizes
    at = Workload(sizes=sizes, batch=1, guided=True, context=sizes.prefix + 11 / 3)
    step = step_seconds(
        device=A100,
        stack=KERNEL_COUNTS["eager"],
        setting=at,
        draft=named_draft("small-7"),
        committed=2.0,
    )
    assert row["mean_accepted_length"] == 2.0
    assert row["nodes"] == 8
    assert row["drafter_forwards_per_step"] == 4
    assert row["step_ms"] == pytest.approx(1e3 * step["total"].sum())
    steps = 3 * row["step_ms"]
    before = 1e3 * row["latency_s"] - steps
    after = 6 * row["ar_ms"]
    assert row["speedup"] == pytest.approx((before + after) / (before + steps))


def test_other_model_keeps_the_acceptance_and_says_so(run: RunData):
    own, other = (
        rows_of(predict_run(run=run, device=A100, stack="compiled", model=model))
        for model in (None, "llamagen-t2i-stage1")
    )
    for ours, theirs in zip(own, other, strict=True):
        assert ours["mean_accepted_length"] == theirs["mean_accepted_length"]
        assert theirs["step_ms"] > 2 * ours["step_ms"]
        assert theirs["model"] == "llamagen-t2i-stage1"
        assert "at the acceptance of lanterns" in theirs["note"]
        assert ours["note"] is None


def test_unknown_drafting_is_taken_for_a_chain(run: RunData):
    drafts = run.records["drafting"] != "none"
    records = run.records.assign(
        drafting=run.records["drafting"].mask(drafts, "echo"),
        tree=run.records["tree"].mask(drafts, "echo-3"),
    )
    rows = rows_of(predict_run(dataclasses.replace(run, records=records), A100, "compiled"))
    assert "a chain of 2 is assumed" in rows[1]["note"]
    assert rows[1]["nodes"] == 3


def test_a_step_without_drafts_is_costed_with_the_tokens_it_draws(run: RunData):
    cell = Decoding(mode="zipar", cfg_scale=2, cfg_default=2)
    record = make_record(cell=cell, prompt=0, walks=[[], [], []], seconds=1.0)
    record |= {"committed_per_step": [1, 3, 2], "start_per_step": [1, 2, 5], "tokens": 7}
    records = frame_of([record])
    (row,) = rows_of(predict_run(dataclasses.replace(run, records=records), A100, "compiled"))
    assert row["nodes"] == 4
    assert row["mean_accepted_length"] == 2
    assert "a step of zipar is costed as a verified chain of 3" in row["note"]


def test_own_tree_is_read_from_the_experiment(run: RunData):
    cell = Decoding(mode="speculative", tree=((0,), (1,), (0, 0)), cfg_scale=2, cfg_default=2)
    records = [make_record(cell=cell, prompt=0, walks=[[0, 0], [0, -1]], seconds=1.0)]
    manifest = run.manifest | {"experiment": {"cells": [cell.settings()]}}
    own = dataclasses.replace(run, records=frame_of(records), manifest=manifest)
    (row,) = rows_of(predict_run(own, A100, "compiled"))
    assert row["nodes"] == 4
    assert row["drafter_forwards_per_step"] == 2
    assert row["note"] is None


def test_run_without_steps_and_model_without_sizes_are_refused(
    run: RunData, monkeypatch: pytest.MonkeyPatch
):
    bare = run.records.assign(committed_per_step=None)
    with pytest.raises(RefusedError, match="no image has recorded steps"):
        predict_run(dataclasses.replace(run, records=bare), A100, "compiled")
    unknown = SimpleNamespace(sizes=None)
    monkeypatch.setattr("lantern_bench.profile.prediction.model_of", lambda _name: unknown)
    with pytest.raises(RefusedError, match="the sizes of lanterns are not known"):
        predict_run(run, A100, "compiled")


def test_hours_by_hand(run: RunData):
    table = measured_times(run)
    assert table["latency_s"].tolist() == pytest.approx(
        tables_of(run)["speed"]["latency_s"].tolist()
    )
    assert table["speedup"].isna().all()
    assert table["speedup_measured"].notna().all()
    # Four devices have 3, 3, 2 and 2 prompts; of 64 devices most have none.
    for count, longest in ((1, 10), (4, 3), (64, 1)):
        planned = with_hours(table, 10, count)
        assert (planned["hours"] * 3600 / longest).tolist() == pytest.approx(
            table["latency_s"].tolist()
        )
        assert planned["device_hours"].tolist() == pytest.approx(
            (count * planned["hours"]).tolist()
        )
    with pytest.raises(RefusedError, match="no seconds"):
        measured_times(dataclasses.replace(run, records=run.records.assign(seconds=float("nan"))))


def test_the_command_plans_a_larger_run(run: RunData, capsys: pytest.CaptureFixture[str]):
    typed = ["predict", str(run.folder), "--prompts", "100", "--devices", "8", "--format", "csv"]
    totals = []
    for device in ([], ["--device", "h100"]):
        assert cli.main([*typed, *device]) == 0
        written = capsys.readouterr()
        hours = pd.read_csv(io.StringIO(written.out))["hours"]
        totals.append(hours.sum())
        assert (
            f"100 prompts in all 3 cells, 300 images: {hours.sum():.3g} hours on 8 devices"
            in written.err
        )
    assert totals[0] != totals[1]


def test_command_prints_the_table_and_its_terms(run: RunData, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["predict", str(run.folder), "--device", "h100", "--format", "csv"]) == 0
    written = capsys.readouterr()
    table = pd.read_csv(io.StringIO(written.out))
    assert table["device"].tolist() == ["h100"] * 3
    assert "The run was measured on " in written.err
    for term in (
        "not measured",
        "3350 GB/s x 0.88",
        "989.4 Tflop/s x 0.6",
        "us a kernel (compiled)",
        "data sheet",
    ):
        assert term in written.err


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        ([], "--device is missing"),
        (
            ["--prompts", "9", "--model", "lanterns"],
            "--model lanterns: only predictions take another model",
        ),
        (["--device", "a100", "--stack", "fast"], "--stack fast: unknown"),
        (["--device", "none.yaml"], "none.yaml: cannot be read"),
        (["--device", "a100", "--model", "llamagen-t2i-stage3"], "did you mean"),
    ],
)
def test_usage_errors(
    run: RunData, typed: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["predict", str(run.folder), *typed]) == 2
    assert wrong in capsys.readouterr().err


def test_the_page_on_scale_shows_the_tables_of_the_committed_run():
    page = make_scale.PAGE.read_text(encoding="utf-8")
    assert page == make_scale.render(page), "run: python -m scripts.docs.sizing"
