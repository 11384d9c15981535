"""A model of any size with random weights: for measuring what steps cost, without a file. Its pictures mean nothing."""

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

# ---- A model as modules: what a family builds, and what its checkpoints are filled into


# ---- How much memory a model needs, told from modules that have shapes and no memory


class Size(NamedTuple):
    """What a part of a model takes: how many parameters (0 for a cache), of what type, how many bytes."""

    part: str
    parameters: int
    dtype: torch.dtype
    bytes: int


def sizes_of(parts: Parts, dtype: torch.dtype, *, guided: bool, nodes: int, batch: int = 1) -> list[Size]:
    """The size of each part on the meta device, and of its cache for trees of at most `nodes` nodes, root included.

    Target and drafter are counted in `dtype`, the tokenizer in float32, which it always has.
    """
    found: list[Size] = []
    for name, module, kind in zip(parts._fields, parts, (dtype, dtype, torch.float32), strict=True):
        if module is not None:
            count = sum(parameter.numel() for parameter in module.parameters())
            found.append(Size(name, count, kind, count * kind.itemsize))
    for name, part in (("target", parts.target), ("drafter", parts.drafter if nodes > 1 else None)):
        if part is not None:
            found.append(Size(f"{name}'s cache", 0, dtype, _cache_bytes(part, dtype, guided, nodes, batch)))
    return found


def _cache_bytes(module: nn.Module, dtype: torch.dtype, guided: bool, nodes: int, batch: int) -> int:
    part: Any = module.to(dtype)
    with torch.device("meta"):
        session = part.session(batch, guided, nodes)
    size: int = session.cache.nbytes
    return size


# ---- A model of the full shape with random weights: for trying whether it runs here, and how fast, without any fil


def blueprint(model: str) -> tuple[str, Buildable, Parts]:
    """The model's own name, its family, and its modules on the meta device; `UserError` where it cannot be built."""
    name = card_of(model).name
    family = family_of(model)
    if not isinstance(family, Buildable):
        able = [card.name for other in families().values() if isinstance(other, Buildable) for card in other.cards()]
        raise UserError(
            f"{model}: random weights, and sizes without its files, are to be had of models with a published shape",
            f"Those are {', '.join(able) or 'none'}.",
        )
    with torch.device("meta"):
        return name, family, family.build(name)


def random_model(model: str, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> LoadedModel:
    """Make a model with weights from `generator` (on `device`); raises `UserError` as `blueprint`."""
    name, family, parts = blueprint(model)
    for module, kind in zip(parts, (dtype, dtype, torch.float32), strict=True):
        if module is not None:
            fill_at_random(module.to(kind).to_empty(device=device), device, generator)
    label = f"random-{generator.initial_seed()}"
    names = [part for part, module in zip(parts._fields, parts, strict=True) if module is not None]
    made = family.assemble(name, parts, dict.fromkeys(names, label))
    made.condition = family.random_condition(name, parts)
    made.prepare = lambda _prompts: iter(())
    return made


@torch.no_grad()
def fill_at_random(module: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Fill a module in place: matrices so that what goes in and what comes out are of one size, norms with ones."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1 or name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    module.requires_grad_(False).eval()
    compute_buffers(module, device)


# ----

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


def made_up_model(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LoadedModel:
    """Target and drafter of a shape, weights drawn in place from `generator` (on `device`) in their own type."""
    with torch.device("meta"):
        target = TransformerTarget(config, ClassLabel(1, config.dim))
        drafter = EagleDrafter(config, target.transformer.output)
    for module in (target, drafter):
        fill_at_random(module.to(dtype).to_empty(device=device), device, generator)
    # A drafter of one layer without training is accepted by chance; what its steps cost is the same.
    codes = torch.randn(config.vocab_size, _CODE_WIDTH, generator=generator, device=device)

    def condition(prompts: Sequence[str]) -> Condition:
        return Condition(torch.zeros(len(prompts), dtype=torch.int64), torch.ones(len(prompts), 1, dtype=torch.bool))

    weights = dict.fromkeys(("target", "drafter"), f"random-{generator.initial_seed()}")
    return LoadedModel(
        "random", target, drafter, NoPixels("random", "it has no tokenizer"), codes, condition, weights, config.grid
    )
