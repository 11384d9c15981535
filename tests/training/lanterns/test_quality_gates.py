"""The quality gates on models so small that all are measured in seconds; figures agree with a plain forward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.train_lanterns import quality_gates, recipe, tasks
from experiments.train_lanterns.__main__ import main
from experiments.train_lanterns.quality_gates import Evaluation, QualityGate, check_weights
from experiments.train_lanterns.recipe import PARTS, RecipeSettings, drafter_task, train_part
from experiments.train_lanterns.tasks import Sequences, TargetTask, held_out_scenes, tokenize
from lantern_bench.decoding.sampling import guide
from lantern_bench.errors import RefusedError
from lantern_bench.models.lanterns import FILES, GUIDANCE
from lantern_bench.models.lanterns import family as family_module
from lantern_bench.models.lanterns import model as lanterns_model
from lantern_bench.models.lanterns.captions import HELD_OUT
from lantern_bench.models.vq import VQConfig
from lantern_bench.training.drafter.run import Observations

CPU = torch.device("cpu")
TINY = RecipeSettings(steps=2, scenes=12, held_out=8, compiled=False)


@pytest.fixture(scope="module", autouse=True)
def tiny() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        config = VQConfig(codes=32, code_dim=4, z_channels=32, channels=32, channel_mult=(1, 1, 1), res_blocks=1)
        for module in (recipe, lanterns_model):
            patch.setattr(module, "TOKENIZER_CONFIG", config)
        sizes = {"vocab_size": 32, "dim": 32, "layers": 2, "heads": 2, "ffn_dim": 32}
        patch.setattr(lanterns_model, "TARGET_CONFIG", replace(lanterns_model.TARGET_CONFIG, **sizes))
        for module in (tasks, recipe):
            patch.setattr(module, "_BATCH", 4)
        patch.setattr(tasks, "_EVALUATED", 8)
        patch.setattr(tasks, "_RETRIEVED", 8)
        patch.setattr(quality_gates, "_SCENES", 8)
        patch.setattr(quality_gates, "_RETRIEVAL", 8)
        patch.setattr(quality_gates, "_TEACHER_FORCED", 6)
        patch.setattr(quality_gates, "_AT_ONCE", 4)
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    for part in PARTS:
        train_part(part, root / "weights", root / "work", TINY, CPU)
    return root / "weights"


@pytest.fixture(scope="module")
def evaluation(folder: Path) -> Evaluation:
    return Evaluation(folder, None, CPU, images=3, batch=2)


@pytest.fixture(scope="module")
def sequences(evaluation: Evaluation) -> Sequences:
    pixels, attributes = held_out_scenes(6, quality_gates._ACCEPTANCE_SEED)
    tokens = tokenize(evaluation.tokenizer, pixels.permute(0, 2, 3, 1))
    return Sequences(tokens, torch.tensor([item.indices() for item in attributes]))


@pytest.fixture(scope="module")
def drafting(evaluation: Evaluation) -> dict[str, QualityGate]:
    return by_name(list(evaluation.measure(["drafter"])))


def by_name(found: list[QualityGate]) -> dict[str, QualityGate]:
    return {gate.name: gate for gate in found}


@torch.no_grad()
def test_teacher_forced_gates_match_a_plain_forward(evaluation: Evaluation, sequences: Sequences) -> None:
    found = by_name(list(evaluation.measure(["target"])))
    task = TargetTask(evaluation.model.target, sequences, sequences)  # type: ignore[arg-type]
    cond, uncond = (task.logits(sequences, torch.full((6,), dropped)) for dropped in (False, True))
    top = guide(cond, uncond, GUIDANCE).softmax(-1).topk(10).values
    nll = torch.nn.functional.cross_entropy(cond.flatten(0, 1), sequences.tokens.long().flatten())
    assert found["mean top-1 probability"].value == pytest.approx(float(top[..., 0].mean()), rel=1e-4)
    assert found["mean top-10 probability"].value == pytest.approx(float(top.sum(-1).mean()), rel=1e-4)
    assert found["held-out NLL, nats a token"].value == pytest.approx(float(nll), rel=1e-4)
    accuracy = found["prompt accuracy of AR samples"].observations
    assert accuracy is not None and accuracy.prompts == [item.caption() for item in HELD_OUT[:3]]


@torch.no_grad()
def test_overlap_matches_a_plain_forward(
    evaluation: Evaluation, drafting: dict[str, QualityGate], sequences: Sequences
) -> None:
    drafter, target = evaluation.model.drafter, evaluation.model.target
    plain = drafter_task(drafter, target, sequences, sequences).evaluate()  # type: ignore[arg-type]
    assert drafting["1 - TV at depth 1"].value == pytest.approx(plain["one_minus_tv"], rel=1e-4)


def test_accepted_lengths_count_tokens_and_steps(drafting: dict[str, QualityGate]) -> None:
    static, dynamic = (drafting[f"lossless MAL, {name}"] for name in ("eagle1-25", "dynamic"))
    for gate in (static, dynamic):
        assert gate.observations is not None
        # All tokens but the first are committed by a step.
        assert gate.observations.over == [255.0] * 3
        assert 1 <= gate.value <= 6
    assert drafting["MAL of dynamic over static"].value == pytest.approx(dynamic.value / static.value)


def test_gates_are_reproducible(evaluation: Evaluation) -> None:
    assert list(evaluation.measure(["target"])) == list(evaluation.measure(["target"]))


def test_scorers_and_tokenizer_have_their_gates(evaluation: Evaluation) -> None:
    found = list(evaluation.measure(["tokenizer", "features"]))
    assert [(gate.part, gate.wanted) for gate in found] == [
        ("tokenizer", ((">=", 28.0),)),
        ("tokenizer", ((">=", 0.95),)),
        ("features", ((">=", 0.97),)),
        ("features", ((">=", 0.93),)),
    ]
    assert all(gate.passed is False for gate in found[:1])


def test_retrieval_counts_pictures_that_find_their_caption() -> None:
    class Half:
        """The first half of the pictures is nearest to its own caption, the other to caption 0."""

        def images(self, pictures: list) -> torch.Tensor:
            near = [number if number < len(pictures) // 2 else 0 for number in range(len(pictures))]
            return torch.eye(len(pictures))[near]

        def captions(self, captions: list[str]) -> torch.Tensor:
            assert captions == [item.caption() for item in HELD_OUT[: len(captions)]]
            return torch.eye(len(captions))

    (gate,) = Evaluation(Path(), Half(), CPU).measure(["clip"])
    assert gate.value == 0.5 and gate.passed is False


def test_gate_between_two_bounds() -> None:
    wanted = ((">=", 0.03), ("<=", 0.12))
    assert [QualityGate("p", "n", value, wanted).passed for value in (0.02, 0.03, 0.12, 0.13)] == [
        False,
        True,
        True,
        False,
    ]
    assert QualityGate("p", "n", 1.0).passed is None
    assert Observations([2.0, 4.0], [1.0, 2.0], ["a", "b"]).value == 2.0


def test_missing_weights_are_named(folder: Path, tmp_path: Path) -> None:
    check_weights(list(PARTS), folder)
    with pytest.raises(RefusedError, match=r"has no clip/open_clip_model.safetensors") as caught:
        check_weights(["clip"], tmp_path)
    assert caught.value.advice == "First: python -m experiments.train_lanterns --part clip"


def test_evaluate_prints_the_table_and_exits_with_5(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--evaluate", "--out", str(folder), "--images", "2", "--format", "json"]
    assert main(typed) == 5
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert [row["part"] for row in rows] == ["tokenizer"] * 2 + ["features"] * 2 + ["clip"] + ["target"] * 4 + [
        "drafter"
    ] * 4
    accuracy = next(row for row in rows if row["bar"] == "prompt accuracy of AR samples")
    assert accuracy["wanted"] == ">= 0.8" and accuracy["met"] == "NO" and accuracy["low"] <= accuracy["measured"]
    assert "PSNR on held-out scenes, dB" in told.err and "quality gates failed" in told.err
    assert family_module.Lanterns().files()["target"] != folder / FILES["target"]
