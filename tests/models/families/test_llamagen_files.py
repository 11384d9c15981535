"""LlamaGen's files: layouts and back, sizes from shapes, and every way in which a file does not
fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from lantern_bench.models.checkpoints.key_map import export
from lantern_bench.models.families.llamagen import LlamaGen, TextToImage, key_map
from lantern_bench.models.networks.target import Condition
from lantern_bench.models.networks.transformer import rotary_table, rotary_turns
from lantern_bench.models.random_weights import meta_model
from lantern_bench.models.registry import models
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers import golden_models, tiny_llamagen
from tests.helpers.tiny_llamagen import official_state

T2I = tiny_llamagen.llamagen("t2i", cls_token_num=5, caption_dim=8)
C2I = tiny_llamagen.llamagen("c2i", (4, 4), n_kv_head=1)


def model_of(
    folder: Path, state: Any, model: LlamaGen, config: Mapping[str, Any] | None = None, **parts: Any
) -> Path:
    """The model file of a target with this state; `config` changes what it states of its sizes."""
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "target.pt")
    target = {"checkpoint": folder / "target.pt", "config": {**model.spec.config, **(config or {})}}
    values: dict[str, Any] = {
        "family": model.family,
        "target": target,
        "grid": list(model.sizes.grid),
    }
    return golden_models.write_model(folder, **(values | parts))


def logits(path: Path, model: LlamaGen) -> Tensor:
    target: Any = golden_models.load(path).target
    generator = torch.Generator().manual_seed(6)
    valid = torch.ones(2, model.sizes.prefix, dtype=torch.bool)
    values = torch.tensor([1, 2])
    if isinstance(model, TextToImage):
        values = torch.randn(
            2, model.sizes.prefix, model.numbers["caption_dim"], generator=generator
        )
        valid[0, 0] = False
    session = target.session(2, guided=True, nodes=1)
    with torch.no_grad():
        return torch.cat(session.prefill(Condition(values, valid))[:2])


@pytest.mark.parametrize("model", [T2I, C2I], ids=["t2i", "c2i"])
def test_layout_round_trip_keeps_logits(model: LlamaGen, tmp_path: Path) -> None:
    state = official_state(model)
    first = model_of(tmp_path / "first", {"model": state}, model)
    wanted = logits(first, model)
    ours: Any = golden_models.load(first).target
    converted = export(ours, key_map(ours, "hf"))
    assert any(name.endswith("self_attn.k_proj.weight") for name in converted)
    assert "lm_head.weight" in converted
    (tmp_path / "hf").mkdir()
    save_file(converted, tmp_path / "hf" / "model.safetensors")
    names = {"dim": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    sizes = {names.get(key, key): value for key, value in model.spec.config.items()}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": False}))
    target = {"checkpoint": tmp_path / "hf", "layout": "hf"}
    grid = list(model.sizes.grid)
    second = golden_models.write_model(
        tmp_path / "hf", family=model.family, target=target, grid=grid
    )
    assert torch.equal(logits(second, model), wanted)
    again: Any = golden_models.load(second).target
    back = export(again, key_map(again, "official"))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("root", ["model.", "gpt."])
def test_a_name_before_all_tensors_is_no_other_layout(root: str, tmp_path: Path) -> None:
    state = official_state(C2I)
    wanted = logits(model_of(tmp_path / "plain", state, C2I), C2I)
    wrapped = {root + name: tensor for name, tensor in state.items()}
    assert torch.equal(logits(model_of(tmp_path / "wrapped", wrapped, C2I), C2I), wanted)
    del wrapped[f"{root}norm.weight"]
    with pytest.raises(UserError, match=r"1 missing: norm\.weight$"):
        golden_models.load(model_of(tmp_path / "cut", wrapped, C2I))


def test_weights_load_in_the_requested_dtype(tmp_path: Path) -> None:
    path = str(model_of(tmp_path, official_state(C2I), C2I))
    loaded: Any = registry.model_of(path).load(torch.device("cpu"), torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.target.parameters()} == {torch.bfloat16}
    assert loaded.target.transformer.table.values.dtype == torch.float32


def test_every_mismatched_key_is_listed(tmp_path: Path) -> None:
    state = official_state(T2I)
    del state["norm.weight"], state["layers.1.attention.wo.weight"]
    state |= {"layers.0.extra": torch.ones(2), "output.weight": torch.ones(33, 48)}
    with pytest.raises(UserError) as caught:
        golden_models.load(model_of(tmp_path, state, T2I))
    message = caught.value.message
    assert "2 missing: layers.1.attention.wo.weight, norm.weight" in message
    assert "1 unexpected: layers.0.extra" in message
    assert "1 misshapen: output.weight is 33x48, not 32x48" in message


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (torch.int64, None, "tok_embeddings.weight has the unsupported type int64"),
        (torch.float8_e4m3fn, None, "the unsupported type float8_e4m3fn"),
        (torch.float32, torch.nan, "has numbers that are not finite in float32"),
        (torch.float16, None, None),
        (torch.float64, None, None),
    ],
)
def test_invalid_weight_values_are_refused(
    dtype: torch.dtype, value: float | None, message: str | None, tmp_path: Path
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in official_state(C2I).items()}
    if value is not None:
        state["norm.weight"][3] = value
    save_file(state, tmp_path / "target.safetensors")
    target = {"checkpoint": tmp_path / "target.safetensors", "config": C2I.spec.config}
    model = golden_models.write_model(tmp_path, family="llamagen-c2i", target=target, grid=[4, 4])
    if message is None:
        assert golden_models.load(model).grid == (4, 4)
        return
    with pytest.raises(UserError, match=message) as caught:
        golden_models.load(model)
    assert "\n" not in caught.value.message


def stage_signs() -> dict[str, Any]:
    table = rotary_turns(tiny_llamagen.llamagen("c2i", (6, 6)).sizes)[: 1 + 36]
    margin = torch.cat([table, torch.zeros(10, 8, 2)])
    return {
        "freqs_cis": lambda state: {"model": state | {"freqs_cis": table}},
        "with margin": lambda state: {"model": state | {"freqs_cis": margin}},
        "args": lambda state: {
            "model": state,
            "args": argparse.Namespace(image_size=96, downsample_size=16),
        },
        "args as dict": lambda state: {
            "model": state,
            "args": {"image_size": 96, "downsample_size": 16},
        },
    }


@pytest.mark.parametrize("sign", ["freqs_cis", "with margin", "args", "args as dict"])
def test_checkpoints_of_another_stage_are_refused(sign: str, tmp_path: Path) -> None:
    state = stage_signs()[sign](official_state(C2I))
    wrong = model_of(tmp_path / "wrong", state, C2I)
    with pytest.raises(UserError) as caught:
        golden_models.load(wrong)
    for message in ("is of another stage", "6x6 grid (36 tokens)", "4x4"):
        assert message in caught.value.message
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    right = model_of(tmp_path / "right", state, C2I, grid=[6, 6])
    assert golden_models.load(right).grid == (6, 6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cls_embedding.uncond_embedding",
            "it is LlamaGen, text-conditional, in the official layout",
        ),
        (
            "model.cls_embedding.uncond_embedding",
            "it is LlamaGen, text-conditional, in the layout of the HF conversion",
        ),
        ("quantize.embedding.weight", "it is a VQ tokenizer"),
        ("fc.weight", "it is an EAGLE drafter"),
        ("model.layers.0.self_attn.q_norm.weight", "it is a Chameleon model (Anole, Lumina-mGPT)"),
        ("model.layers.0.self_attn.q_proj.weight", "it is a Llama language model"),
        ("what", "it has no "),
    ],
)
def test_other_kinds_of_checkpoint_are_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        golden_models.load(model_of(tmp_path, {name: torch.ones(2, 2)}, C2I))
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_checkpoints_of_another_layout_or_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="it is LlamaGen, class-conditional, in the official layout"
    ):
        golden_models.load(model_of(tmp_path, official_state(C2I), T2I))
    target = {"checkpoint": tmp_path / "target.pt", "layout": "hf", "config": C2I.spec.config}
    with pytest.raises(UserError, match="is not in the layout hf"):
        golden_models.load(model_of(tmp_path, official_state(C2I), C2I, target=target))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, None),
        (
            {"input_type": "t2i2"},
            "is a drafter of another stage: its input_type t2i2 is for a 32x32 grid",
        ),
        ({"hidden_size": 64}, "hidden_size: is 64, and this target needs 48"),
        ({"vocab_size": 16384}, "vocab_size: is 16384, and this target needs 32"),
        (
            {"num_hidden_layers": 2},
            "num_hidden_layers: is 2: only drafters of one layer are supported",
        ),
        ({"num_attention_heads": 5}, "num_attention_heads: 5: does not divide the width 48"),
        (
            {"num_attention_heads": 8},
            "num_attention_heads: 8: gives heads of 6 numbers, and rotary positions need",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2: does not divide the 3 heads"),
        (
            {"num_attention_heads": "three"},
            "num_attention_heads: three: must be a whole number above 0",
        ),
        (
            {"num_key_value_heads": "all"},
            "num_key_value_heads: all: must be a whole number above 0",
        ),
        ({"intermediate_size": "wide"}, "intermediate_size: wide: must be a whole number above 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: small: must be a number above 0"),
        ({"hidden_size": "48"}, "hidden_size: 48: must be a whole number above 0"),
        ({"num_hidden_layers": "one"}, "num_hidden_layers: one: must be a whole number above 0"),
        ({"intermediate_size": 33}, "3 misshapen"),
        ({"bias": False}, "1 unexpected: fc.bias"),
    ],
)
def test_drafter_must_fit_target(
    stated: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = tiny_llamagen.write_drafter(tmp_path / "drafter", T2I, **stated)
    model = model_of(tmp_path / "model", official_state(T2I), T2I, drafter={"dir": folder})
    if message is None:
        assert golden_models.load(model).drafter is not None
        return
    with pytest.raises(UserError) as caught:
        golden_models.load(model)
    assert message in caught.value.message


def test_drafter_without_bias_loads(tmp_path: Path) -> None:
    folder = tiny_llamagen.write_drafter(tmp_path / "drafter", T2I, bias=False)
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    bias = state.pop("fc.bias")
    torch.save(state, folder / "pytorch_model.bin")
    model = model_of(tmp_path / "model", official_state(T2I), T2I, drafter={"dir": folder})
    drafter: Any = golden_models.load(model).drafter
    embedded, features = torch.randn(2, 1, 3, 48, generator=torch.Generator().manual_seed(1))
    wanted = torch.cat([embedded, features], dim=-1) @ state["fc.weight"].T
    assert bias.abs().max() > 0
    assert torch.allclose(drafter.fuse(embedded, features), wanted, atol=1e-6)
    with_bias = tiny_llamagen.write_drafter(tmp_path / "other", T2I)
    torch.save(state, with_bias / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"1 missing: fc\.bias"):
        golden_models.load(
            model_of(tmp_path / "model", official_state(T2I), T2I, drafter={"dir": with_bias})
        )


@pytest.mark.parametrize(
    ("stated", "base"),
    [
        ({}, 10000.0),
        ({"rope_base": 500.0}, 10000.0),
        ({"mask_padding": True}, 300.0),
        ({"mask_padding": True, "rope_base": 700.0}, 700.0),
    ],
)
def test_published_drafters_rotate_with_base_10000(
    stated: dict[str, Any], base: float, tmp_path: Path
) -> None:
    """The published code fixes the base; drafters trained here state `mask_padding` and follow
    their target.
    """
    folder = tiny_llamagen.write_drafter(tmp_path / "drafter", T2I, **stated)
    model = model_of(
        folder=tmp_path,
        state=official_state(T2I),
        model=T2I,
        config={"rope_base": 300.0},
        drafter={"dir": folder},
    )
    loaded: Any = golden_models.load(model)
    assert (loaded.target.config.rope_base, loaded.drafter.config.rope_base) == (300.0, base)
    prefix = T2I.sizes.prefix - 1
    wanted = rotary_table(dataclasses.replace(loaded.target.config, rope_base=base, prefix=prefix))
    assert torch.equal(loaded.drafter.table.values, wanted)


def test_rope_base_counts_and_rope_theta_beside_it_does_not(tmp_path: Path) -> None:
    for config, base in (
        ({"rope_base": 500.0, "rope_theta": 10000.0}, 500.0),
        ({"rope_theta": 600.0}, 600.0),
    ):
        loaded: Any = golden_models.load(
            model_of(folder=tmp_path, state=official_state(C2I), model=C2I, config=config)
        )
        assert loaded.target.config.rope_base == base


@pytest.mark.parametrize("heads", [8, 24, 48])
def test_heads_that_rotary_positions_cannot_turn_are_refused(
    heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a head's pairs turn with the row, half with the column: its width must be a multiple
    of 4.
    """
    model = model_of(
        folder=tmp_path,
        state=official_state(C2I),
        model=C2I,
        config={"n_head": heads, "n_kv_head": heads},
    )
    typed = ["generate", "--class", "1", "--model", str(model), "--mode", "ar"]
    assert cli.main([*typed, "--out", str(tmp_path / "picture.png")]) == 2
    message = capsys.readouterr().err
    assert f"target.config.n_head: {heads}: gives heads of {48 // heads} numbers" in message
    assert "internal" not in message
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    ("config", "parts", "message"),
    [
        (
            {},
            {"target": {"checkpoint": "target.pt"}},
            "target.config.hidden_size: missing: no checkpoint states it",
        ),
        ({"n_head": 5}, {}, "does not divide the width 48"),
        ({}, {"grid": None}, "grid: missing"),
        ({"block_size": 64}, {}, "its config (block_size 64) is for a 8x8 grid"),
        ({"class_dropout_prob": 0}, {}, "target.config.class_dropout_prob: 0: "),
        ({"class_dropout_p": 0.0}, {}, "without a null class"),
        (
            {},
            {"tokenizer": {"checkpoint": "target.pt"}},
            "is not a VQ tokenizer of this family: it is LlamaGen, class",
        ),
        # Without a grid, a square one is that of the block.
        ({"block_size": 16}, {"grid": None}, None),
        ({"class_dropout_prob": 0.1}, {}, None),
    ],
)
def test_impossible_targets_are_refused(
    config: dict[str, Any], parts: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    model = model_of(folder=tmp_path, state=official_state(C2I), model=C2I, config=config, **parts)
    if message is None:
        assert golden_models.load(model).grid == (4, 4)
        return
    with pytest.raises(UserError) as caught:
        golden_models.load(model)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--class", "3"], "no picture can be drawn: it has no tokenizer"),
        (["--class", "7"], "--class 7: "),
        (["a caption"], "'a caption' is not a class"),
        ([], "the prompt is missing"),
        (["--class", "1", "a caption"], "a caption and --class"),
    ],
)
def test_usage_errors_write_nothing(
    typed: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(tmp_path / "model", official_state(C2I), C2I)
    out = tmp_path / "picture.png"
    assert (
        cli.main(["generate", *typed, "--model", str(model), "--mode", "ar", "--out", str(out)])
        == 2
    )
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_relaxed_rules_need_a_codebook(tmp_path: Path) -> None:
    folder = tiny_llamagen.write_drafter(tmp_path / "drafter", C2I)
    model = golden_models.load(
        model_of(tmp_path / "model", official_state(C2I), C2I, drafter={"dir": folder})
    )
    relaxed = {"mode": "lantern++", "neighbours": 3, "lambda_": 2}
    with pytest.raises(RefusedError, match="which codes are near each other"):
        lantern_bench.decode(model, "class 3", **relaxed)  # type: ignore[arg-type]
    for mode in ("speculative", "ar"):
        (image,) = lantern_bench.decode(model, "class 3", mode=mode)
        assert image.picture is None
        assert len(image.tokens)


def test_published_sizes_match_the_paper() -> None:
    """Parameters in millions, arXiv 2406.06525 table 1, and the key list of the text-conditional
    target.
    """
    counted = {
        name: round(card.parameters / 1e6)
        for name, card in models().items()
        if card.parameters is not None
    }
    for scale, millions in {"B": 111, "L": 343, "XL": 775, "XXL": 1411, "3B": 3097}.items():
        assert abs(counted[f"llamagen-c2i-{scale}-384"] - millions) <= 1
    target: Any = meta_model("llamagen-t2i-stage1").target
    assert sum(len(slices) for slices in key_map(target, "hf").values()) == 330
    for name in ("llamagen-t2i-stage1", "llamagen-c2i-B-256", "llamagen-c2i-3B-384"):
        target = meta_model(name).target
        assert (
            sum(parameter.numel() for parameter in target.parameters()) == models()[name].parameters
        )
