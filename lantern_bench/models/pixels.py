"""Tokens to pictures through a VQ decoder, as the `PixelDecoder` of `decode.interface`.

A model may have no tokenizer, or one for another vocabulary: what stands in its place says why there is no picture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.errors import UserError
from lantern_bench.models.vq import VQModel

__all__ = ["NoPixels", "VQPixels"]


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
