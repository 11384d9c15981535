"""Model files: YAML files that describe a model, name its code, or give it another drafter.

The family of the model checks `config` and the checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    DirectoryPath,
    Field,
    FilePath,
    ValidationError,
    ValidationInfo,
)

from lantern_bench.config.decoding import read_values
from lantern_bench.methods.catalog import PARAMETERS
from lantern_bench.models.model import Model
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import Problems, Source, problems_of, read_source, show


def _relative(value: object, info: ValidationInfo[Path]) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a path")
    path: Path = info.context.parent / value
    if not os.path.exists(path):  # also False for a name that is too long
        if os.path.islink(path):
            raise ValueError(f"is a link to {os.readlink(path)}, which does not exist")
        raise ValueError("no such file or folder")
    return path


def _json_or_mapping(value: object, info: ValidationInfo[Path]) -> object:
    """Return the sizes of a part, as written or read from a JSON file."""
    if isinstance(value, str):
        try:
            return json.loads(_relative(value, info).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot be read as JSON: {show(error)}") from error
    return value


def _rows_and_columns(value: object) -> object:
    sides = value if isinstance(value, list) else []
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError("must be [rows, columns], two whole numbers above 0")
    return tuple(sides)


def _resolved(model: object, info: ValidationInfo[Path]) -> object:
    """Return a model's name, or the path of its file, which is relative to this one."""
    if not isinstance(model, str) or not is_model_file(model):
        return model
    path = _relative(model, info)
    if path.resolve() == info.context.resolve():
        raise ValueError("is this file itself")
    return str(path)


_PATH = Field(description="give a path, relative to this file")
_Text: TypeAlias = Annotated[str, Field(pattern=r"\S")]
_Relative = BeforeValidator(_relative)


class _Keys(BaseModel):
    model_config = {"extra": "forbid", "frozen": True, "validate_by_alias": True}


class _Part(_Keys):
    path: Path


class _WeightsPart(_Part):
    # The entry of a torch file that holds the weights.
    weights: _Text | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None


class CheckpointPart(_WeightsPart):
    """A checkpoint (a file or a folder) and its sizes."""

    path: Annotated[Path, _Relative, _PATH, Field(alias="checkpoint")]
    config: Annotated[dict[str, Any] | None, BeforeValidator(_json_or_mapping)] = None


class TargetPart(CheckpointPart):
    """The target's checkpoint. By default the layout is told from the checkpoint."""

    layout: Literal["official", "hf"] | None = None


class FolderPart(_Part):
    """The folder of a drafter or of a text encoder."""

    path: Annotated[DirectoryPath, _Relative, _PATH, Field(alias="dir")]


class DrafterPart(FolderPart, _WeightsPart):
    """The folder of a drafter."""


class TablePart(_Part):
    """A table of nearest codes."""

    path: Annotated[FilePath, _Relative, _PATH, Field(alias="table")]


class _AnyModelFile(_Keys):
    """Keys that all kinds of model file share."""

    description: _Text | None = None
    # Decoding values as in an experiment file.
    defaults: dict[str, Any] = {}
    _path: Path

    @property
    def path(self) -> Path:
        """The file as given on the command line."""
        return self._path

    def model_post_init(self, context: Any) -> None:
        """Keep the path of the file, which is the validation context."""
        self._path = context

    def describe(self, model: Model, description: str) -> None:
        """Give a model its name and description, and the decoding values of this file.

        Args:
            model: The model. Its own decoding values hold where this file states none.
            description: Used if this file has none.
        """
        model.name = str(self.path)
        model.description = self.description or description
        model.defaults = {**model.defaults, **self.defaults}

    def error_at(self, key: str, text: str, advice: str | None = None) -> UserError:
        """Return the error for a value of this file.

        Args:
            key: The dotted key, such as `target.config.n_head`.
            text: What is wrong with the value.
            advice: What to do.
        """
        return UserError(f"{self.path}: {key}: {text}", advice)


class ModelFile(_AnyModelFile):
    """A file that describes a model of a family.

    `grid` is rows and columns of image tokens.
    """

    name: _Text | None = None
    family: Annotated[_Text, Field(description="the family the model belongs to, such as llamagen")]
    grid: Annotated[tuple[int, int], BeforeValidator(_rows_and_columns)] | None = None
    target: Annotated[TargetPart, Field(description="give target: {checkpoint: FILE}")]
    tokenizer: CheckpointPart | None = None
    drafter: DrafterPart | None = None
    text_encoder: FolderPart | None = None
    neighbours: TablePart | None = None

    def paths(self) -> dict[str, Path]:
        """Return the path of each part that the file names."""
        return {name: part.path for name, part in self if isinstance(part, _Part)}


class ExternalDrafter(_AnyModelFile):
    """A file that gives a model another drafter.

    `model` is the name of the model, or the path of its own file.
    """

    model: Annotated[
        _Text,
        BeforeValidator(_resolved),
        Field(description="the name of the model, or the path of its file"),
    ]
    drafter: Annotated[DrafterPart, Field(description="give drafter: {dir: FOLDER}")]


class PythonModel(_AnyModelFile):
    """A file that names a model's code, one Python file (`models/hosted.py`), and checkpoint."""

    python: Annotated[FilePath, _Relative, _PATH]
    checkpoint: Annotated[Path, _Relative, _PATH]


def is_model_file(name: str) -> bool:
    """Return whether a model's name is the path of a model file."""
    return name.lower().endswith((".yaml", ".yml"))


def read_model_file(path: Path) -> ModelFile | ExternalDrafter | PythonModel:
    """Read a model file. Raises one `UserError` with every problem of the file, by line."""
    if not path.is_file():
        problem = "is a folder, not a file" if path.is_dir() else "no such file"
        raise UserError(
            f"--model {path}: {problem}", "Give a model's name, or a YAML file that describes one."
        )
    source = read_source(path, "Start with: family and target.")
    kind: type[ModelFile | ExternalDrafter | PythonModel] = ModelFile
    if "python" in source.data:
        kind = PythonModel
    elif "model" in source.data:
        kind = ExternalDrafter
    problems = Problems(str(path))
    written = source.data.get("defaults") or {}
    defaults = _defaults(written, source, problems) if isinstance(written, Mapping) else written
    try:
        file = kind.model_validate(source.data | {"defaults": defaults}, context=path)
    except ValidationError as error:
        for entry in problems_of(error, source, kind):
            problems.add(*entry)
    problems.raise_all()
    return file


def _defaults(written: Mapping[str, Any], source: Source, problems: Problems) -> dict[str, Any]:
    """Return the decoding values that the model suggests, checked as in an experiment."""
    values: dict[str, Any] = {}
    for key, raw in written.items():
        location = source.location(("defaults", str(key)))
        if key not in PARAMETERS or key == "mode":
            problems.add(location, f"unknown value{did_you_mean(key, PARAMETERS)}")
            continue
        checked = read_values(
            key=key, written=raw, location=location, problems=problems, folder=source.folder
        )
        if len(checked) > 1:
            problems.add(location, "must be one value")
        if checked:
            values[key] = checked[0]
    return values
