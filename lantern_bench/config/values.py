"""Checked values with the place where they were given, the overrides of the command line, and collected problems.

Each value keeps its place, so that a message can name the flag, or the key and the line, even when a mistake shows only
in a later combination. All problems are raised as one error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from lantern_bench.config.decoding import adapter
from lantern_bench.config.yaml_source import load_yaml
from lantern_bench.errors import UserError, did_you_mean
from lantern_bench.methods.tables import PARAMETERS, raise_if_refused
from lantern_bench.methods.trees import STATIC_TREES, check_topology, topology_name


@dataclass(frozen=True)
class Place:
    """Where a value stands: a key's path in a file with its line, or a flag (line None)."""

    text: str
    line: int | None = None
    folder: Path = Path()

    @property
    def is_flag(self) -> bool:
        """Whether the value came from a flag."""
        return self.text.startswith("--")


@dataclass(frozen=True)
class Given:
    """A checked value and its place."""

    value: Any
    place: Place


Layer: TypeAlias = Mapping[str, tuple[Given, ...]]


@dataclass
class Problems:
    """The problems of one experiment; `name` is the file's, for the messages."""

    name: str
    found: list[tuple[Place, str]] = field(default_factory=list)

    def add(self, place: Place, text: str, value: object = None) -> None:
        """Add one problem; `value` is shown beside its place unless it is None."""
        shown = "" if value is None else f"{'' if place.text.endswith('=') else ' '}{show(value)}"
        entry = (place, f"{place.text}{shown}: {text}")
        if entry not in self.found:
            self.found.append(entry)

    def raise_all(self) -> None:
        """Raise one `UserError` with every problem, by line, flags last; return if there are none."""
        if not self.found:
            return
        in_order = sorted(self.found, key=lambda entry: (entry[0].is_flag, entry[0].line or 0))
        lines = [f"line {place.line}: {text}" if place.line else text for place, text in in_order]
        if len(lines) > 1:
            raise UserError(f"{self.name}: {len(lines)} problems\n  " + "\n  ".join(lines))
        place = in_order[0][0]
        if place.is_flag:
            raise UserError(lines[0])
        raise UserError(f"{self.name}{' ' if place.line else ': '}{lines[0]}")


def show(value: object) -> str:
    """Return a value as YAML would show it, at most 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "(empty)" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_parameter(key: str, raw: object, place: Place, problems: Problems) -> tuple[Given, ...]:
    """Check the values of one decoding parameter; a list is a grid. Wrong values go to `problems`.

    Raises `RefusedError` for an installed mode, rule or drafting that cannot be used.
    """
    items = raw if isinstance(raw, list) and not (key == "tree" and is_tree(raw)) else [raw]
    if not items:
        problems.add(place, "an empty list; give at least one value")
    good, parameter = [], PARAMETERS[key]
    for item in items:
        try:
            if key == "tree":
                good.append(Given(_read_tree(item, place), place))
            elif parameter.choices and item not in parameter.choices:
                raise_if_refused(item)
                noun, choices = "mode" if key == "mode" else "value", ", ".join(parameter.choices)
                hint = did_you_mean(item, parameter.choices)
                raise ValueError(f"unknown {noun}{hint} ({parameter.allowed} {choices})")
            else:
                good.append(Given(adapter(key).validate_python(item), place))
        except ValueError as error:  # pydantic's errors are ValueErrors
            text = parameter.allowed if isinstance(error, ValidationError) else str(error)
            problems.add(place, text, "(empty)" if item is None else item)
    return tuple(good)


def is_tree(raw: list[Any]) -> bool:
    """Return whether a list is one tree (a list of paths) and not a grid of trees."""
    return bool(raw) and all(isinstance(path, list) and not any(isinstance(r, list) for r in path) for path in raw)


def _read_tree(item: object, place: Place) -> Any:
    """Return a tree's name, or its checked paths when it has none."""
    if isinstance(item, str) and item.startswith("@"):
        try:
            item = load_yaml((place.folder / item[1:]).read_text(encoding="utf-8"), item[1:])[0]
        except (OSError, ValueError, UserError) as error:
            raise ValueError(f"cannot be read as a tree: {' '.join(str(error).split())}") from error
    if isinstance(item, str):
        if item not in STATIC_TREES:
            raise ValueError(f"unknown tree{did_you_mean(item, STATIC_TREES)} (the trees are "
                             f"{', '.join(STATIC_TREES)}; or @FILE, or a list of paths)")  # fmt: skip
        return item
    if not isinstance(item, list) or not is_tree(item):
        raise ValueError("must be a tree's name, @FILE, or a list of child-rank paths such as [[0], [1], [0, 0]]")
    try:
        topology = check_topology(item)
    except UserError as error:
        raise ValueError(error.message + (f". {error.advice}" if error.advice else "")) from error
    name = topology_name(topology)
    return name if name in STATIC_TREES else topology


@dataclass(frozen=True)
class Overrides:
    """Overrides of an experiment file: values by key, each a list (a grid if longer than one), and the modes to keep.

    A key is that of an experiment file; `cells.2.delta` and `models.NAME.delta` reach one cell or one model.
    `from_set` holds the keys that were given by `--set`, for the messages. `many` allows any number of cells.
    """

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    modes: Sequence[str] = ()
    from_set: frozenset[str] = frozenset()
    many: bool = False

    @classmethod
    def from_flags(
        cls,
        flags: Mapping[str, Any],
        *,
        modes: str | Sequence[str] | None = None,
        settings: Sequence[str] = (),
    ) -> Overrides:
        """Return the overrides given by flags (by key; None: not given), `--modes` and `--set`.

        Texts are split at commas; one that starts with `[` is read as YAML. Raises `UserError` for a `--set`
        without `=` and for invalid YAML.
        """
        values = {key.replace("-", "_"): _split(value, f"--{key}") for key, value in flags.items() if value is not None}
        from_set = set()
        for text in settings:
            key, equals, value = text.partition("=")
            key = key.strip().replace("-", "_") if "." not in key else key.strip()
            if not equals or not key or not value.strip():
                raise UserError(f"--set {text}: must have the form key=value", "For example: --set temperature=0.9")
            values[key] = _split(value, f"--set {key}=")
            from_set.add(key)
        return cls(values, tuple(_split(modes, "--modes")) if modes is not None else (), frozenset(from_set))

    def place(self, key: str) -> Place:
        """Return the place of a key: its flag. A tree's `@path` starts from the current directory."""
        return Place(f"--set {key}=" if key in self.from_set else f"--{key.replace('_', '-')}", None, Path())


def _split(value: Any, flag: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return [part for item in value for part in _split(item, flag)]
    if not isinstance(value, str):
        return [value]
    if value.strip().startswith("["):
        try:
            parsed = load_yaml(value, "")[0]
        except UserError as error:
            said = error.message.partition("not valid YAML: ")[2] or error.message
            raise UserError(f"{flag} {value[:200]}: not a valid list: {said}") from error
        return [parsed] if is_tree(parsed) else list(parsed)
    return [part.strip() for part in value.split(",") if part.strip()]
