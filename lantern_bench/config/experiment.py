"""From an experiment file and flags to cells with every value decided.

A resolved experiment writes itself as an experiment file that resolves to the same cells. The keys of an experiment
file are in `settings.py` and `lantern_bench/methods`; `plan.py` puts the cells in order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.config.decoding import STRUCTURE, Decoding, MissingValueError, ParameterError
from lantern_bench.config.parse_experiment import BASELINE, CellEntry, ExperimentReader, Settings
from lantern_bench.config.values import Layer, Location, Overrides, Problems
from lantern_bench.config.yaml_source import Source, read_source
from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.methods.tables import (
    DRAFTINGS,
    MODES,
    PARAMETERS,
    RULES,
    can_decide,
    chain_problem,
    has_parameter,
    owners_of,
)

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


# ---- Layers to cells


class Method(NamedTuple):
    """What decides which parameters a cell has."""

    mode: str
    drafting: str
    rule: str

    def has(self, key: str) -> bool:
        """Whether a cell of this method has the parameter."""
        return has_parameter(key, self.drafting, self.rule)


class Layers(NamedTuple):
    """The values beside those of the cells, from the strongest."""

    flags: Layer
    models: Mapping[str, Layer]  # of the blocks of `models`
    top: Layer  # of the top level of the file


_EMPTY = Layer({}, lambda _key: Location(""))


@dataclass
class Grid:
    """Expands the cells of one model."""

    layers: Layers
    model: str
    model_defaults: Mapping[str, Any]  # the model's own
    problems: Problems
    used_flags: set[str]  # collects the flags that reached a cell
    missing: list[tuple[Location, str]]  # collects what cells lack
    most: int | None = None  # a larger grid is refused
    _count: int = field(default=0, init=False)

    def expand(self, entry: CellEntry) -> Iterator[Decoding]:
        """Yield the decodings of one entry of `cells`, in fixed order, without those that have problems."""
        methods = list(self._methods(entry))
        for method in methods:
            yield from self._decodings(method, entry)
        self._note_unused(entry.layer, methods)

    def _layer_of(self, key: str, cell: Layer) -> Layer | None:
        of_model = self.layers.models.get(self.model, _EMPTY)
        layers = (self.layers.flags, cell, of_model, self.layers.top)
        return next((layer for layer in layers if key in layer.values), None)

    def _methods(self, entry: CellEntry) -> Iterator[Method]:
        for mode in entry.modes:
            row = MODES[mode]
            if not DRAFTINGS[row.drafting].drafts:
                self._note_drafting_without_drafts(entry)
                yield Method(mode, row.drafting, row.rule)
                continue
            stated = {key: self._layer_of(key, entry.layer) for key in ("drafting", "rule")}
            self.used_flags.update(key for key, layer in stated.items() if layer is self.layers.flags)
            draftings = stated["drafting"].values["drafting"] if stated["drafting"] else (row.drafting,)
            rules = stated["rule"].values["rule"] if stated["rule"] else (row.rule,)
            locations = {key: layer.location(key) if layer else entry.location for key, layer in stated.items()}
            drafting_is_typed = stated["drafting"] is self.layers.flags is not stated["rule"]
            for drafting, rule in itertools.product(draftings, rules):
                if "none" in (drafting, rule):
                    key = "drafting" if drafting == "none" else "rule"
                    text = f"mode {mode} drafts and needs a rule; without drafting write mode: ar"
                    self.problems.add(locations[key], text, "none")
                elif can_decide(rule, drafting):
                    yield Method(mode, drafting, rule)
                elif drafting_is_typed:  # the rule of the file is replaced
                    yield Method(mode, drafting, RULES[rule].greedy_rule)
                else:
                    text = chain_problem(rule, drafting, (), f"the drafting {drafting}") or ""
                    self.problems.add(locations["rule"], text, rule)

    def _note_drafting_without_drafts(self, entry: CellEntry) -> None:
        for key in ("drafting", "rule"):
            for value in entry.layer.values.get(key, ()):
                if value != "none" and len(entry.modes) == 1:
                    text = f"mode ar drafts nothing and has no {key}; leave it out"
                    self.problems.add(entry.layer.location(key), text, value)

    def _decodings(self, method: Method, entry: CellEntry) -> Iterator[Decoding]:
        stated = {key: layer for key in PARAMETERS if (layer := self._layer_of(key, entry.layer)) is not None}
        axes = {key: layer.values[key] for key, layer in stated.items() if key not in STRUCTURE and method.has(key)}
        self.used_flags.update(key for key in axes if stated[key] is self.layers.flags)
        self._count += math.prod(map(len, axes.values()))
        if self.most is not None and self._count > self.most:
            raise RefusedError(
                f"the grid has {self._count} cells or more for one model, and a sweep at most {self.most}",
                "Give fewer values; or, if this is meant, add --yes.",
            )
        cfg_default = float(self.model_defaults.get("cfg_scale") or 1.0)
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            values |= {"drafting": method.drafting, "rule": method.rule}
            try:
                yield Decoding(method.mode, **values, model_defaults=self.model_defaults, cfg_default=cfg_default)
            except MissingValueError as error:
                self.missing.append((entry.location, error.text))
            except ParameterError as error:
                if error.key == "tree" and stated["tree"] is self.layers.flags is not stated.get("rule"):
                    # The flag names the tree: it replaces a rule of the file that needs a chain.
                    values["rule"] = RULES[method.rule].greedy_rule
                    yield Decoding(method.mode, **values, model_defaults=self.model_defaults, cfg_default=cfg_default)
                    continue
                layer = stated.get(error.key or "")
                location = entry.location if layer is None else layer.location(str(error.key))
                value = values.get(error.key or "")
                self.problems.add(location, error.text, None if isinstance(value, tuple) else value)

    def _note_unused(self, cell: Layer, methods: list[Method]) -> None:
        """Note values of a cell that none of its methods has."""
        if not methods or "drafting" in self.layers.flags.values or "rule" in self.layers.flags.values:
            return
        mode, drafting, rule = methods[0]
        for key, values in cell.values.items():
            if key not in STRUCTURE and not any(method.has(key) for method in methods):
                text = f"mode {mode} has the drafting {drafting} and the rule {rule}; {key} belongs to {owners_of(key)}"
                self.problems.add(cell.location(key), text, values[0])
