"""Models with random weights, to measure cost without a checkpoint, and how much memory a model's parts need.

Their images are noise. A shape is that of a published model, or one given as text (`read_size`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lantern_bench.errors import UserError
from lantern_bench.models.eagle import EagleDrafter
from lantern_bench.models.io.state_dict import compute_buffers
from lantern_bench.models.loaded_model import LoadedModel, NoPixels, Parts
from lantern_bench.models.registry import Buildable, card_of, families, family_of
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.conditioning import ClassLabel, Condition
from lantern_bench.models.transformer.target import TransformerTarget


class Size(NamedTuple):
    """The size of a part of a model: parameters (0 for a cache), their type, bytes."""

    part: str
    parameters: int
    dtype: torch.dtype
    bytes: int


def sizes_of(parts: Parts, dtype: torch.dtype, *, guided: bool, nodes: int, batch: int = 1) -> list[Size]:
    """The size of each part on the meta device, and of its cache for trees of at most `nodes` nodes with the root.

    Target and drafter are counted in `dtype`, the tokenizer in float32, its type at all times.
    """
    found: list[Size] = []
    for name, module, kind in zip(parts._fields, parts, (dtype, dtype, torch.float32), strict=True):
        if module is not None:
            count = sum(parameter.numel() for parameter in module.parameters())
            found.append(Size(name, count, kind, count * kind.itemsize))
    part: Any
    for name, part in (("target", parts.target), ("drafter", parts.drafter if nodes > 1 else None)):
        if part is not None:
            with torch.device("meta"):
                session = part.to(dtype).session(batch, guided, nodes)
            found.append(Size(f"{name}'s cache", 0, dtype, session.cache.nbytes))
    return found


def blueprint(model: str) -> tuple[str, Buildable, Parts]:
    """A model's name, its family, and its modules on the meta device; `UserError` where the architecture is unknown."""
    name = card_of(model).name
    family = family_of(model)
    if not isinstance(family, Buildable):
        able = [card.name for other in families().values() if isinstance(other, Buildable) for card in other.cards()]
        raise UserError(
            f"{model}: --random-weights and --dry-run need a model whose architecture is known",
            f"These models are {', '.join(able) or 'none'}.",
        )
    with torch.device("meta"):
        return name, family, family.build(name)


def random_model(model: str, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> LoadedModel:
    """Make a model with weights from `generator` (on `device`); raises `UserError` as `blueprint`."""
    name, family, parts = blueprint(model)
    hashes: dict[str, str] = {}
    for part, module, kind in zip(parts._fields, parts, (dtype, dtype, torch.float32), strict=True):
        if module is not None:
            _fill_at_random(module.to(kind).to_empty(device=device), device, generator)
            hashes[part] = f"random-{generator.initial_seed()}"
    made = family.assemble(name, parts, hashes)
    made.condition = family.random_condition(name, parts)
    made.prepare = lambda _prompts: iter(())
    return made


@torch.no_grad()
def _fill_at_random(module: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Fill a module in place: matrices such that outputs have the scale of their inputs, norms with ones."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1 or name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    module.requires_grad_(False).eval()
    compute_buffers(module, device)


def read_size(text: str) -> TransformerConfig:
    """The shape that a `--size` describes: heads of 64, a feed-forward width of 8/3 of the width; else `UserError`."""
    if re.fullmatch(r"\d+(x\d+){1,3}", text) is None:
        raise UserError(
            f"--size {text}: must be LAYERSxWIDTH[xVOCABULARY[xSIDE]]",
            "For example 36x1280x16384x16, LlamaGen-XL at 256 pixels.",
        )
    given = [int(part) for part in text.split("x")]
    layers, width, vocabulary, side = given + [16384, 16][len(given) - 2 :]
    if min(layers, vocabulary, side) < 1 or width < 64 or width % 64:
        raise UserError(f"--size {text}: the width must be a multiple of 64, the rest at least 1")
    ffn = -(-8 * width // 3 // 256) * 256
    return TransformerConfig(vocabulary, width, layers, width // 64, ffn, prefix=1, grid=(side, side))


def random_model_of_size(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LoadedModel:
    """Make a target and a drafter of a shape, with weights from `generator` (on `device`)."""
    with torch.device("meta"):
        target = TransformerTarget(config, ClassLabel(1, config.dim))
        drafter = EagleDrafter(config, target.transformer.output)
    for module in (target, drafter):
        _fill_at_random(module.to(dtype).to_empty(device=device), device, generator)
    codes = torch.randn(config.vocab_size, 8, generator=generator, device=device)

    def condition(prompts: Sequence[str]) -> Condition:
        return Condition(torch.zeros(len(prompts), dtype=torch.int64), torch.ones(len(prompts), 1, dtype=torch.bool))

    weights = dict.fromkeys(("target", "drafter"), f"random-{generator.initial_seed()}")
    pixels = NoPixels("random", "it has no tokenizer")
    return LoadedModel("random", target, drafter, pixels, codes, condition, weights, config.grid)
