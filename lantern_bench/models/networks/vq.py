"""The VQ tokenizer of LlamaGen (arXiv 2406.06525, section 3.1).

It is a convolutional autoencoder around a codebook. Parameters have the names of LlamaGen's
checkpoints.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer."""

    codes: int = 16384
    code_dim: int = 8
    z_channels: int = 256
    channels: int = 128
    # Factor of `channels` at each resolution. The picture is halved between entries.
    channel_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    unit_codes: bool = True  # codes and latents are scaled to unit length
    # Resolutions whose blocks attend, counted from the highest. None means the lowest one. The
    # middle blocks always attend.
    attention: tuple[int, ...] | None = None
    code_norms: bool = False  # codes scale and shift the output of the decoder's norms (MoVQGAN)
    # Video frames that one map of codes stands for (Emu3). None: no convolutions over time.
    frames: int | None = None


GROUPS = 32  # of every group norm


class _Norm(nn.GroupNorm):
    """A group norm. With `code_dim`, codes [B, code_dim, h, w] scale and shift its output."""

    def __init__(self, channels: int, code_dim: int | None) -> None:
        super().__init__(GROUPS, channels, eps=1e-6)
        if code_dim is not None:
            self.conv_y = nn.Conv2d(code_dim, channels, 1)
            self.conv_b = nn.Conv2d(code_dim, channels, 1)

    def forward(self, x: Tensor, codes: Tensor | None) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        if codes is None:
            return out
        scale = functional.interpolate(self.conv_y(codes), x.shape[-2:])
        shift = functional.interpolate(self.conv_b(codes), x.shape[-2:])
        return out * scale + shift


class _ResBlock(nn.Module):
    def __init__(self, inside: int, outside: int, code_dim: int | None) -> None:
        super().__init__()
        self.norm1 = _Norm(inside, code_dim)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = _Norm(outside, code_dim)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, codes: Tensor | None) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x, codes)))
        return self.nin_shortcut(x) + self.conv2(functional.silu(self.norm2(h, codes)))


class _AttnBlock(nn.Module):
    """Single-head attention over all positions of a feature map."""

    def __init__(self, channels: int, code_dim: int | None) -> None:
        super().__init__()
        self.norm = _Norm(channels, code_dim)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, codes: Tensor | None) -> Tensor:
        h = self.norm(x, codes)
        q, k, v = (part(h).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(mixed.transpose(1, 2).reshape(x.shape))


class _Resample(nn.Module):
    """Halve or double the size of a feature map."""

    def __init__(self, channels: int, *, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Conv2d(channels, channels, 3, stride=1 if up else 2, padding=1 if up else 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.up:
            return self.conv(functional.interpolate(x, scale_factor=2.0))
        # The published model pads right and bottom only.
        return self.conv(functional.pad(x, (0, 1, 0, 1)))


class _Level(nn.Module):
    """The blocks of one resolution."""

    def __init__(
        self, inside: int, outside: int, *, blocks: int, attends: bool, code_dim: int | None
    ) -> None:
        super().__init__()
        widths = [inside] + [outside] * blocks
        attending = blocks if attends else 0
        self.res = nn.ModuleList([_ResBlock(a, b, code_dim) for a, b in itertools.pairwise(widths)])
        self.attn = nn.ModuleList([_AttnBlock(outside, code_dim) for _ in range(attending)])
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor, codes: Tensor | None) -> Tensor:
        for number, block in enumerate(self.res):
            x = block(x, codes)
            if len(self.attn):
                x = self.attn[number](x, codes)
        return self.upsample(self.downsample(x))


def _middle(width: int, code_dim: int | None) -> nn.ModuleList:
    return nn.ModuleList(
        [
            _ResBlock(width, width, code_dim),
            _AttnBlock(width, code_dim),
            _ResBlock(width, width, code_dim),
        ]
    )


class _Half(nn.Module):
    """The encoder (pixels to latents) or, with `up`, the decoder (latents to pixels).

    The encoder goes from the highest resolution to the lowest, and the decoder back. The norms of
    the decoder take the codes if `code_norms` is set.
    """

    def __init__(self, config: VQConfig, *, up: bool) -> None:
        super().__init__()
        self.up = up
        code_dim = config.code_dim if up and config.code_norms else None
        levels = [
            (number, config.channels * mult) for number, mult in enumerate(config.channel_mult)
        ]
        lowest, low = levels[-1]
        attending = (lowest,) if config.attention is None else config.attention
        # Fresh weights are drawn in the order of the forward pass.
        if up:
            levels.reverse()
            self.conv_in = nn.Conv2d(config.z_channels, low, 3, padding=1)
            self.mid = _middle(low, code_dim)
        else:
            self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        width = self.conv_in.out_channels
        for number, outside in levels:
            level = _Level(
                width,
                outside,
                blocks=config.res_blocks + 1 if up else config.res_blocks,
                attends=number in attending,
                code_dim=code_dim,
            )
            if up and number > 0:
                level.upsample = _Resample(outside, up=True)
            if not up and number < lowest:
                level.downsample = _Resample(outside, up=False)
            self.conv_blocks.append(level)
            width = outside
        if not up:
            self.mid = _middle(low, code_dim)
        self.norm_out = _Norm(width, code_dim)
        self.conv_out = nn.Conv2d(width, 3 if up else config.z_channels, 3, padding=1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        x = self.conv_in(x)
        parts = [self.mid, self.conv_blocks] if self.up else [self.conv_blocks, self.mid]
        for block in itertools.chain(*parts):
            x = block(x, codes)
        return self.conv_out(functional.silu(self.norm_out(x, codes)))


class _Codebook(nn.Module):
    """The table of codes. With `unit`, as in LlamaGen, its rows are L2-normalised when used."""

    def __init__(self, codes: int, dim: int, *, unit: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)
        self.unit = unit

    def rows(self) -> Tensor:
        """Return the rows [codes, dim] as they are used."""
        rows = self.embedding.weight
        return functional.normalize(rows, dim=-1) if self.unit else rows

    def nearest(self, latents: Tensor) -> Tensor:
        """Return the index of the nearest code of each latent: [..., dim] to int64 [...]."""
        if self.unit:
            # Between unit vectors the smallest distance is the largest inner product.
            return (functional.normalize(latents, dim=-1) @ self.rows().T).argmax(-1)
        distances = torch.cdist(latents.flatten(0, -2), self.rows())
        return distances.argmin(-1).reshape(latents.shape[:-1])


class VQModel(nn.Module):
    """Pictures to tokens and back. Pixels are float numbers in about [-1, 1]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _Half(config, up=False)
        self.decoder = _Half(config, up=True)
        self.quantize = _Codebook(config.codes, config.code_dim, unit=config.unit_codes)
        self.quant_conv: nn.Module = nn.Conv2d(config.z_channels, config.code_dim, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(config.code_dim, config.z_channels, 1)

    def latents(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] to latents [B, d, h, w], neither quantised nor normalised."""
        return self.quant_conv(self.encoder(pixels))

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] to the nearest code of each position, int64 [B, h, w]."""
        return self.quantize.nearest(self.latents(pixels).permute(0, 2, 3, 1).float())

    def decode(self, quantised: Tensor) -> Tensor:
        """Decode code vectors [B, d, h, w] to pixels [B, 3, H, W], not clamped."""
        return self.decoder(
            self.post_quant_conv(quantised), quantised if self.config.code_norms else None
        )

    def decode_tokens(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode token numbers [B, h*w] (row-major) to pixels [B, 3, H, W], not clamped."""
        rows = self.quantize.rows()[tokens.long()]
        return self.decode(rows.reshape(len(tokens), *grid, -1).permute(0, 3, 1, 2))

    def codebook(self) -> Tensor:
        """Return the codes float32 [V, d] as stored."""
        return self.quantize.embedding.weight.detach().float()


# ---- Emu3's tokenizer of videos (arXiv 2409.18869, section 2.2), for single pictures
#
# Around the convolutions of a VQGAN it has convolutions over time, which see no later frame. A
# picture is decoded as the first frame of a video, so that only the last slice of a kernel over
# time counts. It is encoded as a video of equal frames.


class _TimeConv(nn.Conv3d):
    """A convolution over time and space that sees no later frame.

    A picture [B, C, H, W] is taken for a first frame.
    """

    def forward(self, x: Tensor) -> Tensor:
        around = self.kernel_size[1] // 2
        if x.dim() == 4:
            return functional.conv2d(x, self.weight[:, :, -1], self.bias, padding=around)
        return super().forward(functional.pad(x, (around,) * 4 + (2, 0)))


class _StillNorm(nn.Module):
    """A batch norm with the statistics of its training."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in self.__annotations__:
            self.register_parameter(name, nn.Parameter(torch.ones(channels), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, weight=self.weight, bias=self.bias
        )


class _TimeResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = _StillNorm(channels)
        self.norm2 = _StillNorm(channels)
        self.conv1 = _TimeConv(channels, channels, 3)
        self.conv2 = _TimeConv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        return x + self.conv2(functional.silu(self.norm2(h)))


class _VideoVQ(VQModel):
    """A `VQModel` with convolutions over time, which merge the frames and split them again."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        width = config.z_channels
        halvings = int(math.log2(config.frames or 1))
        self.time_down = nn.ModuleList(
            _TimeConv(width, width, (4, 3, 3), stride=(2, 1, 1)) for _ in range(halvings)
        )
        self.time_encoder = nn.Sequential(*(_TimeResBlock(width) for _ in range(config.res_blocks)))
        self.time_decoder = nn.Sequential(*(_TimeResBlock(width) for _ in range(config.res_blocks)))
        self.time_up = nn.ModuleList(_TimeConv(width, width, 3) for _ in range(halvings))
        self.quant_conv = _TimeConv(width, config.code_dim, (3, 1, 1))
        self.post_quant_conv = _TimeConv(config.code_dim, width, (3, 1, 1))

    def latents(self, pixels: Tensor) -> Tensor:
        video = self.encoder(pixels)[:, :, None].expand(-1, -1, self.config.frames or 1, -1, -1)
        for conv in self.time_down:
            video = functional.silu(conv(video))
        return self.quant_conv(self.time_encoder(video))[:, :, 0]

    def decode(self, quantised: Tensor) -> Tensor:
        # The codes go through the convolutions over time too, and into every norm.
        both = self.time_decoder(torch.cat([self.post_quant_conv(quantised), quantised]))
        for conv in self.time_up:
            both = functional.silu(conv(both))
        return self.decoder(*both.chunk(2))


def new_vq(config: VQConfig) -> VQModel:
    """Return a tokenizer with fresh weights."""
    return VQModel(config) if config.frames is None else _VideoVQ(config)
