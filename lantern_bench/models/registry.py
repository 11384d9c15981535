"""All models, by name or by model file: plans, captions and listings need only this, which imports no torch.

Models of other packages are objects of the entry point group `lantern_bench.models`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.checkpoint_model import CheckpointModel
from lantern_bench.models.families.chameleon import Chameleon, Lumina, Lumina2
from lantern_bench.models.families.emu3 import Emu3
from lantern_bench.models.families.janus import Janus
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.models.families.llamagen import ClassToImage, TextToImage
from lantern_bench.models.model import Model
from lantern_bench.models.model_file import (
    ExternalDrafter,
    PythonModel,
    is_model_file,
    read_model_file,
)
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.text import did_you_mean

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel

_GROUP = "lantern_bench.models"
_FAMILIES: tuple[type[CheckpointModel], ...] = (
    Chameleon,
    Lumina,
    Emu3,
    Janus,
    ClassToImage,
    TextToImage,
    Lumina2,
)


@functools.cache
def models() -> dict[str, Model]:
    """Return all models by name; raises `RefusedError` for an entry point that cannot be imported."""
    models: dict[str, Model] = {"lanterns": Lanterns()}
    for family in _FAMILIES:
        models |= {name: family(name, row) for name, row in family.published.items()}
    for entry in sorted(metadata.entry_points(group=_GROUP), key=lambda entry: entry.name):
        try:
            model = entry.load()
        except (ImportError, AttributeError) as error:
            text = f"the model {entry.name} cannot be loaded: {error}"
            raise RefusedError(text, "Reinstall or remove its package.") from error
        models.setdefault(model.name, model)
    return models


def model_of(name: str) -> Model:
    """Return a model by name, alias or model file; raises `UserError` with the known models and the nearest."""
    if is_model_file(name):
        return _model_of_file(Path(name))
    by_name = models()
    for model in by_name.values():
        if name in (model.name, *model.aliases):
            return model
    raise UserError(
        f"--model {name}: unknown model{did_you_mean(name, by_name)}",
        f"The models are {', '.join(by_name) or 'none'}; or give a YAML file that describes one.",
    )


def defaults_of(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the decoding values that models suggest, by name; also by `names` that are files or aliases."""
    defaults = {name: model.defaults for name, model in models().items()}
    aliases = {alias for model in models().values() for alias in model.aliases}
    return defaults | {
        name: model_of(name).defaults for name in names if is_model_file(name) or name in aliases
    }


# ---- Models of model files


def _model_of_file(path: Path) -> Model:
    file = read_model_file(path)
    if isinstance(file, PythonModel):
        return _Hosted(file)
    if isinstance(file, ExternalDrafter):
        return _WithDrafter(file)
    for family in _FAMILIES:
        if (row := family.row_of(file.family)) is not None:
            model = family(str(file.path), row, file.paths(), file)
            # What a file states is checked when it is read.
            _ = model.codes, model.classes
            return model
    families = sorted({family.family for family in _FAMILIES})
    hint = did_you_mean(file.family, families)
    raise file.wrong(
        "family", f"{file.family}: unknown family{hint}", f"The families are {', '.join(families)}."
    )


class _Hosted(Model):
    """The model of a file that names its code."""

    family = "python"

    def __init__(self, file: PythonModel) -> None:
        from lantern_bench.models.hosted import load_class

        self.file = file
        self.name = str(file.path)
        self.description = file.description or f"{file.python.stem}: {file.checkpoint.name}"
        self.defaults = {**load_class(file).defaults, **file.defaults}

    def files(self) -> Mapping[str, Path]:
        return {"target": self.file.checkpoint, "code": self.file.python}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.hosted import load_hosted

        return load_hosted(self.file, device, dtype)


class _WithDrafter(Model):
    """A model with another drafter."""

    def __init__(self, file: ExternalDrafter) -> None:
        model = model_of(file.model)
        self.file = file
        self.model = model
        self.name = str(file.path)
        self.family = model.family
        self.description = (
            file.description or f"{model.description}; drafter {file.drafter.path.name}"
        )
        self.defaults = {**model.defaults, **file.defaults}
        self.licence = model.licence
        self.sizes = model.sizes
        self.codes = model.codes
        self.tokens = model.tokens
        self.parameters = model.parameters
        self.classes = model.classes
        self.prompt_sets = model.prompt_sets

    def check_prompt(self, text: str) -> None:
        self.model.check_prompt(text)

    def files(self) -> Mapping[str, Path]:
        return {**self.model.files(), "drafter": self.file.drafter.path}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.checkpoints.drafter_files import drafter_files, load_drafter
        from lantern_bench.models.loaded_model import transformer_of
        from lantern_bench.utils.files import hash_of

        loaded = self.model.load(device, dtype)
        folder = self.file.drafter.path
        target = transformer_of(loaded)
        loaded.name = self.name
        loaded.drafter = load_drafter(folder, target, dtype=target.dtype, device=target.device)
        loaded.weights = {**loaded.weights, "drafter": hash_of(drafter_files(folder))}
        return loaded
