"""Ways a picture gets worse without changing what it shows: blur, noise, lost detail, shifted light, mirror.

The judges (attribute classifier, CLIP model) are trained on degraded scenes, so that they judge what a tokenizer's
decoder gives back and not only clean paint. All are per picture and vectorised; the draws come from one generator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["blur", "degrade", "drop_detail"]

_BLOCK = 8


def degrade(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Degrade each picture at random: float [n, 3, h, w] in [0, 1] to the same shape and range.

    Each of mirror, blur, lost detail, shifted light and noise hits a picture independently of the others; about one
    in ten stays as it was. Sides must be multiples of 8.
    """
    n = len(pixels)

    def draw(low: float = 0.0, high: float = 1.0) -> Tensor:
        return (torch.rand((n, 1, 1, 1), generator=generator) * (high - low) + low).to(pixels)

    pixels = torch.where(draw() < 0.5, pixels.flip(3), pixels)
    pixels = torch.where(draw() < 0.35, pixels + draw(0.3, 1.0) * (blur(pixels) - pixels), pixels)
    pixels = torch.where(draw() < 0.35, drop_detail(pixels, draw(0.02, 0.15)), pixels)
    pixels = torch.where(draw() < 0.35, pixels * draw(0.92, 1.08) + draw(-0.03, 0.03), pixels)
    noise = torch.randn(pixels.shape, generator=generator).to(pixels)
    pixels = torch.where(draw() < 0.35, pixels + draw(0.005, 0.04) * noise, pixels)
    return pixels.clamp(0, 1)


def blur(pixels: Tensor) -> Tensor:
    """Binomial 5x5 blur of float [n, c, h, w], edges repeated."""
    taps = pixels.new_tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    kernel = (taps[:, None] * taps[None, :]).expand(pixels.shape[1], 1, 5, 5)
    padded = functional.pad(pixels, (2, 2, 2, 2), mode="replicate")
    return functional.conv2d(padded, kernel, groups=pixels.shape[1])


def drop_detail(pixels: Tensor, step: Tensor) -> Tensor:
    """Round the cosine coefficients of 8x8 blocks, coarser for finer detail, as JPEG does.

    `pixels` [n, c, h, w] in [0, 1] with sides that are multiples of 8; `step` [n, 1, 1, 1] is the rounding step of
    the coarsest coefficient.
    """
    n, c, h, w = pixels.shape
    basis = _cosines(pixels)
    blocks = pixels.reshape(n, c, h // _BLOCK, _BLOCK, w // _BLOCK, _BLOCK)
    coefficients = torch.einsum("ui,ncyixj,vj->ncyxuv", basis, blocks, basis)
    order = torch.arange(_BLOCK, device=pixels.device, dtype=pixels.dtype)
    steps = step[..., None, None] * (1 + 0.5 * (order[:, None] + order[None, :]))
    rounded = (coefficients / steps).round() * steps
    return torch.einsum("ui,ncyxuv,vj->ncyixj", basis, rounded, basis).reshape(n, c, h, w)


def _cosines(like: Tensor) -> Tensor:
    """The orthonormal DCT-II basis [8, 8], frequency by sample."""
    frequency = torch.arange(_BLOCK, dtype=like.dtype, device=like.device)[:, None]
    sample = torch.arange(_BLOCK, dtype=like.dtype, device=like.device)[None, :]
    basis = torch.cos(math.pi * (sample + 0.5) * frequency / _BLOCK) * math.sqrt(2 / _BLOCK)
    basis[0] /= math.sqrt(2)
    return basis
