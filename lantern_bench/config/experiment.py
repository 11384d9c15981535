"""From an experiment file and flags to cells with every value decided; `plan.py` puts them in order."""

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
from typing import Any, TypeAlias

from lantern_bench.config.decoding import (
    STRUCTURE,
    Decoding,
    MissingValueError,
    ParameterError,
    word_of,
)
from lantern_bench.config.experiment_file import CellEntry, ExperimentReader, Layer, Stated
from lantern_bench.config.settings import Overrides, Settings
from lantern_bench.methods.catalog import MODES, PARAMETERS, RULES, has_parameter, owners_of
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
)


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
        """The decoding's id, with model and batch where the run has several; names the image directory too."""
        return self.prefix + self.decoding.cell_id + self.suffix

    def columns(self) -> dict[str, Any]:
        """Return the cell columns of `schema.py`; None where the cell lacks the parameter."""
        return self.decoding.columns() | {
            "cell_id": self.cell_id,
            "batch": self.batch,
            "model": self.model,
        }

    def settings(self) -> dict[str, Any]:
        """Return what a record's key covers: the cell as an experiment file writes it, with its model."""
        return {"model": self.model, "batch": self.batch, **self.decoding.settings()}


@dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment with every value decided."""

    settings: Settings
    cells: tuple[Cell, ...]
    cfg_defaults: Mapping[str, float]  # the models' own guidance scales, for the ids

    def to_dict(self) -> dict[str, Any]:
        """Return the content of an experiment file that resolves to the same cells."""
        values = self.settings.model_dump(mode="json", exclude_none=True)
        values["model_defaults"] = {
            model: {"cfg_scale": scale} for model, scale in self.cfg_defaults.items()
        }
        values["batch"] = (
            values["batch"] if len(self.settings.batch) > 1 else self.settings.batch[0]
        )
        # Each decoding once: `batch` lists the batch sizes.
        cells = {cell.prefix + cell.decoding.cell_id: cell for cell in self.cells}.values()
        several = len(self.settings.model) > 1
        values["cells"] = [
            ({"model": cell.model} if several else {}) | cell.decoding.settings() for cell in cells
        ]
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
    """Return the experiments of the wheel, else those of the repository, by name."""
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

    `models` holds the decoding values that models suggest, or returns them for the models that it is called with; those
    that a resolved experiment recorded win. Raises one `UserError` that lists every problem with its location.
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
    defaults = {name: dict(values) for name, values in suggested.items()}
    for name, recorded in reader.model_defaults().items():
        defaults[name] = defaults.get(name, {}) | recorded
    reader.check_models(settings, defaults, entries)
    cells = Grid(reader=reader, settings=settings, entries=entries, defaults=defaults).cells()
    reader.problems.raise_all()
    cfg_defaults = {
        model: float(defaults[model].get("cfg_scale") or 1.0) for model in settings.model
    }
    return ResolvedExperiment(settings, tuple(cells), cfg_defaults)


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


@dataclass
class Grid:
    """Expands the entries of `cells` to the cells of all models; what is wrong goes to the reader's problems."""

    reader: ExperimentReader
    settings: Settings
    entries: Sequence[CellEntry]
    defaults: Mapping[str, Mapping[str, Any]]  # by model
    used_flags: set[str] = field(default_factory=set)
    missing: list[tuple[Location, str]] = field(default_factory=list)  # values that cells lack
    count: int = 0  # of cells of one model

    def cells(self) -> list[Cell]:
        """Return the cells in fixed order, without those that have problems."""
        batches = [
            (batch, f"-batch{batch}" if len(self.settings.batch) > 1 else "")
            for batch in self.settings.batch
        ]
        cells: dict[Cell, None] = {}
        for model in self.settings.model:
            self.count = 0
            prefix = f"{word_of(model)}-" if len(self.settings.model) > 1 else ""
            of_model = [
                entry for entry in self.entries if not entry.models or model in entry.models
            ]
            if self.settings.baseline and not any("ar" in entry.modes for entry in of_model):
                of_model.insert(
                    0,
                    CellEntry(
                        {"mode": Stated(("ar",), Location("baseline"))}, Location("baseline")
                    ),
                )
            for entry in of_model:
                for decoding in self._decodings(entry, model):
                    cells |= dict.fromkeys(
                        Cell(model, decoding, prefix, *batch) for batch in batches
                    )
        self._note_idle_flags()
        if self.reader.problems.entries:  # a value may be missing because it was wrong
            return []
        for location, text in self.missing:
            self.reader.problems.add(location, text)
        for cell_id, times in Counter(cell.cell_id for cell in cells).items():
            if times > 1:
                text = f"two cells differ too little to be told apart by name: {cell_id}"
                self.reader.problems.add(Location("cells"), text)
        return list(cells)

    def _note_idle_flags(self) -> None:
        """Note the flags that no cell uses, unless a cell without a mode may be the reason."""
        if not all(entry.modes for entry in self.entries):
            return
        modes = (
            ", ".join(dict.fromkeys(mode for entry in self.entries for mode in entry.modes)) or "ar"
        )
        for key, stated in self.reader.flags.items():
            if key not in self.used_flags:
                text = f"reaches no cell: it belongs to {owners_of(key)}, and the modes here are {modes}"
                self.reader.problems.add(stated.location, text, stated.values[0])

    def _decodings(self, entry: CellEntry, model: str) -> Iterator[Decoding]:
        """Yield the decodings of one entry, without those that have problems."""
        # Of a value that stands in several places the last wins.
        stated = {
            **self.reader.top,
            **self.reader.models.get(model, {}),
            **entry.layer,
            **self.reader.flags,
        }
        methods = []
        for mode in entry.modes:
            layer = stated
            # a drafting or rule of other cells is not for it, which drafts nothing
            if mode == "ar":
                mode_layer = entry.layer if len(entry.modes) == 1 else {}
                layer = {
                    key: row
                    for key, row in stated.items()
                    if key not in STRUCTURE or mode_layer.get(key) is row
                }
            draftings = layer["drafting"].values if "drafting" in layer else (MODES[mode].drafting,)
            rules = layer["rule"].values if "rule" in layer else (MODES[mode].rule,)
            for drafting, rule in itertools.product(draftings, rules):
                methods.append((mode, drafting, rule))
                yield from self._of_method(
                    mode=mode,
                    drafting=drafting,
                    rule=rule,
                    layer=layer,
                    location=entry.location,
                    model_defaults=self.defaults.get(model, {}),
                )
        if methods and not {"drafting", "rule"} & self.reader.flags.keys():
            self._note_unused(entry.layer, methods)

    def _of_method(
        self,
        mode: str,
        drafting: str,
        rule: str,
        layer: Layer,
        location: Location,
        model_defaults: Mapping[str, Any],
    ) -> Iterator[Decoding]:
        stated = [key for key in PARAMETERS if key in layer]
        reached = [key for key in stated if key in STRUCTURE or has_parameter(key, drafting, rule)]
        self.used_flags.update(reached)
        axes = {key: layer[key].values for key in reached if key not in STRUCTURE}
        self.count += math.prod(map(len, axes.values()))
        most = MOST_CELLS // (len(self.settings.model) * len(self.settings.batch))
        if self.count > most and not self.reader.overrides.many:
            raise RefusedError(
                f"the grid has {self.count} cells or more for one model, and a sweep at most {most}",
                "Give fewer values; or, if this is meant, add --yes.",
            )
        cfg_default = float(model_defaults.get("cfg_scale") or 1.0)
        make = partial(Decoding, mode, model_defaults=model_defaults, cfg_default=cfg_default)
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True)) | {
                "drafting": drafting,
                "rule": rule,
            }
            try:
                try:
                    decoding = make(**values)
                except ParameterError as error:
                    # A flag that names other drafts replaces a rule of the file that cannot decide on them.
                    by_flag = {"tree": "tree", "rule": "drafting"}.get(
                        error.key or ""
                    ) in self.reader.flags
                    if not by_flag or "rule" in self.reader.flags:
                        raise
                    decoding = make(**values | {"rule": RULES[rule].greedy_rule})
                yield decoding
            except MissingValueError as error:
                self.missing.append((location, error.text))
            except ParameterError as error:
                refused = layer.get(error.key or "")
                value = values.get(error.key or "")
                self.reader.problems.add(
                    refused.location if refused else location, error.text, value
                )

    def _note_unused(self, cell: Layer, methods: Sequence[tuple[str, str, str]]) -> None:
        """Note values of a cell that none of its methods (mode, drafting, rule) has."""
        mode, drafting, rule = methods[0]
        for key, stated in cell.items():
            if key not in STRUCTURE and not any(
                has_parameter(key, *method[1:]) for method in methods
            ):
                text = f"mode {mode} has the drafting {drafting} and the rule {rule}; {key} belongs to {owners_of(key)}"
                self.reader.problems.add(stated.location, text, stated.values[0])
