"""Chameleon: modules of a size, and key maps of the HF layout and of its published drafters onto them, nothing else.

A picture uses a part of the vocabulary. Of the output head only the rows of that part are held, so that everything
behind the logits works on image codes and never sees a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lantern_bench.errors import UserError
from lantern_bench.models.chameleon import read_config
from lantern_bench.models.eagle import EagleDrafter, read_drafter_config
from lantern_bench.models.io.checkpoint import Checkpoint, open_checkpoint, what_is
from lantern_bench.models.io.state_dict import KeyMap, Piece, fill, llama_key_map, plain
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.target import TransformerTarget
from lantern_bench.models.vq import VQConfig, VQModel

# ---- Chameleon's image tokenizer: `vqgan.ckpt` and `vqgan.yaml`, in the layout of taming-transformers, onto `VQMod

PUBLISHED_VQGAN = VQConfig(codes=8192, code_dim=256, unit_codes=False, attention=False)
"""Chameleon's tokenizer, which Anole and Lumina-mGPT share."""

_MIDDLE = {"0": "block_1", "1": "attn_1", "2": "block_2"}


def load_vqgan(path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
    """Load a tokenizer in float32; `config` is what vqgan.yaml holds, else it is read beside the checkpoint.

    Raises `UserError` for a missing or malformed yaml, sizes that cannot be, and every key that does not fit.
    """
    beside = path.with_suffix(".yaml")
    stated = _read_yaml(beside) if config is None else config
    where = f"{beside}" if config is None else "tokenizer.config"
    with torch.device("meta"):
        model = VQModel(read_vqgan_config(stated, lambda key, text: UserError(f"{where}: {key}: {text}")))
    wanted = f"a VQGAN of {model.config.codes} codes"
    checkpoint = open_checkpoint(path)
    key_map = vqgan_key_map(model)
    fill(model, checkpoint, key_map, dtype=torch.float32, device=device, computed=_for_training, wanted=wanted)
    return model


def read_vqgan_config(config: Mapping[str, Any], wrong: Callable[[str, str], UserError]) -> VQConfig:
    """The sizes that vqgan.yaml states (`model.params`, or its content); raises what `wrong(key, text)` makes."""
    try:
        params = config["model"]["params"] if "model" in config else config
        network = params["ddconfig"]
        multiples = tuple(network["ch_mult"])
        numbers = {
            "codes": params["n_embed"],
            "code_dim": params["embed_dim"],
            "z_channels": network["z_channels"],
            "channels": network["ch"],
            "res_blocks": network["num_res_blocks"],
        }
    except (KeyError, TypeError) as error:
        raise wrong(str(error).strip("'"), "missing, or not where vqgan.yaml has it (model.params.ddconfig)") from error
    for key, number in [*numbers.items(), *(("ch_mult", multiple) for multiple in multiples)]:
        if type(number) is not int or number < 1:
            raise wrong(key, f"{number}: must be a whole number above 0")
    if network.get("double_z"):
        raise wrong("double_z", "true: a VQGAN has no variance")
    lowest = int(network.get("resolution", 256)) // 2 ** (len(multiples) - 1)
    attends = list(network.get("attn_resolutions") or [])
    if attends not in ([], [lowest]):
        raise wrong("attn_resolutions", f"{attends}: only the lowest resolution ({lowest}) can attend")
    return VQConfig(channel_mult=multiples, unit_codes=False, attention=bool(attends), **numbers)


def vqgan_key_map(model: VQModel) -> KeyMap:
    """The key map of taming-transformers' layout."""
    last = len(model.config.channel_mult) - 1

    def level(found: re.Match[str]) -> str:
        side, number = found[1], int(found[2])
        return f"encoder.down.{number}." if side == "encoder" else f"decoder.up.{last - number}."

    def rename(name: str) -> str:
        name = re.sub(r"^(encoder|decoder)\.conv_blocks\.(\d+)\.", level, name)
        name = re.sub(r"\.res\.(\d+)\.", r".block.\1.", name)
        return re.sub(r"\.mid\.(\d)\.", lambda found: f".mid.{_MIDDLE[found[1]]}.", name)

    return plain(model, rename)


def _for_training(name: str) -> bool:
    return name.startswith("loss.")


def _read_yaml(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file", "Chameleon's tokenizer is vqgan.ckpt and vqgan.yaml, side by side.")
    try:
        stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(stated, dict):
        raise UserError(f"{path}: must hold a mapping")
    return stated


# ----

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
