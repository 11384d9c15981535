"""Where the tensors of a VQ tokenizer are in published files.

The shapes of the tensors tell all sizes, so no config is read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.models.checkpoints.checkpoint import Checkpoint
from lantern_bench.models.checkpoints.key_map import Slice, load_into, same_names
from lantern_bench.models.networks.vq import GROUPS, VQConfig, VQModel, new_vq
from lantern_bench.utils.errors import UserError


def _substitute(name: str, patterns: Mapping[str, str]) -> str:
    for ours, theirs in patterns.items():
        name = re.sub(ours, theirs, name)
    return name


def _from_the_highest(name: str, levels: int) -> str:
    """Count the resolutions of the decoder from the highest one, as most published files do."""

    def flipped(match: re.Match[str]) -> str:
        return f"{match[1]}{levels - 1 - int(match[2])}"

    return re.sub(r"^(decoder\.conv_blocks\.)(\d+)", flipped, name)


_TAMING = {
    r"^encoder\.conv_blocks\.": "encoder.down.",
    r"^decoder\.conv_blocks\.": "decoder.up.",
    r"\.mid\.0\.": ".mid.block_1.",
    r"\.mid\.1\.": ".mid.attn_1.",
    r"\.mid\.2\.": ".mid.block_2.",
    r"\.res\.": ".block.",
}
_MOVING = {
    **_TAMING,
    r"^(decoder\..*norm\w*)\.(weight|bias)$": r"\1.norm_layer.\2",
}
_EMU3 = {
    r"^decoder\.conv_blocks\.": "decoder.up_block.up.",
    r"encoder\.conv_blocks\.": "encoder.down_block.down.",
    r"\.res\.": ".block.",
    r"\.attn\.(\d+)\.norm\.": r".attn_norms.\1.",
    r"\.mid\.0\.": ".middle_block.block_1.",
    r"\.mid\.1\.norm\.": ".middle_block.attn_norm.",
    r"\.mid\.1\.": ".middle_block.attn_1.",
    r"\.mid\.2\.": ".middle_block.block_2.",
    r"(\.attn\.\d+|attn_1)\.(q|k|v)\.": r"\1.\2_proj.",
    r"\.proj_out\.": ".out_proj.",
    r"^(decoder\..*(?:norm1|norm2|norm_out|attn_norm|attn_norms\.\d+))\.(weight|bias)$": (
        r"\1.norm_layer.\2"
    ),
    r"^time_down\.(\d+)\.": r"encoder.time_conv.\1.conv.conv.",
    r"^time_up\.(\d+)\.": r"decoder.time_conv.\1.conv.conv.",
    r"^time_(en|de)coder\.(\d+)\.(norm\d)\.": r"\1coder.time_res_stack.\2.\3.",
    r"^time_(en|de)coder\.(\d+)\.(conv\d)\.": r"\1coder.time_res_stack.\2.\3.conv.",
    r"^(quant_conv|post_quant_conv)\.": r"\1.conv.",
}


def _llamagen(name: str, _levels: int) -> str:
    """LlamaGen's files have our names."""
    return name


def _janus(name: str, _levels: int) -> str:
    """Transformers' Janus: the names of taming-transformers, counted from the lowest resolution."""
    return _substitute(name, _TAMING)


def _taming(name: str, levels: int) -> str:
    """taming-transformers (vqgan.ckpt)."""
    return _substitute(_from_the_highest(name, levels), _TAMING)


def _moving(name: str, levels: int) -> str:
    """MoVQGAN: taming-transformers, with the group norm inside each norm of the decoder."""
    return _substitute(_from_the_highest(name, levels), _MOVING)


def _emu3(name: str, levels: int) -> str:
    """Transformers' Emu3VQVAE."""
    return _substitute(_from_the_highest(name, levels), _EMU3)


class Layout(NamedTuple):
    """A layout of a tokenizer's file."""

    rename: Callable[[str, int], str]  # (our name, number of resolutions) -> the name in the file
    inside: str = ""  # prefix of all names, in a file that holds the target too
    unit_codes: bool = False
    ignored: str = "$"  # a regular expression of tensors that no picture needs


LAYOUTS = {
    "llamagen": Layout(_llamagen, unit_codes=True, ignored="quantize.codebook_used$"),
    "chameleon": Layout(_taming, ignored=r"loss\."),
    "movqgan": Layout(_moving, ignored=r"loss\.|ema_"),
    "janus": Layout(_janus, inside="model.vqmodel.", unit_codes=True),
    # Batch norms count their batches, which changes no picture.
    "emu3": Layout(_emu3, inside="model.vqmodel.", ignored=r".*\.num_batches_tracked$"),
}


def load_vq(checkpoint: Checkpoint, layout: Layout, device: torch.device) -> VQModel:
    """Load a tokenizer in float32.

    Args:
        checkpoint: The tokenizer's file.
        layout: Its layout, one of `LAYOUTS`.
        device: Device of the weights.

    Raises:
        UserError: The file is of another kind.
    """
    checkpoint = checkpoint.inside(layout.inside)
    config = _sizes_in(checkpoint, layout)
    with torch.device("meta"):
        model = new_vq(config)
    keys = same_names(model, lambda name: layout.rename(name, len(config.channel_mult)))
    for name, tensor in model.state_dict().items():
        key = keys[name][0].key
        if tensor.shape[2:] == (1, 1) and key in checkpoint and len(checkpoint.shape(key)) == 2:
            # Some files have a matrix where we have a convolution of one pixel.
            shape = tuple(tensor.shape[:2])
            keys[name] = (Slice(key, prepare=_to_convolution, file_shape=shape),)
    load_into(
        model,
        checkpoint,
        keys,
        dtype=torch.float32,
        device=device,
        ignored=layout.ignored,
        wanted=f"a VQ tokenizer of {config.codes} codes",
    )
    return model


def _to_convolution(rows: Tensor) -> Tensor:
    return rows[:, :, None, None]


def _sizes_in(checkpoint: Checkpoint, layout: Layout) -> VQConfig:
    """Read the sizes of a tokenizer from the shapes of its tensors."""

    # A file of one resolution has the same names from the lowest and from the highest.
    def shape(name: str) -> tuple[int, ...]:
        return checkpoint.shape(layout.rename(name, 1))

    def has(name: str) -> bool:
        return layout.rename(name, 1) in checkpoint

    def count(name: str) -> int:
        return next(n for n in itertools.count() if not has(name.format(n)))

    block = "encoder.conv_blocks.{}.res.{}.conv1.weight"
    wanted = "a VQ tokenizer of this family"
    try:
        codes, code_dim = shape("quantize.embedding.weight")
        channels = shape("encoder.conv_in.weight")[0]
        z_channels = shape("quant_conv.weight")[1]
        levels = count(block.format("{}", 0))
        blocks = count(block.format(0, "{}"))
        widths = [shape(block.format(level, 0))[0] for level in range(levels)]
    except (KeyError, IndexError, ValueError) as error:
        raise checkpoint.is_not(wanted, f"it has no {error}") from error
    if not levels or not blocks or channels % GROUPS:
        raise checkpoint.is_not(wanted, f"it has {levels} resolutions, {channels} channels")

    # Our decoder has the widths of the encoder, from the lowest resolution.
    decoded = []
    for level in reversed(range(levels)):
        name = layout.rename(f"decoder.conv_blocks.{level}.res.0.conv1.weight", levels)
        if name in checkpoint:
            decoded.append(checkpoint.shape(name)[0])
    if len(decoded) == levels and decoded != widths:
        text = f"its encoder has the channels {widths} by resolution and its decoder {decoded}"
        advice = "Only a tokenizer that has the same in both is supported."
        raise UserError(f"{checkpoint.path}: {text}", advice)
    attention = [
        level for level in range(levels) if has(f"encoder.conv_blocks.{level}.attn.0.q.weight")
    ]
    return VQConfig(
        codes=codes,
        code_dim=code_dim,
        z_channels=z_channels,
        channels=channels,
        channel_mult=tuple(width // channels for width in widths),
        res_blocks=blocks,
        unit_codes=layout.unit_codes,
        attention=tuple(attention),
        code_norms=has("decoder.norm_out.conv_y.weight"),
        frames=2 ** count("time_down.{}.weight"),
    )
