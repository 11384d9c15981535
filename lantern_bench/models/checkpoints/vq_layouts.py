"""Where the tensors of a VQ tokenizer are in published files.

The shapes of the tensors tell all sizes, so no config is read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from lantern_bench.models.checkpoints.checkpoint import Checkpoint
from lantern_bench.models.checkpoints.key_map import load_into, same_names
from lantern_bench.models.networks.vq import GROUPS, VQConfig, VQModel, new_vq


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout of a tokenizer's file."""

    names: Mapping[str, str] = {}  # regular expressions of our names, and the names in the file
    # Whether the file counts the resolutions of the decoder from the highest one, as most do.
    from_highest: bool = False
    inside: str = ""  # prefix of all names, in a file that holds the target too
    unit_codes: bool = False
    ignored: str = "$"  # a regular expression of tensors that no picture needs

    def rename(self, name: str, levels: int) -> str:
        """Return the name in the file of one of our tensors.

        Args:
            name: Our name.
            levels: Number of resolutions of the tokenizer.
        """

        def flipped(match: re.Match[str]) -> str:
            return f"{match[1]}{levels - 1 - int(match[2])}"

        if self.from_highest:
            name = re.sub(r"^(decoder\.conv_blocks\.)(\d+)", flipped, name)
        for ours, theirs in self.names.items():
            name = re.sub(ours, theirs, name)
        return self.inside + name


LAYOUTS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Layout]
)


def load_vq(checkpoint: Checkpoint, layout: Layout, device: torch.device) -> VQModel:
    """Load a tokenizer in float32.

    Args:
        checkpoint: The tokenizer's file.
        layout: Its layout, one of `LAYOUTS`.
        device: Device of the weights.

    Raises:
        UserError: The file is of another kind, or its decoder has other channels than its encoder.
    """
    config = _sizes_in(checkpoint, layout)
    with torch.device("meta"):
        model = new_vq(config)
    keys = same_names(model, lambda name: layout.rename(name, len(config.channel_mult)))
    for name, tensor in model.state_dict().items():
        read = checkpoint.get(keys[name][0].key)
        if tensor.dim() == 4 and read is not None and read.dim() == 2:
            # Some files have a matrix where we have a convolution of one pixel.
            checkpoint[keys[name][0].key] = read[:, :, None, None]
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


def _sizes_in(checkpoint: Checkpoint, layout: Layout) -> VQConfig:
    """Read the sizes of a tokenizer from the shapes of its tensors.

    Our decoder has the widths of the encoder.
    """

    # The names below are the same from the lowest resolution and from the highest.
    def shape(name: str) -> tuple[int, ...]:
        return checkpoint[layout.rename(name, 1)].shape

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
        widths = [shape(block.format(level, 0))[0] for level in range(levels)]
    except (KeyError, IndexError, ValueError) as error:
        raise checkpoint.is_not(wanted, f"it has no {error}") from error
    if not levels or channels % GROUPS:
        raise checkpoint.is_not(wanted, f"it has {levels} resolutions, {channels} channels")
    attention = "encoder.conv_blocks.{}.attn.0.q.weight"
    return VQConfig(
        codes=codes,
        code_dim=code_dim,
        z_channels=z_channels,
        channels=channels,
        channel_mult=tuple(width // channels for width in widths),
        res_blocks=count(block.format(0, "{}")),
        unit_codes=layout.unit_codes,
        attention=tuple(level for level in range(levels) if has(attention.format(level))),
        code_norms=has("decoder.norm_out.conv_y.weight"),
        frames=2 ** count("time_down.{}.weight") if has("time_encoder.0.conv1.weight") else None,
    )
