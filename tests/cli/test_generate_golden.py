"""Golden recordings through `generate` with a model file, `--save-tokens` and `--save-logits`.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.cli import main as cli
from lantern_bench.models.io.state_dict import export
from lantern_bench.models.llamagen import LlamaGenSize
from lantern_bench.models.llamagen.checkpoint import build_target, key_map
from lantern_bench.models.transformer.conditioning import CaptionFeatures, Condition
from tests.models import golden_models
from tests.models.golden_models import GOLDEN

TOLERANCE = 2e-4


def generate(folder: Path, model: Path, *typed: str, logits: bool = True) -> dict[str, np.ndarray]:
    """Greedy tokens and logits of a command."""
    out = folder / "made.npz"
    flags = ["--temperature", "0", "--save-tokens", str(out), "--force", *(["--save-logits"] if logits else [])]
    assert cli.main(["generate", "--model", str(model), *typed, *flags]) == 0
    with np.load(out) as arrays:
        return {name: arrays[name] for name in arrays.files}


def features(folder: Path, embeddings: Tensor, mask: Tensor) -> str:
    path = folder / "features.npz"
    np.savez(path, embeddings=embeddings.numpy(), mask=mask.numpy())
    return str(path)


def teacher_forced(model: Path, condition: Condition, tokens: np.ndarray, scale: float) -> Tensor:
    """The guided logits of a plain forward over whole sequences."""
    target: Any = golden_models.load(model).target
    fed = torch.from_numpy(tokens).long()
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
def test_classes_equal_recording(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_file(GOLDEN / "llamagen_gpt" / "c2i_expected.safetensors")
    model = golden_models.recorded_target(tmp_path, "c2i")
    if layout == "hf":
        model = converted(tmp_path, model, "c2i")
    for name in (name for name in expected if name.startswith("greedy_cfg")):
        scale = float(name.removeprefix("greedy_cfg"))
        for row, number in enumerate(expected["class_ids"].tolist()):
            made = generate(tmp_path, model, "--class", str(number), "--mode", "ar", "--cfg-scale", str(scale))
            assert made["tokens"][0].tolist() == expected[name][row].tolist()
            gap = np.abs(made["logits"][0, 0] - first_logits(expected, scale)[row].numpy()).max()
            assert gap < TOLERANCE * max(1.0, scale)
            label = Condition(torch.tensor([number]), torch.ones(1, 1, dtype=torch.bool))
            whole = teacher_forced(model, label, made["tokens"], scale)
            assert np.abs(made["logits"] - whole.numpy()).max() < TOLERANCE * max(1.0, scale)
    assert "no picture" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["official", "hf"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_caption_features_equal_recording(padding: str, layout: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "llamagen_gpt" / "t2i_expected.safetensors")
    names = ("caption_embs", "emb_masks")
    if padding == "right":
        names = ("t5_embeddings_right_padded", "t5_mask_right_padded")
    given = features(tmp_path, *(expected[name] for name in names))
    model = golden_models.recorded_target(tmp_path, "t2i")
    if layout == "hf":
        model = converted(tmp_path, model, "t2i")
    for name in (name for name in expected if name.startswith("greedy_cfg")):
        scale = float(name.removeprefix("greedy_cfg"))
        made = generate(tmp_path, model, "--condition", given, "--mode", "ar", "--cfg-scale", str(scale))
        assert made["tokens"].tolist() == expected[name].tolist()
        gap = np.abs(made["logits"][:, 0] - first_logits(expected, scale).numpy()).max()
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
    (out / "config.json").write_text(json.dumps(sizes))
    target_part = {"checkpoint": out / "model.safetensors", "layout": "hf"}
    return golden_models.write_model(folder / "hf", family=f"llamagen-{kind}", target=target_part)


def typed_for(run: str, info: dict[str, Any]) -> list[str]:
    """The flags of a recorded run's name, such as `full.dynamic_k8_d0.25`."""
    drafting, rest = run.split(".", 1)[1].split("_", 1)
    typed = ["--drafting", "static", "--tree", golden_models.TREES[info["tree"]]]
    if drafting == "dynamic":
        # There the root counts as a node, and `depth` the expansions behind the first.
        typed = ["--drafting", "dynamic", "--nodes", str(info["total_token"] - 1)]
        typed += ["--depth", str(info["depth"] + 1), "--beam", str(info["top_k"])]
    if rest == "off":
        return ["--mode", "speculative", *typed]
    k, bound = (part[1:] for part in rest.split("_"))
    rule = ["--mode", "lantern", "--delta"] if float(bound) <= 1 else ["--mode", "lantern++", "--lambda"]
    return [*rule, bound, "--neighbours", k, *typed]


END_TO_END = json.loads((GOLDEN / "end_to_end" / "e2e_info.json").read_text())


# The recorded relaxed runs of the padded prompt read pad rows differently (docs/algorithms.md, section 9, B4).
@pytest.mark.parametrize("run", [run for run in END_TO_END["runs"] if run.startswith("full.") or run.endswith("_off")])
def test_drafted_runs_equal_recording(run: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "end_to_end" / "e2e_expected.safetensors")
    prompt = run.split(".")[0]
    given = features(tmp_path, *(expected[f"{prompt}.t5_{part}_right_padded"] for part in ("embeddings", "mask")))
    typed = ["--condition", given, "--cfg-scale", str(END_TO_END["cfg_scale"]), *typed_for(run, END_TO_END)]
    made = generate(tmp_path, golden_models.end_to_end(tmp_path), *typed, logits=False)
    wanted = expected[f"{run}.tokens"].flatten().tolist()
    assert made["tokens"][0, : len(wanted)].tolist() == wanted
    if run.endswith("_off"):
        assert wanted == expected[f"{prompt}.ar_greedy_tokens"].flatten().tolist()
    if prompt == "full":
        lengths = expected[f"{run}.accept_lengths"].flatten().tolist()
        lengths = lengths[: golden_models.steps_to(len(wanted), lengths)]
        assert made["accept_lengths"][0, : len(lengths)].tolist() == lengths


@pytest.mark.parametrize("prompt", END_TO_END["prompts"])
def test_autoregressive_runs_equal_recording(prompt: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "end_to_end" / "e2e_expected.safetensors")
    given = features(tmp_path, expected[f"{prompt}.caption_embs"], expected[f"{prompt}.emb_masks"])
    typed = ["--condition", given, "--cfg-scale", str(END_TO_END["cfg_scale"]), "--mode", "ar"]
    wanted = expected[f"{prompt}.ar_greedy_tokens"].flatten().tolist()
    made = generate(tmp_path, golden_models.end_to_end(tmp_path), *typed, logits=False)
    assert made["tokens"][0, : len(wanted)].tolist() == wanted


def test_picture_equals_official_decoding_of_its_tokens(tmp_path: Path) -> None:
    """The recorded tokenizer under a small target of as many codes, drawn at random."""
    recorded = load_file(GOLDEN / "llamagen_vq" / "vq_expected.safetensors")
    codes, rows, columns = recorded["codes"], *(int(side) for side in recorded["decode_shape"][2:])
    vocab_size = json.loads((GOLDEN / "llamagen_vq" / "vq_info.json").read_text())["K"]
    size = LlamaGenSize("c2i", 32, 2, 2, 64, (rows, columns), 1, vocab_size=vocab_size, classes=3)
    target = build_target(size)
    checkpoint = tmp_path / "target.pt"
    torch.save(export(target, key_map(target, "official")), checkpoint)
    model = golden_models.write_model(
        tmp_path,
        family="llamagen",
        target={"checkpoint": checkpoint, "config": {"n_head": 2}},
        tokenizer={"checkpoint": GOLDEN / "llamagen_vq" / "vq.pt"},
        grid=[rows, columns],
    )
    picture = tmp_path / "picture.png"
    made = generate(tmp_path, model, "--class", "1", "--mode", "ar", "--cfg-scale", "2", "--out", str(picture))
    loaded = golden_models.load(model)
    drawn = loaded.pixels.pixels(torch.from_numpy(made["tokens"]))
    assert np.array_equal(np.asarray(Image.open(picture)), drawn[0].numpy())
    official = ((recorded["pixels"].clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1)
    assert (loaded.pixels.pixels(codes).float() - official).abs().max() <= 1
    assert not isinstance(loaded.target.cls_embedding, CaptionFeatures)
