"""Writing a trained drafter, in the layout the published ones have: `config.json` and `model.safetensors`.

Beside them stands `model.yaml`, which names the target and this drafter, so that every command takes the result as a
model. The names of the weights are those of the key map that loads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save

from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.eagle import drafter_key_map
from lantern_bench.models.files import write_atomically
from lantern_bench.models.filling import export

__all__ = ["write_drafter"]

# The published code's name for each grid of LlamaGen; the number of condition positions tells t2i from c2i.
_INPUT_TYPES = {((16, 16), 120): "t2i", ((32, 32), 120): "t2i2", ((24, 24), 1): "c2i"}


def write_drafter(drafter: EagleDrafter, folder: Path, target: str, weights: Mapping[str, str]) -> None:
    """Write a drafter, and the model file for it; `target` is the model's name or its file's path.

    `weights` are the hashes of the model it was trained for. Each file is there as a whole or not at all.
    """
    state = {name: tensor.float() for name, tensor in export(drafter, drafter_key_map(drafter)).items()}
    write_atomically(folder / "model.safetensors", save(state, metadata={"format": "pt"}))
    config = json.dumps(_config(drafter) | {"trained_for": weights.get("target", "")}, indent=1)
    write_atomically(folder / "config.json", config.encode() + b"\n")
    name = os.path.relpath(target, folder) if target.lower().endswith((".yaml", ".yml")) else target
    model = yaml.safe_dump({"model": name, "drafter": {"dir": "."}}, sort_keys=False)
    write_atomically(folder / "model.yaml", model.encode())


def _config(drafter: EagleDrafter) -> dict[str, Any]:
    """The config.json: the keys that the published code and ours read, and how padding is treated."""
    config = drafter.config
    shared = {
        "num_hidden_layers": 1,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.words or config.vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if config.qk_norm:
        return {"model_type": "chameleon", **shared, "rope_theta": config.rope_base, "swin_norm": config.norm_after}
    kind = _INPUT_TYPES.get((config.grid, config.prefix))
    told = {} if kind is None else {"input_type": kind}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shared, **told} | {
        "mask_padding": drafter.mask_padding
    }
