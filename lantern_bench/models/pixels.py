"""Tokens to pictures through a VQ decoder, as the `PixelDecoder` of `decode.interface`, and pictures to tokens.

A model may have no tokenizer, or one for another vocabulary: what stands in its place says why there is no picture.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lantern_bench.errors import UserError
from lantern_bench.models.vq import VQModel

__all__ = ["NoPixels", "ReadsPictures", "VQPixels"]


@runtime_checkable
class ReadsPictures(Protocol):
    """A pixel decoder that knows the way back."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the pictures."""
        ...

    def tokens(self, pictures: Tensor) -> Tensor:
        """Pictures uint8 RGB [B, H, W, 3] of that size -> tokens int64 [B, N] on the CPU."""
        ...


class VQPixels:
    """A tokenizer's decoder for pictures of `grid` (rows, columns) tokens."""

    def __init__(self, model: VQModel, grid: tuple[int, int]) -> None:
        self._model, self._grid = model, grid

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens int [B, N] -> uint8 RGB [B, H, W, 3] on the CPU."""
        weight = self._model.quantize.embedding.weight
        decoded = self._model.decode_tokens(tokens.to(weight.device), self._grid).float()
        scaled = (decoded.clamp(-1, 1) + 1) * 127.5
        return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        side = self._model.config.downsampling
        return self._grid[0] * side, self._grid[1] * side

    @torch.inference_mode()
    def tokens(self, pictures: Tensor) -> Tensor:
        """Pictures uint8 RGB [B, H, W, 3] -> tokens int64 [B, N] on the CPU, row by row."""
        weight = self._model.quantize.embedding.weight
        pixels = pictures.to(weight.device).permute(0, 3, 1, 2).to(weight.dtype) / 127.5 - 1
        return self._model.encode(pixels).indices.flatten(1).cpu()


class NoPixels:
    """Stands where a model's tokens cannot be turned into pictures, and says why."""

    def __init__(self, model: str, reason: str) -> None:
        self.problem = UserError(
            f"{model}: no picture can be drawn: {reason}",
            "Name the tokenizer's checkpoint in the model's file; or ask for the tokens alone with "
            "`generate --save-tokens FILE.npz`.",
        )

    def pixels(self, tokens: Tensor) -> Tensor:  # noqa: ARG002
        """Raise the `UserError` that says why there is no picture."""
        raise self.problem
