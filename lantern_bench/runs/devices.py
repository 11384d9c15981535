"""Where a sweep runs when it runs here: the device, the number type, the models, and what of them enters the keys.

Choosing is done once, before anything is decoded, so that a record says `cpu` and `float32` and never `auto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.methods import OUTSIDE_RULES
from lantern_bench.config.parse_experiment import Settings
from lantern_bench.decoding.compile import Engine, compiler_problem
from lantern_bench.decoding.neighbours import Space
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.packed_linear import lower_packed_products, pack_for_decoding
from lantern_bench.models.registry import load_model
from lantern_bench.runs.keys import KeyFields
from lantern_bench.schema import SCHEMA_VERSION

ENGINE_VERSION = "7"
"""Raised when decoding gives other tokens for the same seed, or takes another time: no run mixes the two."""


class Place(NamedTuple):
    """A device and the number type the models have there."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The number type as it is typed: `float32`."""
        return str(self.dtype).removeprefix("torch.")


def choose_place(device: str = "auto", dtype: str = "auto", fast: bool = False) -> Place:
    """Decide what `auto` means here: CUDA where there is one, bfloat16 there and float32 elsewhere.

    `fast` asks for the number type that decodes fastest: bfloat16 on a processor with instructions for it too.

    Raises `RefusedError` for a device this machine lacks.
    """
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (chosen.index or 0) >= here.get(chosen.type, 0):
        raise RefusedError(f"--device {device}: there is no such device here", "Leave it out, or type --device cpu.")
    if dtype == "auto":
        narrow = chosen.type == "cuda" or (fast and chosen.type == "cpu" and _multiplies_bfloat16())
        dtype = "bfloat16" if narrow else "float32"
    return Place(chosen, getattr(torch, dtype))


def _multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16; without them it is slower than float32."""
    # Older versions of torch do not tell; then float32 is a choice that is never wrong.
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(ask is not None and ask() for ask in asked)


def load_models(experiment: ResolvedExperiment, place: Place) -> dict[str, LoadedModel]:
    """Load every model of an experiment, by name; raises as `registry.load_model`, and for a space it cannot take."""
    models = {name: load_model(name, place.device, place.dtype) for name in experiment.settings.model}
    for model in models.values():
        set_space(model, experiment.settings.neighbour_space)
    return models


def set_space(model: LoadedModel, space: Space | None) -> None:
    """Let a model's neighbours be those of a space; None leaves the published one.

    Raises `UserError` for a model that comes with a table of its own.
    """
    if space is None:
        return
    if model.given_table is not None:
        raise UserError(f"--neighbour-space {space}: {model.name} names a table of its own", "Leave one of them out.")
    model.neighbour_space = space


def compile_models(models: Iterable[LoadedModel], place: Place) -> str | None:
    """Have the models' decode steps compiled from their first use on, and their weights laid out for that.

    Where nothing can be compiled they stay as they are, and the reason is returned, in one line.
    """
    problem = compiler_problem(place.device)
    if problem is None:
        if place.device.type == "cpu":
            lower_packed_products()
        for model in models:
            pack_for_decoding(model.target, model.drafter)
            model.engine = Engine(compile=True)
    return problem


def key_fields(
    models: Mapping[str, LoadedModel], settings: Settings, place: Place, cells: Iterable[Cell] = ()
) -> KeyFields:
    """What holds for the whole run and can change its tokens (`runs/keys.py`)."""
    rules = {cell.decoding.rule for cell in cells} & set(OUTSIDE_RULES)
    parts = {f"{name}/{part}": digest for name, model in models.items() for part, digest in model.weights.items()}
    if settings.neighbour_space is not None:
        parts |= {f"{name}/neighbours": settings.neighbour_space for name in models}
    fields: KeyFields = {
        "schema_version": SCHEMA_VERSION,
        "engine_version": ENGINE_VERSION,
        "torch_version": str(torch.__version__),
        "dtype": place.dtype_name,
        "device_type": place.device.type,
        "compile": any(model.engine.compile for model in models.values()),
        "weights": parts,
    }
    if rules:
        fields["rules"] = {name: OUTSIDE_RULES[name].fingerprint() for name in sorted(rules)}
    return fields
