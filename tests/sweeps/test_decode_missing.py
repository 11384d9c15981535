"""Decoding in one process: complete records, resumed runs, and images that fail alone.

The model is a table of logits (`tests/helpers/tiny_model.py`); the decode loop is the real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.config.experiment import ResolvedExperiment, load_experiment
from lantern_bench.config.plan import Plan, make_plan
from lantern_bench.config.settings import Overrides
from lantern_bench.decoding.engine import BeingCompiledError
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.devices.compute import Compute, choose_compute
from lantern_bench.methods.catalog import PARAMETERS
from lantern_bench.methods.parameters import SAMPLING
from lantern_bench.metrics.protocols import protocol_of
from lantern_bench.models import registry
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.run_directory import (
    disturbance,
    finished_records,
    read_manifest,
    read_records,
)
from lantern_bench.storage.schema import columns
from lantern_bench.sweeps import decoder
from lantern_bench.sweeps.decode_missing import decode_missing
from lantern_bench.sweeps.decoded_image import DecodedImage
from lantern_bench.sweeps.decoder import decode_batch
from lantern_bench.sweeps.events import ImageDone
from lantern_bench.sweeps.request import Request
from lantern_bench.utils.clock import Usage
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.progress import Note, ignore_events
from tests.helpers.tiny_model import EXPERIMENT, PROMPTS, TOKENS, TinyModel

CPU = Compute(torch.device("cpu"), torch.float32)
MODEL = TinyModel().load(*CPU)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a resolved experiment and its plan from flags."""
    monkeypatch.setattr(registry, "models", lambda: {"tiny": TinyModel()})

    def make(**flags: Any) -> tuple[ResolvedExperiment, Plan]:
        path = tmp_path / "tiny.yaml"
        path.write_text(EXPERIMENT)
        overrides = Overrides.from_flags({"threads": 1} | flags)
        resolved = load_experiment(path, {"tiny": TinyModel.defaults}, overrides)
        return resolved, make_plan(resolved, [Prompt(text) for text in PROMPTS])

    return make


def request_of(folder: Path, planned: tuple[ResolvedExperiment, Plan]) -> Request:
    experiment, plan = planned
    protocol = protocol_of("embedded")
    return Request(experiment, plan, folder, protocol=protocol, prompts={})


def run(
    folder: Path, planned: tuple[ResolvedExperiment, Plan], most: int | None = None
) -> list[Any]:
    """Run a plan, or its first `most` images; return the events."""
    events: list[Any] = []

    def emit(event: Any) -> None:
        events.append(event)
        if most is not None and sum(isinstance(event, ImageDone) for event in events) == most:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        decode_missing(request_of(folder, planned), emit)
    return [event for event in events if not isinstance(event, Note)]


def tokens_by_key(folder: Path) -> dict[str, str]:
    return {row["record_key"]: row["tokens_sha256"] for row in read_records(folder)}


def test_every_image_has_a_complete_record_and_picture(tiny_run: Path) -> None:
    rows = read_records(tiny_run)
    assert len(rows) == 18
    # These prompts are of no set, so nobody calls them anything.
    may_be_empty = PARAMETERS.keys() - {"mode", "drafting", "rule", *SAMPLING}
    may_be_empty |= {
        "error",
        "emitted_tv",  # of rules that decide on whole chains and trees
        "peak_memory_bytes",
        "prompt_metadata",
        "prompt_source",
        "driver",
        "clock_mhz",
        "clock_max_mhz",
    }
    may_be_empty |= (
        {"waited_seconds", "involuntary_switches", "steal_seconds"}
        if sys.platform != "linux"
        else set()
    )
    for row in rows:
        assert not {c.name for c in columns("records") if row[c.name] is None} - may_be_empty
        assert row["status"] == "ok"
        assert row["tokens"] == TOKENS == 1 + sum(row["committed_per_step"])
        phases = [row[f"{name}_seconds"] for name in ("draft", "target", "verify", "other")]
        assert sum(phases) == pytest.approx(row["seconds"])
        png = (tiny_run / row["image"]).read_bytes()
        assert hashlib.sha256(png).hexdigest() == row["image_sha256"]
    assert [row["order_index"] for row in rows] == list(range(18))


def test_warm_up_is_recorded_only_in_the_manifest(tiny_run: Path) -> None:
    manifest = read_manifest(tiny_run)
    (session,) = manifest["sessions"]
    # lambda 2 and lambda 5 are of one kind; greedy decoding is another kind.
    assert len(session["warm_up"]) == 5
    assert all(row["seconds"] > 0 for row in session["warm_up"])
    assert session["complete"]
    assert session["images"] == 18
    assert manifest["ended"] == session["ended"]
    assert manifest["device"] == "cpu"
    assert manifest["dtype"] == manifest["key"]["dtype"]
    assert manifest["threads"] == 1
    assert manifest["machine"]["versions"]["torch"]


def test_what_another_process_compiles_is_warmed_up_last(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan = tiny()
    batches = list(plan.batches())
    tried = list[tuple[str, bool]]()

    def decode(model: Any, batch: Any, *_: Any, **__: Any) -> list[DecodedImage]:
        cell = batch[0].cell.cell_id
        tried.append((cell, model.engine.waits))
        if cell == batches[0][0].cell.cell_id and not model.engine.waits:
            raise BeingCompiledError
        return []

    monkeypatch.setattr(decoder, "decode_batch", decode)
    session: dict[str, Any] = {"warm_up": []}
    notes = list(
        decoder.Decoder({"tiny": MODEL}, CPU, session, repeat_disturbed=False).warm_up(batches)
    )
    (first, waits), *others, last = tried
    assert not waits
    assert last == (first, True)
    assert not any(waits for _, waits in others)
    assert [row["cell_id"] for row in session["warm_up"]] == [cell for cell, _ in tried[1:]]
    assert len(notes) == len(tried) - 1 == 5


def test_tokens_hash_covers_little_endian_int32(tmp_path: Path, tiny: Any) -> None:
    experiment, plan = tiny()
    run(tmp_path / "run", (experiment, plan), most=1)
    (row,) = read_records(tmp_path / "run")
    tokens = decode_batch(MODEL, plan.tasks[:1], CPU)[0].tokens.tolist()
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert row["tokens_sha256"] == hashlib.sha256(packed).hexdigest()


@pytest.mark.parametrize("batch", [1, 2])
def test_resumed_run_makes_the_same_tokens(tmp_path: Path, tiny: Any, batch: int) -> None:
    planned = tiny(batch=batch)
    run(tmp_path / "whole", planned)
    run(tmp_path / "cut", planned, most=7)
    assert len(read_records(tmp_path / "cut")) == 7
    assert not read_manifest(tmp_path / "cut")["sessions"][0]["complete"]
    second = run(tmp_path / "cut", planned)
    assert second[0].finished == 7
    assert sum(second[0].to_do.values()) == 11
    assert tokens_by_key(tmp_path / "cut") == tokens_by_key(tmp_path / "whole")
    assert [row["process"] for row in read_records(tmp_path / "cut")] == [0] * 7 + [1] * 11
    third = run(tmp_path / "cut", planned)
    assert third[0].finished == 18
    assert len(third) == 1


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch, tiny: Any, tmp_path: Path) -> Any:
    """Run a plan of stand-ins for images: attempt n lost `lost[n]` of its second and has token
    `tokens[n]`.
    """

    def run_disturbed(
        lost: list[float], tokens: list[int], images: int, **settings: Any
    ) -> list[Any]:
        attempts = itertools.cycle(range(len(lost)))

        def decode(
            _model: object, tasks: Any, _compute: Compute, **_: object
        ) -> list[DecodedImage]:
            number = next(attempts)
            used = Usage(
                cpu_seconds=1.0,
                waited_seconds=lost[number],
                involuntary_switches=0,
                steal_seconds=0.0,
                busy_seconds=1.0,
            )
            trace = ImageTrace(
                start=[],
                committed=[],
                uncut=[],
                accepted=[],
                offered_depth=[],
                child_rank=[],
                target_forwards=1,
                drafter_forwards=0,
                tokens=1,
                seconds=1.0 + number,
                usage=used,
            )
            pixels = torch.zeros(3, 4, 3, dtype=torch.uint8)
            return [
                DecodedImage(
                    prompt="", tokens=torch.tensor([tokens[number]]), trace=trace, pixels=pixels
                )
                for _ in tasks
            ]

        monkeypatch.setattr(decoder, "_MAX_ATTEMPTS", 3)
        monkeypatch.setattr(decoder, "decode_batch", decode)
        monkeypatch.setattr(decoder.Decoder, "warm_up", lambda *_: [])
        experiment, plan = tiny(**{"metrics": "speed"} | settings)
        part = replace(plan, tasks=plan.tasks[:images])
        decode_missing(request_of(tmp_path / "run", (experiment, part)), ignore_events)
        return read_records(tmp_path / "run")

    return run_disturbed


@pytest.mark.parametrize(
    ("lost", "attempts", "seconds", "marked"),
    [
        ([0.01, 0.0, 0.0], 1, 1.0, False),  # undisturbed: one attempt
        ([0.5, 0.01, 0.0], 2, 2.0, False),  # the second is not disturbed and counts
        # shares 0.9, 0.6 and 0.8: the second is the least disturbed
        ([0.9, 1.2, 2.4], 3, 2.0, True),
    ],
)
def test_a_disturbed_image_is_decoded_again(
    monkeypatch: Any,
    disturbed: Any,
    *,
    lost: list[float],
    attempts: int,
    seconds: float,
    marked: bool,
) -> None:
    monkeypatch.setattr(decoder, "_MAX_REPEAT_SHARE", 100.0)
    (row,) = disturbed(lost, [7, 7, 7], 1)
    assert (row["attempts"], row["seconds"], row["disturbed"]) == (attempts, seconds, marked)


def test_other_tokens_at_a_second_attempt_are_an_error(disturbed: Any) -> None:
    (row,) = disturbed([0.5, 0.0], [7, 8], 1)
    assert row["status"] == "failed"
    assert "gave other tokens" in row["error"]


@pytest.mark.parametrize(
    ("settings", "again"),
    [({}, True), ({"metrics": "distance"}, False), ({"redecode_disturbed": False}, False)],
)
def test_a_busy_machine_adds_a_bounded_time(
    disturbed: Any, tmp_path: Path, settings: dict[str, Any], *, again: bool
) -> None:
    rows = disturbed([0.5], [7], 18, **settings)
    more = sum(row["attempts"] for row in rows) - len(rows)
    assert all(row["disturbed"] for row in rows)
    assert 1 <= more <= 0.25 * len(rows) + 1 if again else more == 0
    message = disturbance(finished_records(tmp_path / "run"))
    assert message is not None
    assert message.startswith("speed cannot be measured now: 18 of 18 images")


def test_threads_stay_as_the_finished_images_had_them(tiny: Any, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run(tmp_path / "run", tiny(threads=before + 1), most=2)
    assert torch.get_num_threads() == before
    with pytest.raises(
        RefusedError, match=rf"threads changed\n  recorded  {before + 1}\n"
    ) as refused:
        run(tmp_path / "run", tiny(threads=before))
    assert f"--threads {before + 1}" in str(refused.value.advice)

    decoded_on = list[int]()
    notes = list[str]()

    def emit(event: Any) -> None:
        if isinstance(event, ImageDone):
            decoded_on.append(torch.get_num_threads())
        if isinstance(event, Note):
            notes.append(event.text)

    decode_missing(request_of(tmp_path / "run", tiny(threads=None)), emit)
    assert decoded_on == [before + 1] * 16
    assert not any(note.startswith("threads") for note in notes)


def test_narrow_neighbour_table_is_a_prefix_of_a_wider_one() -> None:
    model = TinyModel().load(*CPU)
    narrow = model.table(2).clone()
    wide = model.table(9)
    assert torch.equal(wide[:, :2], narrow)
    assert torch.equal(model.table(2), narrow)
    with pytest.raises(UserError, match="16 codes"):
        model.table(16)


def test_auto_device_and_dtype() -> None:
    compute = choose_compute("cpu")
    assert choose_compute("cpu", fast=True).dtype_name in ("float32", "bfloat16")
    assert compute.dtype_name == "float32"
    assert choose_compute("cpu", "bfloat16").dtype is torch.bfloat16
