"""`check-model`: sound models pass every check, and a planted mistake fails its own check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama import modeling_llama

from lantern_bench.checks.check_model import TOLERANCE, check_model, read_reference
from lantern_bench.cli import main as cli
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks import target as target_module
from lantern_bench.models.networks import transformer as layers
from lantern_bench.models.networks.target import CachedSession, TransformerTarget
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from tests.examples import tiny_hosted
from tests.helpers import golden_models, tiny_chameleon, tiny_llamagen

CHECKS = ("logits", "cache", "tree", "forced tokens", "guidance", "codebook")
LINES = ["a red lantern", "an image of a lantern"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Sequence[str]]]:
    """Model files and two prompts: hosted by transformers, with forced tokens, and recorded."""
    folder = tmp_path_factory.mktemp("models")
    lumina = tiny_chameleon.write_model_file(folder / "lumina", "lumina-mgpt-7b-768", (4, 4))
    recorded = golden_models.recorded_target(folder / "c2i", "c2i")
    return {
        "hosted": (tiny_hosted.write_model(folder / "janus"), tiny_hosted.CAPTIONS),
        "forced": (lumina, LINES),
        "recorded": (recorded, ["class 1", "class 7"]),
    }


def results_of(
    model: LoadedModel, prompts: Sequence[str], reference: Path | None = None
) -> dict[str, str]:
    checks = check_model(
        model,
        prompts,
        tolerance=TOLERANCE["float32"],
        generator=torch.Generator().manual_seed(0),
        reference=None if reference is None else read_reference(reference, model),
    )
    print(*((check.check, check.result, check.error, check.about) for check in checks), sep="\n")
    return {check.check: check.result for check in checks}


def load(path: Path) -> LoadedModel:
    return model_of(str(path)).load(torch.device("cpu"), torch.float32)


def recorded_logits(folder: Path) -> Path:
    """A reference: the official LlamaGen's logits for the recorded classes and tokens."""
    expected = load_file(golden_models.GOLDEN / "llamagen_gpt" / "c2i_expected.safetensors")
    first = int(expected["logits_positions"][0])
    count = expected["logits_cond"].shape[1]
    assert first == 0
    assert expected["logits_positions"].tolist() == list(range(count))
    arrays = {
        "tokens": expected["tokens"][:, :count],
        "cond": expected["logits_cond"],
        "uncond": expected["logits_uncond"],
    }
    prompts = np.array([f"class {number}" for number in expected["class_ids"].tolist()])
    np.savez(
        folder / "official.npz",
        prompts=prompts,
        **{name: array.numpy() for name, array in arrays.items()},
    )
    return folder / "official.npz"


def test_sound_models_pass(files: dict[str, Any], lanterns: LoadedModel, tmp_path: Path) -> None:
    passed = dict.fromkeys(CHECKS, "pass")
    hosted = load(files["hosted"][0])
    path, classes = files["recorded"]
    assert results_of(hosted, files["hosted"][1]) == passed
    # Janus reads padding in place of the caption: its unconditional row depends on the length of
    # the prompt.
    assert (
        results_of(hosted, ["a red lamp", "two cats on a green sofa two cats on a green sofa"])
        == passed
    )
    assert results_of(load(files["forced"][0]), LINES) == passed | {"logits": "none"}
    assert results_of(load(path), classes, recorded_logits(tmp_path)) == passed | {
        "codebook": "none"
    }
    captions = model_of("lanterns").prompt_sets["held-out"][:2]
    assert results_of(lanterns, captions) == passed | {"logits": "none"}


# ---- Five planted mistakes: how each is planted, and the check that must fail


def swapped_rows(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    split = CachedSession._split

    def swapped(session: CachedSession, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        cond, uncond = split(session, logits)
        return (cond, uncond) if uncond is None else (uncond, cond)

    patch.setattr(CachedSession, "_split", swapped)


def swapped_prompts(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    condition = model.condition
    model.condition = lambda prompts: type(rows := condition(prompts))(
        *(row.flip(1) for row in rows)
    )


def one_position_late(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    right = CachedSession._rotary_positions

    def late(session: CachedSession, positions: Tensor) -> Tensor:
        rotary = right(session, positions)
        behind = (positions >= session._prefix).long()
        return rotary + behind.repeat(len(rotary) // len(behind), 1)

    patch.setattr(CachedSession, "_rotary_positions", late)


def other_pairs(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    rotate = layers.rotate
    patch.setattr(
        layers,
        "rotate",
        lambda x, turn, *, interleaved: rotate(x, turn, interleaved=not interleaved),
    )
    half = modeling_llama.rotate_half
    patch.setattr(
        modeling_llama, "rotate_half", lambda x: half(x.unflatten(-1, (-1, 2)).mT.flatten(-2))
    )


def unforced(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target_module, "force_line_ends", lambda logits, positions, config: logits)


def unnamed(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TransformerTarget, "forced_tokens", lambda target, positions: torch.full_like(positions, -1)
    )


def permuted_rows(model: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    assert model.codebook is not None
    model.codebook = model.codebook[
        torch.randperm(len(model.codebook), generator=torch.Generator().manual_seed(4))
    ]


PLANTED: list[tuple[str, Callable[[LoadedModel, pytest.MonkeyPatch], None], set[str]]] = [
    ("hosted", swapped_rows, {"logits", "cache", "guidance"}),
    ("hosted", swapped_prompts, {"logits", "guidance"}),
    ("forced", swapped_rows, {"cache", "guidance"}),
    ("forced", swapped_prompts, {"guidance"}),
    ("recorded", swapped_rows, {"logits", "cache", "guidance"}),
    ("hosted", one_position_late, {"logits", "cache"}),
    ("forced", one_position_late, {"cache"}),
    ("recorded", one_position_late, {"logits", "cache"}),
    ("hosted", other_pairs, {"logits"}),
    ("recorded", other_pairs, {"logits"}),
    ("forced", unforced, {"forced tokens"}),
    ("forced", unnamed, {"forced tokens"}),
    ("hosted", permuted_rows, {"codebook"}),
    ("forced", permuted_rows, {"codebook"}),
]


@pytest.mark.parametrize(
    ("kind", "plant", "failed"), PLANTED, ids=[f"{row[1].__name__}-{row[0]}" for row in PLANTED]
)
def test_planted_mistakes_fail_their_check(
    kind: str,
    plant: Callable[[LoadedModel, pytest.MonkeyPatch], None],
    failed: set[str],
    *,
    files: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, prompts = files[kind]
    model = load(path)
    reference = None
    if kind == "recorded":
        reference = recorded_logits(tmp_path)
    if kind == "hosted":
        reference = written_by(model, prompts, tmp_path)
    plant(model, monkeypatch)
    results = results_of(model, prompts, reference)
    assert {check for check, result in results.items() if result == "fail"} == failed


def written_by(model: LoadedModel, prompts: Sequence[str], folder: Path) -> Path:
    """Logits of the model's own reference before a mistake is planted."""
    assert model.reference is not None
    tokens = torch.randint(
        model.target.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1)
    )
    cond, uncond = model.reference(model.condition(prompts), tokens)
    np.savez(folder / "own.npz", prompts=np.array(prompts), tokens=tokens, cond=cond, uncond=uncond)
    return folder / "own.npz"


def test_a_missing_row_of_line_ends_fails_against_a_reference(
    files: dict[str, Any], tmp_path: Path
) -> None:
    """A model without forced tokens agrees with itself, so only a reference shows the mistake."""
    path = tmp_path / "model.yaml"
    lumina = files["forced"][0].parent
    path.write_text(f"family: anole\ngrid: [4, 4]\ntarget: {{checkpoint: {lumina / 'target'}}}\n")
    right: Any = load(files["forced"][0])
    tokens = right.target.forced_tokens(torch.arange(20)).clamp_min(0).expand(1, -1)
    condition = right.condition(LINES[:1])
    cond, uncond = right.target.logits_without_cache(condition, tokens)
    np.savez(
        tmp_path / "ends.npz", prompts=np.array(LINES[:1]), tokens=tokens, cond=cond, uncond=uncond
    )
    results = results_of(load(path), LINES, tmp_path / "ends.npz")
    assert results["logits"] == "fail"
    assert results["cache"] == "pass"


# ---- The command


@pytest.mark.parametrize("kind", ["t2i", "c2i"])
def test_llamagen_is_checked_without_its_text_encoder(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_llamagen.write_model_file(tmp_path / "model", kind))
    assert cli.main(["check-model", path]) == 0
    written = capsys.readouterr()
    results = [line.split(",")[1] for line in written.out.splitlines()[1:]]
    assert results == ["none", *["pass"] * 5]
    assert written.err.count("random features replace the prompts") == (kind == "t2i")


def test_logits_of_captions_need_the_text_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_llamagen.write_model_file(tmp_path / "model", "t2i")
    arrays = {name: np.zeros((1, 2, 32)) for name in ("cond", "uncond")}
    reference = tmp_path / "theirs.npz"
    np.savez(reference, tokens=np.zeros((1, 2), int), prompts=np.array(["a lantern"]), **arrays)
    assert cli.main(["check-model", str(path), "--reference", str(reference)]) == 3
    assert "needs its text encoder" in capsys.readouterr().err


def test_command_says_pass_or_fail_and_sets_the_exit_code(
    files: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(files["recorded"][0])
    reference = str(recorded_logits(tmp_path))
    assert cli.main(["check-model", path, "--reference", reference, "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "check,result,error,at most,about"
    assert [line.split(",")[:2] for line in lines[1:]] == [
        [c, "none" if c == "codebook" else "pass"] for c in CHECKS
    ]
    other_pairs(load(files["recorded"][0]), monkeypatch)
    assert cli.main(["check-model", path, "--reference", reference]) == 5
    assert "1 of 6 checks failed: logits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "tokens must be there"),
        ({"tokens": np.zeros((1, 3), int), "cond": np.zeros((1, 4, 9))}, "prompts must be there"),
        (
            {"tokens": np.zeros((1, 3), int), "cond": np.zeros((1, 4, 9)), "prompts": ["class 1"]},
            "tokens must be [n, N]",
        ),
    ],
)
def test_references_that_do_not_fit_are_refused(
    arrays: dict[str, Any], message: str, files: dict[str, Any], tmp_path: Path
) -> None:
    np.savez(tmp_path / "given.npz", **arrays)
    with pytest.raises(UserError) as caught:
        read_reference(tmp_path / "given.npz", load(files["recorded"][0]))
    assert message in caught.value.message
    assert "--reference" in caught.value.message
    with pytest.raises(UserError, match="--reference"):
        read_reference(tmp_path / "none.npz", load(files["recorded"][0]))
