"""Emu3's tokenizer of videos (arXiv 2409.18869, section 2.2), for single pictures.

Around the convolutions of a VQGAN it has convolutions over time, which see no later frame. A picture is decoded as the
first frame of a video: nothing is before it, so a kernel over time is its last slice, and the other frames that the
published decoder makes are never computed. A picture is encoded as frames that are all alike.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.io.checkpoint import Checkpoint
from lantern_bench.models.vq import VQConfig, VQModel, load_vq


class _TimeConv(nn.Conv3d):
    """A convolution over time and space that sees no later frame; a picture [B, C, H, W] is a first frame."""

    def forward(self, x: Tensor) -> Tensor:
        around = self.kernel_size[1] // 2
        if x.dim() == 4:
            return functional.conv2d(x, self.weight[:, :, -1], self.bias, padding=around)
        return super().forward(functional.pad(x, (around,) * 4 + (2, 0)))


class _StillNorm(nn.Module):
    """A batch norm with the statistics of its training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        ones = torch.ones(channels)
        self.weight, self.bias = nn.Parameter(ones), nn.Parameter(ones.clone())
        self.running_mean, self.running_var = (nn.Parameter(ones.clone(), requires_grad=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, ...] of any number of axes."""
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class _TimeResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _StillNorm(channels), _StillNorm(channels)
        self.conv1, self.conv2 = (_TimeConv(channels, channels, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        out: Tensor = x + self.conv2(functional.silu(self.norm2(h)))
        return out


def _one_after_another(blocks: Iterable[nn.Module], x: Tensor, silu: bool = False) -> Tensor:
    for block in blocks:
        x = functional.silu(block(x)) if silu else block(x)
    return x


class Emu3Tokenizer(VQModel):
    """A `VQModel` with convolutions over time, which halve `frames` frames to one and double them again."""

    def __init__(self, config: VQConfig, frames: int = 4) -> None:
        super().__init__(config)
        self.frames, width, halvings = frames, config.z_channels, int(math.log2(frames))
        self.time_down = nn.ModuleList(_TimeConv(width, width, (4, 3, 3), stride=(2, 1, 1)) for _ in range(halvings))
        self.time_encoder = nn.ModuleList(_TimeResBlock(width) for _ in range(config.res_blocks))
        self.time_decoder = nn.ModuleList(_TimeResBlock(width) for _ in range(config.res_blocks))
        self.time_up = nn.ModuleList(_TimeConv(width, width, 3) for _ in range(halvings))
        self.quant_conv = _TimeConv(width, config.code_dim, (3, 1, 1))
        self.post_quant_conv = _TimeConv(config.code_dim, width, (3, 1, 1))

    def latents(self, pixels: Tensor) -> Tensor:
        """As `VQModel.latents`."""
        still = self.encoder(pixels)[:, :, None].expand(-1, -1, self.frames, -1, -1)
        video = _one_after_another(self.time_encoder, _one_after_another(self.time_down, still, silu=True))
        out: Tensor = self.quant_conv(video)[:, :, 0]
        return out

    def decode(self, quantised: Tensor) -> Tensor:
        """As `VQModel.decode`; the codes go through the convolutions over time too, and into every norm."""
        both = torch.cat([self.post_quant_conv(quantised), quantised])
        both = _one_after_another(self.time_up, _one_after_another(self.time_decoder, both), silu=True)
        out: Tensor = self.decoder(*both.chunk(2))
        return out


_TIME = {
    r"time_down\.(\d+)\.": r"encoder.time_conv.\1.conv.conv.",
    r"time_up\.(\d+)\.": r"decoder.time_conv.\1.conv.conv.",
    r"time_(en|de)coder\.(\d+)\.(norm\d)\.": r"\1coder.time_res_stack.\2.\3.",
    r"time_(en|de)coder\.(\d+)\.(conv\d)\.": r"\1coder.time_res_stack.\2.\3.conv.",
    r"(quant_conv|post_quant_conv)\.": r"\1.conv.",
}
_INSIDE = {
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
}


def file_names(name: str, levels: int) -> str:
    """Return the name of our tensor in transformers' Emu3VQVAE; `levels` resolutions."""
    for ours, theirs in _TIME.items():
        if (match := re.match(ours, name)) is not None:
            return match.expand(theirs) + name[match.end() :]
    name = re.sub(
        r"^decoder\.conv_blocks\.(\d+)", lambda match: f"decoder.up_block.up.{levels - 1 - int(match[1])}", name
    )
    for ours, theirs in _INSIDE.items():
        name = re.sub(ours, theirs, name)
    return name


def load_emu3_tokenizer(checkpoint: Checkpoint, device: torch.device) -> VQModel:
    """Load the tokenizer in float32; raises `UserError` for another kind of file."""
    halvings = next(n for n in itertools.count() if f"encoder.time_conv.{n}.conv.conv.weight" not in checkpoint)

    def make(config: VQConfig) -> VQModel:
        return Emu3Tokenizer(config, frames=2**halvings)

    # Batch norms count their batches, which changes no picture.
    return load_vq(checkpoint, file_names, device, make=make, ignored=r".*\.num_batches_tracked$")
