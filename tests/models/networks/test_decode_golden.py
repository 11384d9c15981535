"""Logits and whole images against golden recordings, through `lantern_bench.decode` with a model
file.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import lantern_bench
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding import loop
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks import target as target_module
from lantern_bench.models.networks.target import CaptionFeatures, Condition
from tests.helpers import golden_models, tiny_llamagen
from tests.helpers.golden_models import GOLDEN

TOLERANCE = 2e-4
decode = functools.partial(lantern_bench.decode, temperature=0)


def recorded(folder: Path, kind: str) -> tuple[LoadedModel, dict[str, Tensor], Condition]:
    """A recorded target, what was recorded, and the prompts of all rows as recorded."""
    model = golden_models.load(golden_models.recorded_target(folder, kind))
    expected = load_file(GOLDEN / "llamagen_gpt" / f"{kind}_expected.safetensors")
    if kind == "c2i":
        return (
            model,
            expected,
            Condition(expected["class_ids"], torch.ones(len(expected["class_ids"]), 1).bool()),
        )
    return model, expected, Condition(expected["caption_embs"], expected["emb_masks"].bool())


def features(model: LoadedModel, embeddings: Tensor, mask: Tensor) -> list[Condition]:
    """Caption features as the model takes them: padded in front, up to its prefix; a condition an
    image.
    """
    target: Any = model.target
    positions = target.cls_embedding.uncond_embedding.shape[0]
    conditions = []
    for row, valid in zip(embeddings.float(), mask.bool(), strict=True):
        words = row[valid]
        short = positions - len(words)
        visible = torch.arange(positions) >= short
        conditions.append(Condition(functional.pad(words, (0, 0, short, 0))[None], visible[None]))
    return conditions


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
@torch.no_grad()
def test_logits_equal_the_official_ones(kind: str, tmp_path: Path) -> None:
    model, expected, condition = recorded(tmp_path, kind)
    target: Any = model.target
    logits = teacher_forced(target, condition, expected["tokens"].long(), guided=True).logits
    assert logits.uncond is not None
    at = expected["logits_positions"].long() - (target.config.prefix - 1)
    assert (logits.cond[:, at] - expected["logits_cond"]).abs().max() < TOLERANCE
    assert (logits.uncond[:, at] - expected["logits_uncond"]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        ("c2i", None),
        ("t2i", ("caption_embs", "emb_masks")),
        ("t2i", ("t5_embeddings_right_padded", "t5_mask_right_padded")),
    ],
    ids=["classes", "padded left", "padded right"],
)
@torch.no_grad()
def test_greedy_images_equal_recording(
    kind: str, arrays: tuple[str, str] | None, tmp_path: Path
) -> None:
    model, expected, condition = recorded(tmp_path, kind)
    conditions = None if arrays is None else features(model, *(expected[array] for array in arrays))
    labels = range(len(condition.values)) if arrays else condition.values.tolist()
    prompts = [f"class {number}" for number in labels]  # names alone where features are given
    names = [name for name in expected if name.startswith("greedy_cfg")]
    assert names
    for name in names:
        scale = float(name.removeprefix("greedy_cfg"))
        images = decode(
            model, prompts, mode="ar", cfg_scale=scale, conditions=conditions, logits=True
        )
        tokens = torch.stack([image.tokens for image in images])
        assert tokens.tolist() == expected[name].tolist()
        assert all(image.picture is None for image in images)
        logits = torch.stack([image.logits for image in images if image.logits is not None])
        forced = teacher_forced(model.target, condition, tokens.long(), guided=scale != 1).logits
        wanted = (
            forced.cond if forced.uncond is None else torch.lerp(forced.uncond, forced.cond, scale)
        )
        assert (logits - wanted).abs().max() < TOLERANCE * max(1.0, scale)


END_TO_END = json.loads((GOLDEN / "end_to_end" / "e2e_info.json").read_text())


def parameters_of(run: str) -> dict[str, Any]:
    """The decoding parameters of a recorded run's name, such as `full.dynamic_k8_d0.25`."""
    greedy = {"temperature": 0, "cfg_scale": END_TO_END["cfg_scale"]}
    drafting, rest = run.split(".", 1)[1].split("_", 1)
    if drafting == "ar":
        return {"mode": "ar", **greedy}
    tree: dict[str, Any] = {"drafting": "static", "tree": golden_models.TREES[END_TO_END["tree"]]}
    if drafting == "dynamic":
        # There the root counts as a node, and `depth` the expansions behind the first.
        tree = {
            "drafting": "dynamic",
            "nodes": END_TO_END["total_token"] - 1,
            "depth": END_TO_END["depth"] + 1,
        }
        tree["beam"] = END_TO_END["top_k"]
    if rest == "off":
        return {"mode": "speculative", **tree, **greedy}
    k, bound = (word[1:] for word in rest.split("_"))
    name = "delta" if float(bound) <= 1 else "lambda"
    rule = {
        "mode": "lantern" if name == "delta" else "lantern++",
        name: float(bound),
        "neighbours": int(k),
    }
    return {**rule, **tree, **greedy}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Target, drafter and table of the end-to-end recording."""
    return golden_models.load(golden_models.end_to_end(tmp_path_factory.mktemp("e2e")))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(GOLDEN / "end_to_end" / "e2e_expected.safetensors")


# Relaxed runs of a padded prompt depend on its pad rows: they have a test of their own below.
RUNS = [run for run in END_TO_END["runs"] if run.startswith("full.") or run.endswith("_off")]
RUNS += [f"{prompt}.ar_greedy" for prompt in END_TO_END["prompts"]]


@pytest.mark.parametrize("run", RUNS)
def test_whole_runs_equal_recording(
    run: str, whole: LoadedModel, expected: dict[str, Tensor]
) -> None:
    prompt = run.split(".")[0]
    drafted = not run.endswith(".ar_greedy")
    embeddings = expected[f"{prompt}.t5_embeddings_right_padded"]
    conditions = features(whole, embeddings, expected[f"{prompt}.t5_mask_right_padded"])
    (image,) = lantern_bench.decode(whole, "row", conditions=conditions, **parameters_of(run))
    wanted = expected[f"{run}_tokens" if not drafted else f"{run}.tokens"].flatten().tolist()
    assert image.tokens[: len(wanted)].tolist() == wanted
    if run.endswith("_off"):
        assert wanted == expected[f"{prompt}.ar_greedy_tokens"].flatten().tolist()
    if prompt == "full" and drafted:
        lengths = expected[f"{run}.accept_lengths"].flatten().tolist()
        lengths = lengths[: golden_models.steps_to(len(wanted), lengths)]
        # Uncut: the last step may exceed the image, and the published code counts it as complete.
        assert [count - 1 for count in image.trace.uncut][: len(lengths)] == lengths


def test_recorded_runs_may_have_two_steps_more() -> None:
    assert golden_models.steps_to(4, [2, 0, 0]) == 1
    assert golden_models.steps_to(4, [1, 0, 0]) == 2
    assert golden_models.steps_to(1, [3]) == 0


def seen_in_float32(visible: Tensor, n: int) -> Tensor:
    """`prefix_seen` as in the LANTERN code in float32: padding sees what comes after it too, but no
    later padding.
    """
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    seen = causal & (visible[:, None, :n] == visible[:, :n, None])
    return seen | (~visible[:, :n, None] & ~causal & visible[:, None, :n])


@pytest.mark.parametrize("prompt", sorted(END_TO_END["prompts"].keys() - {"full"}))
def test_drafters_read_pad_rows_by_a_published_rule(
    prompt: str, whole: LoadedModel, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs with padded prompts, recorded by the published code in half precision or, as here,
    in float32.

    `test_pad_rows` has the rule of half precision, which published drafters were trained with.
    """
    condition = Condition(
        expected[f"{prompt}.caption_embs"], expected[f"{prompt}.emb_masks"].bool()
    )

    def equal(run: str) -> bool:
        wanted, lengths = (
            expected[f"{run}.{name}"].flatten().tolist() for name in ("tokens", "accept_lengths")
        )
        decoding = Decoding(**parameters_of(run))
        image = loop.decode(
            model=whole,
            condition=condition,
            decoding=decoding,
            generators=[torch.Generator()],
            tokens=len(wanted),
        )[0]
        ours = [count - 1 for count in image.trace.uncut]
        return (
            image.tokens.tolist() == wanted
            and ours == lengths[: golden_models.steps_to(len(wanted), lengths)]
        )

    runs = [run for run in END_TO_END["runs"] if run.startswith(f"{prompt}.")]
    in_half = [run for run in runs if equal(run)]
    monkeypatch.setattr(target_module, "prefix_seen", seen_in_float32)
    in_float32 = [run for run in runs if equal(run)]
    equal_runs = f"{len(in_half)} equal in half precision, {len(in_float32)} in float32"
    print(f"{prompt}: of {len(runs)} runs {equal_runs}")
    assert runs in (in_half, in_float32)


def test_picture_equals_official_decoding_of_its_tokens(tmp_path: Path) -> None:
    """The recorded tokenizer under a small target of as many codes, drawn at random."""
    recorded = load_file(GOLDEN / "llamagen_vq" / "vq_expected.safetensors")
    codes = recorded["codes"]
    rows, columns = (int(side) for side in recorded["decode_shape"][2:])
    vocab_size = json.loads((GOLDEN / "llamagen_vq" / "vq_info.json").read_text())["K"]
    config = {
        "dim": 32,
        "n_layer": 2,
        "n_head": 2,
        "intermediate_size": 64,
        "num_classes": 3,
        "vocab_size": vocab_size,
    }
    checkpoint = tmp_path / "target.pt"
    torch.save(
        tiny_llamagen.official_state(tiny_llamagen.llamagen("c2i", (rows, columns), **config)),
        checkpoint,
    )
    path = golden_models.write_model(
        tmp_path,
        family="llamagen-c2i",
        target={"checkpoint": checkpoint, "config": config},
        tokenizer={"checkpoint": GOLDEN / "llamagen_vq" / "vq.pt"},
        grid=[rows, columns],
    )
    model: Any = golden_models.load(path)
    (image,) = decode(model, "class 1", mode="ar", cfg_scale=2)
    drawn = model.draw(image.tokens[None])
    assert np.array_equal(np.asarray(image.picture), drawn[0].numpy())
    official = ((recorded["pixels"].clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1)
    assert (model.draw(codes).float() - official).abs().max() <= 1
    assert not isinstance(model.target.cls_embedding, CaptionFeatures)
