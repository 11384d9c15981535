"""Published EAGLE drafters for LlamaGen: their folder (config.json and weights) onto `EagleDrafter`, nothing else.

Their token embedding is their own (it equals the target's output head, finding B3) and is always loaded from the file.
They read padded positions (finding B4), and their `input_type` fixes the grid they draft for, whatever else is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.checkpoint import open_checkpoint
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.filling import KeyMap, fill
from lantern_bench.models.llama_names import llama_key_map
from lantern_bench.models.llamagen import is_computed
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig

__all__ = ["build_drafter", "drafter_config", "drafter_key_map", "load_drafter", "read_drafter_config"]

# The published code's grid for each kind of input.
_SIDES = {"c2i": 24, "t2i": 16, "t2i2": 32}
_EPS = 1e-6


def load_drafter(folder: Path, target: TransformerTarget, *, dtype: torch.dtype, device: torch.device) -> EagleDrafter:
    """Load a published drafter for a target that has its weights.

    Raises `UserError` for a folder without config.json or weights, sizes that are not the target's, a drafter of
    another stage, and every key that does not fit.
    """
    stated = read_drafter_config(folder)
    config = drafter_config(stated, target.config, folder)
    _check_stage(stated, target.config, folder)
    with torch.device("meta"):
        drafter = build_drafter(config, target)
        # Ours state it; the published ones read padding and say nothing.
        drafter.mask_padding = stated.get("mask_padding", False) is True
    checkpoint = open_checkpoint(folder)
    key_map = drafter_key_map(drafter)
    wanted = "the EAGLE drafter of its config.json"
    fill(drafter, checkpoint, key_map, dtype=dtype, device=device, computed=is_computed, wanted=wanted)
    return drafter


def build_drafter(config: TransformerConfig, target: TransformerTarget) -> EagleDrafter:
    """A drafter as they were published: it reads padding, and its layer has no input norm."""
    return EagleDrafter(config, target.transformer.output, mask_padding=False)


def drafter_key_map(drafter: EagleDrafter) -> KeyMap:
    """The key map of the published layout; query, key and value are one matrix here (no rotary permutation)."""
    return llama_key_map(drafter, drafter.config, {"layer.": "layers.0."})


def read_drafter_config(folder: Path) -> Mapping[str, Any]:
    """The config.json of a drafter; raises `UserError` when it is missing or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file", "A published drafter is a folder with config.json and its weights.")
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(stated, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return stated


def drafter_config(stated: Mapping[str, Any], target: TransformerConfig, folder: Path) -> TransformerConfig:
    """The sizes of a drafter's one layer for a target; raises `UserError` where the two cannot work together."""
    wanted = {"hidden_size": target.dim, "vocab_size": target.vocab_size, "num_hidden_layers": 1}
    for name, value in wanted.items():
        if stated.get(name, value) != value:
            raise UserError(
                f"{folder / 'config.json'}: {name} is {stated[name]}, and this target needs {value}",
                "The drafter was trained for another model.",
            )
    heads = stated.get("num_attention_heads", target.heads)
    ffn = stated.get("intermediate_size", target.ffn_dim)
    for name, number in (("num_attention_heads", heads), ("intermediate_size", ffn)):
        if not isinstance(number, int) or number < 1 or (name == "num_attention_heads" and target.dim % number):
            raise UserError(f"{folder / 'config.json'}: {name} is {number}, which cannot be")
    return replace(
        target,
        layers=1,
        heads=heads,
        kv_heads=stated.get("num_key_value_heads") or heads,
        ffn_dim=ffn,
        norm_eps=float(stated.get("rms_norm_eps", _EPS)),
    )


def _check_stage(stated: Mapping[str, Any], target: TransformerConfig, folder: Path) -> None:
    side = _SIDES.get(str(stated.get("input_type")))
    if side is not None and target.grid != (side, side):
        raise UserError(
            f"{folder}: is a drafter of another stage: its input_type {stated['input_type']} is for a {side}x{side} "
            f"grid, and this model's grid is {target.grid[0]}x{target.grid[1]}",
            "Give the drafter that was trained for this model.",
        )
