"""The device and dtype of a run, its models, and their fields of the record key.

`auto` is resolved once, before decoding, so that a record says `cpu` and `float32`.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.settings import Settings
from lantern_bench.decoding.compile import Engine, compiler_problem
from lantern_bench.decoding.neighbours import Space
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.tables import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models.io.files import cache_folder
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.packed_linear import has_bfloat16, lower_packed_products, pack_for_decoding
from lantern_bench.models.registry import model_of
from lantern_bench.runs.events import Note
from lantern_bench.runs.keys import KeyFields
from lantern_bench.schema import SCHEMA_VERSION

ENGINE_VERSION = "10"
"""Incremented when the tokens at a seed or the timing change; a run never mixes two versions."""


class Compute(NamedTuple):
    """The device of a process and the dtype of the models on it."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as the flag writes it: `float32`."""
        return str(self.dtype).removeprefix("torch.")


def choose_compute(device: str = "auto", dtype: str = "auto", fast: bool = False) -> Compute:
    """Resolve `auto`: CUDA if available; bfloat16 on CUDA and float32 elsewhere.

    With `fast`, `auto` is bfloat16 also on a CPU that has instructions for it. Raises `RefusedError` for a device that
    this machine lacks.
    """
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (chosen.index or 0) >= here.get(chosen.type, 0):
        raise RefusedError(f"--device {device}: this machine has no such device", "Leave it out, or give --device cpu.")
    if dtype == "auto":
        narrow = chosen.type == "cuda" or (fast and chosen.type == "cpu" and has_bfloat16(chosen))
        dtype = "bfloat16" if narrow else "float32"
    return Compute(chosen, getattr(torch, dtype))


def load_models(experiment: ResolvedExperiment, compute: Compute) -> dict[str, LoadedModel]:
    """Load every model of an experiment, by name; raises as `Model.load` and `set_space`."""
    models = {name: model_of(name).load(compute.device, compute.dtype) for name in experiment.settings.model}
    for model in models.values():
        set_space(model, experiment.settings.neighbour_space)
    return models


def set_space(model: LoadedModel, space: Space | None) -> None:
    """Set the space of a model's neighbours; None keeps the published one.

    Raises `UserError` for a model that has a neighbour table of its own.
    """
    if space is not None and model.given_table is not None:
        what = f"--neighbour-space {space}: {model.name} has its own neighbour table"
        raise UserError(what, "Leave one of them out.")
    model.neighbour_space = space or model.neighbour_space


def compile_models(models: Iterable[LoadedModel], compute: Compute) -> Note | None:
    """Compile the models' decode steps at their first use, and pack their weights for that.

    Where nothing can be compiled the models stay unchanged; returns a warning that says why. Programs of a CPU are kept
    in the user's cache for the next process. Models whose code cannot be compiled stay as they are.
    """
    on_cpu = compute.device.type == "cpu"
    folders = [(model, program_folder(model, compute) if on_cpu else None) for model in models if model.compiles]
    # Where programs were saved, the compiler worked.
    saved = all(folder and any(folder.glob("*.program")) for _, folder in folders)
    if not saved and (problem := compiler_problem(compute.device)) is not None:
        advice = "Decoding is slower without. Install torch 2.10 or newer and a C++ compiler, or pass --no-compile."
        return Note(f"decoding is not compiled: {problem}", advice, "warning")
    for model, folder in folders:
        pack_for_decoding(model.target, model.drafter)
        if on_cpu:
            lower_packed_products()
        model.engine = Engine(compile=True, folder=folder)
    return None


def program_folder(model: LoadedModel, compute: Compute) -> Path:
    """Return where the programs of a model are saved: the name covers all that they depend on."""
    code = Path(__file__).parents[1]
    files = sorted(file for part in ("config", "decoding", "methods", "models") for file in (code / part).rglob("*.py"))
    outside = {name: row.fingerprint() for name, row in (OUTSIDE_RULES | OUTSIDE_DRAFTINGS).items()}
    # `model.weights` alone does not tell apart models of random weights.
    parts = (model.name, sorted(model.weights.items()), repr(model.target), repr(model.drafter), compute.dtype_name)
    here = (ENGINE_VERSION, str(torch.__version__), *processor(), sorted(outside.items()))
    digest = hashlib.sha256(repr((parts, here)).encode())
    for file in files:
        digest.update(file.read_bytes())
    return cache_folder() / "programs" / digest.hexdigest()[:24]


def processor() -> tuple[str, ...]:
    """What compiled code depends on in a CPU: its architecture, model and instructions."""
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else platform.processor()
    kinds = {line for line in text.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(kinds)


def key_fields(
    models: Mapping[str, LoadedModel], settings: Settings, compute: Compute, cells: Iterable[Cell] = ()
) -> KeyFields:
    """Return the fields of the record key that hold for the whole run (`runs/keys.py`)."""
    used = [cell.decoding for cell in cells]
    rules = OUTSIDE_RULES.keys() & {decoding.rule for decoding in used}
    draftings = OUTSIDE_DRAFTINGS.keys() & {decoding.drafting for decoding in used}
    parts = {f"{name}/{part}": digest for name, model in models.items() for part, digest in model.weights.items()}
    if settings.neighbour_space is not None:
        parts |= {f"{name}/neighbours": settings.neighbour_space for name in models}
    fields: KeyFields = {
        "schema_version": SCHEMA_VERSION,
        "engine_version": ENGINE_VERSION,
        "torch_version": str(torch.__version__),
        "dtype": compute.dtype_name,
        "device_type": compute.device.type,
        "compile": any(model.engine.compile for model in models.values()),
        "weights": parts,
    }
    if rules:
        fields["rules"] = {name: OUTSIDE_RULES[name].fingerprint() for name in sorted(rules)}
    if draftings:
        fields["draftings"] = {name: OUTSIDE_DRAFTINGS[name].fingerprint() for name in sorted(draftings)}
    return fields
