"""Drafters in the folder layout that EAGLE publishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.key_map import KeyMap, llama_key_map, load_into
from lantern_bench.models.networks.eagle import EagleDrafter, build_drafter
from lantern_bench.models.networks.target import (
    CachedTarget,
)
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    llama_sizes,
    read_sizes,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import read_json


def drafter_key_map(drafter: EagleDrafter) -> KeyMap:
    """Return the key map of the published layout."""
    return llama_key_map(drafter, drafter.config, {"layer.": "layers.0."})


# Tables and caches, which are computed anew.
_COMPUTED = r"(.*\.)?(freqs_cis|causal_mask|k_cache|v_cache|inv_freq|cos_cached|sin_cached)$"


def load_drafter(
    folder: Path, target: CachedTarget, *, dtype: torch.dtype, device: torch.device
) -> EagleDrafter:
    """Load a published drafter for a loaded target; raises `UserError` for one that does not fit it."""
    path = folder / "config.json"
    chameleon = target.config.qk_norm
    if not path.is_file():
        raise UserError(
            f"{path}: no such file",
            "A published drafter is a folder with config.json and its weights.",
        )
    if not isinstance(stated := read_json(path), dict):
        raise UserError(f"{path}: must hold a JSON object")
    config = drafter_config(stated, target.drafter_config, folder)
    checkpoint = open_checkpoint(folder)
    wanted = (
        "an EAGLE drafter of Chameleon" if chameleon else "the EAGLE drafter of its config.json"
    )
    if chameleon:
        checkpoint.require("layers.0.self_attn.q_norm.weight", wanted)
    with torch.device("meta"):
        # As in the published code, which takes any value but false or null for true.
        drafter = build_drafter(config, target, bias=bool(stated.get("bias", True)))
        # Drafters trained here state it; LlamaGen's published ones read padding and state nothing.
        drafter.mask_padding = chameleon or stated.get("mask_padding", False) is True
    keys = drafter_key_map(drafter)
    load_into(
        drafter, checkpoint, keys, dtype=dtype, device=device, ignored=_COMPUTED, wanted=wanted
    )
    return drafter


def drafter_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that decide what a published drafter computes."""
    return (*open_checkpoint(folder).paths, folder / "config.json")


_ROPE_BASE = 10000.0  # of the published code, whatever the target's is and the file says
# The published code's grid and number of condition positions for each `input_type`.
INPUT_TYPES = {"c2i": ((24, 24), 1), "t2i": ((16, 16), 120), "t2i2": ((32, 32), 120)}


def drafter_config(
    stated: Mapping[str, Any], target: TransformerConfig, folder: Path
) -> TransformerConfig:
    """Return the sizes of a drafter's one layer; raises `UserError` where it cannot work with the target."""

    def wrong(key: str, text: str, advice: str | None = None) -> UserError:
        return UserError(f"{folder / 'config.json'}: {key}: {text}", advice)

    chameleon = target.qk_norm
    needed = {"hidden_size": target.dim, "vocab_size": target.embedded_tokens}
    config: dict[str, Any] = {
        "num_attention_heads": target.heads,
        "intermediate_size": target.ffn_dim,
        **needed,
    }
    config |= {key: value for key, value in stated.items() if value is not None}
    for key, size in read_sizes(config, {key: (key,) for key in needed}, wrong).items():
        if size != needed[key]:
            raise wrong(
                key,
                f"is {size}, and this target needs {needed[key]}",
                "It was trained for another model.",
            )
    # drafters trained here state `mask_padding`, and rotate as they say or as their target
    if not chameleon:
        config["rope_theta"] = (
            stated.get("rope_base", target.rope_base) if "mask_padding" in stated else _ROPE_BASE
        )
    sizes = llama_sizes(config, wrong, target.positions)
    del sizes["dim"], sizes["text_vocab_size"]
    if (layers := sizes.pop("layers", 1)) != 1:
        raise wrong("num_hidden_layers", f"is {layers}: only drafters of one layer are supported")
    (rows, columns), _ = INPUT_TYPES.get(str(stated.get("input_type")), (target.grid, 0))
    if target.grid != (rows, columns):
        raise UserError(
            f"{folder}: is a drafter of another stage: its input_type {stated['input_type']} is for a {rows}x{columns} "
            f"grid, and this model's grid is {target.grid[0]}x{target.grid[1]}",
            "Give the drafter that was trained for this model.",
        )
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("norm_eps", target.norm_eps if chameleon else 1e-6)
    return replace(target, **sizes)
