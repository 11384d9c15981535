"""The recipe part by part, and its quality gates, with models and data so small that a step takes
milliseconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lantern_bench.decoding.sampling import guide
from lantern_bench.models.families.lanterns import modules
from lantern_bench.models.families.lanterns.description import FILES, GUIDANCE, HELD_OUT
from lantern_bench.models.networks.vq import VQConfig
from lantern_bench.training.train_drafter import Observations
from lantern_bench.training.trainer import TrainEvent
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import file_sha256
from scripts.train_lanterns import __main__ as program
from scripts.train_lanterns import part_tasks, parts, quality_gates
from scripts.train_lanterns.__main__ import main
from scripts.train_lanterns.part_tasks import Sequences, TargetTask, held_out_scenes, tokenize
from scripts.train_lanterns.parts import (
    PARTS,
    REPORT,
    PartReport,
    RecipeSettings,
    check_part,
    drafter_task,
    train_part,
)
from scripts.train_lanterns.quality_gates import Evaluation, QualityGate

CPU = torch.device("cpu")
TINY = RecipeSettings(
    steps=3, scenes=12, held_out=8, log_every=1, checkpoint_every=1, compiled=False
)


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        config = VQConfig(
            codes=32, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1, 1), res_blocks=1
        )
        for module in (parts, modules):
            patch.setattr(module, "TOKENIZER_CONFIG", config)
        sizes = {"vocab_size": 32, "dim": 32, "layers": 2, "heads": 2, "ffn_dim": 32}
        patch.setattr(modules, "TARGET_CONFIG", replace(modules.TARGET_CONFIG, **sizes))
        for module in (part_tasks, parts):
            patch.setattr(module, "_BATCH", 4)
        for name in (
            "part_tasks._EVALUATED",
            "part_tasks._RETRIEVED",
            "quality_gates._SCENES",
            "quality_gates._RETRIEVAL",
        ):
            patch.setattr(f"scripts.train_lanterns.{name}", 8)
        patch.setattr(quality_gates, "_TEACHER_FORCED", 6)
        patch.setattr(quality_gates, "_AT_ONCE", 4)
        yield


def run(
    root: Path,
    part: str = "tokenizer",
    settings: RecipeSettings = TINY,
    on_event: Callable[[TrainEvent], None] = lambda _event: None,
) -> PartReport:
    return train_part(
        part=part,
        folder=root / "weights",
        work=root / "work",
        settings=settings,
        device=CPU,
        on_event=on_event,
    )


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and work of a family whose parts were trained in order.

    Tests that change it copy it.
    """
    root = tmp_path_factory.mktemp("family")
    for part in PARTS:
        assert run(root, part).figures, part
    return root


@pytest.fixture(scope="module")
def evaluation(family: Path) -> Evaluation:
    return Evaluation(family / "weights", None, CPU, images=3, batch=2)


@pytest.fixture(scope="module")
def sequences(evaluation: Evaluation) -> Sequences:
    pixels, attributes = held_out_scenes(6, quality_gates._ACCEPTANCE_SEED)
    tokens = tokenize(evaluation.tokenizer, pixels.permute(0, 2, 3, 1))
    return Sequences(tokens, torch.tensor([item.indices() for item in attributes]))


@pytest.fixture(scope="module")
def drafting(evaluation: Evaluation) -> dict[str, QualityGate]:
    return {gate.name: gate for gate in evaluation.measure(["drafter"])}


def test_parts_train_in_the_order_of_their_needs(family: Path) -> None:
    assert tuple(PARTS) == ("tokenizer", "features", "clip", "target", "drafter") == tuple(FILES)
    for number, part in enumerate(PARTS.values()):
        assert set(part.needs) <= set(list(PARTS)[:number])
    entries = json.loads((family / "weights" / REPORT).read_text())
    assert list(entries) == list(PARTS)
    assert entries["drafter"]["rests_on"] == {
        part: entries[part]["weights_sha256"] for part in ("tokenizer", "target")
    }
    assert "accuracy_reconstructions" in entries["features"]["figures"]
    path = family / "weights" / FILES["tokenizer"]
    entry = entries["tokenizer"]
    assert {value.dtype for value in load_file(path).values()} == {torch.float16}
    assert entry["steps"] == 3
    assert len(entry["losses"]) == 3
    assert entry["settings"]["lr"] == 1.5e-3
    assert set(entry["figures"]) == {"psnr_db", "codes_used"}
    assert entry["weights_sha256"] == file_sha256(path)
    assert entry["versions"]["torch"]
    assert str(family) not in json.dumps(entry)


def test_resumed_part_equals_an_uninterrupted_one(family: Path, tmp_path: Path) -> None:
    """The same seed gives the same weights, with and without an interruption; another seed gives
    others.
    """

    def interrupt(event: TrainEvent) -> None:
        if event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_event=interrupt)
    assert not (tmp_path / "weights").exists()
    steps = list[int]()
    resumed = run(tmp_path, on_event=lambda event: steps.append(event.step))
    assert steps == [2, 3]
    name = FILES["tokenizer"]
    assert (tmp_path / "weights" / name).read_bytes() == (family / "weights" / name).read_bytes()
    assert (
        run(tmp_path / "other", settings=TINY.model_copy(update={"seed": 1})).losses
        != resumed.losses
    )


def test_retrained_tokenizer_gets_new_tokens_and_checkpoints(family: Path, tmp_path: Path) -> None:
    root = shutil.copytree(family, tmp_path / "family")
    before = {path.name for path in (root / "work").iterdir()}
    run(root, settings=TINY.model_copy(update={"steps": 2, "resume": False}))
    assert run(root, "target").steps == 3
    new = {path.name for path in (root / "work").iterdir()} - before
    assert {name.partition("-")[0] for name in new} == {"tokens", "held", "target"}


def test_training_starts_from_weights(family: Path, tmp_path: Path) -> None:
    weights = family / "weights"
    losses = list[float]()
    for init_from in (weights, None):
        settings = TINY.model_copy(update={"init_from": init_from, "seed": 5, "steps": 1})
        run(
            tmp_path / str(init_from is None),
            settings=settings,
            on_event=lambda event: losses.append(event.loss),
        )
    assert losses[0] != losses[1]
    report = json.loads((tmp_path / "False/weights" / REPORT).read_text())
    assert report["tokenizer"]["started_from_weights"] is True
    other = tmp_path / "other"
    other.mkdir()
    (other / FILES["tokenizer"]).write_bytes((weights / FILES["target"]).read_bytes())
    with pytest.raises(UserError, match="holds the weights of another model"):
        run(tmp_path / "new", settings=TINY.model_copy(update={"init_from": other}))
    with pytest.raises(UserError, match=r"there is no drafter.safetensors"):
        check_part(part="drafter", folder=weights, among=("target",), init_from=other)


def test_broken_report_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / REPORT).write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        run(tmp_path)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--part", "tokeniser"], 2, "--part tokeniser: unknown part; did you mean tokenizer?"),
        (["--part", "clip", "--out", "OUT"], 3, "--part clip needs the tokenizer"),
        (["--part", "target", "--out", "OUT"], 3, "--part target needs the tokenizer"),
        (
            ["--part", "drafter", "--out", "OUT"],
            3,
            "First: python -m scripts.train_lanterns --part tokenizer",
        ),
        (["--minutes", "0"], 2, "--minutes 0.0: must be greater than 0"),
        (["--steps", "0"], 2, "--steps 0: must be greater than 0"),
        (["--images", "0", "--evaluate"], 2, "--images 0: must be greater than 0"),
        (["--device", "gpu"], 2, "--device gpu: must be auto, cpu, mps, cuda or cuda:N"),
        (["--init-from", "OUT/none"], 2, "OUT/none: there is no tokenizer.safetensors"),
        (["--evaluate", "--steps", "3"], 2, "--steps does not go with --evaluate"),
        (["--evaluate", "--out", "OUT"], 3, "has no tokenizer.safetensors, features.safetensors"),
        (
            ["--evaluate", "--part", "clip", "--out", "OUT"],
            3,
            "First: python -m scripts.train_lanterns --part clip",
        ),
    ],
)
def test_usage_errors_are_raised_before_anything_is_made(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    out = str(tmp_path / "out")
    arguments = [argument.replace("OUT", out) for argument in arguments]
    assert main(["--work", str(tmp_path / "work"), *arguments]) == code
    printed = capsys.readouterr()
    assert message.replace("OUT", out) in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
    assert list(tmp_path.iterdir()) == []


def test_command_reports_what_it_wrote_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tiny(RecipeSettings):
        scenes: int = 12
        held_out: int = 8
        compiled: bool = False

    monkeypatch.setattr(program, "RecipeSettings", Tiny)
    command = ["--part", "tokenizer", "--steps", "1", "--no-resume"]
    command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for word in ("wrote", "replaced"):
        assert main(command) == 0
        printed = capsys.readouterr().err
        assert f"tokenizer: {word} {tmp_path / 'out' / FILES['tokenizer']}" in printed
        assert "tokenizer: 1 steps in" in printed
        assert "training the tokenizer: 100%" in printed


@torch.no_grad()
def test_teacher_forced_gates_match_a_plain_forward(
    evaluation: Evaluation, sequences: Sequences
) -> None:
    measured = list(evaluation.measure(["target"]))
    assert measured == list(evaluation.measure(["target"]))
    gates = {gate.name: gate for gate in measured}
    task = TargetTask(evaluation.model.target, sequences, sequences)  # type: ignore[arg-type]
    cond, uncond = (task.logits(sequences, torch.full((6,), dropped)) for dropped in (False, True))
    top = guide(cond, uncond, GUIDANCE).softmax(-1).topk(10).values
    nll = torch.nn.functional.cross_entropy(cond.flatten(0, 1), sequences.tokens.long().flatten())
    assert gates["mean top-1 probability"].value == pytest.approx(
        float(top[..., 0].mean()), rel=1e-4
    )
    assert gates["mean top-10 probability"].value == pytest.approx(
        float(top.sum(-1).mean()), rel=1e-4
    )
    assert gates["held-out NLL, nats per token"].value == pytest.approx(float(nll), rel=1e-4)
    accuracy = gates["prompt accuracy of AR samples"].observations
    assert accuracy is not None
    assert accuracy.prompts == [item.caption() for item in HELD_OUT[:3]]


@torch.no_grad()
def test_overlap_matches_a_plain_forward(
    evaluation: Evaluation, drafting: dict[str, QualityGate], sequences: Sequences
) -> None:
    drafter = evaluation.model.drafter
    target = evaluation.model.target
    overlap = drafter_task(
        drafter=drafter, target=target, sequences=sequences, held_out=sequences
    ).overlap(drafter)  # type: ignore[arg-type]
    assert drafting["1 - TV at depth 1"].value == pytest.approx(overlap, rel=1e-4)


def test_accepted_lengths_count_tokens_and_steps(drafting: dict[str, QualityGate]) -> None:
    static, dynamic = (drafting[f"lossless MAL, {name}"] for name in ("eagle1-25", "dynamic"))
    for gate in (static, dynamic):
        assert gate.observations is not None
        # All tokens but the first are committed by a step.
        assert gate.observations.numerator == [255.0] * 3
        assert 1 <= gate.value <= 6
    assert drafting["MAL of dynamic over static"].value == pytest.approx(
        dynamic.value / static.value
    )


def test_retrieval_counts_pictures_that_find_their_caption() -> None:
    class Half:
        """The first half of the pictures is nearest to its own caption, the other to caption 0."""

        def embed_pictures(self, pictures: list) -> torch.Tensor:
            nearest = [
                number if number < len(pictures) // 2 else 0 for number in range(len(pictures))
            ]
            return torch.eye(len(pictures))[nearest]

        def embed_captions(self, captions: list[str]) -> torch.Tensor:
            assert captions == [item.caption() for item in HELD_OUT[: len(captions)]]
            return torch.eye(len(captions))

    (gate,) = Evaluation(Path(), Half(), CPU).measure(["clip"])
    assert gate.value == 0.5
    assert gate.passed is False


def test_gate_between_two_bounds() -> None:
    wanted = ((">=", 0.03), ("<=", 0.12))
    passed = [
        QualityGate(part="p", name="n", value=value, wanted=wanted).passed
        for value in (0.02, 0.03, 0.12, 0.13)
    ]
    assert passed == [False, True, True, False]
    assert QualityGate("p", "n", 1.0).passed is None
    assert Observations([2.0, 4.0], [1.0, 2.0], ["a", "b"]).value == 2.0


def test_evaluate_prints_the_table_and_exits_with_5(
    family: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--evaluate", "--out", str(family / "weights"), "--images", "1", "--format", "json"]
    assert main(words) == 5
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    parts = ["tokenizer"] * 2 + ["features"] * 2 + ["clip"] + ["target"] * 4 + ["drafter"] * 4
    assert [row["part"] for row in rows] == parts
    wanted = [">= 28", ">= 0.95", ">= 0.97", ">= 0.93", ">= 0.7", ">= 0.8"]
    assert [row["wanted"] for row in rows][:6] == wanted
    assert rows[0]["met"] == "NO"
    accuracy = next(row for row in rows if row["bar"] == "prompt accuracy of AR samples")
    assert accuracy["met"] == "NO"
    assert accuracy["low"] <= accuracy["measured"]
    assert "PSNR on held-out scenes, dB" in printed.err
    assert "quality gates failed" in printed.err
