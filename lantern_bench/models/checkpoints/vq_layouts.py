"""Where the tensors of a VQ tokenizer are in published files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from lantern_bench.models.checkpoints.checkpoint import Checkpoint
from lantern_bench.models.checkpoints.key_map import Slice, load_into, same_names
from lantern_bench.models.networks.vq import _GROUPS, VQConfig, VQModel, new_vq
from lantern_bench.utils.errors import UserError

# ---- Files. Shapes tell all sizes, so no config is read.


def _janus(name: str, _levels: int) -> str:
    """Transformers' Janus: the names of taming-transformers, resolutions counted from the lowest one."""
    name = name.replace("encoder.conv_blocks.", "encoder.down.").replace(
        "decoder.conv_blocks.", "decoder.up."
    )
    middle = ("block_1", "attn_1", "block_2")
    name = re.sub(r"\.mid\.(\d)\.", lambda match: f".mid.{middle[int(match[1])]}.", name)
    return name.replace(".res.", ".block.")


def _taming(name: str, levels: int) -> str:
    """Taming-transformers (vqgan.ckpt), whose decoder counts resolutions from the highest one."""
    name = _janus(name, levels)
    return re.sub(
        r"^decoder\.up\.(\d+)", lambda match: f"decoder.up.{levels - 1 - int(match[1])}", name
    )


def _moving(name: str, levels: int) -> str:
    """MoVQGAN: taming-transformers', with the group norm inside each norm of the decoder."""
    return re.sub(
        r"^(decoder\..*norm\w*)\.(weight|bias)$", r"\1.norm_layer.\2", _taming(name, levels)
    )


_EMU3 = {
    r"encoder\.conv_blocks\.": "encoder.down_block.down.",
    r"\.res\.": ".block.",
    r"\.attn\.(\d+)\.norm\.": r".attn_norms.\1.",
    r"\.mid\.0\.": ".middle_block.block_1.",
    r"\.mid\.1\.norm\.": ".middle_block.attn_norm.",
    r"\.mid\.1\.": ".middle_block.attn_1.",
    r"\.mid\.2\.": ".middle_block.block_2.",
    r"(\.attn\.\d+|attn_1)\.(q|k|v)\.": r"\1.\2_proj.",
    r"\.proj_out\.": ".out_proj.",
    r"^(decoder\..*(?:norm1|norm2|norm_out|attn_norm|attn_norms\.\d+))\.(weight|bias)$": r"\1.norm_layer.\2",
    r"^time_down\.(\d+)\.": r"encoder.time_conv.\1.conv.conv.",
    r"^time_up\.(\d+)\.": r"decoder.time_conv.\1.conv.conv.",
    r"^time_(en|de)coder\.(\d+)\.(norm\d)\.": r"\1coder.time_res_stack.\2.\3.",
    r"^time_(en|de)coder\.(\d+)\.(conv\d)\.": r"\1coder.time_res_stack.\2.\3.conv.",
    r"^(quant_conv|post_quant_conv)\.": r"\1.conv.",
}


def _emu3(name: str, levels: int) -> str:
    """Transformers' Emu3VQVAE."""
    name = re.sub(
        r"^decoder\.conv_blocks\.(\d+)",
        lambda match: f"decoder.up_block.up.{levels - 1 - int(match[1])}",
        name,
    )
    for ours, theirs in _EMU3.items():
        name = re.sub(ours, theirs, name)
    return name


class Layout(NamedTuple):
    """A layout of a tokenizer's file."""

    rename: Callable[[str, int], str]  # (our name, number of resolutions) -> the name in the file
    inside: str = ""  # before all names, in a file that holds the target too
    unit_codes: bool = False
    ignored: str = "$"  # a regular expression of tensors that no picture needs


LAYOUTS = {
    "llamagen": Layout(
        lambda name, _levels: name, unit_codes=True, ignored="quantize.codebook_used$"
    ),
    "chameleon": Layout(_taming, ignored=r"loss\."),
    "movqgan": Layout(_moving, ignored=r"loss\.|ema_"),
    "janus": Layout(_janus, inside="model.vqmodel.", unit_codes=True),
    # Batch norms count their batches, which changes no picture.
    "emu3": Layout(_emu3, inside="model.vqmodel.", ignored=r".*\.num_batches_tracked$"),
}


def load_vq(checkpoint: Checkpoint, layout: Layout, device: torch.device) -> VQModel:
    """Load a tokenizer in float32; raises `UserError` for another kind of file."""
    checkpoint = checkpoint.inside(layout.inside)
    config = _sizes_in(checkpoint, layout)
    with torch.device("meta"):
        model = new_vq(config)
    keys = same_names(model, lambda name: layout.rename(name, len(config.channel_mult)))
    for name, tensor in model.state_dict().items():
        key = keys[name][0].key
        if tensor.shape[2:] == (1, 1) and key in checkpoint and len(checkpoint.shape(key)) == 2:
            # Matrices there, and convolutions of one pixel here.
            keys[name] = (
                Slice(
                    key,
                    prepare=lambda rows: rows[:, :, None, None],
                    file_shape=tuple(tensor.shape[:2]),
                ),
            )
    wanted = f"a VQ tokenizer of {config.codes} codes"
    load_into(
        model,
        checkpoint,
        keys,
        dtype=torch.float32,
        device=device,
        ignored=layout.ignored,
        wanted=wanted,
    )
    return model


def _sizes_in(checkpoint: Checkpoint, layout: Layout) -> VQConfig:

    def shape(name: str) -> tuple[int, ...]:
        return checkpoint.shape(layout.rename(name, 1))

    def has(name: str) -> bool:
        return layout.rename(name, 1) in checkpoint

    def count(name: str) -> int:
        return next(n for n in itertools.count() if not has(name.format(n)))

    block = "encoder.conv_blocks.{}.res.{}.conv1.weight"
    try:
        codes, code_dim = shape("quantize.embedding.weight")
        channels = shape("encoder.conv_in.weight")[0]
        z_channels = shape("quant_conv.weight")[1]
        levels = count(block.format("{}", 0))
        blocks = count(block.format(0, "{}"))
        widths = [shape(block.format(level, 0))[0] for level in range(levels)]
    except (KeyError, IndexError, ValueError) as error:
        raise checkpoint.is_not("a VQ tokenizer of this family", f"it has no {error}") from error
    if not levels or not blocks or channels % _GROUPS:
        raise checkpoint.is_not(
            "a VQ tokenizer of this family", f"it has {levels} resolutions, {channels} channels"
        )
    # A decoder has the same, from the lowest; `shape` counts its resolutions as a file of one resolution does.
    ups = [
        layout.rename(block.format(level, 0).replace("en", "de", 1), levels)
        for level in range(levels)
    ]
    decoded = [checkpoint.shape(name)[0] for name in reversed(ups) if name in checkpoint]
    if len(decoded) == levels and decoded != widths:
        text = f"its encoder has the channels {widths} by resolution and its decoder {decoded}"
        raise UserError(
            f"{checkpoint.path}: {text}", "Only a tokenizer that has the same in both is supported."
        )
    return VQConfig(
        codes=codes,
        code_dim=code_dim,
        z_channels=z_channels,
        channels=channels,
        channel_mult=tuple(width // channels for width in widths),
        res_blocks=blocks,
        unit_codes=layout.unit_codes,
        attention=tuple(
            level for level in range(levels) if has(f"encoder.conv_blocks.{level}.attn.0.q.weight")
        ),
        code_norms=has("decoder.norm_out.conv_y.weight"),
        frames=2 ** count("time_down.{}.weight"),
    )
