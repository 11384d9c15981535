"""From an experiment file and flags to cells with every value decided.

A resolved experiment writes itself as an experiment file that resolves to the same cells. The keys of an experiment
file are in `settings.py` and `lantern_bench/methods`; `plan.py` puts the cells in order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.expand_grid import Grid, Layers
from lantern_bench.config.parse_experiment import BASELINE, CellEntry, ExperimentReader
from lantern_bench.config.settings import Settings
from lantern_bench.config.values import Layer, Location, Overrides, Problems
from lantern_bench.config.yaml_source import Source, read_source
from lantern_bench.errors import UserError, did_you_mean
from lantern_bench.methods.tables import owners_of

ModelDefaults: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The decoding values that models suggest, by the model's name."""

MOST_CELLS = 1_000
"""Larger grids are more often a slip than a plan: they need `--yes`."""

# Keys that do not change the images, up to rounding.
_NOT_RUN = ("name", "description", "paper", "protocol", "reference", "processes", "threads", "pool_devices")


@dataclass(frozen=True)
class Cell:
    """One model with one decoding and batch size."""

    model: str
    decoding: Decoding
    prefix: str = ""  # the model's name in the id, if the run has several models
    batch: int = 1  # images decoded at once
    suffix: str = ""  # the batch in the id, if the run has several batch sizes

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
    """An experiment with every value decided."""

    settings: Settings
    cells: tuple[Cell, ...]
    cfg_defaults: Mapping[str, float]  # the models' own guidance scales, for the ids

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.settings.name

    @property
    def is_relaxed(self) -> bool:
        """Whether any cell has a relaxed rule."""
        return any(not cell.decoding.rule_row.lossless for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that is itself a valid experiment file and resolves to the same cells."""
        values = self.settings.model_dump(mode="json", exclude_none=True)
        values["model_defaults"] = {model: {"cfg_scale": scale} for model, scale in self.cfg_defaults.items()}
        values["batch"] = values["batch"] if len(self.settings.batch) > 1 else self.settings.batch[0]
        # Each decoding once: `batch` lists the batch sizes.
        cells = {cell.prefix + cell.decoding.cell_id: cell for cell in self.cells}.values()
        if len(self.settings.model) > 1:
            values["cells"] = [{"model": cell.model, **cell.decoding.settings()} for cell in cells]
        else:
            values["cells"] = [cell.decoding.settings() for cell in cells]
        return values

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


def load_experiment(
    source: str | Path | Mapping[str, Any] | Source,
    models: ModelDefaults | Callable[[Sequence[str]], ModelDefaults],
    overrides: Overrides | None = None,
) -> ResolvedExperiment:
    """Read an experiment (a file, the name of a shipped one, or the content of one) with the overrides over it.

    `models` holds the decoding values that models suggest, by name, or returns them for the models that it is called
    with. A guidance scale recorded in the file (a resolved one) wins over the model's. Raises one `UserError` that
    lists every problem with its location.
    """
    overrides = overrides or Overrides()
    if isinstance(source, str | Path):
        source = read_source(_find(source))
    elif not isinstance(source, Source):
        source = Source("experiment", Path(), dict(source))
    reader = ExperimentReader(source, overrides)
    settings = reader.settings()
    layers = Layers(reader.flags(), reader.models(), reader.top())
    entries = reader.cells(settings)
    suggested = models(settings.model) if callable(models) else models
    defaults = {name: dict(values) for name, values in suggested.items()}
    for name, recorded in reader.model_defaults().items():
        defaults[name] = defaults.get(name, {}) | recorded
    reader.check_models(settings, defaults, entries)
    most = None if overrides.many else MOST_CELLS
    cells = _expand(settings, layers, entries, defaults, reader.problems, most)
    reader.problems.raise_all()
    cfg_defaults = {model: float(defaults[model].get("cfg_scale") or 1.0) for model in settings.model}
    return ResolvedExperiment(settings, tuple(cells), cfg_defaults)


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


def _expand(
    settings: Settings,
    layers: Layers,
    entries: Sequence[CellEntry],
    defaults: Mapping[str, Mapping[str, Any]],
    problems: Problems,
    most: int | None,
) -> list[Cell]:
    """Return the cells of all models; what is wrong goes to `problems`."""
    batches = [(batch, f"-batch{batch}" if len(settings.batch) > 1 else "") for batch in settings.batch]
    most = most and most // (len(settings.model) * len(batches))
    used_flags: set[str] = set()
    missing: list[tuple[Location, str]] = []
    cells: dict[Cell, None] = {}
    for model in settings.model:
        grid = Grid(layers, model, defaults.get(model, {}), problems, used_flags, missing, most)
        prefix = re.sub(r"[^A-Za-z0-9.+_-]", "_", model) + "-" if len(settings.model) > 1 else ""
        of_model = [entry for entry in entries if not entry.models or model in entry.models]
        if settings.baseline and not any("ar" in entry.modes for entry in of_model):
            of_model.insert(0, BASELINE)
        for entry in of_model:
            for decoding in grid.expand(entry):
                cells |= dict.fromkeys(Cell(model, decoding, prefix, *batch) for batch in batches)
    _note_idle_flags(layers.flags, used_flags, entries, problems)
    if problems.entries:  # a value may be missing because it was wrong
        return []
    for location, text in missing:
        problems.add(location, text)
    for cell_id, times in Counter(cell.cell_id for cell in cells).items():
        if times > 1:
            text = f"two cells differ too little to be told apart by name: {cell_id}"
            problems.add(Location("cells"), text)
    return list(cells)


def _note_idle_flags(
    flags: Layer, used_flags: Collection[str], entries: Sequence[CellEntry], problems: Problems
) -> None:
    """Note the flags that no cell of the experiment uses, unless a cell without a mode may be the reason."""
    if not all(entry.modes for entry in entries):
        return
    modes = ", ".join(dict.fromkeys(mode for entry in entries for mode in entry.modes)) or "ar"
    for key, values in flags.values.items():
        if key not in used_flags:
            text = f"reaches no cell: it belongs to {owners_of(key)}, and the modes here are {modes}"
            problems.add(flags.location(key), text, values[0])
