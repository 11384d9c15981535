"""Drafters in the folder layout that EAGLE publishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern_bench.models.checkpoints.checkpoint import Checkpoint, open_checkpoint, what_is
from lantern_bench.models.checkpoints.key_map import KeyMap, llama_key_map, load_into
from lantern_bench.models.loaded_model import LoadedModel, transformer_of
from lantern_bench.models.model import Model
from lantern_bench.models.networks.eagle import EagleDrafter, embedding_of
from lantern_bench.models.networks.target import CachedTarget
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
    llama_sizes,
    read_number,
    with_one_rope_base,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import read_json
from lantern_bench.utils.hashes import hash_of

# Tables and caches in published files, which are computed anew.
_COMPUTED = r"(.*\.)?(freqs_cis|causal_mask|k_cache|v_cache|inv_freq|cos_cached|sin_cached)$"
# The published code rotates by this base, whatever the target and the file say.
_ROPE_BASE = 10000.0
# The published code's grid and number of condition positions for each `input_type`.
INPUT_TYPES = {"c2i": ((24, 24), 1), "t2i": ((16, 16), 120), "t2i2": ((32, 32), 120)}


def drafter_key_map(drafter: EagleDrafter) -> KeyMap:
    """Return the key map of the published layout."""
    return llama_key_map(drafter, drafter.config, {"layer.": "layers.0."})


def give_drafter(model: LoadedModel, described: Model) -> None:
    """Give a loaded model the published drafter of a folder.

    Args:
        model: The model.
        described: Names the folder, and what the model file states of the drafter.

    Raises:
        UserError: As `load_drafter`.
    """
    folder = described.files()["drafter"]
    entry = described.stated("drafter", "weights")
    checkpoint = open_checkpoint(folder, entry=entry)
    checkpoint.check_hash(described.stated("drafter", "sha256"))
    model.drafter = load_drafter(folder, transformer_of(model), checkpoint=checkpoint)
    model.remarks = (*model.remarks, *checkpoint.remarks)
    digest = hash_of((*checkpoint.paths, folder / "config.json"))
    if entry is not None:
        digest = f"{digest} {entry}"
    model.weights = {**model.weights, "drafter": digest}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a drafter's config.json. Raises `UserError` for a folder without."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{path}: no such file",
            "A published drafter is a folder with config.json and its weights.",
        )
    stated = read_json(path)
    if not isinstance(stated, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return stated


def load_drafter(
    folder: Path,
    target: CachedTarget,
    dtype: torch.dtype | None = None,
    checkpoint: Checkpoint | None = None,
) -> EagleDrafter:
    """Load a published drafter onto the device of its target.

    Args:
        folder: Folder with config.json and weights.
        target: The loaded target, whose head the drafter takes.
        dtype: Type of the weights. The default is the type of the target.
        checkpoint: The opened weights. The default opens them.

    Raises:
        UserError: The folder has no drafter, or one that does not fit the target.
    """
    stated = read_config(folder)
    config = drafter_config(stated, target.drafter_config, folder)
    if checkpoint is None:
        checkpoint = open_checkpoint(folder)
    is_chameleon = target.config.qk_norm
    wanted = "the EAGLE drafter of its config.json"
    if is_chameleon:
        wanted = "an EAGLE drafter of Chameleon"
        checkpoint.require("layers.0.self_attn.q_norm.weight", wanted)
    _share(checkpoint, target)
    with torch.device("meta"):
        drafter = EagleDrafter(
            config,
            target.transformer.output,
            # Drafters trained here state it. LlamaGen's published drafters state nothing, and
            # read padding.
            mask_padding=is_chameleon or stated.get("mask_padding", False) is True,
            # The published code takes any value but false or null for true.
            bias=bool(stated.get("bias", True)),
        )
    load_into(
        drafter,
        checkpoint,
        drafter_key_map(drafter),
        dtype=dtype or target.dtype,
        device=target.device,
        ignored=_COMPUTED,
        wanted=wanted,
    )
    return drafter


def _share(checkpoint: Checkpoint, target: CachedTarget) -> None:
    """Complete a drafter by its target's embedding, and drop a copy of its target's head.

    EAGLE shares both. Raises `UserError` for a head of its own.
    """
    name = "embed_tokens.weight"
    if name not in checkpoint and "fc.weight" in checkpoint:
        checkpoint[name] = embedding_of(target)
        checkpoint.remarks.append(f"{checkpoint.path}: has no {name}: the target's is taken")
    head = checkpoint.get("lm_head.weight")
    ours = getattr(target.transformer.output, "weight", None)
    if head is None or what_is(checkpoint) != "an EAGLE drafter":
        return
    ids = target.config.token_ids
    if ids is not None and len(head) == target.config.embedded_tokens:
        head = head[torch.tensor(ids)]
    if ours is None or not torch.equal(head.to(ours.device, ours.dtype), ours):
        raise UserError(
            f"{checkpoint.path}: has an lm_head.weight that differs from the target's head, which "
            "EAGLE drafters share",
            "It was trained for another model; or remove lm_head.weight from the file.",
        )
    del checkpoint["lm_head.weight"]
    checkpoint.remarks.append(f"{checkpoint.path}: its lm_head.weight is the target's head")


def drafter_config(
    stated: Mapping[str, Any], target: TransformerConfig, folder: Path
) -> TransformerConfig:
    """Return the sizes of a drafter's layer.

    Args:
        stated: The content of its config.json.
        target: Sizes of the target.
        folder: The drafter's folder, for errors.

    Raises:
        UserError: The drafter cannot work with this target.
    """

    def error_at(key: str, text: str, advice: str | None = None) -> UserError:
        return UserError(f"{folder / 'config.json'}: {key}: {text}", advice)

    is_chameleon = target.qk_norm
    of_target = {
        "hidden_size": target.dim,
        "vocab_size": target.embedded_tokens,
        "num_attention_heads": target.heads,
        "intermediate_size": target.ffn_dim,
    }
    stated, _ = with_one_rope_base(stated)
    config: dict[str, Any] = of_target | {
        key: value for key, value in stated.items() if value is not None
    }
    for key in ("hidden_size", "vocab_size"):
        size = read_number(key, config[key], error_at)
        if size != of_target[key]:
            raise error_at(
                key,
                f"is {size}, and this target needs {of_target[key]}",
                "It was trained for another model.",
            )

    if not is_chameleon:
        # Drafters trained here state `mask_padding`, and rotate as they say or as their target.
        config["rope_theta"] = _ROPE_BASE
        if "mask_padding" in stated:
            config["rope_theta"] = stated.get("rope_base", target.rope_base)
    read = ("swin_norm", "bias", "rope_base", "rope_theta")
    sizes = llama_sizes(config, error_at, positions=target.positions, read=read)
    del sizes["text_vocab_size"]  # `target` has it, or is as large without
    layers = sizes.pop("layers", 1)
    if layers != 1:
        raise error_at(
            "num_hidden_layers", f"is {layers}: only drafters of one layer are supported"
        )
    grid, _ = INPUT_TYPES.get(str(stated.get("input_type")), (target.grid, 0))
    if target.grid != grid:
        rows, columns = target.grid
        raise UserError(
            f"{folder}: is a drafter of another stage: its input_type {stated['input_type']} is "
            f"for a {grid[0]}x{grid[1]} grid, and this model's grid is {rows}x{columns}",
            "Give the drafter that was trained for this model.",
        )
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("norm_eps", target.norm_eps if is_chameleon else 1e-6)
    return replace(target, **sizes)
