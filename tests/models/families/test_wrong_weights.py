"""Files that do not hold what they seem to: refused, or loaded with a remark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lantern_bench.models.checkpoint_model import FAMILIES
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.checkpoints.vq_layouts import LAYOUTS
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from tests.helpers import tiny_hosted as tiny
from tests.helpers import tiny_llamagen

CPU = torch.device("cpu")
HEAD = "text_model.lm_head.weight"
EMBEDDING = "text_model.model.embed_tokens.weight"
PLAIN = tiny.Shape()
WRITERS = {"emu3": tiny.write_emu3, "janus": tiny.write_janus}
Weights = dict[str, Tensor]


def write(
    folder: Path,
    family: str,
    weights: Callable[[Weights], Weights] = dict,
    shape: tiny.Shape = PLAIN,
    **config: Any,
) -> Path:
    """A model file of a tiny checkpoint whose weights and config are changed."""
    WRITERS[family](folder / "weights", shape)
    path = folder / "weights" / "model.safetensors"
    save_file(weights(load_file(path)), path)
    change_config(folder / "weights", **config)
    grid = "grid: [4, 5]\n" if family == "emu3" else ""
    (folder / "model.yaml").write_text(f"family: {family}\n{grid}target: {{checkpoint: weights}}\n")
    return folder / "model.yaml"


def change_config(folder: Path, **changes: Any) -> None:
    """Change config.json; a mapping changes a section, and None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    path.write_text(json.dumps(without_none(config)))


def without_none(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the keys that are None, also inside its sections."""
    kept = {key: value for key, value in config.items() if value is not None}
    return {
        key: without_none(value) if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def load(path: Path) -> LoadedModel:
    return model_of(str(path)).load(CPU, torch.float32)


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


# ---- Heads and configs


@pytest.mark.parametrize("keys", [("top", "text"), ("top",), ("text",)])
def test_a_missing_head_needs_a_tied_config(keys: tuple[str, ...], tmp_path: Path) -> None:
    name = "tie_word_embeddings"
    config = {
        name: False if "top" in keys else None,
        "text_config": {name: False if "text" in keys else None},
    }
    path = write(tmp_path, "emu3", without(HEAD), **config)
    message = rf"{name}: is false, and .*weights has no lm_head\.weight"
    with pytest.raises(UserError, match=message):
        load(path)


def test_a_head_that_no_config_mentions_is_named(tmp_path: Path) -> None:
    name = "tie_word_embeddings"
    path = write(tmp_path, "emu3", without(HEAD), **{name: None, "text_config": {name: None}})
    assert "has no lm_head.weight: its embedding is the head" in load(path).remarks[0]


def test_a_model_of_the_wanted_kind_is_not_called_another(tmp_path: Path) -> None:
    head = "model.generation_head.vision_head.weight"
    path = write(tmp_path, "janus", without(head))
    with pytest.raises(
        UserError, match=r"is a Janus model in the layout of .*, but it has no model"
    ):
        load(path)


def test_a_tied_config_with_another_head_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "emu3", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"tie_word_embeddings: is true, and .* differs from"):
        load(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "text_config.partial_rotary_factor: is 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "text_config.rope_parameters.mrope_section: is [1, 1, 2]",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "text_config.rope_parameters.partial_rotary_factor: is 0.25",
        ),
        ({"rope_parameters": [1]}, "text_config.rope_parameters: must be a mapping"),
        ({"sliding_window": 8}, "text_config.sliding_window: is 8"),
        ({"final_logit_softcapping": 30.0}, "text_config.final_logit_softcapping: is 30.0"),
        ({"logits_scaling": 8.0}, "text_config.logits_scaling: is 8.0"),
        ({"embedding_multiplier": 12}, "text_config.embedding_multiplier: is 12"),
        ({"use_qk_norm": True}, "text_config.use_qk_norm: is True"),
        ({"num_local_experts": 8}, "text_config.num_local_experts: is 8"),
        ({"clip_qkv": 8.0}, "text_config.clip_qkv: is 8.0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "text_config.layer_types: is"),
        ({"query_pre_attn_scalar": 16}, "text_config.query_pre_attn_scalar: is 16"),
        ({"head_dim": 16}, "text_config.head_dim: is 16"),
    ],
)
def test_keys_that_change_the_network_are_read_or_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "emu3", text_config=config)
    with pytest.raises(UserError) as caught:
        load(path)
    assert message in caught.value.message


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "emu3", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="quantization_config: quantised weights are not supported"):
        load(path)


def test_keys_without_effect_are_allowed(tmp_path: Path) -> None:
    neutral = {
        "partial_rotary_factor": 1.0,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
        "logit_scale": 1,
        "use_qk_norm": False,
        "num_experts": 0,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "rotary_dim": 8,
        "attention_dropout": 0.5,
    }
    assert not load(write(tmp_path, "emu3", text_config=neutral)).remarks


def test_the_newer_name_of_the_rotary_base_counts(tmp_path: Path) -> None:
    both = {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 1e6}}
    model: Any = load(write(tmp_path, "emu3", text_config=both))
    assert model.target.config.rope_base == 1e6
    assert "text_config.rope_theta: 10000.0, and rope_parameters says 1000000.0" in model.remarks[0]
    # What stands in another source does not count as stated twice.
    file = tmp_path / "model.yaml"
    file.write_text(
        "family: emu3\ngrid: [4, 5]\n"
        "target: {checkpoint: weights, config: {text_config: {rope_theta: 500.0}}}\n"
    )
    model = load(file)
    assert model.target.config.rope_base == 500.0


def test_an_older_base_beside_published_defaults_counts(tmp_path: Path) -> None:
    old = {"rope_theta": 700.0, "rope_parameters": None}
    model: Any = load(write(tmp_path, "emu3", text_config=old))
    assert model.target.config.rope_base == 700.0
    assert not model.remarks


def test_janus_draws_the_grid_of_its_config(tmp_path: Path) -> None:
    file = write(tmp_path, "janus")
    text = file.read_text()
    file.write_text(f"{text}grid: [4, 4]\n")
    assert load(file).grid == (4, 4)
    file.write_text(f"{text}grid: [4, 5]\n")
    with pytest.raises(UserError, match=r"grid: \[4, 5\]: this Janus draws 4x4 codes"):
        load(file)


def test_emu3_of_single_frames_is_loaded(tmp_path: Path) -> None:
    model: Any = load(write(tmp_path, "emu3", shape=tiny.Shape(frames=1)))
    assert model.pixels.model.config.frames == 1
    assert model.draw(torch.zeros(1, model.target.image_tokens, dtype=torch.int64)).any()


def test_a_config_whose_link_is_broken_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "emu3")
    (tmp_path / "weights" / "config.json").unlink()
    (tmp_path / "weights" / "config.json").symlink_to("gone")
    with pytest.raises(UserError, match=r"config\.json: cannot be read as JSON: .* No such file"):
        load(path)


def test_emu3_in_its_authors_layout_is_named(tmp_path: Path) -> None:
    def authors(weights: Weights) -> Weights:
        return {
            name.removeprefix("text_model."): value
            for name, value in weights.items()
            if name.startswith("text_model.")
        }

    with pytest.raises(UserError, match="it is a Llama language model, as Emu3-Gen in") as caught:
        load(write(tmp_path, "emu3", authors))
    assert "BAAI/Emu3-Gen-hf" in str(caught.value.advice)


def test_a_llamagen_size_with_two_values_is_refused(tmp_path: Path) -> None:
    config = tiny_llamagen.CONFIGS["c2i"] | {"hidden_size": 64}
    part = {"checkpoint": tmp_path / "model" / "target.pt", "config": config}
    path = tiny_llamagen.write_model_file(tmp_path / "model", "c2i", target=part)
    with pytest.raises(UserError, match=r"target\.config\.dim: is 48, and hidden_size is 64"):
        load(path)


def test_a_padded_vocabulary_is_named(tmp_path: Path) -> None:
    path = tiny_llamagen.write_model_file(tmp_path / "model", "c2i")
    file = tmp_path / "model" / "target.pt"
    weights = torch.load(file)["model"]
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])])
    torch.save({"model": weights}, file)
    with pytest.raises(UserError) as caught:
        load(path)
    wanted = "is 64x48, not 32x48 (vocab_size here is 32; the checkpoint's is 64)"
    assert f"output.weight {wanted}" in caught.value.message


# ---- What a model file chooses


def test_a_model_file_chooses_the_weights(tmp_path: Path) -> None:
    path = tiny_llamagen.write_model_file(tmp_path / "model", "c2i")
    raw: Any = load(path)
    file = tmp_path / "model" / "target.pt"
    weights = torch.load(file)["model"]
    torch.save({"model": weights, "ema": {k: v / 2 for k, v in weights.items()}}, file)
    both: Any = load(path)
    assert "holds weights in model and ema; model is taken" in both.remarks[0]
    part = {"checkpoint": file, "config": tiny_llamagen.CONFIGS["c2i"], "weights": "ema"}
    chosen: Any = load(
        tiny_llamagen.golden_models.write_model(
            tmp_path / "model", family="llamagen-c2i", grid=[3, 5], target=part
        )
    )
    weight = raw.target.transformer.output.weight
    assert both.target.transformer.output.weight.equal(weight)
    assert chosen.target.transformer.output.weight.equal(weight / 2)
    assert not chosen.remarks
    # A run of one is not continued with the other.
    assert chosen.weights["target"] == both.weights["target"]
    assert chosen.weights["sizes"] != both.weights["sizes"]


# ---- Drafters


def drafter(folder: Path, change: Callable[[Weights], Any], **config: Any) -> Path:
    """A LlamaGen with a changed drafter."""
    path = tiny_llamagen.write_model_file(folder / "model", "c2i")
    file = folder / "model" / "drafter" / "pytorch_model.bin"
    torch.save(change(torch.load(file)), file)
    change_config(folder / "model" / "drafter", **config)
    return path


def test_a_drafter_without_embedding_takes_the_targets(tmp_path: Path) -> None:
    model: Any = load(drafter(tmp_path, without("embed_tokens.weight")))
    embedding = model.target.transformer.tok_embeddings.weight
    assert model.drafter.embed_tokens.weight.equal(embedding)
    assert "has no embed_tokens.weight: the target's is taken" in model.remarks[0]


def test_a_drafter_may_hold_a_copy_of_the_targets_head(tmp_path: Path) -> None:
    path = drafter(tmp_path, dict)
    model: Any = load(path)
    file = tmp_path / "model" / "drafter" / "pytorch_model.bin"
    head = model.target.transformer.output.weight.clone()
    torch.save(torch.load(file) | {"lm_head.weight": head}, file)
    assert "its lm_head.weight is the target's head" in load(path).remarks[0]
    torch.save(torch.load(file) | {"lm_head.weight": head + 1}, file)
    with pytest.raises(UserError, match=r"lm_head\.weight that differs from the target's head"):
        load(path)


def test_a_drafter_without_bias_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 missing: fc\.bias") as caught:
        load(drafter(tmp_path, without("fc.bias")))
    assert "write bias: false into its config.json" in str(caught.value.advice)
    assert load(drafter(tmp_path / "mended", without("fc.bias"), bias=False)).drafter is not None


EAGLE3 = ("d2t", "t2d", "fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight")
MEDUSA = ("0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "1.0.linear.weight", "1.1.weight")


@pytest.mark.parametrize(
    ("names", "kind"), [(EAGLE3, "an EAGLE-3 drafter"), (MEDUSA, "a Medusa head")]
)
def test_heads_of_other_methods_are_named(
    names: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"it is {kind}, which this package does not read"):
        load(drafter(tmp_path, lambda _weights: {name: torch.ones(2, 2) for name in names}))


def test_where_a_tokenizer_lies_is_known_before_it_is_read() -> None:
    """A model file may leave the tokenizer out only where the target's file holds it."""
    for family, row in FAMILIES.items():
        if row.vq_layout is None:
            continue  # it has none
        published = [hub.PARTS.get(name, {}) for name in row.models]
        is_apart = any(parts.get("tokenizer") != parts.get("target") for parts in published)
        assert is_apart != bool(LAYOUTS[row.vq_layout].inside), family
