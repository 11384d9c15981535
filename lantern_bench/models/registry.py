"""All models, by name or by model file.

This package's models are listed here; those of other packages are objects of the entry point group
`lantern_bench.models`. Plans, captions and listings need only this module: it imports no torch and opens no weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.models.family import CheckpointFamily, ModelCard
from lantern_bench.models.io.model_file import (
    ExternalDrafter,
    ModelFile,
    PythonModel,
    is_model_file,
    read_model_file,
)
from lantern_bench.models.model import Model

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel

_GROUP = "lantern_bench.models"
_FAMILIES = (
    "chameleon.family:FAMILY",
    "emu3.family:FAMILY",
    "janus:FAMILY",
    "lanterns.family:Lanterns",
    "llamagen.family:C2I",
    "llamagen.family:T2I",
    "chameleon.lumina2:FAMILY",
)


@functools.cache
def models() -> dict[str, Model]:
    """Return all models by name, this package's and those of entry points.

    A model of another package cannot take the name of a shipped one. Raises `RefusedError` for an entry point that
    cannot be imported.
    """
    shipped = {model.name: model for model in _shipped()}
    external: dict[str, Model] = {}
    for entry in sorted(metadata.entry_points(group=_GROUP), key=lambda entry: entry.name):
        try:
            model = entry.load()
        except (ImportError, AttributeError) as error:
            text = f"the model {entry.name} cannot be loaded: {error}"
            raise RefusedError(text, "Reinstall or remove its package.") from error
        external[model.name] = model
    return shipped | {name: model for name, model in external.items() if name not in shipped}


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
    """Return the decoding values that every model suggests, by name; also by `names` that are files or aliases."""
    defaults = {name: model.defaults for name, model in models().items()}
    aliases = {alias for model in models().values() for alias in model.aliases}
    return defaults | {name: model_of(name).defaults for name in names if is_model_file(name) or name in aliases}


# ---- The models of this package


def _shipped_families() -> Iterator[Any]:
    for path in _FAMILIES:
        module, name = path.split(":")
        yield getattr(import_module(f"lantern_bench.models.{module}"), name)


def _shipped() -> Iterator[Model]:
    for family in _shipped_families():
        if isinstance(family, CheckpointFamily):
            for card in family.cards():
                yield _Published(family, card)
        else:
            yield family()


class _Described(Model):
    """A model whose family states its card."""

    def __init__(self, described: CheckpointFamily, card: ModelCard) -> None:
        self.described, self.card = described, card
        self.name, self.family, self.description, self.licence = card.name, card.family, card.description, card.licence
        self.defaults, self.mode, self.aliases, self.sizes = card.defaults, card.mode, card.also_called, card.sizes
        self.codes, self.tokens, self.parameters = card.vocab_size, card.tokens, card.parameters
        self.classes = card.classes

    def files(self) -> Mapping[str, Path]:
        return self.card.weights


class _Published(_Described):
    """A published model of a family."""

    def __init__(self, described: CheckpointFamily, card: ModelCard) -> None:
        super().__init__(described, card)
        self.prompt_sets = described.prompt_sets()

    def check_prompt(self, text: str) -> None:
        self.described.check_prompt(text)

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        return self.described.load(self.name, device, dtype)

    def with_random_weights(self) -> LoadedModel:
        import torch

        with torch.device("meta"):
            parts = self.described.build(self.name)
            loaded = self.described.assemble(self.name, parts, {})
        loaded.condition = self.described.random_condition(self.name, parts)
        return loaded


class _OfFile(_Described):
    """The model that a model file describes."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        described = next((family for family in _shipped_families() if _takes(family, file)), None)
        if described is None:
            able = [family.name for family in _shipped_families() if isinstance(family, CheckpointFamily)]
            hint = did_you_mean(file.family, able)
            text = f"{file.family}: unknown family{hint}"
            raise file.wrong("family", text, f"The families are {', '.join(sorted(able)) or 'none'}.")
        super().__init__(described, described.card_of_file(file))
        of_file = getattr(described, "prompt_sets_of_file", None)
        self.prompt_sets = described.prompt_sets() if of_file is None else of_file(file)

    def check_prompt(self, text: str) -> None:
        self.described.check_prompt_of_file(self.file, text)

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        return self.described.load_file(self.file, device, dtype)


def _takes(family: Any, file: ModelFile) -> bool:
    return isinstance(family, CheckpointFamily) and family.takes(file)


# ---- Models of model files


def _model_of_file(path: Path) -> Model:
    file = read_model_file(path)
    if isinstance(file, PythonModel):
        return _Hosted(file)
    return _OfFile(file) if isinstance(file, ModelFile) else _WithDrafter(file)


class _Hosted(Model):
    """The model of a file that names its code."""

    family, mode = "python", "scd"  # it has no drafter

    def __init__(self, file: PythonModel) -> None:
        from lantern_bench.models.hosted import load_class

        self.file, self.name = file, str(file.path)
        self.description = file.description or f"{file.python.stem}: {file.checkpoint.name}"
        self.defaults = {**load_class(file).defaults, **file.defaults}

    def files(self) -> Mapping[str, Path]:
        return {"target": self.file.checkpoint, "code": self.file.python}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.hosted import load_hosted

        return load_hosted(self.file, device, dtype)


class _WithDrafter(Model):
    """The model of a file that gives a model another drafter."""

    def __init__(self, file: ExternalDrafter) -> None:
        model = model_of(file.model)
        self.file, self.model, self.name, self.family = file, model, str(file.path), model.family
        self.description = file.description or f"{model.description}; drafter {file.drafter.path.name}"
        self.defaults, self.licence, self.sizes = {**model.defaults, **file.defaults}, model.licence, model.sizes
        self.codes, self.tokens, self.parameters = model.codes, model.tokens, model.parameters
        self.classes, self.prompt_sets = model.classes, model.prompt_sets

    def check_prompt(self, text: str) -> None:
        self.model.check_prompt(text)

    def files(self) -> Mapping[str, Path]:
        return {**self.model.files(), "drafter": self.file.drafter.path}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.eagle import load_drafter
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.files import hash_of
        from lantern_bench.models.loaded_model import transformer_of

        loaded, folder = self.model.load(device, dtype), self.file.drafter.path
        target = transformer_of(loaded)
        loaded.name = self.name
        loaded.drafter = load_drafter(folder, target, dtype=target.dtype, device=target.device)
        paths = (*open_checkpoint(folder).paths, folder / "config.json")
        loaded.weights = {**loaded.weights, "drafter": hash_of(paths)}
        return loaded
