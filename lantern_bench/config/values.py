"""Where a value stands, the problems of a file with their locations, and the flags that override a file.

A message names the flag, or the key and its line, and all problems of a file are raised as one error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.config.decoding import ParameterError, check_value, is_tree
from lantern_bench.config.yaml_source import load_yaml
from lantern_bench.errors import UserError


class Location(NamedTuple):
    """Where a value stands: the path of a key in a file with its line, or a flag (line None)."""

    text: str
    line: int | None = None

    @property
    def is_flag(self) -> bool:
        """Whether the value came from a flag."""
        return self.text.startswith("--")


class Layer(NamedTuple):
    """The checked values of one block of a file, or of the flags."""

    values: Mapping[str, tuple[Any, ...]]  # by parameter; several values are a grid
    location: Callable[[str], Location]  # of a parameter's values, for messages


@dataclass
class Problems:
    """The problems of one file."""

    name: str  # of the file, for the messages
    entries: list[tuple[Location, str]] = field(default_factory=list)

    def add(self, location: Location, text: str, value: object = None) -> None:
        """Add one problem; `value` is shown beside its location unless it is None."""
        shown = "" if value is None else f"{'' if location.text.endswith('=') else ' '}{show(value)}"
        problem = (location, f"{location.text}{shown}: {text}")
        if problem not in self.entries:
            self.entries.append(problem)

    def raise_all(self) -> None:
        """Raise one `UserError` with every problem, by line, flags last; return if there are none."""
        if not self.entries:
            return
        in_order = sorted(self.entries, key=lambda problem: (problem[0].is_flag, problem[0].line or 0))
        lines = [f"line {location.line}: {text}" if location.line else text for location, text in in_order]
        if len(lines) > 1:
            raise UserError(f"{self.name}: {len(lines)} problems\n  " + "\n  ".join(lines))
        location = in_order[0][0]
        if location.is_flag:
            raise UserError(lines[0])
        raise UserError(f"{self.name}{' ' if location.line else ': '}{lines[0]}")


def show(value: object) -> str:
    """Return a value as YAML would show it, at most 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "(empty)" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_values(
    key: str, written: object, location: Location, problems: Problems, folder: Path = Path()
) -> tuple[Any, ...]:
    """Return the checked values of one decoding parameter; a list is a grid. Wrong values go to `problems`.

    Raises `RefusedError` for an installed mode, rule or drafting that cannot be used.
    """
    values = written if isinstance(written, list) and not (key == "tree" and is_tree(written)) else [written]
    if not values:
        problems.add(location, "an empty list; give at least one value")
    checked = []
    for value in values:
        try:
            checked.append(check_value(key, value, folder))
        except ParameterError as error:
            problems.add(location, error.text, "(empty)" if value is None else value)
    return tuple(checked)


@dataclass(frozen=True)
class Overrides:
    """The flags that override an experiment file."""

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by key of the file; several are a grid
    modes: Sequence[str] = ()  # the modes to keep; empty: all
    from_set: frozenset[str] = frozenset()  # the keys that were given by `--set`, for the messages
    many: bool = False  # allow any number of cells

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
        for setting in settings:
            key, equals, text = setting.partition("=")
            key = key.strip().replace("-", "_")
            if not equals or not key or not text.strip():
                raise UserError(f"--set {setting}: must have the form key=value", "For example: --set temperature=0.9")
            values[key] = _split(text, f"--set {key}=")
            from_set.add(key)
        return cls(values, tuple(_split(modes, "--modes")) if modes is not None else (), frozenset(from_set))

    def location(self, key: str) -> Location:
        """Return the flag of a key."""
        return Location(f"--set {key}=" if key in self.from_set else f"--{key.replace('_', '-')}")


def _split(value: Any, flag: str) -> list[Any]:
    """Return the values of a flag: of a text those between commas, or those of a YAML list."""
    if isinstance(value, list | tuple):
        return [item for element in value for item in _split(element, flag)]
    if not isinstance(value, str):
        return [value]
    if value.strip().startswith("["):
        try:
            parsed = load_yaml(value, "")[0]
        except UserError as error:
            problem = error.message.partition("not valid YAML: ")[2] or error.message
            raise UserError(f"{flag} {value[:200]}: not a valid list: {problem}") from error
        return [parsed] if is_tree(parsed) else list(parsed)
    return [text.strip() for text in value.split(",") if text.strip()]
