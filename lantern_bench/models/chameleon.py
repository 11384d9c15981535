"""Chameleon: modules of a size, and key maps of the HF layout and of its published drafters onto them, nothing else.

A picture uses a part of the vocabulary. Of the output head only the rows of that part are held, so that everything
behind the logits works on image codes and never sees a word.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lantern_bench.errors import UserError
from lantern_bench.models.chameleon_sizes import read_config
from lantern_bench.models.checkpoint import Checkpoint, open_checkpoint
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.eagle import read_drafter_config
from lantern_bench.models.filling import KeyMap, Piece, fill
from lantern_bench.models.llama_names import llama_key_map
from lantern_bench.models.recognise import what_is
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig

__all__ = ["build_drafter", "check_target", "drafter_key_map", "key_map", "load_drafter", "load_target"]

_HEAD = "transformer.output.weight"


def load_target(
    checkpoint: Checkpoint, config: TransformerConfig, *, dtype: torch.dtype, device: torch.device
) -> TransformerTarget:
    """Load a target in the HF layout; raises `UserError` for another model, and for every key that does not fit."""
    check_target(checkpoint)
    with torch.device("meta"):
        target = TransformerTarget(config)
    wanted = f"Chameleon of {config.layers} layers of width {config.dim}"
    fill(target, checkpoint, key_map(target), dtype=dtype, device=device, computed=_unused, wanted=wanted)
    return target


def check_target(checkpoint: Checkpoint) -> None:
    """Raise `UserError`, in one line, for a checkpoint that is no Chameleon in the HF layout."""
    _check_kind(checkpoint, "model.layers.0.self_attn.q_norm.weight", "a Chameleon model in the HF layout")


def _check_kind(checkpoint: Checkpoint, tell_tale: str, wanted: str) -> None:
    """Refuse what is another model altogether, in one line."""
    if tell_tale not in checkpoint:
        kind = what_is(checkpoint)
        found = f"it is {kind}" if kind is not None and kind not in wanted else f"it has no {tell_tale}"
        raise UserError(f"{checkpoint.path}: is not {wanted}: {found}", "Give the checkpoint of this model.")


def key_map(target: TransformerTarget) -> KeyMap:
    """The key map of the HF layout; of the head it takes the rows of the image's tokens."""
    config = target.config
    pieces = llama_key_map(target, config)
    if config.token_ids is not None:
        ids = torch.tensor(config.token_ids, device="cpu")

        def rows_of_codes(head: Tensor) -> Tensor:
            return head[ids]

        pieces[_HEAD] = (Piece("lm_head.weight", len(ids), prepare=rows_of_codes, file_rows=config.words),)
    return pieces


def _unused(name: str) -> bool:
    """The encoder that turns given pictures into tokens is in the file; nothing here reads pictures."""
    return name.startswith("model.vqmodel.") or name.endswith(".rotary_emb.inv_freq")


def load_drafter(folder: Path, target: TransformerTarget, *, dtype: torch.dtype, device: torch.device) -> EagleDrafter:
    """Load a published drafter (config.json and weights) for a target that has its weights.

    Raises `UserError` for a folder without config.json or weights, a drafter of another model, every key that does not
    fit.
    """
    where = folder / "config.json"
    size = read_config(read_drafter_config(folder), lambda key, text: UserError(f"{where}: {key}: {text}"))
    wide = target.config
    for key, has, needed in (
        ("hidden_size", size.dim, wide.dim),
        ("vocab_size", size.words, wide.words or wide.vocab_size),
        ("num_hidden_layers", size.layers, 1),
    ):
        if has != needed:
            raise UserError(
                f"{where}: {key} is {has}, and the drafter of this target has {needed}",
                "The drafter was trained for another model.",
            )
    config = replace(
        wide,
        layers=1,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn_dim=size.ffn_dim,
        norm_eps=size.norm_eps,
        rope_base=size.rope_base,
    )
    checkpoint, wanted = open_checkpoint(folder), "an EAGLE drafter of Chameleon"
    _check_kind(checkpoint, "layers.0.self_attn.q_norm.weight", wanted)
    with torch.device("meta"):
        drafter = build_drafter(config, target)
    names = drafter_key_map(drafter)
    fill(drafter, checkpoint, names, dtype=dtype, device=device, computed=_unused, wanted=wanted)
    return drafter


def build_drafter(config: TransformerConfig, target: TransformerTarget) -> EagleDrafter:
    """A drafter as they were published: padding is hidden from it, and its layer norms its input."""
    return EagleDrafter(replace(config, layers=1), target.transformer.output, input_norm=True)


def drafter_key_map(drafter: EagleDrafter) -> KeyMap:
    """The key map of the published layout."""
    return llama_key_map(drafter, drafter.config, {"layer.": "layers.0."})
