"""YAML with the line of every value, and the problems of a file as one error that names their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean

KeyPath: TypeAlias = tuple[str | int, ...]

MOST_CHARACTERS = 1_000_000
DEEPEST = 32


class Location(NamedTuple):
    """Where a value stands: the path of a key in a file with its line, or a flag (line None)."""

    text: str
    line: int | None = None


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    name: str  # for messages
    folder: Path  # that `@path` starts from
    data: dict[Any, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)  # the line of each value, from 1
    twice: tuple[KeyPath, ...] = ()  # keys that are written twice

    def line(self, path: KeyPath) -> int | None:
        """Return the line, from 1, of the value at `path` or of what encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines[path] if path else None

    def location(self, path: KeyPath) -> Location:
        """Return where a value stands: its key, such as `cells[0].mode`, and its line."""
        text = ""
        for key in path:
            text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
        return Location(text, self.line(path))


def read_source(
    path: Path, beginning: str = "Start with: name, model, prompts and cells."
) -> Source:
    """Read a YAML file; raises `UserError` if it cannot be read or is no mapping, with line and column.

    `beginning` says what to write into an empty one.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    data, node = load_yaml(text, str(path))
    if node is None:
        raise UserError(f"{path}: the file is empty", beginning)
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"'{data}'"
        raise UserError(f"{path}: must be a mapping of keys to values, not {kind}")
    lines: dict[KeyPath, int] = {}
    twice: list[KeyPath] = []
    _note_lines(node=node, path=(), lines=lines, twice=twice)
    return Source(name=str(path), folder=path.parent, data=data, lines=lines, twice=tuple(twice))


def load_yaml(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """Return the data of a YAML text and its tree with line numbers; None for both if it is empty.

    Raises `UserError`, with `name`, for what `_Loader` refuses too.
    """
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{name[:200]}: has more than {MOST_CHARACTERS} characters, the most of a YAML text here"
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None, None) if node is None else (loader.construct_document(node), node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = ", ".join(phrase for phrase in (error.context, error.problem) if phrase)
        raise UserError(f"{name}{location}: not valid YAML: {problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """Refuses aliases, with which a short file can mean a large one, and what is nested too deep."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            text = f"the alias *{event.anchor} cannot be used here; write the value again"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=mark)
        if self._depth >= DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"nested deeper than {DEEPEST} levels", problem_mark=mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _note_lines(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], twice: list[KeyPath]
) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(node=item, path=(*path, index), lines=lines, twice=twice)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines:
                twice.append(inner)
            _note_lines(node=value, path=inner, lines=lines, twice=twice)
            lines[inner] = key.start_mark.line + 1


@dataclass
class Problems:
    """The problems of one file."""

    name: str  # of the file, for the messages
    entries: list[tuple[Location, str]] = field(default_factory=list)

    def add(self, location: Location, text: str, value: object = None) -> None:
        """Add one problem; `value` is shown beside its location unless it is None."""
        shown = (
            "" if value is None else f"{'' if location.text.endswith('=') else ' '}{show(value)}"
        )
        problem = (location, f"{location.text}{shown}: {text}")
        if problem not in self.entries:
            self.entries.append(problem)

    def raise_all(self) -> None:
        """Raise one `UserError` with the problems, by line, flags last, if there are any."""
        if not self.entries:
            return
        in_order = sorted(
            self.entries, key=lambda problem: (problem[1].startswith("--"), problem[0].line or 0)
        )
        lines = [
            f"line {location.line}: {text}" if location.line else text
            for location, text in in_order
        ]
        if len(lines) > 1:
            raise UserError(f"{self.name}: {len(lines)} problems\n  " + "\n  ".join(lines))
        [text] = lines
        raise UserError(
            text
            if text.startswith("--")
            else f"{self.name}{' ' if in_order[0][0].line else ': '}{text}"
        )


def show(value: object) -> str:
    """Return a value as YAML would show it, at most 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "(empty)" if value is None or value == "" else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
    """Yield what pydantic found wrong with a source as `model`, as the arguments of `Problems.add`.

    A ValueError of a validator is the sentence itself, as is a field's `description` that begins with "must"; other
    descriptions explain a missing key.
    """
    for item in error.errors(include_url=False):
        # Follow the path as far as there are fields: errors inside a field belong to the field.
        kind = item["type"]
        about = ""
        path: KeyPath = ()
        keys: list[str] = []
        inside: type[BaseModel] | None = model
        for key in item["loc"]:
            if inside is None:
                break
            path = (*path, key)
            fields = _fields(inside)
            keys = list(fields)
            if key not in fields:
                break
            about = fields[key].description or ""
            inside = _model_in(fields[key].annotation)
        value = _value_at(source.data, path)
        words = re.findall(r"'([^']*)'", item["ctx"]["expected"]) if kind == "literal_error" else []
        if kind in ("extra_forbidden", "invalid_key"):
            text = f"unknown key{did_you_mean(path[-1], keys)} (the keys are {', '.join(keys)})"
            value = None
        elif kind == "missing":
            text = f"missing; {about}"
        elif kind in ("less_than", "less_than_equal"):
            value = item["input"]
            (limit,) = item["ctx"].values()
            text = f"must be {'below' if kind == 'less_than' else 'at most'} {limit:,}"
        elif about.startswith("must"):
            value = item["input"]
            text = about + did_you_mean(value, words)
        elif words:
            text = f"must be one of {', '.join(words)}{did_you_mean(value, words)}"
        elif kind in ("model_type", "model_attributes_type") and inside is not None:
            text = f"must be a mapping with {', '.join(_fields(inside))}"
        elif kind in _SENTENCES:
            text = _SENTENCES[kind]
        else:
            text = str(item.get("ctx", {}).get("error") or item["msg"])
        yield Location(".".join(map(str, path)), source.line(path)), text, value


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
