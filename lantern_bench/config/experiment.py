"""From an experiment file and flags to cells; `plan.py` puts their images in order."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.config.decoding import (
    STRUCTURE,
    Decoding,
    MissingValueError,
    ParameterError,
    word_of,
)
from lantern_bench.config.experiment_file import CellEntry, ExperimentReader, Layer
from lantern_bench.config.settings import Overrides, Settings
from lantern_bench.methods.catalog import (
    DRAFTINGS,
    MODES,
    PARAMETERS,
    RULES,
    has_parameter,
    owners_of,
)
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import Location, Source, read_source

# the decoding values that models suggest, by model
ModelDefaults: TypeAlias = Mapping[str, Mapping[str, Any]]
MOST_CELLS = 1_000  # larger grids need `--yes`

# Keys that do not change the images, up to rounding. They may differ between shards of a run.
KEYS_WITHOUT_EFFECT = (
    "name",
    "description",
    "paper",
    "protocol",
    "reference",
    "metrics",
    "processes",
    "threads",
    "pool_devices",
    "redecode_disturbed",
)


@dataclass(frozen=True)
class Cell:
    """One model with one decoding and batch size."""

    model: str
    decoding: Decoding
    prefix: str = ""  # the model in the id, if the run has several models
    batch: int = 1  # images decoded at once
    suffix: str = ""  # the batch size in the id, if the run has several

    @cached_property
    def cell_id(self) -> str:
        """The decoding's id, with the model and the batch size if the run has several.

        It also names the directory of the cell's images.
        """
        return self.prefix + self.decoding.cell_id + self.suffix

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of the schema; None for parameters that the cell lacks."""
        return self.decoding.columns() | {
            "cell_id": self.cell_id,
            "batch": self.batch,
            "model": self.model,
        }

    def settings(self) -> dict[str, Any]:
        """Return the cell as an experiment file writes it, with its model, for record keys."""
        return {"model": self.model, "batch": self.batch, **self.decoding.settings()}


@dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment with every value decided."""

    settings: Settings
    cells: tuple[Cell, ...]
    remarks: tuple[str, ...] = ()  # what cells do otherwise than they are written

    def to_dict(self) -> dict[str, Any]:
        """Return the content of an experiment file that resolves to the same cells."""
        values = self.settings.model_dump(mode="json", exclude_none=True)
        values["model_defaults"] = {
            cell.model: {"cfg_scale": cell.decoding.cfg_default} for cell in self.cells
        }
        if len(self.settings.batch) == 1:
            values["batch"] = self.settings.batch[0]
        # Each decoding once: `batch` lists the batch sizes.
        cells = {}
        for cell in self.cells:
            block = cell.decoding.settings()
            if len(self.settings.model) > 1:
                block = {"model": cell.model, **block}
            cells[cell.prefix + cell.decoding.cell_id] = block
        values["cells"] = list(cells.values())
        return values

    @cached_property
    def hash8(self) -> str:
        """8 hex digits of a hash of everything that changes the images."""
        covered = {
            key: value for key, value in self.to_dict().items() if key not in KEYS_WITHOUT_EFFECT
        }
        return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run_name(self) -> str:
        """The name of the run directory."""
        return f"{self.settings.name}-{self.hash8}"


def shipped_experiments() -> dict[str, Path]:
    """Return the experiments that come with the wheel, or with the repository, by name."""
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
    """Read an experiment and resolve it to cells.

    Args:
        source: An experiment file, the name of a shipped experiment, or the content of a file.
        models: Decoding values that models suggest, by model, or a function that returns them for
            the names of models. Values that a resolved experiment recorded replace them.
        overrides: Flags that replace values of the file.

    Raises:
        UserError: The experiment has problems; the message lists all of them by line.
        RefusedError: The grid has too many cells, or an installed method cannot be used.
    """
    overrides = overrides or Overrides()
    if isinstance(source, str | Path):
        source = read_source(_find(source))
    elif not isinstance(source, Source):
        source = Source("experiment", Path(), dict(source))
    reader = ExperimentReader(source, overrides)
    settings = reader.settings()
    entries = reader.cells(settings)
    suggested = models(settings.model) if callable(models) else models
    recorded = reader.model_defaults()
    defaults = {name: {**row, **recorded.get(name, {})} for name, row in suggested.items()}
    reader.check_models(settings, defaults, entries)
    grid = Grid(reader=reader, settings=settings, entries=entries, defaults=defaults)
    cells = grid.cells()
    reader.problems.raise_all()
    if overrides.modes:
        cells = [cell for cell in cells if _is_compared(cell, cells)]
    return ResolvedExperiment(settings, tuple(cells), tuple(grid.remarks()))


# Settings in which the ar cell that a cell is compared with should agree with it, as in the tables.
_SAMPLING = ("cfg_scale", "temperature", "top_k", "top_p")


def _is_compared(cell: Cell, cells: Sequence[Cell]) -> bool:
    """Return whether a cell is not ar, or other cells of its model are compared with it."""
    of_model = [other for other in cells if other.model == cell.model]
    others = [other for other in of_model if other.decoding.mode != "ar"]
    if cell.decoding.mode != "ar" or not others:
        return True

    def unlike(other: Cell, baseline: Cell) -> list[bool]:
        values = other.decoding.value
        return [values(name) != baseline.decoding.value(name) for name in _SAMPLING]

    for other in others:
        closest = min(unlike(other, ar) for ar in of_model if ar.decoding.mode == "ar")
        if unlike(other, cell) == closest:
            return True
    return False


def _find(source: str | Path) -> Path:
    shipped = shipped_experiments()
    path = shipped.get(str(source), Path(source))
    if path.is_file():
        return path
    if path.stem == source:
        raise UserError(
            f"no experiment is named '{source}'{did_you_mean(source, shipped)}",
            f"The experiments are: {', '.join(shipped) or 'none'}. "
            "A file is named with its ending, for example mine.yaml.",
        )
    raise UserError(
        f"{source}: no such experiment file",
        "Give a YAML file, or the name of a shipped experiment.",
    )


class _Method(NamedTuple):
    mode: str
    drafting: str
    rule: str

    def has(self, key: str) -> bool:
        return key in STRUCTURE or has_parameter(key, self.drafting, self.rule)


@dataclass
class Grid:
    """Expands the entries of `cells` to the cells of all models.

    Problems are added to the reader's problems.
    """

    reader: ExperimentReader
    settings: Settings
    entries: Sequence[CellEntry]
    defaults: Mapping[str, Mapping[str, Any]]  # by model
    used_flags: set[str] = field(default_factory=set)
    missing: list[tuple[Location, str]] = field(default_factory=list)  # values that cells lack
    count: int = 0  # cells of one model
    # The cells whose rule gives way to another one, by both rules and the reason.
    replaced: dict[str, dict[str, None]] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """Return the cells in a fixed order, without cells that have problems."""
        cells: dict[Cell, None] = {}
        for model in self.settings.model:
            self.count = 0
            for entry in self._entries_of(model):
                cells |= dict.fromkeys(self._cells_of(entry, model))
        self._note_idle_flags()
        if self.reader.problems.entries:  # a value may be missing because it was wrong
            return []
        for location, text in self.missing:
            self.reader.problems.add(location, text)
        for cell_id, times in Counter(cell.cell_id for cell in cells).items():
            if times > 1:
                self.reader.problems.add(
                    Location("cells"),
                    f"two cells differ too little to be told apart by name: {cell_id}",
                )
        return list(cells)

    def remarks(self) -> list[str]:
        """Return what cells do otherwise than they are written."""
        return [f"{text}: {', '.join(cells)}" for text, cells in self.replaced.items()]

    def _entries_of(self, model: str) -> list[CellEntry]:
        """Return the entries for a model, with an ar cell first if a baseline is wanted."""
        entries = [entry for entry in self.entries if not entry.models or model in entry.models]
        if self.settings.baseline and not any("ar" in entry.modes for entry in entries):
            entries.insert(0, CellEntry(("ar",), Location("baseline"), {}))
        return entries

    def _cells_of(self, entry: CellEntry, model: str) -> Iterator[Cell]:
        """Yield the cells of one entry: its decodings, each with every batch size."""
        prefix = f"{word_of(model)}-" if len(self.settings.model) > 1 else ""
        batches = self.settings.batch
        for decoding, batch in itertools.product(self._decodings(entry, model), batches):
            suffix = f"-batch{batch}" if len(batches) > 1 else ""
            yield Cell(model=model, decoding=decoding, prefix=prefix, batch=batch, suffix=suffix)

    def _note_idle_flags(self) -> None:
        """Note the flags that no cell uses, unless a cell without a mode may be the reason."""
        if not all(entry.modes for entry in self.entries):
            return
        modes = itertools.chain.from_iterable(entry.modes for entry in self.entries)
        names = ", ".join(dict.fromkeys(modes)) or "ar"
        for key, stated in self.reader.flags.items():
            if key not in self.used_flags:
                self.reader.problems.add(
                    stated.location,
                    f"reaches no cell: it belongs to {owners_of(key)}, "
                    f"and the modes here are {names}",
                    stated.values[0],
                )

    def _decodings(self, entry: CellEntry, model: str) -> Iterator[Decoding]:
        """Yield the decodings of one entry, without decodings that have problems."""
        # A later place of a value replaces an earlier one.
        stated = {
            **self.reader.top,
            **self.reader.models.get(model, {}),
            **entry.layer,
            **self.reader.flags,
        }
        methods = []
        for mode in entry.modes:
            layer = stated
            # A drafting or rule meant for other cells is not for a mode that drafts nothing.
            if not DRAFTINGS[MODES[mode].drafting].drafts:
                own = entry.layer if len(entry.modes) == 1 else {}
                layer = {
                    key: row
                    for key, row in stated.items()
                    if key not in STRUCTURE or own.get(key) is row
                }
            draftings = layer["drafting"].values if "drafting" in layer else (MODES[mode].drafting,)
            rules = layer["rule"].values if "rule" in layer else (MODES[mode].rule,)
            for drafting, rule in itertools.product(draftings, rules):
                method = _Method(mode, drafting, rule)
                methods.append(method)
                yield from self._of_method(method, layer, entry.location, model=model)
        if methods and not {"drafting", "rule"} & self.reader.flags.keys():
            self._note_unused(entry.layer, methods)

    def _of_method(
        self, method: _Method, layer: Layer, location: Location, *, model: str
    ) -> Iterator[Decoding]:
        """Yield the decodings of a method with every combination of the stated values."""
        reached = [key for key in PARAMETERS if key in layer and method.has(key)]
        self.used_flags.update(reached)
        axes = {key: layer[key].values for key in reached if key not in STRUCTURE}
        self.count += math.prod(map(len, axes.values()))
        most = MOST_CELLS // (len(self.settings.model) * len(self.settings.batch))
        if self.count > most and not self.reader.overrides.many:
            raise RefusedError(
                f"the grid has {self.count} cells or more for one model, "
                f"and a sweep at most {most}",
                "Give fewer values; or, if this is meant, add --yes.",
            )
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            values |= {"drafting": method.drafting, "rule": method.rule}
            try:
                decoding = self._decoding(method.mode, values, model)
                if decoding.rule != method.rule:
                    reason = "at temperature 0" if decoding.greedy else "on these drafts"
                    text = f"{method.rule} follows the {decoding.rule} rule {reason}"
                    self.replaced.setdefault(text, {})[decoding.cell_id] = None
                yield decoding
            except MissingValueError as error:
                self.missing.append((location, error.text))
            except ParameterError as error:
                key = error.key or ""
                place = layer[key].location if key in layer else location
                self.reader.problems.add(place, error.text, values.get(key))

    def _decoding(self, mode: str, values: Mapping[str, Any], model: str) -> Decoding:
        make = partial(Decoding, mode, model_defaults=self.defaults.get(model))
        try:
            return make(**values)
        except ParameterError as error:
            # A flag may name drafts on which the file's rule cannot decide. The rule yields.
            flag = {"tree": "tree", "rule": "drafting"}.get(error.key or "")
            if flag not in self.reader.flags or "rule" in self.reader.flags:
                raise
            return make(**{**values, "rule": RULES[values["rule"]].greedy_rule})

    def _note_unused(self, cell: Layer, methods: Sequence[_Method]) -> None:
        """Note the values of a cell that none of its methods has."""
        first = methods[0]
        for key, stated in cell.items():
            if not any(method.has(key) for method in methods):
                self.reader.problems.add(
                    stated.location,
                    f"mode {first.mode} has the drafting {first.drafting} and the rule "
                    f"{first.rule}; {key} belongs to {owners_of(key)}",
                    stated.values[0],
                )
