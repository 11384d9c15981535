"""The recipe, part by part, with models and data so small that a step takes milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.train_lanterns import __main__ as program
from experiments.train_lanterns import recipe, tasks
from experiments.train_lanterns.__main__ import main
from experiments.train_lanterns.recipe import PARTS, REPORT, RecipeSettings, check_part, train_part
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.lanterns import FILES, model
from lantern_bench.models.lanterns.model import load_tokenizer
from lantern_bench.models.vq import VQConfig
from lantern_bench.training.loop import TrainEvent, TrainReport

CPU = torch.device("cpu")
TINY = RecipeSettings(steps=3, scenes=12, held_out=8, log_every=1, checkpoint_every=1, compiled=False)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VQConfig(codes=32, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1, 1), res_blocks=1)
    for module in (recipe, model):
        monkeypatch.setattr(module, "TOKENIZER_CONFIG", config)
    sizes = {"vocab_size": 32, "dim": 32, "layers": 2, "heads": 2, "ffn_dim": 32}
    monkeypatch.setattr(model, "TARGET_CONFIG", replace(model.TARGET_CONFIG, **sizes))
    for module in (tasks, recipe):
        monkeypatch.setattr(module, "_BATCH", 4)
    monkeypatch.setattr(tasks, "_EVALUATED", 8)
    monkeypatch.setattr(tasks, "_RETRIEVED", 8)


def run(
    root: Path,
    part: str = "tokenizer",
    settings: RecipeSettings = TINY,
    on_event: Callable[[TrainEvent], None] = lambda _event: None,
) -> TrainReport:
    return train_part(part, root / "weights", root / "work", settings, CPU, on_event)


def test_parts_are_in_the_order_of_their_needs() -> None:
    assert tuple(PARTS) == ("tokenizer", "features", "clip", "target", "drafter") == tuple(FILES)
    assert [part.minutes for part in PARTS.values()] == [20, 6, 8, 60, 55]
    for number, part in enumerate(PARTS.values()):
        assert set(part.needs) <= set(list(PARTS)[:number])


def test_trained_part_writes_weights_and_a_report(tmp_path: Path) -> None:
    events = list[TrainEvent]()
    report = run(tmp_path, on_event=events.append)
    assert report.steps == 3 and [event.step for event in events] == [1, 2, 3]
    path = tmp_path / "weights" / FILES["tokenizer"]
    assert {value.dtype for value in load_file(path).values()} == {torch.float16}
    assert load_tokenizer(tmp_path / "weights").quantize.embedding.weight.dtype == torch.float32
    (part, entry), *others = json.loads((tmp_path / "weights" / REPORT).read_text()).items()
    assert part == "tokenizer" and not others
    assert entry["steps"] == 3 and len(entry["losses"]) == 3 and entry["settings"]["lr"] == 1.5e-3
    assert set(entry["figures"]) == {"psnr_db", "codes_used"}
    assert entry["weights_sha256"] == model.part_hash(path) and entry["versions"]["torch"]
    assert str(tmp_path) not in json.dumps(entry)


def test_trained_weights_are_reproducible_by_seed(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    other = run(tmp_path / "c", settings=TINY.model_copy(update={"seed": 1}))
    assert first.losses == second.losses != other.losses
    a, b, c = ((tmp_path / name / "weights" / FILES["tokenizer"]).read_bytes() for name in "abc")
    assert a == b != c


def test_resumed_part_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")

    def interrupt(event: TrainEvent) -> None:
        if event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", on_event=interrupt)
    assert not (tmp_path / "broken" / "weights").exists()
    steps = list[int]()
    resumed = run(tmp_path / "broken", on_event=lambda event: steps.append(event.step))
    assert steps == [2, 3] and resumed.losses == whole.losses
    name = FILES["tokenizer"]
    assert (tmp_path / "broken/weights" / name).read_bytes() == (tmp_path / "whole/weights" / name).read_bytes()


def test_all_parts_train_in_order(tmp_path: Path) -> None:
    for part in PARTS:
        assert run(tmp_path, part, TINY.model_copy(update={"steps": 2})).figures, part
    entries = json.loads((tmp_path / "weights" / REPORT).read_text())
    assert list(entries) == list(PARTS)
    assert all((tmp_path / "weights" / name).is_file() for name in FILES.values())
    assert entries["drafter"]["rests_on"] == {part: entries[part]["weights_sha256"] for part in ("tokenizer", "target")}
    assert "accuracy_reconstructions" in entries["features"]["figures"]


def test_retrained_tokenizer_gets_new_tokens_and_checkpoints(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, "target")
    before = {path.name for path in (tmp_path / "work").iterdir()}
    run(tmp_path, settings=TINY.model_copy(update={"steps": 2, "resume": False}))
    assert run(tmp_path, "target").steps == 3
    more = {path.name for path in (tmp_path / "work").iterdir()} - before
    assert {name.partition("-")[0] for name in more} == {"tokens", "held", "target"}


def test_training_starts_from_weights(tmp_path: Path) -> None:
    run(tmp_path / "a")
    start = tmp_path / "a" / "weights"
    seen = list[float]()
    settings = TINY.model_copy(update={"init_from": start, "seed": 5})
    run(tmp_path / "b", settings=settings, on_event=lambda event: seen.append(event.loss))
    fresh = list[float]()
    run(
        tmp_path / "c",
        settings=settings.model_copy(update={"init_from": None}),
        on_event=lambda event: fresh.append(event.loss),
    )
    assert seen[0] != fresh[0]
    assert json.loads((tmp_path / "b/weights" / REPORT).read_text())["tokenizer"]["started_from_weights"] is True


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, "target")
    weights = tmp_path / "weights"
    (weights / FILES["tokenizer"]).write_bytes((weights / FILES["target"]).read_bytes())
    with pytest.raises(UserError, match="holds the weights of another model"):
        run(tmp_path / "new", settings=TINY.model_copy(update={"init_from": weights}))
    with pytest.raises(UserError, match=r"there is no drafter.safetensors"):
        check_part("drafter", weights, ("target",), tmp_path / "work")


@pytest.mark.parametrize(("part", "needed"), [("target", "tokenizer"), ("drafter", "tokenizer"), ("clip", "tokenizer")])
def test_missing_part_is_named_with_its_command(tmp_path: Path, part: str, needed: str) -> None:
    with pytest.raises(RefusedError, match=f"--part {part} needs the {needed}") as caught:
        run(tmp_path, part)
    assert caught.value.exit_code == 3
    assert caught.value.advice == f"First: python -m experiments.train_lanterns --part {needed}"
    assert not (tmp_path / "work").exists()
    check_part(part, tmp_path, tuple(PARTS))


def test_broken_report_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / REPORT).write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        run(tmp_path)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--part", "tokeniser"], 2, "--part tokeniser: unknown part; did you mean tokenizer?"),
        (["--part", "drafter", "--out", "OUT"], 3, "--part drafter needs the tokenizer"),
        (["--minutes", "0"], 2, "--minutes 0: must be a number above 0"),
        (["--steps", "0"], 2, "--steps 0: must be a whole number"),
        (["--images", "0", "--evaluate"], 2, "--images 0: must be a whole number"),
        (["--device", "gpu"], 2, "--device gpu: must be auto, cpu, mps, cuda or cuda:N"),
        (["--init-from", "OUT/none"], 2, "OUT/none: there is no tokenizer.safetensors"),
        (["--evaluate", "--steps", "3"], 2, "--steps does not go with --evaluate"),
        (["--evaluate", "--out", "OUT"], 3, "has no tokenizer.safetensors, features.safetensors"),
    ],
)
def test_usage_errors_are_raised_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    out = str(tmp_path / "out")
    typed = [argument.replace("OUT", out) for argument in arguments]
    assert main(["--work", str(tmp_path / "work"), *typed]) == code
    told = capsys.readouterr()
    assert said.replace("OUT", out) in told.err and "Traceback" not in told.err and not told.out
    assert list(tmp_path.iterdir()) == []


def test_command_reports_what_it_wrote_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tiny(RecipeSettings):
        scenes: int = 12
        held_out: int = 8
        compiled: bool = False

    monkeypatch.setattr(program, "RecipeSettings", Tiny)
    typed = ["--part", "tokenizer", "--steps", "2", "--no-resume"]
    typed += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for word in ("wrote", "replaced"):
        assert main(typed) == 0
        told = capsys.readouterr().err
        assert f"tokenizer: {word} {tmp_path / 'out' / FILES['tokenizer']}" in told
        assert "tokenizer: 2 steps in" in told and "training the tokenizer: 100%" in told
