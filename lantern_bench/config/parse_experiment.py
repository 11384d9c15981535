"""Read an experiment file and its overrides: which keys exist, their values, and what the flags change.

The result still holds lists and lacks the values that only a model knows; `experiment.py` decides those. All problems
are collected in one `Problems`; nothing is raised here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lantern_bench.config.paper import paper_problems
from lantern_bench.config.values import Given, Layer, Overrides, Place, Problems, read_parameter
from lantern_bench.config.yaml_source import KeyPath, Source, problems_of
from lantern_bench.errors import did_you_mean
from lantern_bench.methods.parameters import Count, Natural
from lantern_bench.methods.tables import MODES, PARAMETERS, RULES, owners_of, raise_if_refused

Metric = Literal["speed", "quality"]
METRICS: tuple[Metric, ...] = ("speed", "quality")
_COUNT, _SWITCH = "must be a whole number of at least 1", "must be true or false"


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


_Unique = AfterValidator(lambda values: tuple(dict.fromkeys(values)))


class Settings(BaseModel):
    """The run-wide part of an experiment; a field's description says what is allowed.

    `images` counts per cell: prompts in order, then again with the next repeat; None is every prompt once. `repeats`
    repeats that list of images with new seeds. `batch` is how many images are decoded at once; several values give
    several cells. `protocol` names the scoring protocol (None: the model's own), `reference` the reference pictures
    (None: the protocol's own), `neighbour_space` the space of code distances (`decoding/neighbours.py`; None: as
    published). `processes` new worker processes make the images, one after the other; `threads` decode (None: as many
    as a calibration finds fastest). `baseline` adds an ar cell. With
    `pool_devices`, a run on several kinds of device gets speedups over all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="must be letters, digits and . _ + - (it names a folder)",
    )
    description: str | None = Field(default=None, description="must be text")
    paper: dict[str, Any] | None = Field(default=None, description="must be a mapping")
    model: Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1), _Unique] = Field(
        description="must be a model's name or a list of names"
    )
    prompts: str = Field(default="held-out", min_length=1, description="must be the name of a prompt set, or a file")
    images: Count | None = Field(default=None, description=_COUNT)
    repeats: Count = Field(default=1, description=_COUNT)
    seed: Natural = Field(default=0, lt=2**63, description="must be a whole number of at least 0")
    protocol: str | None = Field(default=None, min_length=1, description="must be the name of a quality protocol")
    reference: str | None = Field(
        default=None, min_length=1, description="must be embedded, a folder, a .json or a .npz file"
    )
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(_as_list), Field(min_length=1), _Unique] = Field(
        default=METRICS, description=f"must be a list of {' and '.join(METRICS)}"
    )
    batch: Annotated[tuple[Count, ...], BeforeValidator(_as_list), Field(min_length=1), _Unique] = Field(
        default=(1,), description="must be a whole number of at least 1, or a list of them"
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="must be auto, cpu, mps, cuda or cuda:N"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="must be one of auto, float32, bfloat16, float16"
    )
    compile: bool = Field(default=False, description=_SWITCH)
    processes: Count = Field(default=1, description=_COUNT)
    threads: Count | None = Field(default=None, description=_COUNT)
    neighbour_space: Literal["raw", "normalised"] | None = Field(
        default=None, description="must be raw or normalised; if absent, it is as published for the model"
    )
    baseline: bool = Field(default=True, description=_SWITCH)
    pool_devices: bool = Field(default=False, description=_SWITCH)


ALLOWED = {key: str(field.description) for key, field in Settings.model_fields.items()}
_REQUIRED = {"name": "unnamed", "model": "unnamed"}


def read_settings(values: Mapping[str, Any], places: Mapping[str, Place], problems: Problems) -> Settings:
    """Check the run-wide values; wrong ones go to `problems` and get their default, so that reading continues."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        wrong = set()
        found = problems_of(error, Source("", Path(), dict(values)), Settings)
        for (_, path, text, _), item in zip(found, error.errors(), strict=True):
            key = path.partition(".")[0]
            wrong.add(key)
            shown = "(empty)" if item["input"] is None else item["input"]
            problems.add(places.get(key, Place(key)), text, None if item["type"] == "missing" else shown)
    return Settings.model_validate(_REQUIRED | {key: value for key, value in values.items() if key not in wrong})


_DEFAULTS = tuple(key for key in PARAMETERS if key != "mode")
_BLOCKS = ("models", "model_defaults", "cells")
_LISTS = ("model", "metrics", "batch")
# Run-wide settings that a block of `models` may hold, for experiments that run with one model at a time.
_OF_MODEL = ("prompts", "images", "protocol", "reference")


@dataclass(frozen=True)
class CellSpec:
    """One entry of `cells`: its values, its place, and the models it is for (empty: all)."""

    values: Layer
    place: Place
    models: tuple[str, ...] = ()

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of the entry."""
        return tuple(given.value for given in self.values.get("mode", ()))


@dataclass(frozen=True)
class Experiment:
    """A checked experiment in layers: run-wide settings, top-level values, models, cells, flags.

    `many` allows any number of cells.
    """

    settings: Settings
    top: Layer
    models: Mapping[str, Layer]
    cells: tuple[CellSpec, ...]
    flags: Layer
    source: str
    places: Mapping[str, Place] = field(default_factory=dict)
    recorded_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    many: bool = False

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.settings.name

    @property
    def is_relaxed(self) -> bool:
        """Whether any cell may have a relaxed rule, from its mode or its own key."""
        own = [given.value for spec in self.cells for given in spec.values.get("rule", ())]
        rules = [*own, *(MODES[mode].rule for spec in self.cells for mode in spec.modes)]
        return any(not RULES[rule].lossless for rule in rules)

    def cells_of(self, model: str) -> Iterator[CellSpec]:
        """Yield the entries for a model; adds the baseline first if it is wanted and missing."""
        entries = [spec for spec in self.cells if not spec.models or model in spec.models]
        if self.settings.baseline and not any("ar" in spec.modes for spec in entries):
            place = Place("baseline")
            yield CellSpec({"mode": (Given("ar", place),)}, place)
        yield from entries

    def note_idle_flag(self, key: str, given: Given, problems: Problems) -> None:
        """Note a flag that no cell of the experiment uses."""
        modes = ", ".join(dict.fromkeys(mode for spec in self.cells for mode in spec.modes))
        text = f"reaches no cell: it belongs to {owners_of(key)}, and the modes here are {modes or 'ar'}"
        problems.add(given.place, text, given.value)


@dataclass
class _Reader:
    source: Source
    overrides: Overrides
    problems: Problems

    def place(self, path: KeyPath) -> Place:
        dotted = ".".join(map(str, path))
        if len(path) > 1 and dotted in self.overrides.values:
            return self.overrides.place(dotted)
        text = ""
        for part in path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return Place(text, self.source.line(path), self.source.folder)

    def mapping(self, raw: object, path: KeyPath, what: str) -> dict[str, Any]:
        if isinstance(raw, dict):
            return {str(key): value for key, value in raw.items()}
        self.problems.add(self.place(path), f"must be {what}", "(empty)" if raw is None else raw)
        return {}

    def layer(self, raw: Mapping[str, Any], path: KeyPath, keys: tuple[str, ...], known: tuple[str, ...]) -> Layer:
        """Read the parameters among `keys`; a key that is not `known` is a problem."""
        found: dict[str, tuple[Given, ...]] = {}
        for key, value in raw.items():
            place = self.place((*path, key))
            if key in keys:
                found[key] = read_parameter(key, value, place, self.problems)
            elif key not in known:
                self.unknown(key, place, bool(path), (*keys, *known))
        return {key: given for key, given in found.items() if given}

    def unknown(self, key: str, place: Place, inside: bool, known: tuple[str, ...]) -> None:
        if inside and (key in ALLOWED or key in _BLOCKS):
            self.problems.add(place, "belongs at the top level of the file, not here")
        elif key == "mode":
            self.problems.add(place, "belongs in cells, for example: cells: [{mode: lantern}]")
        else:
            self.problems.add(place, "unknown key" + did_you_mean(key, known))

    def settings(self, data: Mapping[str, Any]) -> tuple[Settings, dict[str, Place]]:
        """Read the run-wide settings, overridden by flags; also return the place of each value."""
        values: dict[str, Any] = {"name": Path(self.source.name).stem}
        if isinstance(data.get("models"), dict) and "model" not in data:
            values["model"] = [str(name) for name in data["models"]]
        places: dict[str, Place] = {}
        own = self._of_model(data, values)
        for key in ALLOWED:
            if key in data:
                values[key], places[key] = data[key], self.place((key,))
            if key in own:
                values[key], places[key] = own[key]
            if key in self.overrides.values:
                given, place = list(self.overrides.values[key]), self.overrides.place(key)
                if len(given) != 1 and key not in _LISTS:
                    self.problems.add(place, "takes one value", ",".join(map(str, given)))
                    continue
                values[key], places[key] = given if key in _LISTS else given[0], place
        return read_settings(values, places, self.problems), places

    def _of_model(self, data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, tuple[Any, Place]]:
        """Return the run-wide settings in the block of the run's only model; with several models each must agree."""
        models = self.overrides.values.get("model") or data.get("model") or values.get("model") or ()
        given = data.get("models")
        blocks: dict[Any, Any] = given if isinstance(given, dict) else {}
        found: dict[str, tuple[Any, Place]] = {}
        for name in (str(one) for one in (models if isinstance(models, list | tuple) else [models])):
            block = blocks.get(name)
            for key in _OF_MODEL:
                if not isinstance(block, dict) or key not in block or key in self.overrides.values:
                    continue
                place = self.place(("models", name, key))
                if key in found and found[key][0] != block[key]:
                    self.problems.add(place, "differs from another model's; run one of them, with --model", block[key])
                found[key] = (block[key], place)
        return found

    def flags(self) -> Layer:
        """Read the parameters given as flags; `_with_dotted` has handled dotted keys."""
        found: dict[str, tuple[Given, ...]] = {}
        for key, values in self.overrides.values.items():
            place = self.overrides.place(key)
            if key in _DEFAULTS:
                found[key] = read_parameter(key, list(values), place, self.problems)
            elif key not in ALLOWED and "." not in key:
                hint = "; cells are picked with --modes" if key == "mode" else did_you_mean(key, (*_DEFAULTS, *ALLOWED))
                self.problems.add(Place(place.text.rstrip("=")), "unknown key" + hint)
        return {key: given for key, given in found.items() if given}

    def cells(self, raw: object) -> list[CellSpec]:
        if not isinstance(raw, list) or not raw:
            text = "must be a list of cells, for example: cells: [{mode: ar}, {mode: lantern, delta: 0.1}]"
            self.problems.add(self.place(("cells",)), text)
            return []
        return [self.cell(item, ("cells", index)) for index, item in enumerate(raw)]

    def cell(self, item: object, path: KeyPath) -> CellSpec:
        raw = self.mapping(item, path, "a cell such as {mode: lantern, delta: 0.1}")
        values = dict(self.layer(raw, path, tuple(PARAMETERS), ("model",)))
        if "mode" not in raw and raw:
            self.problems.add(self.place(path), f"has no mode; the modes are {', '.join(MODES)}")
        return CellSpec(values, self.place(path), self.models_of(raw, path))

    def models_of(self, raw: Mapping[str, Any], path: KeyPath) -> tuple[str, ...]:
        """Read the models a cell is for; none means all."""
        given = raw.get("model", ())
        names = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(name, str) for name in names) or given == []:
            self.problems.add(self.place((*path, "model")), ALLOWED["model"], "(empty)" if given is None else given)
            return ()
        return tuple(names)

    def paper(self, block: Mapping[str, Any] | None) -> None:
        """Note the problems of the published figures."""
        for path, text in paper_problems(block):
            self.problems.add(self.place(("paper", *path)), text)

    def named_blocks(self, raw: object, path: KeyPath, known: tuple[str, ...] = ()) -> dict[str, Layer]:
        found = {}
        for name, item in self.mapping(raw, path, "a mapping of model names to values").items():
            inner = (*path, name)
            block = self.mapping({} if item is None else item, inner, "a mapping of keys to values")
            found[name] = self.layer(block, inner, _DEFAULTS, known)
        return found


def read_experiment(source: Source, overrides: Overrides) -> tuple[Experiment, Problems]:
    """Read a parsed file with its overrides; the experiment is valid only if there are no problems.

    Raises `RefusedError` if it names an installed rule or drafting that cannot be used.
    """
    problems = Problems(source.name)
    reader = _Reader(source, overrides, problems)
    for path in source.twice:
        problems.add(reader.place(path), "is written twice")
    data = _with_dotted(source, overrides, problems)
    settings, places = reader.settings(data)
    top = reader.layer(data, (), _DEFAULTS, (*ALLOWED, *_BLOCKS))
    models = reader.named_blocks(data.get("models", {}), ("models",), _OF_MODEL)
    recorded = reader.named_blocks(data.get("model_defaults", {}), ("model_defaults",))
    cells = _keep_modes(reader.cells(data.get("cells")), settings, overrides, problems)
    flags = reader.flags()
    _note_unknown_models(settings, models, cells, reader)
    reader.paper(settings.paper)
    plain = {name: {key: given[0].value for key, given in layer.items()} for name, layer in recorded.items()}
    found = Experiment(settings, top, models, tuple(cells), flags, source.name, places, plain, overrides.many)
    return found, problems


def _with_dotted(source: Source, overrides: Overrides, problems: Problems) -> dict[str, Any]:
    """Return the file's data with the flags `cells.2.delta` and `models.NAME.delta` set in it."""
    data = {str(key): value for key, value in source.data.items()}
    for key, values in overrides.values.items():
        block, dot, rest = key.partition(".")
        name, _, inner = rest.rpartition(".")
        if not dot:
            continue
        value = values[0] if len(values) == 1 else list(values)
        items = data.get(block) if block in ("cells", "models") else None
        if isinstance(items, list) and name.isdigit() and int(name) < len(items) and isinstance(items[int(name)], dict):
            data[block] = [item | {inner: value} if i == int(name) else item for i, item in enumerate(items)]
        elif isinstance(items, dict | None) and block == "models" and inner:
            data[block] = (items or {}) | {name: ((items or {}).get(name) or {}) | {inner: value}}
        else:
            text = "no such place; write KEY=VALUE, cells.NUMBER.KEY=VALUE or models.NAME.KEY=VALUE"
            problems.add(Place(overrides.place(key).text.rstrip("=")), text)
    return data


def _keep_modes(cells: list[CellSpec], settings: Settings, overrides: Overrides, problems: Problems) -> list[CellSpec]:
    """Apply `--modes` and `--no-baseline`: keep the named modes, and `ar` unless it is excluded."""
    here = dict.fromkeys(mode for spec in cells for mode in spec.modes)
    place, baseline = Place("--modes"), settings.baseline
    for mode in overrides.modes:
        if mode not in MODES:
            raise_if_refused(mode)
            problems.add(place, f"unknown mode{did_you_mean(mode, MODES)} (the modes are {', '.join(MODES)})", mode)
        elif mode not in here and not (mode == "ar" and baseline) and here:
            problems.add(place, f"no cell has this mode; the modes here are {', '.join(here)}", mode)
    wanted = set(overrides.modes) & set(MODES) or set(MODES)
    if baseline:
        wanted.add("ar")
    elif "baseline" in overrides.values and "ar" not in overrides.modes:
        wanted.discard("ar")
    kept = []
    for spec in cells:
        modes = tuple(given for given in spec.values.get("mode", ()) if given.value in wanted)
        if modes or not spec.modes:
            values = {**spec.values, "mode": modes} if modes else spec.values
            kept.append(CellSpec(values, spec.place, spec.models))
    if here and not kept and not baseline:
        problems.add(Place("--no-baseline"), "leaves no cell to run")
    return kept


def _note_unknown_models(
    settings: Settings, models: Mapping[str, Layer], cells: list[CellSpec], reader: _Reader
) -> None:
    """Note cells for models that the experiment does not name, and blocks whose name resembles one of its models.

    Blocks of other models are allowed: `model` and `--model` select some of them.
    """
    if "model" in reader.overrides.values:
        return
    known = ", ".join(settings.model)
    places = [(name, reader.place(("models", name))) for name in models if did_you_mean(name, settings.model)]
    places += [(name, spec.place) for spec in cells for name in spec.models if name not in models]
    for name, place in places:
        if name not in settings.model:
            reader.problems.add(place, f"the model {name} is not among the experiment's models ({known})")
