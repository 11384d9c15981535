"""The runner: complete records, resumed runs, and images that fail alone.

The model is a table of logits (`tests/tiny_model.py`); the decode loop is the real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.clock import Usage
from lantern_bench.config.experiment import ResolvedExperiment, load_experiment
from lantern_bench.config.parse_experiment import Overrides
from lantern_bench.config.plan import Plan, Prompt, make_plan
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.methods.tables import PARAMETERS
from lantern_bench.runs import runner
from lantern_bench.runs.devices import Compute, choose_compute, key_fields
from lantern_bench.runs.events import ImageDone, Note, Started
from lantern_bench.runs.images import DecodedImage
from lantern_bench.runs.runner import calibrate_threads, decode_batch, run_plan
from lantern_bench.runs.store import RunStore, check_folder, read_manifest, read_records, seconds_per_image
from lantern_bench.runs.sweep import disturbance
from lantern_bench.schema import columns
from tests.tiny_model import EXPERIMENT, PROMPTS, TOKENS, TinyModel

CPU = Compute(torch.device("cpu"), torch.float32)
MODEL = TinyModel().load(*CPU)


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """Make a resolved experiment and its plan from flags."""

    def make(prompts: tuple[str, ...] = PROMPTS, **flags: Any) -> tuple[ResolvedExperiment, Plan]:
        path = tmp_path / "tiny.yaml"
        path.write_text(EXPERIMENT)
        resolved = load_experiment(path, {"tiny": TinyModel.defaults}, Overrides.from_flags(flags))
        return resolved, make_plan(resolved, [Prompt(text) for text in prompts])

    return make


def run(folder: Path, planned: tuple[ResolvedExperiment, Plan], most: int | None = None) -> list[Any]:
    """Run a plan, or its first `most` images; return the events."""
    experiment, plan = planned
    events: list[Any] = []

    def emit(event: Any) -> None:
        events.append(event)
        if most is not None and sum(isinstance(event, ImageDone) for event in events) == most:
            raise KeyboardInterrupt

    with (
        RunStore(folder, experiment, key_fields({"tiny": MODEL}, experiment.settings, CPU)) as store,
        contextlib.suppress(KeyboardInterrupt),
    ):
        run_plan(store, plan, {"tiny": MODEL}, CPU, emit)
    return events


def ignore(_event: object) -> None:
    """Nothing is asked of these events."""


def tokens_by_key(folder: Path) -> dict[str, str]:
    return {row["record_key"]: row["tokens_sha256"] for row in read_records(folder)}


def test_every_image_has_a_complete_record_and_picture(tmp_path: Path, tiny: Any) -> None:
    planned = tiny()
    run(tmp_path / "run", planned)
    rows = read_records(tmp_path / "run")
    assert len(rows) == len(planned[1].tasks) == 18
    # These prompts are of no set, so nobody calls them anything.
    may_be_empty = PARAMETERS.keys() - {"mode", "drafting", "rule", *SAMPLING}
    may_be_empty |= {"error", "peak_memory_bytes", "prompt_source", "driver", "clock_mhz", "clock_max_mhz"}
    may_be_empty |= {"waited_seconds", "involuntary_switches", "steal_seconds"} if sys.platform != "linux" else set()
    for row in rows:
        assert not {c.name for c in columns("records") if row[c.name] is None} - may_be_empty
        assert row["status"] == "ok" and row["tokens"] == TOKENS == 1 + sum(row["committed_per_step"])
        phases = [row[f"{name}_seconds"] for name in ("draft", "target", "verify", "other")]
        assert sum(phases) == pytest.approx(row["seconds"])
        png = (tmp_path / "run" / row["image"]).read_bytes()
        assert hashlib.sha256(png).hexdigest() == row["image_sha256"]
    assert [row["order_index"] for row in rows] == list(range(18))


def test_tokens_hash_covers_little_endian_int32(tmp_path: Path, tiny: Any) -> None:
    experiment, plan = tiny()
    run(tmp_path / "run", (experiment, plan), most=1)
    (row,) = read_records(tmp_path / "run")
    tokens = decode_batch(MODEL, plan.tasks[:1], CPU)[0].tokens.tolist()
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert row["tokens_sha256"] == hashlib.sha256(packed).hexdigest()


def test_run_plan_emits_events_in_order(tmp_path: Path, tiny: Any) -> None:
    events = run(tmp_path / "run", tiny())
    assert isinstance(events[0], Started)
    assert events[0].finished == 0 and set(events[0].to_do.values()) == {3} and len(events[0].to_do) == 6
    assert [type(event) for event in events[1:]] == [Note] * 5 + [ImageDone] * 18
    assert not any(event.failed for event in events[6:])


def test_warm_up_is_recorded_only_in_the_manifest(tmp_path: Path, tiny: Any) -> None:
    run(tmp_path / "run", tiny())
    manifest = read_manifest(tmp_path / "run")
    (session,) = manifest["sessions"]
    # lambda 2 and lambda 5 are of one kind; greedy decoding is a kind of its own.
    assert len(session["warm_up"]) == 5 and all(row["seconds"] > 0 for row in session["warm_up"])
    assert session["complete"] and session["images"] == 18 and manifest["ended"] == session["ended"]
    assert manifest["device"] == "cpu" and manifest["dtype"] == "float32" and manifest["threads"] >= 1
    assert manifest["machine"]["versions"]["torch"]
    assert len(read_records(tmp_path / "run")) == 18


@pytest.mark.parametrize("batch", [1, 2])
def test_resumed_run_makes_the_same_tokens(tmp_path: Path, tiny: Any, batch: int) -> None:
    planned = tiny(batch=batch)
    run(tmp_path / "whole", planned)
    run(tmp_path / "cut", planned, most=7)
    assert len(read_records(tmp_path / "cut")) == 7
    assert not read_manifest(tmp_path / "cut")["sessions"][0]["complete"]
    second = run(tmp_path / "cut", planned)
    assert second[0].finished == 7 and sum(second[0].to_do.values()) == 11
    assert tokens_by_key(tmp_path / "cut") == tokens_by_key(tmp_path / "whole")
    assert [row["process"] for row in read_records(tmp_path / "cut")] == [0] * 7 + [1] * 11
    third = run(tmp_path / "cut", planned)
    assert third[0].finished == 18 and len(third) == 1


def test_one_image_that_fails_does_not_stop_the_others(tmp_path: Path, tiny: Any) -> None:
    planned = tiny(("one red lantern", "broken", "two blue lanterns"))
    events = run(tmp_path / "run", planned)
    failed = [event for event in events if isinstance(event, ImageDone) and event.failed]
    assert len(failed) == 6 and {event.task.prompt.text for event in failed} == {"broken"}
    rows = [row for row in read_records(tmp_path / "run") if row["status"] != "ok"]
    assert {row["error"] for row in rows} == {"RuntimeError: no memory left"}
    assert all(row["tokens_sha256"] is None and row["image"] is None for row in rows)
    again = run(tmp_path / "run", planned)
    assert again[0].finished == 12 and sum(again[0].to_do.values()) == 6


def decoded_images(lost: list[float], tokens: list[int]) -> Any:
    """A stand-in for `decode_batch`: attempt n of an image lost `lost[n]` of its second and has token `tokens[n]`."""
    calls: list[int] = []

    def make(_model: object, tasks: Any, _compute: Compute, **_: object) -> list[DecodedImage]:
        number = len(calls) % len(lost)
        calls.append(number)
        used = Usage(1.0, lost[number], 0, 0.0, 1.0)
        trace = ImageTrace([], [], [], [], [], [], 1, 0, 1, seconds=1.0 + number, usage=used)
        pixels = torch.zeros(3, 4, 3, dtype=torch.uint8)
        return [DecodedImage("", torch.tensor([tokens[number]]), trace, pixels) for _ in tasks]

    return make


@pytest.mark.parametrize(
    ("lost", "attempts", "seconds", "disturbed"),
    [
        ([0.01, 0.0, 0.0], 1, 1.0, False),  # undisturbed: one attempt
        ([0.5, 0.01, 0.0], 2, 2.0, False),  # the second is not disturbed and counts
        ([0.9, 1.2, 2.4], 3, 2.0, True),  # shares 0.9, 0.6 and 0.8: the second is the least disturbed
    ],
)
def test_a_disturbed_image_is_decoded_again(
    monkeypatch: Any, tiny: Any, tmp_path: Path, lost: list[float], attempts: int, seconds: float, disturbed: bool
) -> None:
    experiment, plan = tiny(images=1)
    monkeypatch.setattr(runner, "decode_batch", decoded_images(lost, [7, 7, 7]))
    monkeypatch.setattr(runner, "_MAX_REPEAT_SHARE", 100.0)
    first_image = replace(plan, tasks=plan.tasks[:1])
    with RunStore(tmp_path / "run", experiment, key_fields({"tiny": MODEL}, experiment.settings, CPU)) as store:
        monkeypatch.setattr(runner.Decoder, "warm_up", lambda *_: [])
        run_plan(store, first_image, {"tiny": MODEL}, CPU, ignore, again=True)
    (row,) = read_records(tmp_path / "run")
    assert (row["attempts"], row["seconds"], row["disturbed"]) == (attempts, seconds, disturbed)


def test_other_tokens_at_a_second_attempt_are_an_error(monkeypatch: Any, tiny: Any, tmp_path: Path) -> None:
    experiment, plan = tiny(images=1)
    monkeypatch.setattr(runner, "decode_batch", decoded_images([0.5, 0.0], [7, 8]))
    monkeypatch.setattr(runner.Decoder, "warm_up", lambda *_: [])
    first_image = replace(plan, tasks=plan.tasks[:1])
    with RunStore(tmp_path / "run", experiment, key_fields({"tiny": MODEL}, experiment.settings, CPU)) as store:
        run_plan(store, first_image, {"tiny": MODEL}, CPU, ignore, again=True)
    (row,) = read_records(tmp_path / "run")
    assert row["status"] == "failed" and "gave other tokens" in row["error"]


@pytest.mark.parametrize("again", [True, False])
def test_a_busy_machine_adds_a_bounded_time(monkeypatch: Any, tiny: Any, tmp_path: Path, again: bool) -> None:
    experiment, plan = tiny()
    monkeypatch.setattr(runner, "decode_batch", decoded_images([0.5], [7]))
    monkeypatch.setattr(runner.Decoder, "warm_up", lambda *_: [])
    with RunStore(tmp_path / "run", experiment, key_fields({"tiny": MODEL}, experiment.settings, CPU)) as store:
        run_plan(store, plan, {"tiny": MODEL}, CPU, ignore, again=again)
    rows = read_records(tmp_path / "run")
    more = sum(row["attempts"] for row in rows) - len(rows)
    assert all(row["disturbed"] for row in rows)
    assert 1 <= more <= 0.25 * len(rows) + 1 if again else more == 0
    message = disturbance(tmp_path / "run")
    assert message is not None and message.startswith("speed cannot be measured now: 18 of 18 images")


def test_threads_stay_as_the_finished_images_had_them(tiny: Any, tmp_path: Path) -> None:
    experiment, plan = tiny()
    run(tmp_path / "run", (experiment, plan), most=2)
    before, events = torch.get_num_threads(), list[Any]()
    try:
        with RunStore(tmp_path / "run", experiment, key_fields({"tiny": MODEL}, experiment.settings, CPU)) as store:
            store.update_manifest(threads=before + 1)
            calibrate_threads(store, plan, {"tiny": MODEL}, None, events.append)
            assert torch.get_num_threads() == before + 1 and not events
        other, _plan = tiny(threads=before)
        with pytest.raises(RefusedError, match=rf"threads changed\n  recorded  {before + 1}\n") as refused:
            RunStore(tmp_path / "run", other, key_fields({"tiny": MODEL}, other.settings, CPU))
        assert f"--threads {before + 1}" in str(refused.value.advice)
    finally:
        torch.set_num_threads(before)


def test_narrow_neighbour_table_is_a_prefix_of_a_wider_one() -> None:
    model = TinyModel().load(*CPU)
    narrow = model.table(2).clone()
    wide = model.table(9)
    assert torch.equal(wide[:, :2], narrow) and torch.equal(model.table(2), narrow)
    with pytest.raises(UserError, match="16 codes"):
        model.table(16)


def test_auto_device_and_dtype() -> None:
    compute = choose_compute("cpu")
    assert choose_compute("cpu", fast=True).dtype_name in ("float32", "bfloat16")
    assert compute.dtype_name == "float32" and choose_compute("cpu", "bfloat16").dtype is torch.bfloat16
    with pytest.raises(RefusedError, match="--device cuda:97"):
        choose_compute("cuda:97")


def test_preflight_refuses_another_experiment(tmp_path: Path, tiny: Any) -> None:
    experiment, plan = tiny()
    run(tmp_path / "run", (experiment, plan), most=4)
    check_folder(tmp_path / "run", experiment)
    assert 1 <= len(seconds_per_image(tmp_path / "run")) <= 4
    with pytest.raises(RefusedError, match="seed changed"):
        check_folder(tmp_path / "run", tiny(seed=5)[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"contains thesis\.tex"):
        check_folder(tmp_path / "mine", experiment)
    with RunStore(tmp_path / "run", experiment, key_fields({"tiny": MODEL}, experiment.settings, CPU)):
        pass
    check_folder(tmp_path / "run", experiment)
