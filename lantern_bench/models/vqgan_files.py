"""Chameleon's image tokenizer: `vqgan.ckpt` and `vqgan.yaml`, in the layout of taming-transformers, onto `VQModel`.

The same network as LlamaGen's under other names, its codes not brought to unit length (VQGAN, arXiv 2012.09841). The
decoder's levels are numbered from the finest there and in the order they run here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from lantern_bench.errors import UserError
from lantern_bench.models.checkpoint import open_checkpoint
from lantern_bench.models.filling import KeyMap, fill, plain
from lantern_bench.models.vq import VQConfig, VQModel

__all__ = ["PUBLISHED_VQGAN", "load_vqgan", "read_vqgan_config", "vqgan_key_map"]

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
