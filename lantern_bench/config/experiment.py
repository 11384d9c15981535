"""From an experiment file and flags to cells with every value decided.

`load_experiment` reads and checks all that can be known without models; `resolve` adds what the models themselves
say and returns the cells. A resolved experiment writes itself as an experiment file that resolves to the same cells.
The keys of an experiment file are in `parse_experiment.py` and `methods/`; `plan.py` puts the cells in order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.expand_grid import Expansion
from lantern_bench.config.parse_experiment import Experiment, Settings, read_experiment
from lantern_bench.config.values import Overrides, Place, Problems
from lantern_bench.config.yaml_source import read_source
from lantern_bench.errors import UserError, did_you_mean

MOST_CELLS = 1_000
"""Larger grids are more often a slip than a plan: they need `--yes`."""

# Keys that do not change the images, up to rounding.
_NOT_RUN = ("name", "description", "paper", "protocol", "reference", "processes", "threads", "pool_devices")


@dataclass(frozen=True)
class Cell:
    """One model with one decoding, `batch` images at once.

    `prefix` and `suffix` are the model's name and the batch in the id, when a run has several of them.
    """

    model: str
    decoding: Decoding
    prefix: str = ""
    batch: int = 1
    suffix: str = ""

    @cached_property
    def cell_id(self) -> str:
        """The decoding's id, with model and batch where the run has several; also the name of the image directory."""
        return self.prefix + self.decoding.cell_id + self.suffix

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of `schema.py`, in their order; None where the cell lacks the parameter."""
        return self.decoding.columns() | {"cell_id": self.cell_id, "batch": self.batch, "model": self.model}

    def settings(self) -> dict[str, Any]:
        """Return the cell as an experiment file writes it, the model included: what a record's key covers."""
        return {"model": self.model, "batch": self.batch, **self.decoding.settings()}


@dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment with every value decided; `cfg_defaults` are the models' own guidance scales, for the ids."""

    settings: Settings
    cells: tuple[Cell, ...]
    cfg_defaults: Mapping[str, float]

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.settings.name

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that is itself a valid experiment file and resolves to the same cells."""
        values = self.settings.model_dump(mode="json", exclude_none=True)
        values["model_defaults"] = {model: {"cfg_scale": scale} for model, scale in self.cfg_defaults.items()}
        several = len(self.settings.model) > 1
        values["batch"] = values["batch"] if len(self.settings.batch) > 1 else self.settings.batch[0]
        # Each decoding once: `batch` lists the batch sizes.
        found = {cell.prefix + cell.decoding.cell_id: cell for cell in self.cells}.values()
        named = ({"model": cell.model} if several else {} for cell in found)
        values["cells"] = [name | cell.decoding.settings() for name, cell in zip(named, found, strict=True)]
        return values

    def to_yaml(self) -> str:
        """Return `to_dict` as YAML."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120))

    @cached_property
    def hash8(self) -> str:
        """8 hex digits of a hash of everything that changes the images; names, published figures and scoring do not."""
        covered = {key: value for key, value in self.to_dict().items() if key not in _NOT_RUN}
        return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run_name(self) -> str:
        """The name of the run directory."""
        return f"{self.name}-{self.hash8}"


def shipped_experiments() -> dict[str, Path]:
    """Return the experiments that come with the package, by name: from the wheel, else from the repository."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "experiments", package.parent / "experiments"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def load_experiment(source: str | Path, overrides: Overrides | None = None) -> Experiment:
    """Read an experiment: a file, or the name of a shipped one, with the overrides applied.

    Raises one `UserError` that lists every problem with its place. What depends on a model's defaults is checked by
    `resolve`; everything else is checked here.
    """
    experiment, problems = read_experiment(read_source(_find(source)), overrides or Overrides())
    _expand(experiment, None, problems)
    problems.raise_all()
    return experiment


def _find(source: str | Path) -> Path:
    path = Path(source)
    if isinstance(source, str) and not path.suffix and path.name == source:
        shipped = shipped_experiments()
        if source in shipped:
            return shipped[source]
        if not path.is_file():
            names = ", ".join(shipped) or "none"
            raise UserError(
                f"no experiment is named '{source}'{did_you_mean(source, shipped)}",
                f"The experiments are: {names}. A file is named with its ending, for example mine.yaml.",
            )
    if not path.is_file():
        raise UserError(f"{source}: no such experiment file", "Give a YAML file, or the name of a shipped experiment.")
    return path


def resolve(experiment: Experiment, model_defaults: Mapping[str, Mapping[str, Any]]) -> ResolvedExperiment:
    """Decide every value: `model_defaults` holds, by model, the values the model itself suggests.

    A scale recorded in the file (a resolved one) wins over the model's. Raises one `UserError` for all unknown
    models, missing parameters and cells that cannot be told apart.
    """
    problems = Problems(experiment.source)
    known = dict(model_defaults)
    for model, recorded in experiment.recorded_defaults.items():
        known[model] = dict(known.get(model, {})) | dict(recorded)
    for model in experiment.settings.model:
        if model not in known:
            place = experiment.places.get("model", Place("model"))
            problems.add(place, f"unknown model{did_you_mean(model, known)} (the models are {', '.join(known)})", model)
    problems.raise_all()
    cells = _expand(experiment, known, problems)
    for cell_id, times in Counter(cell.cell_id for cell in cells).items():
        if times > 1:
            problems.add(Place("cells"), f"two cells differ too little to be told apart by name: {cell_id}")
    problems.raise_all()
    defaults = {model: float(known[model].get("cfg_scale") or 1.0) for model in experiment.settings.model}
    return ResolvedExperiment(experiment.settings, tuple(cells), defaults)


def _expand(experiment: Experiment, known: Mapping[str, Mapping[str, Any]] | None, problems: Problems) -> list[Cell]:
    models, several = experiment.settings.model, len(experiment.settings.batch) > 1
    batches = [(batch, f"-batch{batch}" if several else "") for batch in experiment.settings.batch]
    cells: dict[Cell, None] = {}
    used_flags: set[str] = set()
    for model in models:
        defaults = known[model] if known is not None else None
        layer = experiment.models.get(model, {})
        most = None if experiment.many else MOST_CELLS // (len(models) * len(batches))
        expansion = Expansion(experiment.flags, layer, experiment.top, defaults, problems, used_flags, most)
        prefix = re.sub(r"[^A-Za-z0-9.+_-]", "_", model) + "-" if len(models) > 1 else ""
        for spec in experiment.cells_of(model):
            for one in expansion.expand(spec.values, spec.place):
                cells.update(dict.fromkeys(Cell(model, one, prefix, *batch) for batch in batches))
    for key, given in experiment.flags.items():
        if key not in used_flags and all(spec.modes for spec in experiment.cells):
            experiment.note_idle_flag(key, given[0], problems)
    return list(cells)
