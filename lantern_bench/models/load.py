"""Load the models of an experiment, ready to decode, after checking the memory that they need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.decoding.engine import ENGINE_VERSION, Engine, compiler_problem
from lantern_bench.decoding.neighbours import Space
from lantern_bench.devices.compute import Compute
from lantern_bench.methods.catalog import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks.packed_linear import pack_for_decoding
from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Note

if TYPE_CHECKING:
    import torch
from lantern_bench.devices.machine import check_free, processor


def load_models(experiment: ResolvedExperiment, compute: Compute) -> dict[str, LoadedModel]:
    """Load every model of an experiment, by name; raises `RefusedError` where its cells need too much memory."""
    models = {}
    for name in experiment.settings.model:
        described = model_of(name)
        cells = [cell for cell in experiment.cells if cell.model == name]
        if (sizes := described.sizes) is not None:
            for cell in cells:
                check_memory(
                    decoding=cell.decoding, batch=cell.batch, config=sizes, compute=compute
                )
        model = models[name] = described.load(compute.device, compute.dtype)
        set_space(model, experiment.settings.neighbour_space)
        for cell in cells:
            check_loaded(model=model, decoding=cell.decoding, batch=cell.batch, compute=compute)
    return models


def check_loaded(model: LoadedModel, decoding: Decoding, batch: int, compute: Compute) -> None:
    """Raise `UserError` for a size that the model bounds, and as `check_memory`."""
    decoding.check_sizes(model.name, model.target.image_tokens, model.target.n_codes)
    if isinstance(config := getattr(model.target, "config", None), TransformerConfig):
        check_memory(decoding=decoding, batch=batch, config=config, compute=compute)


# float32 numbers of each node and token that a step holds at once: logits, p, q, noise, quotients
_DISTRIBUTIONS = 16


def check_memory(
    decoding: Decoding, batch: int, config: TransformerConfig, compute: Compute
) -> None:
    """Raise `RefusedError` where cache, mask and distributions of a step, without weights, need more than is free."""
    nodes = 1 + decoding.draft_nodes
    rows = batch * (1 + (decoding.cfg_scale != 1))
    columns = config.prefix + config.image_tokens + 2 * nodes
    heads = config.kv_heads or config.heads
    cache = 2 * config.layers * heads * config.head_dim * compute.dtype.itemsize
    # GSD compares each token with its cluster: p, q and the rows of the codebook.
    values = _DISTRIBUTIONS + 8 * (decoding.cluster or 0)
    neighbours = decoding.neighbours or 0
    needed = rows * columns * (cache + 4 * nodes) + 4 * config.vocab_size * (
        batch * nodes * values + neighbours
    )
    advice = "Give a smaller --batch, or a draft of fewer nodes."
    check_free(
        subject=f"{decoding.cell_id}, batch {batch}",
        needed=needed,
        device=compute.device,
        advice=advice,
    )


def set_space(model: LoadedModel, space: Space | None) -> None:
    """Set the space of neighbours (None: as published); raises `UserError` for a model with its own table."""
    if space is not None and model.given_table is not None:
        problem = f"--neighbour-space {space}: {model.name} has its own neighbour table"
        raise UserError(problem, "Leave one of them out.")
    model.neighbour_space = space or model.neighbour_space


def compile_models(models: Iterable[LoadedModel], compute: Compute) -> Note | None:
    """Have the models' decode steps compiled at their first use and pack their weights; else return why not."""
    on_cpu = compute.device.type == "cpu"
    folders = [
        (model, program_folder(model, compute) if on_cpu else None)
        for model in models
        if model.compiles
    ]
    # Where programs were saved, the compiler worked.
    saved = all(folder and any(folder.glob("*.program")) for _, folder in folders)
    if not saved and (problem := compiler_problem(compute.device)) is not None:
        advice = "Decoding is slower without. Install torch 2.10 or newer and a C++ compiler, or pass --no-compile."
        return Note(f"decoding is not compiled: {problem}", advice, "warning")
    for model, folder in folders:
        pack_for_decoding(model.target, model.drafter)
        model.engine = Engine(compile=True, folder=folder)
    return None


def program_folder(model: LoadedModel, compute: Compute) -> Path:
    """Return where the programs of a model are saved; the name covers all that they depend on."""
    code = Path(__file__).parents[1]
    files = sorted(
        file
        for part in ("config", "decoding", "methods", "models")
        for file in (code / part).rglob("*.py")
    )
    outside = {name: row.fingerprint() for name, row in (OUTSIDE_RULES | OUTSIDE_DRAFTINGS).items()}
    # `model.weights` alone does not tell apart models of random weights.
    parts = (
        model.name,
        sorted(model.weights.items()),
        repr(model.target),
        repr(model.drafter),
        compute.dtype_name,
    )
    environment = (ENGINE_VERSION, str(torch.__version__), *processor(), sorted(outside.items()))
    digest = hashlib.sha256(repr((parts, environment)).encode())
    for file in files:
        digest.update(file.read_bytes())
    return cache_folder() / "programs" / digest.hexdigest()[:24]
