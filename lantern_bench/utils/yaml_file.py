"""YAML with the line of every value, and one error that lists a file's problems by line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import read_text
from lantern_bench.utils.text import did_you_mean

KeyPath: TypeAlias = tuple[str | int, ...]

MOST_CHARACTERS = 1_000_000
"""Longest YAML text that is read, in characters."""
DEEPEST = 32
"""Deepest nesting of a YAML text, in levels."""


class Location(NamedTuple):
    """The place of a value: a key of a file with its line, or a flag, which has no line."""

    text: str
    line: int | None = None


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    name: str  # for messages
    folder: Path  # relative paths in the file, such as `@tree.yaml`, start here
    data: dict[Any, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)  # line of each value, from 1

    def location(self, path: KeyPath) -> Location:
        """Return the location of a value: its key, such as `cells[0].mode`, and its line.

        Without a line of its own, it has the line of the innermost value around it.
        """
        keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
        around = path
        while around and around not in self.lines:
            around = around[:-1]
        return Location("".join(keys).removeprefix("."), self.lines.get(around))

    def note_lines(self, node: yaml.Node, path: KeyPath = ()) -> None:
        """Note the line of every value below a node; raises `UserError` for a repeated key."""
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[*path, index] = item.start_mark.line + 1
                self.note_lines(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*path, str(key.value))
                line = key.start_mark.line + 1
                if inner in self.lines:
                    text = self.location(inner).text
                    raise UserError(f"{self.name} line {line}: {text}: is written twice")
                self.lines[inner] = line
                self.note_lines(value, inner)


def read_source(
    path: Path, beginning: str = "Start with: name, model, prompts and cells."
) -> Source:
    """Read a YAML file that holds a mapping.

    `beginning` is the advice for an empty file. Raises `UserError`, with line and column where
    they are known, if the file cannot be read, is not a mapping, or has a key twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        read_text(path)  # raises an error that names the encoding
        raise UserError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    data, node = load_yaml(text, str(path))
    if node is None:
        raise UserError(f"{path}: the file is empty", beginning)
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"'{data}'"
        raise UserError(f"{path}: must be a mapping of keys to values, not {kind}")
    source = Source(name=str(path), folder=path.parent, data=data)
    source.note_lines(node)
    return source


def load_yaml(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """Return the data of a YAML text and its tree with line numbers, both None if it is empty.

    Raises `UserError`, which begins with `name`, for invalid or too large texts, for aliases, and
    for deep nesting.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{name[:200]}: has more than {MOST_CHARACTERS} characters, the limit for YAML texts"
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
        return data, node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = ", ".join(phrase for phrase in (error.context, error.problem) if phrase)
        raise UserError(f"{name}{location}: not valid YAML: {problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


_PLAIN_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9]*)",
    "tag:yaml.org,2002:float": r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.\w+",
}


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses aliases and deep nesting.

    With aliases a short file can describe an exponentially large one.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor} cannot be used here; write the value again"
        elif self._depth >= DEEPEST:
            problem = f"nested deeper than {DEEPEST} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            self._check_number(node)
        return node

    def _check_number(self, node: yaml.ScalarNode) -> None:
        """Refuse numbers that YAML reads otherwise than they look: 010 is 8, 12:30 is 750."""
        pattern = _PLAIN_NUMBERS.get(node.tag)
        if pattern is None or re.fullmatch(pattern, node.value):
            return
        number = self.construct_object(node)
        raise yaml.MarkedYAMLError(
            problem=f"YAML reads {node.value} as the number {number}; write a plain decimal "
            "number, or a text in quotes",
            problem_mark=node.start_mark,
        )


# A date, such as `name: 2026-11-25`, is a text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag != "tag:yaml.org,2002:timestamp"]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass
class Problems:
    """The problems of one file."""

    name: str  # name of the file, for messages
    entries: dict[str, int | None] = field(default_factory=dict)  # the line of each problem

    def add(self, location: Location, text: str, value: object = None) -> None:
        """Add one problem.

        Args:
            location: Where the value is written.
            text: What is wrong, and what is allowed.
            value: The value, shown after its location unless it is None.
        """
        place = location.text
        text += _spelling(value, text)
        if value is not None:
            separator = "" if place.endswith("=") else " "
            place += separator + show(value)
        self.entries.setdefault(f"{place}: {text}", location.line)

    def raise_all(self) -> None:
        """Raise one `UserError` that lists all problems, if any, by line and with flags last."""
        lines = []
        for text, line in sorted(self.entries.items(), key=_order):
            lines.append(f"line {line}: {text}" if line else text)
        if len(lines) > 1:
            raise UserError(f"{self.name}: {len(lines)} problems\n  " + "\n  ".join(lines))
        for text in lines:
            if text.startswith("--"):
                raise UserError(text)
            separator = " " if text.startswith("line ") else ": "
            raise UserError(f"{self.name}{separator}{text}")


def _spelling(value: object, text: str) -> str:
    """Return how a number is written that has another notation than `text` asks for."""
    if not isinstance(value, str) or " number" not in text:
        return ""
    if re.fullmatch(r"\d+,\d+", value):
        return f"; a decimal number is written {value.replace(',', '.')}"
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value)
        if "whole" in text and number == int(number) and not value.lstrip("-").isdigit():
            return f"; write {int(number)}"
    return ""


def _order(problem: tuple[str, int | None]) -> tuple[bool, int]:
    text, line = problem
    return text.startswith("--"), line or 0


def show(value: object) -> str:
    """Return a value as YAML shows it, cut to 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "(empty)" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_LIMITS = {"less_than": "below", "less_than_equal": "at most"}
_SENTENCES = {
    "string_type": "must be text",
    "string_pattern_mismatch": "must be text",
    "dict_type": "must be a mapping",
    "path_not_file": "must be an existing file",
    "path_not_directory": "must be an existing folder",
}


def problems_of(
    error: ValidationError, source: Source, model: type[BaseModel]
) -> Iterator[tuple[Location, str, object]]:
    """Yield the problems that pydantic found, as arguments of `Problems.add`.

    A validator's ValueError is the sentence of the problem. A field's `description` is the
    sentence if it begins with "must"; otherwise it explains a missing key.

    Args:
        error: The error that pydantic raised.
        source: The file that was validated.
        model: The class that the file was validated as.
    """
    for item in error.errors(include_url=False):
        path, fields, field = _field_of(item["loc"], model)
        about = (field and field.description) or ""
        kind = item["type"]
        context = item.get("ctx", {})
        words = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        value = item["input"]
        inside = None if field is None else _model_in(field.annotation)
        if kind in ("extra_forbidden", "invalid_key"):
            text = f"unknown key{did_you_mean(path[-1], fields)} (the keys are {', '.join(fields)})"
            value = None
        elif kind == "missing":
            text = f"missing; {about}"
            value = None
        elif kind in _LIMITS:
            [limit] = context.values()
            text = f"must be {_LIMITS[kind]} {limit:,}"
        elif about.startswith("must"):
            text = about + did_you_mean(value, words)
            if kind == "string_type" and isinstance(value, bool | int | float):
                text += "; YAML reads it as a number or a switch, so put it in quotes"
        elif words:
            text = f"must be one of {', '.join(words)}{did_you_mean(value, words)}"
        elif kind == "model_type" and inside is not None:
            text = f"must be a mapping with {', '.join(_fields(inside))}"
        else:
            # Pydantic writes "Input should be greater than 0".
            message = context.get("error", item["msg"].replace("Input should", "must"))
            text = _SENTENCES.get(kind, str(message))
            value = _value_at(source.data, path)  # as written: validators resolve paths
        yield source.location(path), text, value


def _field_of(
    keys: KeyPath, model: type[BaseModel]
) -> tuple[KeyPath, dict[str, FieldInfo], FieldInfo | None]:
    """Follow a path while it names fields: an error inside a field belongs to the field.

    Returns the path of the field, the fields beside it, and the field, None for an unknown key.
    """
    path: KeyPath = ()
    fields: dict[str, FieldInfo] = {}
    field = None
    inside: type[BaseModel] | None = model
    for key in keys:
        if inside is None:
            break
        path = (*path, key)
        fields = _fields(inside)
        field = fields.get(str(key))
        inside = None if field is None else _model_in(field.annotation)
    return path, fields, field


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model class that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = map(_model_in, get_args(annotation))
    return next((model for model in models if model is not None), None)


def _value_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        try:
            data = data[key]
        except (KeyError, TypeError):
            return None
    return data
