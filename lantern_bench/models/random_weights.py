"""Models with random weights, which measure the cost of a model without its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lantern_bench.devices.machine import check_free
from lantern_bench.models.loaded_model import CodeMap, LoadedModel, VQPixels, assemble
from lantern_bench.models.networks.eagle import published_drafter
from lantern_bench.models.networks.target import (
    ClassLabel,
    Condition,
    Prompts,
    TransformerTarget,
)
from lantern_bench.models.networks.transformer import in_dtype
from lantern_bench.models.networks.transformer_config import MOST, TransformerConfig
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError

_LONGEST = 1024  # largest number of layers, and of rows, of a random model


class Size(NamedTuple):
    """The size of a part of a model."""

    part: str
    parameters: int  # 0 for a cache
    dtype: torch.dtype
    bytes: int


def sizes_of(
    model: LoadedModel, dtype: torch.dtype, *, guided: bool, nodes: int, batch: int = 1
) -> list[Size]:
    """Return the size of each part of a model on the meta device, and of its caches.

    Args:
        model: The model.
        dtype: Type of the weights.
        guided: Whether each image has an unconditional row too.
        nodes: Nodes of the draft tree. With one node the drafter needs no cache.
        batch: Number of images at once.
    """
    sizes = [size for size, _ in _modules(model, dtype)]
    cached = {"target": model.target, "drafter": model.drafter if nodes > 1 else None}
    for name, network in cached.items():
        if isinstance(network, nn.Module):
            with torch.device("meta"):
                session = in_dtype(network, dtype).session(batch, guided=guided, nodes=nodes)
            sizes.append(Size(f"{name}'s cache", 0, dtype, session.cache.nbytes))
    return sizes


def meta_model(name: str) -> LoadedModel:
    """Return a model on the meta device.

    Raises:
        UserError: Only the files of the model tell its architecture.
    """
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
    """Make a model with random weights.

    Args:
        name: Name of the model.
        device: Device of the weights.
        dtype: Type of the weights.
        generator: Draws the weights, on `device`.

    Raises:
        UserError: Only the files of the model tell its architecture.
        RefusedError: The weights do not fit in the free memory.
    """
    model = meta_model(name)
    _fill_at_random(model, device, dtype, generator=generator)
    if isinstance(model.pixels, VQPixels):
        model.codebook = model.pixels.model.codebook()
    if isinstance(model.pixels, CodeMap):
        model.codebook = _random_codebook(model.target.n_codes, generator)
    return model


def _random_codebook(codes: int, generator: torch.Generator) -> Tensor:
    return torch.randn(codes, 8, generator=generator, device=generator.device)


def _modules(model: LoadedModel, dtype: torch.dtype) -> list[tuple[Size, nn.Module]]:
    """Return the modules of a model with their sizes. A tokenizer is always float32."""
    modules: dict[str, Any] = {"target": model.target, "drafter": model.drafter}
    if isinstance(model.pixels, VQPixels):
        modules["tokenizer"] = model.pixels.model
    sized = []
    for part, module in modules.items():
        if module is not None:
            kind = torch.float32 if part == "tokenizer" else dtype
            count = sum(parameter.numel() for parameter in module.parameters())
            sized.append((Size(part, count, dtype=kind, bytes=count * kind.itemsize), module))
    return sized


@torch.no_grad()
def _fill_at_random(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, *, generator: torch.Generator
) -> None:
    """Fill a model's modules so that outputs have the scale of their inputs."""
    modules = _modules(model, dtype)
    check_free(model.name, sum(size.bytes for size, _ in modules), device)
    for size, module in modules:
        in_dtype(module, size.dtype)
        empty = {
            name: torch.empty_like(tensor, device=device)
            for name, tensor in module.state_dict().items()
        }
        module.load_state_dict(empty, assign=True)
        module.to(device)  # its tables
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1 or name.endswith("norm.weight"):
                parameter.fill_(1)
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        module.requires_grad_(requires_grad=False).eval()
    model.weights = {size.part: f"random-{generator.initial_seed()}" for size, _ in modules}


def read_size(text: str) -> TransformerConfig:
    """Read the sizes that a `--size` describes.

    Heads are 64 wide, and the feed-forward width is 8/3 of the width.

    Args:
        text: LAYERSxWIDTH[xVOCABULARY[xSIDE]].

    Raises:
        UserError: The text is malformed, or a size is not possible.
    """
    if re.fullmatch(r"\d+(x\d+){1,3}", text) is None:
        raise UserError(
            f"--size {text}: must be LAYERSxWIDTH[xVOCABULARY[xSIDE]]",
            "For example 36x1280x16384x16, LlamaGen-XL at 256 pixels.",
        )
    numbers = [int(number) for number in text.split("x")]
    usual = [0, 0, 16384, 16]  # the last two may be left out
    layers, width, vocabulary, side = numbers + usual[len(numbers) :]
    if min(layers, vocabulary, side) < 1 or width < 64 or width % 64:
        raise UserError(f"--size {text}: the width must be a multiple of 64, the rest at least 1")
    if max(layers, side) > _LONGEST or max(width, vocabulary) > MOST:
        raise UserError(
            f"--size {text}: is too large: at most {_LONGEST:,} layers and side, width and "
            f"vocabulary at most {MOST:,}"
        )
    return TransformerConfig(
        vocab_size=vocabulary,
        dim=width,
        layers=layers,
        heads=width // 64,
        ffn_dim=-(-8 * width // 3 // 256) * 256,
        prefix=1,
        grid=(side, side),
    )


def random_model_of_size(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LoadedModel:
    """Make a target and a drafter with random weights.

    Args:
        config: Sizes of both.
        device: Device of the weights.
        dtype: Type of the weights.
        generator: Draws the weights, on `device`.

    Raises:
        RefusedError: The weights do not fit in the free memory.
    """

    def condition(prompts: Sequence[str]) -> Condition:
        return Condition(
            values=torch.zeros(len(prompts), dtype=torch.int64),
            valid=torch.ones(len(prompts), 1, dtype=torch.bool),
        )

    with torch.device("meta"):
        target = TransformerTarget(config, ClassLabel(1, config.dim))
        drafter = published_drafter(config, target)
    model = assemble(
        "random",
        target=target,
        drafter=drafter,
        tokenizer=None,
        prompts=Prompts(condition),
        weights={},
    )
    _fill_at_random(model, device, dtype, generator=generator)
    model.codebook = _random_codebook(config.vocab_size, generator)
    return model
