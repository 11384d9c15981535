"""A model of any size with random weights: for measuring what steps cost, without a file. Its pictures mean nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lantern_bench.errors import UserError
from lantern_bench.models.conditioning import ClassLabel, Condition
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig

__all__ = ["SIZE_HELP", "made_up_model", "read_size"]

SIZE_HELP = "LAYERSxWIDTH[xVOCABULARY[xSIDE]], e.g. 36x1280x16384x16 (LlamaGen-XL at 256 pixels)."
_HEAD_DIM = 64
_VOCABULARY, _SIDE = 16384, 16
_CODE_WIDTH = 8


def read_size(text: str) -> TransformerConfig:
    """The shape that `SIZE_HELP` describes, heads of 64, feed-forward 8/3 of the width; else `UserError`."""
    if re.fullmatch(r"\d+(x\d+){1,3}", text) is None:
        raise UserError(f"--size {text}: is no size", f"Write {SIZE_HELP}")
    given = [int(part) for part in text.split("x")]
    layers, width, vocabulary, side = given + [_VOCABULARY, _SIDE][len(given) - 2 :]
    if min(layers, vocabulary, side) < 1 or width < _HEAD_DIM or width % _HEAD_DIM:
        raise UserError(f"--size {text}: the width must be a multiple of {_HEAD_DIM}, the rest at least 1")
    ffn = -(-8 * width // 3 // 256) * 256
    return TransformerConfig(vocabulary, width, layers, width // _HEAD_DIM, ffn, prefix=1, grid=(side, side))


class _NoPictures:
    def pixels(self, tokens: Tensor) -> Tensor:  # noqa: ARG002
        raise UserError("a model of random weights makes no pictures")


def made_up_model(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LoadedModel:
    """Target and drafter of a shape, weights drawn in place from `generator` (on `device`) in their own type."""
    with torch.device("meta"):
        target = TransformerTarget(config, ClassLabel(1, config.dim))
        drafter = EagleDrafter(config, target.transformer.output)
    for module in (target, drafter):
        module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
        _draw(module, device, generator)
    # A drafter of one layer without training is accepted by chance; what its steps cost is the same.
    codes = torch.randn(config.vocab_size, _CODE_WIDTH, generator=generator, device=device)

    def condition(prompts: Sequence[str]) -> Condition:
        return Condition(torch.zeros(len(prompts), dtype=torch.int64), torch.ones(len(prompts), 1, dtype=torch.bool))

    weights = dict.fromkeys(("target", "drafter"), f"random-{generator.initial_seed()}")
    return LoadedModel("random", target, drafter, _NoPictures(), codes, condition, weights, config.grid)


@torch.no_grad()
def _draw(module: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    part: Any
    for part in module.modules():
        if hasattr(part, "compute_buffers"):
            part.compute_buffers(device)
