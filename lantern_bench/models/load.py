"""Models ready to decode, of an experiment or with random weights, and the memory that they need.

Random weights measure the cost of a model without its checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.decoding.engine import ENGINE_VERSION, Engine, compiler_problem
from lantern_bench.decoding.neighbours import Space
from lantern_bench.devices.compute import Compute
from lantern_bench.devices.machine import check_free, processor
from lantern_bench.methods.catalog import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models.loaded_model import LoadedModel, VQPixels, assemble
from lantern_bench.models.networks.eagle import published_drafter
from lantern_bench.models.networks.packed_linear import pack_for_decoding
from lantern_bench.models.networks.target import (
    CachedTarget,
    ClassLabel,
    Condition,
    Prompts,
    TransformerTarget,
)
from lantern_bench.models.networks.transformer_config import MOST, TransformerConfig
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Note

# Numbers of type float32 that a step holds for each node and token: logits, p, q, noise, quotients.
_DISTRIBUTIONS = 16
# Folders of the package whose code a compiled program depends on.
_COMPILED_FOLDERS = ("config", "decoding", "methods", "models")


def load_models(experiment: ResolvedExperiment, compute: Compute) -> dict[str, LoadedModel]:
    """Load every model of an experiment, by name.

    Raises:
        RefusedError: Weights are missing, or a cell needs too much memory. That is checked before
            loading if the sizes are known, and again with the weights in memory.
    """
    models = {}
    for name in experiment.settings.model:
        described = model_of(name)
        cells = [cell for cell in experiment.cells if cell.model == name]
        if described.sizes is not None:
            for cell in cells:
                check_memory(cell.decoding, cell.batch, config=described.sizes, compute=compute)
        model = described.load(compute.device, compute.dtype)
        set_space(model, experiment.settings.neighbour_space)
        for cell in cells:
            check_loaded(model, cell.decoding, batch=cell.batch, compute=compute)
        models[name] = model
    return models


def check_loaded(model: LoadedModel, decoding: Decoding, *, batch: int, compute: Compute) -> None:
    """Check that a loaded model can decode as a cell asks.

    Args:
        model: The model.
        decoding: The decoding configuration.
        batch: Number of images at once.
        compute: Device and type.

    Raises:
        UserError: A parameter is larger than the model allows.
        RefusedError: Less memory is free than a step needs.
    """
    decoding.check_sizes(model.name, model.target.image_tokens, model.target.n_codes)
    if isinstance(model.target, CachedTarget):
        check_memory(decoding, batch, config=model.target.config, compute=compute)


def check_memory(
    decoding: Decoding, batch: int, *, config: TransformerConfig, compute: Compute
) -> None:
    """Raise `RefusedError` if less memory is free than a step needs besides the weights.

    It needs the cache, the mask and the distributions.

    Args:
        decoding: The decoding configuration.
        batch: Number of images at once.
        config: Sizes of the target.
        compute: Device and type.
    """
    nodes = 1 + decoding.draft_nodes
    rows = batch * (1 if decoding.cfg_scale == 1 else 2)
    columns = config.prefix + config.image_tokens + 2 * nodes
    heads = config.kv_heads or config.heads
    cache = 2 * config.layers * heads * config.head_dim * compute.dtype.itemsize
    mask = 4 * nodes
    # GSD compares each token with its cluster: p, q and the rows of the codebook.
    values = _DISTRIBUTIONS + 8 * (decoding.cluster or 0)
    distributions = 4 * (batch * nodes * values + (decoding.neighbours or 0))
    check_free(
        subject=f"{decoding.cell_id}, batch {batch}",
        needed=rows * columns * (cache + mask) + config.vocab_size * distributions,
        device=compute.device,
        advice="Give a smaller --batch, or a draft of fewer nodes.",
    )


def set_space(model: LoadedModel, space: Space | None) -> None:
    """Set the space of neighbours. None leaves the space of the published tables.

    Raises:
        UserError: The model has its own table of neighbours.
    """
    if space is None:
        return
    if model.given_table is not None:
        raise UserError(
            f"--neighbour-space {space}: {model.name} has its own neighbour table",
            "Leave one of them out.",
        )
    model.neighbour_space = space


def compile_models(models: Iterable[LoadedModel], compute: Compute) -> Note | None:
    """Pack the weights of models, and have their steps compiled at the first use.

    Returns:
        None, or why the models are not compiled.
    """
    compiled = [model for model in models if model.compiles]
    is_cpu = compute.device.type == "cpu"
    folders = [program_folder(model, compute) if is_cpu else None for model in compiled]
    # If programs were saved, the compiler worked.
    are_saved = all(folder and any(folder.glob("*.program")) for folder in folders)
    problem = None if are_saved else compiler_problem(compute.device)
    if problem is not None:
        return Note(
            f"decoding is not compiled: {problem}",
            "Decoding is slower without. Install torch 2.10 or newer and a C++ compiler, or pass "
            "--no-compile.",
            "warning",
        )
    for model, folder in zip(compiled, folders, strict=True):
        pack_for_decoding(model.target, model.drafter)
        model.engine = Engine(compile=True, folder=folder)
    return None


def program_folder(model: LoadedModel, compute: Compute) -> Path:
    """Return where the programs of a model are saved. The name covers all they depend on."""
    outside = OUTSIDE_RULES | OUTSIDE_DRAFTINGS
    facts = (
        model.name,
        sorted(model.weights.items()),
        # `model.weights` alone does not tell apart models of random weights.
        repr(model.target),
        repr(model.drafter),
        compute.dtype_name,
        ENGINE_VERSION,
        torch.__version__,
        processor(),
        sorted((name, row.fingerprint()) for name, row in outside.items()),
    )
    digest = hashlib.sha256(repr(facts).encode())
    for folder in _COMPILED_FOLDERS:
        for file in sorted((Path(__file__).parents[1] / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return cache_folder() / "programs" / digest.hexdigest()[:24]


# ---- Random weights


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
                session = network.to(dtype).session(batch, guided=guided, nodes=nodes)
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
    return model


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
            size = Size(part=part, parameters=count, dtype=kind, bytes=count * kind.itemsize)
            sized.append((size, module))
    return sized


@torch.no_grad()
def _fill_at_random(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, *, generator: torch.Generator
) -> None:
    """Fill a model's modules so that outputs have the scale of their inputs."""
    modules = _modules(model, dtype)
    check_free(model.name, sum(size.bytes for size, _ in modules), device)
    for size, module in modules:
        module.to(size.dtype).to_empty(device=device)
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
    usual = [0, 0, 16384, 16]
    numbers += usual[len(numbers) :]  # those that may be left out
    layers, width, vocabulary, side = numbers
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
        valid = torch.ones(len(prompts), 1, dtype=torch.bool)
        return Condition(torch.zeros(len(prompts), dtype=torch.int64), valid)

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
    model.codebook = torch.randn(config.vocab_size, 8, generator=generator, device=device)
    return model
