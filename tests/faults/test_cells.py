"""What fails in one cell or one image stays there; and a clock that jumps changes no record."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantern_bench.cli import main as cli
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import make_plan
from lantern_bench.devices.compute import Compute
from lantern_bench.models import registry
from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.families.lanterns.description import FILES, WEIGHTS_FOLDER
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.run_directory import read_manifest, read_records
from lantern_bench.storage.run_store import RunStore
from lantern_bench.sweeps.decode_missing import key_fields
from lantern_bench.utils.errors import RefusedError, UserError
from tests.faults.child import IMAGES, SMALL
from tests.faults.conftest import Bench, Outcome
from tests.faults.test_files import flip
from tests.helpers.tiny_model import PROMPTS, TinyModel

CPU = Compute(torch.device("cpu"), torch.float32)


def by_status(folder: Path) -> dict[str, list[dict[str, object]]]:
    rows = read_records(folder)
    return {status: [row for row in rows if row["status"] == status] for status in ("ok", "failed")}


def test_out_of_memory_in_one_cell(
    bench: Bench, expected: dict[str, str], outcome: Outcome
) -> None:
    """Out of memory in one cell"""
    code, output = bench.sweep("run", TINY_FULL="7")  # nodes of the dynamic tree and its root
    rows = by_status(bench.folder / "run")
    assert code == 4
    assert "error: 3 of 9 images failed" in output
    assert "Traceback" not in output
    assert {row["mode"] for row in rows["failed"]} == {"lantern"}
    assert len(rows["ok"]) == 6
    errors = {str(row["error"]) for row in rows["failed"]}
    assert len(errors) == 1
    assert "DefaultCPUAllocator" in errors.pop()
    summary = (bench.folder / "run" / "summary.csv").read_text()
    assert "lantern-dynamic" in summary
    assert bench.sweep("run")[0] == 0
    assert bench.tokens("run") == expected
    outcome(f"exit {code}: its 3 images failed, the other 6 are decoded")


def test_nan_in_one_image(bench: Bench, expected: dict[str, str], outcome: Outcome) -> None:
    """NaN in the logits of one prompt, in a sweep"""
    code, output = bench.sweep("run", TINY_NAN=PROMPTS[1])
    rows = by_status(bench.folder / "run")
    assert code == 4
    assert "Traceback" not in output
    assert {row["prompt"] for row in rows["failed"]} >= {PROMPTS[1]}
    assert all(
        str(row["error"]).startswith("LogitsError: the target gave NaN or infinite")
        for row in rows["failed"]
    )
    decoded = {str(row["record_key"]): row["tokens_sha256"] for row in rows["ok"]}
    assert decoded.items() <= expected.items()
    assert decoded
    assert bench.sweep("run")[0] == 0
    assert bench.tokens("run") == expected
    outcome(f"exit {code}: {rows['failed'][0]['error']}")


def test_clock_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str], outcome: Outcome
) -> None:
    """A wall clock that jumps between years at every reading"""
    jumps = np.random.default_rng(0)
    readings = count()

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            next(readings)
            return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(
                days=float(jumps.uniform(-9000, 9000))
            )

    monkeypatch.setattr("lantern_bench.utils.clock.datetime", Jumping)
    monkeypatch.setattr("time.time", lambda: float(jumps.uniform(0, 2e9)))
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(SMALL)
    typed = ["sweep", "tiny.yaml", "--threads", "1", "--out", "run"]
    assert cli.main([*typed, "--images", "2"]) == 0
    assert cli.main(typed) == 0
    rows = read_records(tmp_path / "run")
    assert {row["tokens_sha256"] for row in rows} == set(expected.values())
    assert len(rows) == IMAGES
    assert all(0 < row["seconds"] < 60 and row["other_seconds"] >= 0 for row in rows)
    first, second = read_manifest(tmp_path / "run")["sessions"]
    assert next(readings) > 3
    assert sorted((first["started"], first["ended"], second["started"])) != (
        [first["started"], first["ended"], second["started"]]
    )
    assert cli.main(["check-run", "run"]) == 0
    outcome("no record or duration changes; resuming works")


def test_damaged_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: Outcome
) -> None:
    """A damaged weight file: cut off, a flipped bit in its header, no tensors"""
    expected = (WEIGHTS_FOLDER / FILES["drafter"]).read_bytes()
    header = 8 + int.from_bytes(expected[:8], "little")
    path = tmp_path / "drafter.safetensors"
    output = set()
    for content in (expected[: len(expected) // 2], flip(expected, 9), expected[:header]):
        path.write_bytes(content)
        with pytest.raises(UserError) as raised:
            checkpoint = open_checkpoint(path)
            [checkpoint[name] for name in checkpoint]
        output.add(raised.value.message.replace(str(path), "FILE").split(" (")[0])
    assert output == {"FILE: is truncated or no safetensors file"}
    outcome(f"exit 2: {output.pop()}")


def test_flipped_bit_in_a_weight(tmp_path: Path, outcome: Outcome) -> None:
    """A flipped bit in a tensor of a weight file, when a run is resumed"""
    folder = tmp_path / "weights"
    folder.mkdir()
    for part in ("target", "drafter", "tokenizer"):
        shutil.copy(WEIGHTS_FOLDER / FILES[part], folder)
    (tmp_path / "one.yaml").write_text("{model: lanterns, images: 1, cells: [{mode: speculative}]}")
    experiment = load_experiment(
        tmp_path / "one.yaml", {"lanterns": {"cfg_scale": 3.0, "tree": "chain-4"}}
    )
    plan = make_plan(experiment, [Prompt("one red lantern")])

    def key() -> dict[str, Any]:
        loaded = Lanterns(folder).load(CPU.device, CPU.dtype)
        return key_fields(
            models={"lanterns": loaded}, settings=experiment.settings, compute=CPU, cells=plan.cells
        )

    with RunStore.open(tmp_path / "run", experiment, key()) as store:
        store.append(plan.tasks[0], {"tokens": 1})
    with RunStore.open(tmp_path / "run", experiment, key()):
        """Whole files are let in."""
    path = folder / FILES["drafter"]
    content = path.read_bytes()
    path.write_bytes(flip(content, len(content) // 2))
    with pytest.raises(RefusedError) as raised:
        RunStore.open(tmp_path / "run", experiment, key())
    assert "weights of lanterns/drafter changed" in raised.value.message
    outcome(f"exit 3: {raised.value.message.splitlines()[0]}")
