"""The VQ tokenizer of LlamaGen (arXiv 2406.06525, section 3.1): a convolutional autoencoder around a codebook.

LlamaGen's tokenizers, Chameleon's and the bundled one differ only by `VQConfig`; the parameter names are those of
LlamaGen's checkpoints, which `load_vq` reads. The training losses are in `experiments/train_lanterns/tasks.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.errors import UserError
from lantern_bench.models.io.checkpoint import Checkpoint, open_checkpoint, what_is
from lantern_bench.models.io.state_dict import KeyMap, fill, plain
from lantern_bench.models.transformer_config import Wrong, read_sizes


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer. `channel_mult` has one entry a resolution; the picture is halved between entries.

    `unit_codes`: codes and latents are scaled to unit length. `attention`: the blocks of the lowest resolution attend,
    as the middle ones always do. `code_norms`: the codes scale and shift what the decoder's norms give (MoVQGAN).
    """

    codes: int = 16384
    code_dim: int = 8
    z_channels: int = 256
    channels: int = 128
    channel_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    unit_codes: bool = True
    attention: bool = True
    code_norms: bool = False

    @property
    def downsampling(self) -> int:
        """Pixels a token spans in each direction."""
        return int(2 ** (len(self.channel_mult) - 1))


class Encoded(NamedTuple):
    """Quantised vectors and the latents before [B, d, h, w], and indices int64 [B, h, w]."""

    quantised: Tensor
    indices: Tensor
    latents: Tensor


_GROUPS = 32


class _Norm(nn.GroupNorm):
    """A group norm; with `code_dim`, codes [B, code_dim, h, w] scale and shift its result by place."""

    def __init__(self, channels: int, code_dim: int | None = None) -> None:
        super().__init__(_GROUPS, channels, eps=1e-6)
        if code_dim is not None:
            self.conv_y = nn.Conv2d(code_dim, channels, 1)
            self.conv_b = nn.Conv2d(code_dim, channels, 1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        if codes is None:
            return out
        scale, shift = (functional.interpolate(part(codes), x.shape[-2:]) for part in (self.conv_y, self.conv_b))
        return out * scale + shift


class _ResBlock(nn.Module):
    def __init__(self, inside: int, outside: int, code_dim: int | None = None) -> None:
        super().__init__()
        self.norm1 = _Norm(inside, code_dim)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = _Norm(outside, code_dim)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x, codes)))
        out: Tensor = self.nin_shortcut(x) + self.conv2(functional.silu(self.norm2(h, codes)))
        return out


class _AttnBlock(nn.Module):
    """Single-head attention over all positions of a feature map."""

    def __init__(self, channels: int, code_dim: int | None = None) -> None:
        super().__init__()
        self.norm = _Norm(channels, code_dim)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        h = self.norm(x, codes)
        q, k, v = (part(h).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = x + self.proj_out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class _Resample(nn.Module):
    """Halve or double the size of a feature map."""

    def __init__(self, channels: int, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if up else nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        # Going down, the published model pads right and bottom only.
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest") if self.up else functional.pad(x, (0, 1, 0, 1))
        out: Tensor = self.conv(x)
        return out


class _Level(nn.Module):
    """The blocks of one resolution; attention only at the lowest one."""

    def __init__(self, inside: int, outside: int, blocks: int, attention: bool, code_dim: int | None) -> None:
        super().__init__()
        widths = [inside] + [outside] * blocks
        self.res = nn.ModuleList([_ResBlock(a, b, code_dim) for a, b in itertools.pairwise(widths)])
        self.attn = nn.ModuleList([_AttnBlock(outside, code_dim) for _ in range(blocks)] if attention else [])
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        for number, block in enumerate(self.res):
            x = block(x, codes)
            if len(self.attn):
                x = self.attn[number](x, codes)
        out: Tensor = self.upsample(self.downsample(x))
        return out


def _code_dim(config: VQConfig, up: bool) -> int | None:
    """The width of the codes that the norms of an encoder or decoder (`up`) take."""
    return config.code_dim if up and config.code_norms else None


def _levels(config: VQConfig, up: bool) -> nn.ModuleList:
    """The resolutions of a decoder (`up`), from the lowest, or of an encoder, from the highest."""
    widths = [config.channels * mult for mult in (config.channel_mult[::-1] if up else config.channel_mult)]
    levels, last = [], len(widths) - 1
    for number, (inside, outside) in enumerate(itertools.pairwise([widths[0] if up else config.channels, *widths])):
        attention = config.attention and number == (0 if up else last)
        level = _Level(inside, outside, config.res_blocks + up, attention, _code_dim(config, up))
        if number != last:
            setattr(level, "upsample" if up else "downsample", _Resample(outside, up))
        levels.append(level)
    return nn.ModuleList(levels)


class _Coder(nn.Module):
    """The encoder, pixels to latents, or the decoder (`up`), latents to pixels."""

    def __init__(self, config: VQConfig, up: bool) -> None:
        super().__init__()
        top, low = (config.channels * config.channel_mult[end] for end in (0, -1))
        self.conv_in = nn.Conv2d(config.z_channels, low, 3, padding=1) if up else nn.Conv2d(3, config.channels, 3, 1, 1)
        # Fresh weights are drawn in the order of the forward pass.
        if not up:
            self.conv_blocks = _levels(config, up)
        codes = _code_dim(config, up)
        self.mid = nn.ModuleList([_ResBlock(low, low, codes), _AttnBlock(low, codes), _ResBlock(low, low, codes)])
        if up:
            self.conv_blocks = _levels(config, up)
        self.norm_out = _Norm(top if up else low, codes)
        self.conv_out = nn.Conv2d(top if up else low, 3 if up else config.z_channels, 3, padding=1)
        self.up = up

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        """`codes` where the norms take them."""
        x = self.conv_in(x)
        for block in (*self.mid, *self.conv_blocks) if self.up else (*self.conv_blocks, *self.mid):
            x = block(x, codes)
        out: Tensor = self.conv_out(functional.silu(self.norm_out(x, codes)))
        return out


class _Codebook(nn.Module):
    """The table of codes; with `unit`, as in LlamaGen, its rows are L2-normalised when they are used."""

    def __init__(self, codes: int, dim: int, unit: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)
        self.unit = unit

    def rows(self) -> Tensor:
        """Rows as they are used [codes, dim]."""
        return functional.normalize(self.embedding.weight, dim=-1) if self.unit else self.embedding.weight

    def nearest(self, latents: Tensor) -> Tensor:
        """Index of the nearest code of each latent: [..., dim] -> int64 [...]."""
        if not self.unit:
            return torch.cdist(latents.flatten(0, -2), self.rows()).argmin(-1).reshape(latents.shape[:-1])
        # Between unit vectors the nearest in distance is the largest in inner product.
        return (functional.normalize(latents, dim=-1) @ self.rows().T).argmax(-1)


class VQModel(nn.Module):
    """Pictures to tokens and back. Pixels are float in about [-1, 1]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = _Coder(config, up=False)
        self.decoder = _Coder(config, up=True)
        self.quantize = _Codebook(config.codes, config.code_dim, config.unit_codes)
        self.quant_conv: nn.Module = nn.Conv2d(config.z_channels, config.code_dim, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(config.code_dim, config.z_channels, 1)

    def latents(self, pixels: Tensor) -> Tensor:
        """Latents before quantisation, not normalised: [B, 3, H, W] -> [B, d, h, w]."""
        out: Tensor = self.quant_conv(self.encoder(pixels))
        return out

    def encode(self, pixels: Tensor) -> Encoded:
        """Encode pixels [B, 3, H, W] to the nearest code at each position."""
        latents = self.latents(pixels)
        indices = self.quantize.nearest(latents.permute(0, 2, 3, 1).float())
        quantised = self.quantize.rows()[indices].permute(0, 3, 1, 2)
        return Encoded(quantised, indices, latents)

    def decode(self, quantised: Tensor) -> Tensor:
        """Decode code vectors [B, d, h, w] to pixels [B, 3, H, W], not clamped."""
        codes = quantised if self.config.code_norms else None
        out: Tensor = self.decoder(self.post_quant_conv(quantised), codes)
        return out

    def decode_tokens(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode token numbers [B, h*w] (row-major) to pixels [B, 3, H, W], not clamped."""
        rows = self.quantize.rows()[tokens.long()]
        return self.decode(rows.reshape(len(tokens), *grid, -1).permute(0, 3, 1, 2))

    @torch.no_grad()
    def codebook(self, normalised: bool = False) -> Tensor:
        """The codes [V, d] float32: raw as stored (what published nearest-code tables use) or as looked up."""
        table = self.quantize.rows() if normalised else self.quantize.embedding.weight
        return table.detach().float()


def vqgan_key_map(model: VQModel, lowest_first: bool = False) -> KeyMap:
    """The key map of taming-transformers' layout; it counts the decoder's resolutions from the highest one.

    `lowest_first`: from the lowest one, as transformers' Janus does.
    """
    last = len(model.config.channel_mult) - 1
    middle = ("block_1", "attn_1", "block_2")

    def rename(name: str) -> str:
        name = name.replace("encoder.conv_blocks.", "encoder.down.").replace(".res.", ".block.")
        level = re.match(r"decoder\.conv_blocks\.(\d+)", name)
        if level is not None:
            number = int(level[1]) if lowest_first else last - int(level[1])
            name = f"decoder.up.{number}{name[level.end() :]}"
        return re.sub(r"\.mid\.(\d)\.", lambda found: f".mid.{middle[int(found[1])]}.", name)

    return plain(model, rename)


# Our name -> the names it goes by: here, in the official code, in the recordings, in transformers.
_NAMES: dict[str, tuple[str, ...]] = {
    "codes": ("codes", "codebook_size", "K", "num_embeddings"),
    "code_dim": ("code_dim", "codebook_embed_dim", "e", "embed_dim"),
    "z_channels": ("z_channels", "z", "latent_channels"),
    "channels": ("channels", "ch", "base_channels"),
    "res_blocks": ("res_blocks", "num_res_blocks"),
}


def load_vq(path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
    """Load a tokenizer in float32; raises `UserError` for another kind of file, or sizes other than in `config`."""
    checkpoint = open_checkpoint(path)
    found = _found(checkpoint)
    stated = read_vq_config(config or {}, lambda name, text: UserError(f"{path}: tokenizer.config.{name}: {text}"))
    with torch.device("meta"):
        model = VQModel(replace(found, **stated))
    fill(
        model,
        checkpoint,
        plain(model),
        dtype=torch.float32,
        device=device,
        computed=lambda name: name == "quantize.codebook_used",
        wanted=f"a VQ tokenizer of {model.config.codes} codes",
    )
    return model


def read_vq_config(config: Mapping[str, Any], wrong: Wrong) -> dict[str, Any]:
    """The fields of `VQConfig` that a `config` states; raises what `wrong(name, text)` returns."""
    if config.get("codebook_l2_norm") is False:
        raise wrong("codebook_l2_norm", "false: LlamaGen's tokenizers normalise their codes")
    decoder = config.get("decoder_ch_mult")
    if decoder is not None and list(decoder) != list(config.get("encoder_ch_mult", decoder)):
        raise wrong("decoder_ch_mult", "must equal encoder_ch_mult")
    if config.get("double_latent"):
        raise wrong("double_latent", "true: these tokenizers have no variance")
    said = read_sizes(config, _NAMES, wrong)
    if (channels := said.get("channels", _GROUPS)) % _GROUPS:
        raise wrong(
            next(name for name in _NAMES["channels"] if name in config), f"{channels}: must be a multiple of {_GROUPS}"
        )
    for name in ("channel_mult", "encoder_ch_mult", "ch_mult", "mult", "channel_multiplier"):
        if (items := config.get(name)) is not None:
            listed = isinstance(items, list | tuple) and len(items) > 0
            if not listed or not all(type(item) is int and item > 0 for item in items):
                raise wrong(name, f"{items}: must be a list of whole numbers above 0")
            said["channel_mult"] = tuple(items)
    return said


def _found(checkpoint: Checkpoint) -> VQConfig:
    """The sizes of a tokenizer, from its shapes; raises `UserError` for another kind of file."""
    level = "encoder.conv_blocks.{}.res.{}.conv1.weight"
    try:
        codes, code_dim = checkpoint.shape("quantize.embedding.weight")
        z_channels = checkpoint.shape("quant_conv.weight")[1]
        channels = checkpoint.shape("encoder.conv_in.weight")[0]
        levels = list(itertools.takewhile(checkpoint.__contains__, (level.format(n, 0) for n in itertools.count())))
        blocks = itertools.takewhile(checkpoint.__contains__, (level.format(0, n) for n in itertools.count()))
        multiples = tuple(checkpoint.shape(name)[0] // channels for name in levels)
    except (KeyError, IndexError, ValueError) as error:
        kind = what_is(checkpoint)
        raise UserError(
            f"{checkpoint.path}: is no VQ tokenizer" + (f": it is {kind}" if kind else ""),
            "LlamaGen's are vq_ds16_t2i.pt and vq_ds16_c2i.pt.",
        ) from error
    return VQConfig(codes, code_dim, z_channels, channels, multiples, len(list(blocks)))
