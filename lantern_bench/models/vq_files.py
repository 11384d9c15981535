"""The files of LlamaGen's VQ tokenizers: their sizes, read from their shapes, and how they are loaded.

A tokenizer's file says all about its sizes; a `config` is only a claim about it, which is checked like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.checkpoint import Checkpoint, open_checkpoint
from lantern_bench.models.filling import fill, plain
from lantern_bench.models.recognise import what_is
from lantern_bench.models.vq import VQConfig, VQModel

__all__ = ["load_vq", "read_vq_config"]

# Our name -> the names it goes by: here, in the official code, in the recordings.
_NAMES: dict[str, tuple[str, ...]] = {
    "codes": ("codes", "codebook_size", "K"),
    "code_dim": ("code_dim", "codebook_embed_dim", "e"),
    "z_channels": ("z_channels", "z"),
    "channels": ("channels", "ch"),
    "channel_mult": ("channel_mult", "encoder_ch_mult", "ch_mult", "mult"),
    "res_blocks": ("res_blocks", "num_res_blocks"),
}


def load_vq(path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
    """Load a tokenizer in float32; raises `UserError` for a file that is none, or not of the sizes in `config`."""
    checkpoint = open_checkpoint(path)
    found = _found(checkpoint)

    def wrong(name: str, text: str) -> UserError:
        return UserError(f"{path}: tokenizer.config.{name}: {text}")

    with torch.device("meta"):
        model = VQModel(read_vq_config(config or {}, found, wrong))
    wanted = f"a VQ tokenizer of {model.config.codes} codes"
    fill(model, checkpoint, plain(model), dtype=torch.float32, device=device, computed=_is_computed, wanted=wanted)
    return model


def read_vq_config(config: Mapping[str, Any], found: VQConfig, wrong: Callable[[str, str], UserError]) -> VQConfig:
    """The sizes that a `config` states, the rest as `found`; raises what `wrong(name, text)` makes."""
    if config.get("codebook_l2_norm") is False:
        raise wrong("codebook_l2_norm", "false: only tokenizers that norm their codes are known here")
    decoder = config.get("decoder_ch_mult")
    if decoder is not None and list(decoder) != list(config.get("encoder_ch_mult", decoder)):
        raise wrong("decoder_ch_mult", "must equal encoder_ch_mult")
    said: dict[str, Any] = {}
    for ours, names in _NAMES.items():
        for name in names:
            value = config.get(name)
            if value is None:
                continue
            items = value if ours == "channel_mult" and isinstance(value, list | tuple) else [value]
            if not items or not all(type(item) is int and item > 0 for item in items):
                raise wrong(name, f"{value}: must be {'a list of ' * (ours == 'channel_mult')}whole numbers above 0")
            said[ours] = tuple(items) if ours == "channel_mult" else value
    return replace(found, **said)


def _found(checkpoint: Checkpoint) -> VQConfig:
    """The sizes of a tokenizer, from its shapes; raises `UserError` for a file that is none."""
    try:
        codes, code_dim = checkpoint.shape("quantize.embedding.weight")
        z_channels = checkpoint.shape("quant_conv.weight")[1]
        channels = checkpoint.shape("encoder.conv_in.weight")[0]
        widths: list[int] = []
        while (name := f"encoder.conv_blocks.{len(widths)}.res.0.conv1.weight") in checkpoint:
            widths.append(checkpoint.shape(name)[0])
        blocks = 0
        while f"encoder.conv_blocks.0.res.{blocks}.conv1.weight" in checkpoint:
            blocks += 1
    except (KeyError, IndexError, ValueError) as error:
        kind = what_is(checkpoint)
        raise UserError(
            f"{checkpoint.path}: is no VQ tokenizer" + (f": it is {kind}" if kind else ""),
            "LlamaGen's are vq_ds16_t2i.pt and vq_ds16_c2i.pt.",
        ) from error
    multiples = tuple(width // channels for width in widths)
    return VQConfig(codes, code_dim, z_channels, channels, multiples, blocks)


def _is_computed(name: str) -> bool:
    return name == "quantize.codebook_used"
