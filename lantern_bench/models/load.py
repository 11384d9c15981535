"""Load the models of an experiment, check that memory suffices, and compile their steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.decoding.engine import ENGINE_VERSION, Engine, compiler_problem
from lantern_bench.decoding.neighbours import Space
from lantern_bench.devices.compute import Compute, choose_compute
from lantern_bench.devices.machine import check_free, processor
from lantern_bench.methods.catalog import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models.checkpoints.checkpoint import count_numbers
from lantern_bench.models.checkpoints.drafter_files import read_config
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.model import Model
from lantern_bench.models.networks.packed_linear import pack_for_decoding
from lantern_bench.models.networks.target import CachedTarget
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError, joined
from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Emit, Note, ignore_events

# Numbers of type float32 that a step holds for each node and token: logits, p, q, noise, quotients.
_DISTRIBUTIONS = 16
# Folders of the package whose code a compiled program depends on.
_COMPILED_FOLDERS = ("config", "decoding", "methods", "models")


def load_models(
    experiment: ResolvedExperiment, compute: Compute, emit: Emit = ignore_events
) -> dict[str, LoadedModel]:
    """Load every model of an experiment, by name.

    Args:
        experiment: The experiment.
        compute: Device and type.
        emit: Receives remarks on the files.

    Raises:
        RefusedError: Weights are missing, or a cell needs too much memory. That is checked before
            loading if the sizes are known, and again with the weights in memory.
    """
    models = {}
    for name in experiment.settings.model:
        described = model_of(name)
        cells = [cell for cell in experiment.cells if cell.model == name]
        model = load_model(described, compute, cells, captions=True)
        for remark in model.remarks:
            emit(Note(remark, level="warning"))
        set_space(model, experiment.settings.neighbour_space)
        for cell in cells:
            check_loaded(model, cell.decoding, batch=cell.batch, compute=compute)
        models[name] = model
    return models


def load_model(
    described: Model, compute: Compute, cells: Iterable[Cell] = (), *, captions: bool = False
) -> LoadedModel:
    """Load a model if its weights, and a step of each of `cells`, fit in the free memory.

    Args:
        described: The model.
        compute: Device and type.
        cells: Cells of the model.
        captions: Whether captions will be encoded, so that a text encoder must be here.

    Raises:
        UserError: A file does not fit.
        RefusedError: Parts are missing, or need too much memory.
    """
    missing = described.missing(drafter=False) if captions else []
    if missing:
        raise joined(missing)
    drafter = described.files().get("drafter")
    if drafter is not None and drafter.is_dir():
        read_config(drafter)
    weights = bytes_of_weights(described, compute)
    check_free(
        subject=f"the weights of {described.name} in {compute.dtype_name}",
        needed=weights,
        device=compute.device,
        advice="Give --dtype bfloat16, or stop other programs.",
    )
    if described.sizes is not None:
        for cell in cells:
            check_memory(
                cell.decoding,
                cell.batch,
                config=described.sizes,
                compute=compute,
                weights=weights,
            )
    return described.load(compute.device, compute.dtype)


def bytes_of_weights(described: Model, compute: Compute) -> int:
    """Return the memory that a model's weights take, as far as its files tell it."""
    numbers = {}
    for part, path in described.files().items():
        if part in ("target", "drafter", "tokenizer") and path.exists():
            # A tokenizer may be in the file of the target.
            numbers[path] = count_numbers(
                path, described.stated(part, "weights"), described.ignored
            )
    return sum(numbers.values()) * compute.dtype.itemsize


def load_to_decode(
    experiment: ResolvedExperiment, emit: Emit
) -> tuple[Compute, dict[str, LoadedModel]]:
    """Load the models of an experiment by name, compiled if it asks for that.

    Raises as `load_uncompiled`.
    """
    compute, models = load_uncompiled(experiment, emit)
    if experiment.settings.compile:
        warning = compile_models(models.values(), compute)
        if warning is not None:
            emit(warning)
    return compute, models


def load_uncompiled(
    experiment: ResolvedExperiment, emit: Emit
) -> tuple[Compute, dict[str, LoadedModel]]:
    """Load the models of an experiment by name.

    Raises `RefusedError` for missing weights or tokenizers, and where memory does not suffice.
    """
    settings = experiment.settings
    compute = choose_compute(settings.device, settings.dtype, fast=True)
    models = load_models(experiment, compute, emit)
    for model in models.values():
        model.pixel_decoder()
    emit(Note(f"device {compute.device}, {compute.dtype_name}", level="detail"))
    return compute, models


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
    decoding: Decoding,
    batch: int,
    *,
    config: TransformerConfig,
    compute: Compute,
    weights: int = 0,
) -> None:
    """Raise `RefusedError` if less memory is free than a step needs.

    It needs the cache, the mask and the distributions.

    Args:
        decoding: The decoding configuration.
        batch: Number of images at once.
        config: Sizes of the target.
        compute: Device and type.
        weights: Bytes of weights that are not loaded yet.
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
        needed=weights + rows * columns * (cache + mask) + config.vocab_size * distributions,
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


def compile_models(
    models: Iterable[LoadedModel], compute: Compute, *, try_compiler: bool = True
) -> Note | None:
    """Pack the weights of models, and have their steps compiled at the first use.

    Args:
        models: The models.
        compute: Device and type.
        try_compiler: Whether the compiler is tried where no programs are saved.

    Returns:
        None, or why the models are not compiled.
    """
    compiled = [model for model in models if model.compiles]
    problem = None
    # If programs were saved, the compiler worked.
    if try_compiler and not are_saved(compiled, compute):
        problem = compiler_problem(compute.device)
    if problem is not None:
        return Note(
            f"decoding is not compiled: {problem}",
            "Decoding is slower without. Install a C++ compiler, or pass --no-compile.",
            "warning",
        )
    for model in compiled:
        # Packing changes what names the folder.
        folder = program_folder(model, compute) if compute.device.type == "cpu" else None
        pack_for_decoding(model.target, model.drafter)
        model.engine = Engine(compile=True, folder=folder)
    return None


def are_saved(models: Iterable[LoadedModel], compute: Compute) -> bool:
    """Return whether programs of each model are saved, of those that compile and are not packed."""
    compiled = [model for model in models if model.compiles]
    if compute.device.type != "cpu":
        return not compiled
    return all(any(program_folder(model, compute).glob("*.program")) for model in compiled)


def program_folder(model: LoadedModel, compute: Compute) -> Path:
    """Return where the programs of a model are saved. The name covers all they depend on."""
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
        sorted(
            (name, row.fingerprint()) for name, row in (OUTSIDE_RULES | OUTSIDE_DRAFTINGS).items()
        ),
    )
    digest = hashlib.sha256(repr(facts).encode())
    for folder in _COMPILED_FOLDERS:
        for file in sorted((Path(__file__).parents[1] / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return cache_folder() / "programs" / digest.hexdigest()[:24]
