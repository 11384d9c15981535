"""Models with random weights, to measure cost without a checkpoint, and how much memory a model's parts need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lantern_bench.devices.machine import check_free
from lantern_bench.models.loaded_model import LoadedModel, VQPixels, assemble
from lantern_bench.models.networks.conditions import ClassLabel, Condition, Prompts
from lantern_bench.models.networks.eagle import build_drafter
from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.networks.transformer_config import MOST, TransformerConfig
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError

_LONGEST = 1024


class Size(NamedTuple):
    """The size of a part of a model: parameters (0 for a cache), their type, bytes."""

    part: str
    parameters: int
    dtype: torch.dtype
    bytes: int


def sizes_of(
    model: LoadedModel, dtype: torch.dtype, *, guided: bool, nodes: int, batch: int = 1
) -> list[Size]:
    """The size of each part of a model on the meta device, and of its cache for trees of `nodes` nodes."""
    sizes: list[Size] = []
    for name, module, kind in _modules(model, dtype):
        count = sum(parameter.numel() for parameter in module.parameters())
        sizes.append(Size(part=name, parameters=count, dtype=kind, bytes=count * kind.itemsize))
    for name, module in (
        ("target", model.target),
        ("drafter", model.drafter if nodes > 1 else None),
    ):
        if isinstance(module, nn.Module):
            with torch.device("meta"):
                session = module.to(dtype).session(batch, guided=guided, nodes=nodes)
            sizes.append(
                Size(part=f"{name}'s cache", parameters=0, dtype=dtype, bytes=session.cache.nbytes)
            )
    return sizes


def meta_model(name: str) -> LoadedModel:
    """Return a model on the meta device; raises `UserError` where only its files tell its architecture."""
    model = model_of(name).with_random_weights()
    if model is None:
        raise UserError(
            f"{name}: --random-weights and --dry-run need a model whose architecture is known",
            "Give a published model; `lantern-bench models` lists them.",
        )
    return model


def random_model(
    name: str, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LoadedModel:
    """Make a model with weights from `generator` (on `device`); raises `UserError` as `meta_model`."""
    model = meta_model(name)
    _fill_at_random(model=model, device=device, dtype=dtype, generator=generator)
    if isinstance(model.pixels, VQPixels):
        model.codebook = model.pixels.model.codebook()
    return model


def _modules(model: LoadedModel, dtype: torch.dtype) -> Iterator[tuple[str, Any, torch.dtype]]:
    """The modules of a model with their names and number types: only the tokenizer's is fixed."""
    tokenizer = model.pixels.model if isinstance(model.pixels, VQPixels) else None
    modules = {"target": model.target, "drafter": model.drafter, "tokenizer": tokenizer}
    for name, module in modules.items():
        if module is not None:
            yield name, module, torch.float32 if name == "tokenizer" else dtype


@torch.no_grad()
def _fill_at_random(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Fill a model's modules so that outputs have the scale of their inputs; `RefusedError` where they do not fit."""
    modules = list(_modules(model, dtype))
    weights = [
        weight.numel() * kind.itemsize
        for _, module, kind in modules
        for weight in module.parameters()
    ]
    check_free(model.name, sum(weights), device)
    for _, module, kind in modules:
        module.to(kind).to_empty(device=device)
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1 or name.endswith("norm.weight"):
                parameter.fill_(1)
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        module.requires_grad_(False).eval()
    model.weights = {part: f"random-{generator.initial_seed()}" for part, *_ in modules}


def read_size(text: str) -> TransformerConfig:
    """The shape that a `--size` describes: heads of 64, a feed-forward width of 8/3 of the width; else `UserError`."""
    if re.fullmatch(r"\d+(x\d+){1,3}", text) is None:
        raise UserError(
            f"--size {text}: must be LAYERSxWIDTH[xVOCABULARY[xSIDE]]",
            "For example 36x1280x16384x16, LlamaGen-XL at 256 pixels.",
        )
    numbers = [int(number) for number in text.split("x")]
    layers, width, vocabulary, side = numbers + [16384, 16][len(numbers) - 2 :]
    if min(layers, vocabulary, side) < 1 or width < 64 or width % 64:
        raise UserError(f"--size {text}: the width must be a multiple of 64, the rest at least 1")
    if max(layers, side) > _LONGEST or max(width, vocabulary) > MOST:
        most = f"at most {_LONGEST:,} layers and side, width and vocabulary at most {MOST:,}"
        raise UserError(f"--size {text}: is too large: {most}")
    ffn = -(-8 * width // 3 // 256) * 256
    return TransformerConfig(
        vocab_size=vocabulary,
        dim=width,
        layers=layers,
        heads=width // 64,
        ffn_dim=ffn,
        prefix=1,
        grid=(side, side),
    )


def random_model_of_size(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LoadedModel:
    """Make a target and a drafter of a shape, with weights from `generator` (on `device`)."""
    with torch.device("meta"):
        target = TransformerTarget(config, ClassLabel(1, config.dim))
        drafter = build_drafter(config, target)

    def condition(prompts: Sequence[str]) -> Condition:
        return Condition(
            torch.zeros(len(prompts), dtype=torch.int64),
            torch.ones(len(prompts), 1, dtype=torch.bool),
        )

    model = assemble(
        name="random",
        target=target,
        drafter=drafter,
        tokenizer=None,
        prompts=Prompts(condition),
        weights={},
    )
    _fill_at_random(model=model, device=device, dtype=dtype, generator=generator)
    model.codebook = torch.randn(config.vocab_size, 8, generator=generator, device=device)
    return model
