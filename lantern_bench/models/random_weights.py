"""A model of the full shape with random weights: for trying whether it runs here, and how fast, without any file.

The pictures mean nothing. Weights are drawn in place, in their final type, so that no more memory is needed than the
model takes. Where a text encoder would stand, the family gives a function of the caption alone.
"""

from __future__ import annotations

import torch
from torch import nn

from lantern_bench.errors import UserError
from lantern_bench.models.filling import compute_buffers
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.parts import Parts
from lantern_bench.models.registry import Buildable, card_of, families, family_of

__all__ = ["blueprint", "fill_at_random", "random_model"]


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
