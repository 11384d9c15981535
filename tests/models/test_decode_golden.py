"""Golden recordings of whole images through `lantern_bench.decode` with a model file.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import lantern_bench
from lantern_bench.api import DecodedImage
from lantern_bench.models.io.state_dict import export
from lantern_bench.models.llamagen import key_map
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.target import CaptionFeatures, Condition
from tests.models import golden_models, tiny_llamagen
from tests.models.golden_models import GOLDEN

TOLERANCE = 2e-4
decode = functools.partial(lantern_bench.decode, temperature=0)


def features(model: LoadedModel, embeddings: Tensor, mask: Tensor) -> list[Condition]:
    """Caption features as the model takes them: padded in front, up to its prefix; a condition an image."""
    target: Any = model.target
    positions = target.cls_embedding.uncond_embedding.shape[0]
    conditions = []
    for row, valid in zip(embeddings.float(), mask.bool(), strict=True):
        words = row[valid]
        short = positions - len(words)
        visible = torch.arange(positions) >= short
        conditions.append(Condition(functional.pad(words, (0, 0, short, 0))[None], visible[None]))
    return conditions


def names(conditions: Sequence[Condition]) -> list[str]:
    return [f"row {number}" for number in range(len(conditions))]


def stacked_logits(images: Sequence[DecodedImage]) -> Tensor:
    return torch.stack([image.logits for image in images if image.logits is not None])


def teacher_forced(model: Any, condition: Condition, tokens: Tensor, scale: float) -> Tensor:
    """The guided logits of a plain forward over whole sequences."""
    target, fed = model.target, tokens.long()
    n = fed.shape[1]
    session = target.session(len(fed), scale != 1, n)
    with torch.no_grad():
        start = session.prefill(condition)
        attention = torch.ones(n - 1, n - 1, dtype=torch.bool).tril().expand(len(fed), -1, -1)
        rest = session.score(fed[:, :-1], torch.arange(n - 1).expand(len(fed), -1), attention)
    cond = torch.cat([start.cond, rest.cond], dim=1)
    return cond if scale == 1 else torch.lerp(torch.cat([start.uncond, rest.uncond], dim=1), cond, scale)


def first_logits(expected: dict[str, Tensor], scale: float) -> Tensor:
    """The recorded guided logits of the first token, which depend on the condition alone."""
    assert int(expected["logits_positions"][0]) == golden_prefix(expected) - 1
    cond, null = expected["logits_cond"][:, 0], expected["logits_uncond"][:, 0]
    return null + scale * (cond - null) if scale != 1 else cond


def golden_prefix(expected: dict[str, Tensor]) -> int:
    return expected["caption_embs"].shape[1] if "caption_embs" in expected else 1


@pytest.mark.parametrize("layout", ["official", "hf"])
def test_classes_equal_recording(layout: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "llamagen_gpt" / "c2i_expected.safetensors")
    path = golden_models.recorded_target(tmp_path, "c2i")
    model = golden_models.load(converted(tmp_path, path, "c2i") if layout == "hf" else path)
    numbers = expected["class_ids"].tolist()
    for name in (name for name in expected if name.startswith("greedy_cfg")):
        scale = float(name.removeprefix("greedy_cfg"))
        prompts = [f"class {number}" for number in numbers]
        images = decode(model, prompts, mode="ar", cfg_scale=scale, logits=True)
        tokens, logits = torch.stack([image.tokens for image in images]), stacked_logits(images)
        assert all(image.picture is None for image in images)
        assert tokens.tolist() == expected[name].tolist()
        assert (logits[:, 0] - first_logits(expected, scale)).abs().max() < TOLERANCE * max(1.0, scale)
        labels = Condition(torch.tensor(numbers), torch.ones(len(numbers), 1, dtype=torch.bool))
        assert (logits - teacher_forced(model, labels, tokens, scale)).abs().max() < TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("layout", ["official", "hf"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_caption_features_equal_recording(padding: str, layout: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "llamagen_gpt" / "t2i_expected.safetensors")
    arrays = ("caption_embs", "emb_masks")
    if padding == "right":
        arrays = ("t5_embeddings_right_padded", "t5_mask_right_padded")
    path = golden_models.recorded_target(tmp_path, "t2i")
    model = golden_models.load(converted(tmp_path, path, "t2i") if layout == "hf" else path)
    conditions = features(model, *(expected[array] for array in arrays))
    for name in (name for name in expected if name.startswith("greedy_cfg")):
        scale = float(name.removeprefix("greedy_cfg"))
        images = decode(model, names(conditions), mode="ar", cfg_scale=scale, conditions=conditions, logits=True)
        assert [image.tokens.tolist() for image in images] == expected[name].tolist()
        gap = (stacked_logits(images)[:, 0] - first_logits(expected, scale)).abs().max()
        assert gap < TOLERANCE * max(1.0, scale)


def converted(folder: Path, official: Path, kind: str) -> Path:
    """The model file of the same target in the layout of the HF conversion: weights and config.json in a folder."""
    from safetensors.torch import save_file

    target: Any = golden_models.load(official).target
    config, out = golden_models.gpt_config(kind), folder / "converted"
    out.mkdir()
    save_file(export(target, key_map(target, "hf")), out / "model.safetensors")
    sizes = {"hidden_size": config["dim"], "num_hidden_layers": config["n_layer"], "input_type": kind}
    sizes |= {"num_attention_heads": config["n_head"], "rms_norm_eps": config["norm_eps"]}
    sizes |= {"block_size": config["block_size"], "rope_theta": config["rope_base"], "tie_word_embeddings": False}
    sizes |= {key: config[key] for key in ("vocab_size", "multiple_of", "caption_dim", "num_classes")}
    (out / "config.json").write_text(json.dumps(sizes))
    target_part = {"checkpoint": out / "model.safetensors", "layout": "hf"}
    return golden_models.write_model(folder / "hf", family=f"llamagen-{kind}", target=target_part)


def parameters_of(run: str, info: dict[str, Any]) -> dict[str, Any]:
    """The decoding parameters of a recorded run's name, such as `full.dynamic_k8_d0.25`."""
    drafting, rest = run.split(".", 1)[1].split("_", 1)
    tree: dict[str, Any] = {"drafting": "static", "tree": golden_models.TREES[info["tree"]]}
    if drafting == "dynamic":
        # There the root counts as a node, and `depth` the expansions behind the first.
        tree = {"drafting": "dynamic", "nodes": info["total_token"] - 1, "depth": info["depth"] + 1}
        tree["beam"] = info["top_k"]
    if rest == "off":
        return {"mode": "speculative", **tree}
    k, bound = (word[1:] for word in rest.split("_"))
    name = "delta" if float(bound) <= 1 else "lambda"
    return {"mode": "lantern" if name == "delta" else "lantern++", name: float(bound), "neighbours": int(k), **tree}


END_TO_END = json.loads((GOLDEN / "end_to_end" / "e2e_info.json").read_text())


def decode_end_to_end(folder: Path, embeddings: Tensor, mask: Tensor, **parameters: Any) -> DecodedImage:
    """The image of the end-to-end recording's model for these caption features."""
    model = golden_models.load(golden_models.end_to_end(folder))
    conditions = features(model, embeddings, mask)
    (image,) = decode(model, "row 0", cfg_scale=END_TO_END["cfg_scale"], conditions=conditions, **parameters)
    return image


# The recorded relaxed runs of the padded prompt read pad rows differently (docs/algorithms.md, section 9, B4).
@pytest.mark.parametrize("run", [run for run in END_TO_END["runs"] if run.startswith("full.") or run.endswith("_off")])
def test_drafted_runs_equal_recording(run: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "end_to_end" / "e2e_expected.safetensors")
    prompt = run.split(".")[0]
    arrays = [expected[f"{prompt}.t5_{array}_right_padded"] for array in ("embeddings", "mask")]
    image = decode_end_to_end(tmp_path, *arrays, **parameters_of(run, END_TO_END))
    wanted = expected[f"{run}.tokens"].flatten().tolist()
    assert image.tokens[: len(wanted)].tolist() == wanted
    if run.endswith("_off"):
        assert wanted == expected[f"{prompt}.ar_greedy_tokens"].flatten().tolist()
    if prompt == "full":
        lengths = expected[f"{run}.accept_lengths"].flatten().tolist()
        lengths = lengths[: golden_models.steps_to(len(wanted), lengths)]
        # Uncut: the last step may exceed the image, and the published code counts it as complete.
        assert [count - 1 for count in image.trace.uncut][: len(lengths)] == lengths


@pytest.mark.parametrize("prompt", END_TO_END["prompts"])
def test_autoregressive_runs_equal_recording(prompt: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "end_to_end" / "e2e_expected.safetensors")
    arrays = [expected[f"{prompt}.caption_embs"], expected[f"{prompt}.emb_masks"]]
    wanted = expected[f"{prompt}.ar_greedy_tokens"].flatten().tolist()
    image = decode_end_to_end(tmp_path, *arrays, mode="ar")
    assert image.tokens[: len(wanted)].tolist() == wanted


def test_picture_equals_official_decoding_of_its_tokens(tmp_path: Path) -> None:
    """The recorded tokenizer under a small target of as many codes, drawn at random."""
    recorded = load_file(GOLDEN / "llamagen_vq" / "vq_expected.safetensors")
    codes, rows, columns = recorded["codes"], *(int(side) for side in recorded["decode_shape"][2:])
    vocab_size = json.loads((GOLDEN / "llamagen_vq" / "vq_info.json").read_text())["K"]
    config = {"dim": 32, "n_layer": 2, "n_head": 2, "intermediate_size": 64, "num_classes": 3, "vocab_size": vocab_size}
    checkpoint = tmp_path / "target.pt"
    torch.save(tiny_llamagen.official_state(tiny_llamagen.llamagen("c2i", (rows, columns), **config)), checkpoint)
    path = golden_models.write_model(
        tmp_path,
        family="llamagen-c2i",
        target={"checkpoint": checkpoint, "config": config},
        tokenizer={"checkpoint": GOLDEN / "llamagen_vq" / "vq.pt"},
        grid=[rows, columns],
    )
    model: Any = golden_models.load(path)
    (image,) = decode(model, "class 1", mode="ar", cfg_scale=2)
    drawn = model.pixels.pixels(image.tokens[None])
    assert np.array_equal(np.asarray(image.picture), drawn[0].numpy())
    official = ((recorded["pixels"].clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1)
    assert (model.pixels.pixels(codes).float() - official).abs().max() <= 1
    assert not isinstance(model.target.cls_embedding, CaptionFeatures)
