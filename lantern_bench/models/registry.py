"""All models, by name or by model file.

Plans, captions and listings need only this module, which imports no torch. Models of other packages
are objects of the entry point group `lantern_bench.models`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.methods.plugins import find_rows
from lantern_bench.models.checkpoint_model import CheckpointModel
from lantern_bench.models.families.chameleon import Chameleon, Lumina, Lumina2
from lantern_bench.models.families.emu3 import Emu3
from lantern_bench.models.families.glm_image import GlmImage
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
from lantern_bench.utils.errors import LanternError, RefusedError, UserError
from lantern_bench.utils.text import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lantern_bench.models.loaded_model import LoadedModel

_FAMILIES: tuple[type[CheckpointModel], ...] = (
    Chameleon,
    Lumina,
    Emu3,
    Janus,
    GlmImage,
    ClassToImage,
    TextToImage,
    Lumina2,
)


@functools.cache
def find_models() -> tuple[dict[str, Model], dict[str, RefusedError]]:
    """Return all models by name, and the errors of installed models that cannot be used."""
    shipped: dict[str, Model] = {"lanterns": Lanterns()}
    for family in _FAMILIES:
        for name, spec in family.family_spec.models.items():
            if spec.parameters is not None:
                shipped[name] = family(name, spec)
    abstract: Any = Model  # mypy wants a class that can be instantiated
    outside, refused = find_rows("lantern_bench.models", abstract, taken=dict.fromkeys(shipped))
    return shipped | outside, refused


def models() -> dict[str, Model]:
    """Return all models by name."""
    return find_models()[0]


def model_of(name: str) -> Model:
    """Return a model by name, alias or path of a model file.

    Raises:
        UserError: The model is unknown. The error lists the models and suggests the nearest name.
        RefusedError: The model of an installed package cannot be used.
    """
    if is_model_file(name):
        return _model_of_file(Path(name))
    by_name = models()
    for model in by_name.values():
        if name in (model.name, *model.aliases):
            return model
    refused = find_models()[1]
    if name in refused:
        raise refused[name]
    raise UserError(
        f"--model {name}: unknown model{did_you_mean(name, by_name)}",
        f"The models are {', '.join(by_name)}; or give a YAML file that describes one.",
    )


def defaults_of(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the decoding values that models suggest.

    Args:
        names: Files and aliases to include besides the names of all models.

    Returns:
        The values of each model by name.

    Raises:
        RefusedError: A name belongs to an installed model that cannot be used.
    """
    defaults = {name: model.defaults for name, model in models().items()}
    for name in names:
        try:
            defaults[name] = model_of(name).defaults
        except UserError:
            # The caller reports an unknown name with its place.
            if is_model_file(name):
                raise
    return defaults


# ---- Models of model files


def _model_of_file(path: Path) -> Model:
    file = read_model_file(path)
    if isinstance(file, PythonModel):
        return _Hosted(file)
    if isinstance(file, ExternalDrafter):
        return _WithDrafter(file)
    for family in _FAMILIES:
        spec = family.spec_of(file.family)
        if spec is not None:
            return family.of_file(file, spec)
    families = sorted({family.family_spec.name for family in _FAMILIES})
    raise file.error_at(
        "family",
        f"{file.family}: unknown family{did_you_mean(file.family, families)}",
        f"The families are {', '.join(families)}.",
    )


class _Hosted(Model):
    """The model of a file that names its code."""

    family = "python"

    def __init__(self, file: PythonModel) -> None:
        from lantern_bench.models.hosted import load_class, makes_pixels

        hosted = load_class(file)
        self.file = file
        self.defaults = hosted.defaults
        self.draws_maps = not makes_pixels(hosted)
        file.describe(self, f"{file.python.stem}: {file.checkpoint.name}")

    def files(self) -> Mapping[str, Path]:
        return {"target": self.file.checkpoint, "code": self.file.python}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.hosted import load_hosted

        return load_hosted(self.file, device, dtype)


class _WithDrafter(Model):
    """A model with another drafter."""

    def __init__(self, file: ExternalDrafter) -> None:
        model = model_of(file.model)
        same = (
            "family licence prompt_sets defaults sizes ignored codes tokens parameters classes "
            "guided draws_maps"
        )
        for field in same.split():
            setattr(self, field, getattr(model, field))
        self.file = file
        self.model = model
        file.describe(self, f"{model.description}; drafter {file.drafter.path.name}")

    def check_prompt(self, text: str) -> None:
        self.model.check_prompt(text)

    def files(self) -> Mapping[str, Path]:
        return {**self.model.files(), "drafter": self.file.drafter.path}

    def missing(self, *, drafter: bool) -> list[LanternError]:  # noqa: ARG002
        return self.model.missing(drafter=False)

    @property
    def why_no_pixels(self) -> str:
        return self.model.why_no_pixels

    def stated(self, part: str, key: str) -> str | None:
        if part == "drafter":
            return super().stated(part, key)
        return self.model.stated(part, key)

    def decoder_input(self, tokens: Tensor) -> Mapping[str, Tensor]:
        return self.model.decoder_input(tokens)

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.checkpoints.drafter_files import give_drafter

        loaded = self.model.load(device, dtype)
        loaded.name = self.name
        give_drafter(loaded, self)
        return loaded
