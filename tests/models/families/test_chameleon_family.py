"""Anole and Lumina-mGPT as a user has them: files in the published layouts, described by a model
file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.models import registry
from lantern_bench.models.checkpoints.hub import PARTS
from lantern_bench.models.random_weights import meta_model, sizes_of
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from tests.helpers import tiny_chameleon as tiny

CPU = torch.device("cpu")
FLOAT = torch.float32
GRIDS = {"anole-7b": (4, 4), "lumina-mgpt-7b-768": (4, 6)}
MODES: dict[str, dict[str, Any]] = {
    "ar": {},
    "speculative": {"tree": "eagle1-25"},
    "lantern": {"neighbours": 5, "delta": 0.3, "nodes": 12, "depth": 3, "beam": 3},
    "lantern++": {"neighbours": 63, "lambda": 3.0, "tree": "small-7"},
}


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {
        name: model for name, model in registry.models().items() if model.family == "chameleon"
    }
    monkeypatch.setattr(registry, "models", lambda: shipped)


@pytest.fixture(params=GRIDS)
def described(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny.write_model_file(tmp_path, request.param, GRIDS[request.param])


@pytest.fixture
def anole(tmp_path: Path) -> Path:
    return tiny.write_model_file(tmp_path, "anole", (4, 4))


def test_model_files_decode_in_every_mode(described: Path) -> None:
    card = model_of(str(described))
    model = model_of(str(described)).load(CPU, FLOAT)
    model_of(str(described)).check_prompt("a red lantern")
    condition = model.condition(["a red lantern"])
    rows, columns = model.grid
    for mode, shape in MODES.items():
        decoding = Decoding(mode=mode, cfg_scale=3.0, **shape)
        image = decode(
            model=model,
            condition=condition,
            decoding=decoding,
            generators=[torch.Generator().manual_seed(1)],
        )[0]
        assert len(image.tokens) == card.tokens == model.target.image_tokens
        assert model.draw(image.tokens[None]).shape == (1, 2 * rows, 2 * columns, 3)
    assert set(model.weights) == {"target", "sizes", "drafter", "tokenizer"}


def test_batched_prompts_equal_single_prompts(described: Path) -> None:
    """The longer prompt of a batch pads the shorter one."""
    model = model_of(str(described)).load(CPU, FLOAT)
    prompts = ["red", "an image of the lantern over a lantern"]
    decoding = Decoding(mode="ar", temperature=0, cfg_scale=2.0)
    together = decode(
        model=model,
        condition=model.condition(prompts),
        decoding=decoding,
        generators=[torch.Generator()] * 2,
        keep_logits=True,
    )
    for prompt, image in zip(prompts, together, strict=True):
        alone = decode(
            model=model,
            condition=model.condition([prompt]),
            decoding=decoding,
            generators=[torch.Generator()],
            keep_logits=True,
        )[0]
        assert alone.logits is not None
        assert image.logits is not None
        assert (alone.logits - image.logits).abs().max() < 2e-4
        assert alone.tokens.equal(image.tokens)


def test_head_holds_only_the_rows_of_codes(anole: Path) -> None:
    target: Any = model_of(str(anole)).load(CPU, FLOAT).target
    head = load_file(anole.parent / "target" / "model-00002-of-00002.safetensors")["lm_head.weight"]
    numbers = [tiny.vocabulary()[tiny.code_name(code)] for code in range(tiny.CODES)]
    assert target.transformer.output.weight.equal(head[numbers])


def test_neighbour_table_has_a_row_for_forced_tokens(tmp_path: Path) -> None:
    model = model_of(str(tiny.write_model_file(tmp_path, "lumina-mgpt", (4, 4)))).load(CPU, FLOAT)
    table = model.table(63)
    assert table.shape == (65, 63)
    assert int(table.max()) == 63  # no code is near the forced token


def rewritten(file: Path, old: str, new: str) -> str:
    file.write_text(file.read_text().replace(old, new))
    return str(file)


def refused(model: str) -> str:
    with pytest.raises(UserError) as caught:
        model_of(model).load(CPU, FLOAT)
    return caught.value.message


def test_mismatched_checkpoints_give_one_error(anole: Path) -> None:
    shard = anole.parent / "target" / "model-00002-of-00002.safetensors"
    # Copies: the file that is written anew below may be mapped into memory.
    state = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    save_file(
        {"model.norm.weight": state["model.norm.weight"][:8].clone(), "model.rope": torch.zeros(1)},
        shard,
    )
    message = refused(str(anole))
    for part in ("lm_head.weight", "1 unexpected: model.rope", "model.norm.weight is 8, not 32"):
        assert part in message
    # Of the head only the image's rows are read, and the whole of it must be of this vocabulary.
    save_file(state | {"lm_head.weight": state["lm_head.weight"][:100].clone()}, shard)
    assert f"lm_head.weight is 100x32, not {tiny.WORDS}x32" in refused(str(anole))


def test_other_families_are_refused_in_one_line(anole: Path) -> None:
    save_file(
        {"cls_embedding.uncond_embedding": torch.zeros(4, 4)}, anole.parent / "other.safetensors"
    )
    model = rewritten(anole, "checkpoint: target,", "checkpoint: other.safetensors,")
    expected = "is not a Chameleon model in the HF layout: it is LlamaGen, text-conditional"
    message = refused(model)
    assert expected in message
    assert "\n" not in message
    (anole.parent / "config.json").write_text(json.dumps(tiny.config()))
    assert expected in refused(model)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "layout: hf",
            "layout: official",
            "is not in the layout official: it is a Chameleon model",
        ),
        ("layout: hf", "config: {hidden_act: gelu}", "target.config.hidden_act: is gelu"),
        ("family: anole", "family: anolé", "unknown family"),
        ("dir: drafter", "dir: target", "num_hidden_layers: is 2"),
        ("vq/vqgan.ckpt", "target/config.json", "config.json"),
    ],
)
def test_wrong_model_files_are_refused(anole: Path, old: str, new: str, message: str) -> None:
    assert message in refused(rewritten(anole, old, new))


def test_tokenizer_of_another_size_draws_nothing(anole: Path) -> None:
    words = {
        name: number
        for name, number in tiny.vocabulary().items()
        if name != tiny.code_name(tiny.CODES - 1)
    }
    (anole.parent / "target" / "config.json").write_text(
        json.dumps(tiny.config(vocabulary_map=words))
    )
    (anole.parent / "target" / "tokenizer.json").unlink()
    model = model_of(str(anole)).load(CPU, FLOAT)
    with pytest.raises(UserError, match="the tokenizer has 64 codes, the target 63"):
        model.draw(torch.zeros(1, 16))


@pytest.mark.parametrize("name", GRIDS)
def test_published_folders_are_loaded_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files lie as the hub names them; only their sizes are small."""
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    parts = PARTS[name]
    tiny.write_target(tmp_path / parts["target"][0].repo)
    tiny.write_vqgan(tmp_path / parts["tokenizer"][0].repo / "tokenizer")
    if "drafter" in parts:
        tiny.write_drafter(tmp_path / parts["drafter"][0].repo)
    model = model_of(name).load(CPU, FLOAT)
    assert (model.drafter is not None) == ("drafter" in parts) == ("drafter" in model.weights)
    decoding = Decoding(mode="speculative" if model.drafter else "ar", temperature=0, cfg_scale=3.0)
    (image,) = decode(
        model=model,
        condition=model.condition(["a red lantern"]),
        decoding=decoding,
        generators=[torch.Generator()],
        tokens=60,
    )
    ends = (image.tokens == tiny.CODES).nonzero().flatten().tolist()
    assert len(image.tokens) == 60
    assert ends == ([48] if "lumina" in name else [])


@pytest.mark.parametrize("name", GRIDS)
def test_full_shapes_are_counted_without_memory(name: str) -> None:
    model: Any = meta_model(name)
    for module in (model.target, model.drafter, model.pixels.model):
        assert all(parameter.is_meta for parameter in module.parameters())
    sizes = {size.part: size for size in sizes_of(model, torch.bfloat16, guided=True, nodes=26)}
    # Of the head only the rows of the image's tokens are held.
    codes = 8192 + (name != "anole-7b")
    card = model_of(name)
    assert sizes["target"].parameters == (card.parameters or 0) - (65536 - codes) * 4096
    assert sizes["target"].bytes == 2 * sizes["target"].parameters
    positions = math.ceil((256 + (card.tokens or 0) + 2 * 26) / 8) * 8
    assert sizes["target's cache"].bytes == 2 * 2 * 32 * positions * 4096 * 2
    assert sizes["tokenizer"].parameters > 6e7
