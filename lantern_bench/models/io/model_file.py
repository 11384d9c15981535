"""A user's own model as a YAML file: which family, which checkpoints, which sizes.

Only what holds for every family is read here: the keys, their types, paths relative to the file. What `config` may
contain, and whether the checkpoints fit it, is for the family to say. Nothing is opened but the YAML itself, and no
torch is imported, so that a plan can be made of a model that is not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantern_bench.config.decoding import PARAMETERS
from lantern_bench.config.values import Place, Problems, read_parameter, show
from lantern_bench.config.yaml_source import KeyPath, Source, read_source
from lantern_bench.errors import UserError, did_you_mean

LAYOUTS = ("official", "hf")
KEYS: dict[str, tuple[str, ...]] = {
    "target": ("checkpoint", "layout", "config"),
    "tokenizer": ("checkpoint", "config"),
    "drafter": ("dir",),
    "text_encoder": ("dir",),
    "neighbours": ("table",),
}
"""The keys of each part; `config` is a mapping, or the path of a JSON file."""
_TOP = ("name", "description", "family", "grid", "defaults", *KEYS)
_OWN_DRAFTER = ("model", "drafter", "description", "defaults")


@dataclass(frozen=True)
class PartFile:
    """One part of a model file: where it lies, and what is said of it (keys as written)."""

    path: Path
    config: Mapping[str, Any] | None = None
    layout: str | None = None


@dataclass(frozen=True)
class ModelFile:
    """A model file, read. `path` is the file as typed; `grid` rows and columns of image tokens.

    The parts that are not given are None; `family` is any name that a family goes by.
    """

    path: Path
    name: str
    family: str
    grid: tuple[int, int] | None
    target: PartFile
    tokenizer: PartFile | None = None
    drafter: PartFile | None = None
    text_encoder: PartFile | None = None
    neighbours: PartFile | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""

    def wrong(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a value of this file; `key` as a person writes it: `target.config.n_head`."""
        return UserError(f"{self.path}: {key}: {text}", advice)


@dataclass(frozen=True)
class OwnDrafter:
    """A model file that takes a model as it is and gives it another drafter.

    `path` is the file as typed; `model` the model's name, or the path of its own file.
    """

    path: Path
    model: str
    drafter: Path
    defaults: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


def is_model_file(name: str) -> bool:
    """Whether a model's name is the path of a model file."""
    return name.lower().endswith((".yaml", ".yml"))


def read_model_file(path: Path) -> ModelFile:
    """Read a model file; raises one `UserError` with every problem of it, by line."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        raise UserError(f"--model {path}: {what}", "Give a model's name, or a YAML file that describes one.")
    source = read_source(path, "Start with: family and target.")
    problems = Problems(str(path))
    _check_keys(source, (), _TOP, problems)
    texts = {key: _text(source, key, problems) for key in ("name", "description", "family")}
    if texts["family"] is None:
        problems.add(Place("family"), "missing; the family the model belongs to, such as llamagen")
    parts = {part: _part(source, part, problems) for part in KEYS}
    if "target" not in source.data:
        problems.add(Place("target"), "missing; give target: {checkpoint: FILE}")
    grid = _grid(source, problems)
    defaults = _defaults(source, problems)
    problems.raise_all()
    target = parts.pop("target")
    if target is None or texts["family"] is None:
        raise RuntimeError("a model file without target or family was not refused")
    name = texts["name"] or path.stem
    return ModelFile(
        path, name, texts["family"], grid, target, **parts, defaults=defaults, description=texts["description"] or ""
    )


def read_own_drafter(path: Path) -> OwnDrafter | None:
    """Read a model file that names a `model`; None for one that describes its own. Raises as `read_model_file`."""
    source = read_source(path) if path.is_file() else None
    if source is None or "model" not in source.data:
        return None
    problems = Problems(str(path))
    _check_keys(source, (), _OWN_DRAFTER, problems)
    model, description = (_text(source, key, problems) for key in ("model", "description"))
    drafter = _part(source, "drafter", problems)
    if source.data.get("drafter") is None:
        problems.add(Place("drafter"), "missing; give drafter: {dir: FOLDER}")
    if model is None:
        problems.add(_place(source, ("model",)), "missing; the name of the model, or the path of its file")
    elif is_model_file(model):
        model = str(source.folder / model)
        if Path(model).resolve() == path.resolve():
            problems.add(_place(source, ("model",)), "is this file itself")
    defaults = _defaults(source, problems)
    problems.raise_all()
    if model is None or drafter is None:
        raise RuntimeError("a model file without model or drafter was not refused")
    return OwnDrafter(path, model, drafter.path, defaults, description or "")


def _place(source: Source, path: KeyPath) -> Place:
    return Place(".".join(map(str, path)), source.line(path), source.folder)


def _check_keys(source: Source, path: KeyPath, known: Iterable[str], problems: Problems) -> Mapping[str, Any] | None:
    """The mapping at `path`, its unknown and double keys noted; None when it is none."""
    data: Any = source.data
    for key in path:
        data = data[key]
    if not isinstance(data, Mapping):
        problems.add(_place(source, path), f"must be a mapping with {', '.join(known)}", data)
        return None
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known)
            problems.add(_place(source, (*path, key)), f"unknown key{hint} (the keys are {', '.join(known)})")
    for twice in source.twice:
        problems.add(_place(source, twice), "is written twice")
    return data


def _text(source: Source, key: str, problems: Problems) -> str | None:
    value = source.data.get(key)
    if value is not None and not (isinstance(value, str) and value.strip()):
        problems.add(_place(source, (key,)), "must be text", value)
        return None
    return value


def _part(source: Source, part: str, problems: Problems) -> PartFile | None:
    """Read one part; its path must be there."""
    if source.data.get(part) is None:
        return None
    data = _check_keys(source, (part,), KEYS[part], problems)
    if data is None:
        return None
    where = KEYS[part][0]
    path = _existing(source, part, where, data.get(where), problems)
    layout = data.get("layout")
    if layout is not None and layout not in LAYOUTS:
        hint = did_you_mean(layout, LAYOUTS)
        problems.add(_place(source, (part, "layout")), f"must be one of {', '.join(LAYOUTS)}{hint}", layout)
    config = _config(source, part, data.get("config"), problems)
    return PartFile(path, config, layout) if path is not None else None


def _existing(source: Source, part: str, key: str, value: object, problems: Problems) -> Path | None:
    place = _place(source, (part, key))
    if not isinstance(value, str) or not value:
        problems.add(place, "missing; give a path, relative to this file" if value is None else "must be a path", value)
        return None
    path = source.folder / value
    wanted = "folder" if key == "dir" else "file"
    if not path.exists():
        problems.add(place, f"no such {wanted}", value)
        return None
    # A checkpoint may be either.
    if (key == "dir" and not path.is_dir()) or (key == "table" and not path.is_file()):
        problems.add(place, f"must be a {wanted}", value)
    return path


def _config(source: Source, part: str, value: object, problems: Problems) -> Mapping[str, Any] | None:
    """The sizes of a part: as written, or read from a JSON file."""
    place = _place(source, (part, "config"))
    if isinstance(value, str):
        path = source.folder / value
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problems.add(place, f"cannot be read as JSON: {show(error)}", path.name)
            return None
    if value is not None and not isinstance(value, Mapping):
        problems.add(place, "must be a mapping, or the path of a JSON file", value)
        return None
    return value


def _defaults(source: Source, problems: Problems) -> dict[str, Any]:
    """The decoding values that the model suggests, checked as an experiment's are."""
    written = source.data.get("defaults") or {}
    if not isinstance(written, Mapping):
        problems.add(_place(source, ("defaults",)), "must be a mapping of decoding values", written)
        return {}
    values: dict[str, Any] = {}
    for key, raw in written.items():
        place = _place(source, ("defaults", key))
        if key not in PARAMETERS or key == "mode":
            problems.add(place, f"unknown value{did_you_mean(key, PARAMETERS)}")
            continue
        given = read_parameter(key, raw, place, problems)
        if len(given) > 1:
            problems.add(place, "must be one value")
        if given:
            values[key] = given[0].value
    return values


def _grid(source: Source, problems: Problems) -> tuple[int, int] | None:
    value = source.data.get("grid")
    if value is None:
        return None
    whole = isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
    if not whole:
        problems.add(_place(source, ("grid",)), "must be [rows, columns], two whole numbers above 0", value)
        return None
    return int(value[0]), int(value[1])
