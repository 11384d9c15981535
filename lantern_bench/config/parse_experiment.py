"""Read an experiment file and the flags over it: run-wide settings, and layers of decoding parameters.

All problems are collected in one `Problems`; nothing is raised here. `experiment.py` makes the cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lantern_bench.config.paper import paper_problems
from lantern_bench.config.values import Layer, Location, Overrides, Problems, read_values
from lantern_bench.config.yaml_source import KeyPath, Source, problems_of
from lantern_bench.errors import did_you_mean
from lantern_bench.methods.parameters import COUNT, NATURAL, Count, Natural
from lantern_bench.methods.tables import MODES, PARAMETERS, raise_if_refused

Metric = Literal["speed", "quality"]
METRICS: tuple[Metric, ...] = ("speed", "quality")
_SWITCH = "must be true or false"


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


_Listed = BeforeValidator(_as_list)  # a single value is a list of one
_Unique = AfterValidator(lambda values: tuple(dict.fromkeys(values)))


class Settings(BaseModel):
    """The run-wide settings of an experiment; the description of a field says what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="must be letters, digits and . _ + - (it names a folder)",
    )
    description: str | None = Field(default=None, description="must be text")
    paper: dict[str, Any] | None = Field(default=None, description="must be a mapping")  # see paper.py
    model: Annotated[tuple[str, ...], _Listed, Field(min_length=1), _Unique] = Field(
        description="must be a model's name or a list of names"
    )
    prompts: str = Field(default="held-out", min_length=1, description="must be the name of a prompt set, or a file")
    # Images of each cell: prompts in order, then again with the next repeat; None: every prompt once.
    images: Count | None = Field(default=None, description=COUNT.allowed)
    repeats: Count = Field(default=1, description=COUNT.allowed)  # of that list of images, each with new seeds
    seed: Natural = Field(default=0, lt=2**63, description=NATURAL.allowed)
    # How pictures are scored; None: the model's own protocol.
    protocol: str | None = Field(default=None, min_length=1, description="must be the name of a quality protocol")
    # The reference pictures; None: those of the protocol.
    reference: str | None = Field(
        default=None, min_length=1, description="must be embedded, a folder, a .json or a .npz file"
    )
    metrics: Annotated[tuple[Metric, ...], _Listed, Field(min_length=1), _Unique] = Field(
        default=METRICS, description=f"must be a list of {' and '.join(METRICS)}"
    )
    # Images that are decoded at once; several values give several cells.
    batch: Annotated[tuple[Count, ...], _Listed, Field(min_length=1), _Unique] = Field(
        default=(1,), description=f"{COUNT.allowed}, or a list of them"
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="must be auto, cpu, mps, cuda or cuda:N"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="must be one of auto, float32, bfloat16, float16"
    )
    compile: bool = Field(default=False, description=_SWITCH)
    # New worker processes that make the images, one after the other.
    processes: Count = Field(default=1, description=COUNT.allowed)
    # That decode; None: as many as a calibration finds fastest.
    threads: Count | None = Field(default=None, description=COUNT.allowed)
    # Where code distances are measured (decoding/neighbours.py).
    neighbour_space: Literal["raw", "normalised"] | None = Field(
        default=None, description="must be raw or normalised; if absent, it is as published for the model"
    )
    baseline: bool = Field(default=True, description=_SWITCH)  # add an ar cell
    # Speedups of a run on several kinds of device are over all of them together.
    pool_devices: bool = Field(default=False, description=_SWITCH)


ALLOWED = {key: str(field.description) for key, field in Settings.model_fields.items()}
"""What each setting may be, by key."""


# ---- From a file and flags

UNNAMED = "unnamed"
"""Stands for the experiment's or the model's name where that is wrong, so that reading continues."""

_PARAMETERS = tuple(key for key in PARAMETERS if key != "mode")
_BLOCKS = ("models", "model_defaults", "cells")
_LISTS = ("model", "metrics", "batch")
# Settings that a block of `models` may hold, for experiments that run with one model at a time.
_SETTINGS_OF_MODEL = ("prompts", "images", "protocol", "reference")


class CellEntry(NamedTuple):
    """One entry of `cells`."""

    layer: Layer
    location: Location
    models: tuple[str, ...] = ()  # that it is for; empty: all

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of the entry."""
        return self.layer.values.get("mode", ())


BASELINE = CellEntry(Layer({"mode": ("ar",)}, lambda _key: Location("baseline")), Location("baseline"))
"""The cell that is added if the experiment has no `ar` and wants a baseline."""


class ExperimentReader:
    """Reads the blocks of one file and the flags over them; what is wrong goes to `problems`.

    Raises `RefusedError` if the file names an installed rule or drafting that cannot be used.
    """

    def __init__(self, source: Source, overrides: Overrides) -> None:
        self.source = source
        self.data = {str(key): value for key, value in source.data.items()}
        self.overrides = overrides
        self.problems = Problems(source.name)
        for path in source.twice:
            self.problems.add(self.location(path), "is written twice")

    def location(self, path: KeyPath) -> Location:
        """Return where a value of the file stands: its key and line."""
        text = ""
        for key in path:
            text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
        return Location(text, self.source.line(path))

    def settings(self) -> Settings:
        """Read the run-wide settings: of the file, of the blocks of its models, of the flags."""
        values: dict[str, Any] = {"name": Path(self.source.name).stem}
        locations: dict[str, Location] = {}
        if isinstance(self.data.get("models"), dict) and "model" not in self.data:
            values["model"] = [str(name) for name in self.data["models"]]
        for key in ALLOWED:
            if key in self.data:
                values[key], locations[key] = self.data[key], self.location((key,))
        for path, value in self._settings_of_models(values.get("model")):
            key = str(path[-1])
            values[key], locations[key] = value, self.location(path)
        for key in ALLOWED:
            if key not in self.overrides.values:
                continue
            typed, location = list(self.overrides.values[key]), self.overrides.location(key)
            if len(typed) != 1 and key not in _LISTS:
                self.problems.add(location, "takes one value", ",".join(map(str, typed)))
            else:
                values[key], locations[key] = typed if key in _LISTS else typed[0], location
        settings = self._checked_settings(values, locations)
        for path, text in paper_problems(settings.paper):
            self.problems.add(self.location(("paper", *path)), text)
        return settings

    def _checked_settings(self, values: dict[str, Any], locations: Mapping[str, Location]) -> Settings:
        """Check the values; wrong ones get their default, so that reading continues."""
        try:
            return Settings.model_validate(values)
        except ValidationError as error:
            problems = problems_of(error, Source("", Path(), values), Settings)
            for problem, item in zip(problems, error.errors(), strict=True):
                key = problem.key.partition(".")[0]
                shown = "(empty)" if item["input"] is None else item["input"]
                location = locations.get(key, Location(key))
                self.problems.add(location, problem.text, None if item["type"] == "missing" else shown)
                values = {name: value for name, value in values.items() if name != key}
            return Settings.model_validate({"name": UNNAMED, "model": UNNAMED} | values)

    def _settings_of_models(self, models: Any) -> Iterator[tuple[KeyPath, Any]]:
        """Yield path and value of the run-wide settings in the blocks of the run's models, which must agree."""
        models = self.overrides.values.get("model") or models or ()
        blocks = self.data.get("models")
        first: dict[str, Any] = {}
        for name in map(str, models if isinstance(models, list | tuple) else [models]):
            block = blocks.get(name) if isinstance(blocks, dict) else None
            if not isinstance(block, dict):
                continue
            for key in _SETTINGS_OF_MODEL:
                if key not in block or key in self.overrides.values:
                    continue
                path = ("models", name, key)
                if first.setdefault(key, block[key]) != block[key]:
                    text = "differs from another model's; run one of them, with --model"
                    self.problems.add(self.location(path), text, block[key])
                yield path, block[key]

    def top(self) -> Layer:
        """Read the parameters at the top level."""
        return self._layer(self.data, (), _PARAMETERS, (*ALLOWED, *_BLOCKS))

    def models(self) -> dict[str, Layer]:
        """Read the block `models`: a layer for each model."""
        return self._layers_by_model("models", _SETTINGS_OF_MODEL)

    def model_defaults(self) -> dict[str, dict[str, Any]]:
        """Read the block `model_defaults` that a resolved experiment records: values by model."""
        layers = self._layers_by_model("model_defaults")
        return {model: {key: values[0] for key, values in layer.values.items()} for model, layer in layers.items()}

    def flags(self) -> Layer:
        """Read the parameters given as flags."""
        typed: dict[str, tuple[Any, ...]] = {}
        for key, values in self.overrides.values.items():
            location = self.overrides.location(key)
            if key in _PARAMETERS:
                typed[key] = read_values(key, list(values), location, self.problems)
            elif key not in ALLOWED:
                text = "unknown key" + did_you_mean(key, (*_PARAMETERS, *ALLOWED))
                if key == "mode":
                    text = "unknown key; cells are picked with --modes"
                elif "." in key:
                    text = "a flag cannot reach one cell or one model; write the value into the experiment file"
                self.problems.add(Location(location.text.rstrip("=")), text)
        return Layer({key: values for key, values in typed.items() if values}, self.overrides.location)

    def cells(self, settings: Settings) -> list[CellEntry]:
        """Read `cells` and keep those of `--modes`; `ar` stays unless `--no-baseline` excludes it."""
        written = self.data.get("cells")
        if not isinstance(written, list) or not written:
            text = "must be a list of cells, for example: cells: [{mode: ar}, {mode: lantern, delta: 0.1}]"
            self.problems.add(self.location(("cells",)), text)
            return []
        entries = [self._entry(block, ("cells", number)) for number, block in enumerate(written)]
        modes = dict.fromkeys(mode for entry in entries for mode in entry.modes)
        wanted = self._wanted_modes(modes, settings.baseline)
        remaining = []
        for entry in entries:
            modes_here = tuple(mode for mode in entry.modes if mode in wanted)
            if modes_here:
                layer = Layer({**entry.layer.values, "mode": modes_here}, entry.layer.location)
                remaining.append(entry._replace(layer=layer))
            elif not entry.modes:  # a problem was noted
                remaining.append(entry)
        if modes and not remaining and not settings.baseline:
            self.problems.add(Location("--no-baseline"), "leaves no cell to run")
        return remaining

    def _wanted_modes(self, modes: Collection[str], baseline: bool) -> set[str]:
        """Return the modes to keep of those of the file."""
        location, typed = Location("--modes"), self.overrides.modes
        for mode in typed:
            if mode not in MODES:
                raise_if_refused(mode)
                text = f"unknown mode{did_you_mean(mode, MODES)} (the modes are {', '.join(MODES)})"
                self.problems.add(location, text, mode)
            elif mode not in modes and not (mode == "ar" and baseline) and modes:
                self.problems.add(location, f"no cell has this mode; the modes here are {', '.join(modes)}", mode)
        wanted = set(typed) & set(MODES) or set(MODES)
        if baseline:
            wanted.add("ar")
        elif "baseline" in self.overrides.values and "ar" not in typed:
            wanted.discard("ar")
        return wanted

    def _entry(self, block: object, path: KeyPath) -> CellEntry:
        mapping = self._mapping(block, path, "a cell such as {mode: lantern, delta: 0.1}")
        layer = self._layer(mapping, path, tuple(PARAMETERS), ("model",))
        if mapping and "mode" not in mapping:
            self.problems.add(self.location(path), f"has no mode; the modes are {', '.join(MODES)}")
        return CellEntry(layer, self.location(path), self._models_of_entry(mapping, path))

    def _models_of_entry(self, block: Mapping[str, Any], path: KeyPath) -> tuple[str, ...]:
        written = block.get("model", ())
        names = written if isinstance(written, list | tuple) else [written]
        if not all(isinstance(name, str) for name in names) or written == []:
            shown = "(empty)" if written is None else written
            self.problems.add(self.location((*path, "model")), ALLOWED["model"], shown)
            return ()
        return tuple(names)

    def _layers_by_model(self, name: str, other_keys: tuple[str, ...] = ()) -> dict[str, Layer]:
        layers = {}
        blocks = self._mapping(self.data.get(name, {}), (name,), "a mapping of model names to values")
        for model, block in blocks.items():
            path = (name, model)
            mapping = self._mapping({} if block is None else block, path, "a mapping of keys to values")
            layers[model] = self._layer(mapping, path, _PARAMETERS, other_keys)
        return layers

    def _mapping(self, block: object, path: KeyPath, expected: str) -> dict[str, Any]:
        if isinstance(block, dict):
            return {str(key): value for key, value in block.items()}
        self.problems.add(self.location(path), f"must be {expected}", "(empty)" if block is None else block)
        return {}

    def _layer(
        self, block: Mapping[str, Any], path: KeyPath, parameters: tuple[str, ...], other_keys: tuple[str, ...]
    ) -> Layer:
        """Read the parameters of a block; a key that is neither a parameter nor among `other_keys` is a problem."""
        layer: dict[str, tuple[Any, ...]] = {}
        for key, written in block.items():
            if key in parameters:
                values = read_values(key, written, self.location((*path, key)), self.problems, self.source.folder)
                if values:
                    layer[key] = values
            elif key not in other_keys and (key, written) != ("form", "exact"):  # which earlier versions recorded
                self._note_unknown_key(key, path, (*parameters, *other_keys))
        return Layer(layer, lambda key: self.location((*path, key)))

    def _note_unknown_key(self, key: str, path: KeyPath, allowed: Collection[str]) -> None:
        location = self.location((*path, key))
        if key == "form":  # of earlier versions
            text = "removed; what published code does is a drafting: scd-published or sjd-pac-published"
            self.problems.add(location, text)
        elif path and (key in ALLOWED or key in _BLOCKS):
            self.problems.add(location, "belongs at the top level of the file, not here")
        elif key == "mode":
            self.problems.add(location, "belongs in cells, for example: cells: [{mode: lantern}]")
        else:
            self.problems.add(location, "unknown key" + did_you_mean(key, allowed))

    def check_models(self, settings: Settings, models: Collection[str], entries: list[CellEntry]) -> None:
        """Note unknown models, cells of models that the experiment does not name, and blocks of misspelt ones.

        Blocks of other models are allowed: `model` and `--model` select some of them.
        """
        typed = "model" in self.overrides.values
        location = self.overrides.location("model") if typed else self.location(("model",))
        for name in settings.model:
            if name not in models and name != UNNAMED:
                text = f"unknown model{did_you_mean(name, models)} (the models are {', '.join(models)})"
                self.problems.add(location, text, name)
        if typed:
            return
        blocks = self.data.get("models")
        names = [str(name) for name in blocks] if isinstance(blocks, dict) else []
        suspects = [(name, self.location(("models", name))) for name in names if did_you_mean(name, settings.model)]
        suspects += [(name, entry.location) for entry in entries for name in entry.models if name not in names]
        for name, location in suspects:
            if name not in settings.model:
                names_here = ", ".join(settings.model)
                self.problems.add(location, f"the model {name} is not among the experiment's models ({names_here})")
