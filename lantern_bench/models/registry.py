"""The model families, and the models by name or by model file.

This package's families are listed here; those of other packages are objects of the entry point group
`lantern_bench.families`. Plans, captions and listings need only this module: it imports no torch and opens no weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.models.card import ModelCard
from lantern_bench.models.io.hub_files import SOURCES, require_part
from lantern_bench.models.io.model_file import (
    ExternalDrafter,
    ModelFile,
    PythonModel,
    is_model_file,
    read_model_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lantern_bench.decoding.neighbours import Space
    from lantern_bench.models.io.neighbour_cache import Codes
    from lantern_bench.models.loaded_model import LoadedModel, Parts


class Family(Protocol):
    """A kind of model: its cards, the prompts it takes, how it is loaded."""

    def cards(self) -> Sequence[ModelCard]:
        """The models of the family; opens no weights."""

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt the family cannot take; needs no torch."""

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """The family's own prompt sets, by name; needs no torch."""

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load a model; raises `RefusedError` when its weights are missing."""


@runtime_checkable
class FromFile(Protocol):
    """A family whose models a user can describe in a YAML file."""

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` of the file names this family; opens the checkpoint only where the name is ambiguous."""

    def card_of_file(self, file: ModelFile) -> ModelCard:
        """The card of the model; its name is `file.path` as given. Raises `UserError` for impossible sizes."""

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """As `Family.check_prompt`, for the model of the file."""

    def load_file(self, file: ModelFile, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model; raises `UserError` for checkpoints that are malformed or of another model or stage."""


@runtime_checkable
class Buildable(Protocol):
    """A family whose architectures are known without files: for random weights and memory estimates."""

    def build(self, name: str) -> Parts:
        """Fresh modules of the full shape; under `torch.device("meta")` nothing is allocated."""

    def assemble(self, name: str, parts: Parts, weights: Mapping[str, str]) -> LoadedModel:
        """Make a model of parts that have their weights; `weights` maps a part to the hash in the records."""

    def random_condition(self, name: str, parts: Parts) -> Callable[[Sequence[str]], Any]:
        """Conditions without a text encoder, for random weights: a function of the prompts alone."""


@runtime_checkable
class HasTokenizer(Protocol):
    """A family that can load a tokenizer without its target.

    `neighbour_space`: the space in which its codes are near each other, raw or normalised.
    """

    neighbour_space: Space

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> Any:
        """Load a tokenizer: an object whose `codebook()` is a tensor [V, d], its rows as stored.

        `config` is from the model file. Raises `UserError` for the tokenizer of another family.
        """


_GROUP = "lantern_bench.families"
_SHIPPED = {
    "chameleon": "chameleon.family:FAMILY",
    "emu3": "emu3.family:FAMILY",
    "janus": "janus:FAMILY",
    "lanterns": "lanterns.family:FAMILY",
    "llamagen-c2i": "llamagen.family:C2I",
    "llamagen-t2i": "llamagen.family:T2I",
    "lumina-mgpt2": "chameleon.lumina2:FAMILY",
}


@functools.cache
def families() -> dict[str, Family]:
    """All families by name, this package's and those of entry points; `RefusedError` for one that cannot be imported.

    An entry point cannot take the name of a shipped family.
    """
    entries = {entry.name: entry for entry in metadata.entry_points(group=_GROUP)}
    for name, place in _SHIPPED.items():
        entries[name] = metadata.EntryPoint(name, f"lantern_bench.models.{place}", _GROUP)
    found: dict[str, Family] = {}
    for _, entry in sorted(entries.items()):
        try:
            found[entry.name] = entry.load()
        except (ImportError, AttributeError) as error:
            raise RefusedError(
                f"the model family {entry.name} cannot be loaded: {error}", "Reinstall or remove its package."
            ) from error
    return found


def cards() -> dict[str, ModelCard]:
    """The card of every model of every family, by name."""
    return {card.name: card for family in families().values() for card in family.cards()}


def card_of(model: str) -> ModelCard:
    """The card of a model, by name, alias or model file; raises `UserError` with the known models and the nearest."""
    if is_model_file(model):
        return family_of(model).cards()[0]
    known = cards()
    for card in known.values():
        if model in (card.name, *card.also_called):
            return card
    raise UserError(
        f"--model {model}: unknown model{did_you_mean(model, known)}",
        f"The models are {', '.join(known) or 'none'}; or give a YAML file that describes one.",
    )


def defaults_of(models: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The decoding values that every model suggests, by name; also by those of `models` that are files or aliases."""
    found = cards()
    found |= {alias: card for card in found.values() for alias in card.also_called if alias in models}
    found |= {model: card_of(model) for model in models if is_model_file(model)}
    return {name: card.defaults for name, card in found.items()}


def family_of(model: str) -> Family:
    """The family of a model; raises `UserError` as `card_of`."""
    if is_model_file(model):
        file = read_model_file(Path(model))
        if isinstance(file, PythonModel):
            return _PythonFamily(file)
        return _FileFamily(file) if isinstance(file, ModelFile) else _ExternalDrafterFamily(file)
    name = card_of(model).name
    return next(family for family in families().values() if any(card.name == name for card in family.cards()))


def load_model(model: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a model; raises `UserError` for an unknown model, `RefusedError` when its weights are missing."""
    name = model if is_model_file(model) else card_of(model).name
    return family_of(model).load(name, device, dtype)


def load_codes(model: str) -> Codes:
    """The codes of a model on the CPU, loading only its tokenizer where the family can.

    Raises as `load_model`, and `UserError` for a model without a tokenizer.
    """
    import torch

    from lantern_bench.models.io.neighbour_cache import Codes

    device = torch.device("cpu")
    if is_model_file(model):
        file = read_model_file(Path(model))
        if isinstance(file, ExternalDrafter):
            return load_codes(file.model)
        described = _family_named(file) if isinstance(file, ModelFile) else None
        if isinstance(file, ModelFile) and isinstance(described, HasTokenizer) and file.tokenizer is not None:
            path = file.tokenizer.path
            rows = described.load_tokenizer(path, device, file.tokenizer.config).codebook()
            return Codes(rows, path.parent, described.neighbour_space)
    else:
        model = card_of(model).name
        family = family_of(model)
        if isinstance(family, HasTokenizer) and model in SOURCES:
            found = require_part(model, "tokenizer")
            return Codes(family.load_tokenizer(found.path, device).codebook(), found.folder, family.neighbour_space)
    loaded = load_model(model, device, torch.float32)
    if loaded.codebook is None:
        raise UserError(f"{model}: without a tokenizer there is no codebook", "Give the tokenizer in the model file.")
    return Codes(loaded.codebook, loaded.table_folder, loaded.neighbour_space)


class _FileFamily:
    """The model of a model file, as a family of one model."""

    def __init__(self, file: ModelFile) -> None:
        self._file, self._family = file, _family_named(file)

    def cards(self) -> Sequence[ModelCard]:
        return [self._family.card_of_file(self._file)]

    def check_prompt(self, text: str) -> None:
        self._family.check_prompt_of_file(self._file, text)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        # Optional methods of families that describe models.
        if (of_file := getattr(self._family, "prompt_sets_of_file", None)) is not None:
            return dict(of_file(self._file))
        return dict(getattr(self._family, "prompt_sets", dict)())

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        loaded = self._family.load_file(self._file, device, dtype)
        loaded.name = name
        return loaded


class _PythonFamily:
    """The model of a file that names its code, as a family of one model."""

    def __init__(self, file: PythonModel) -> None:
        self._file = file

    def cards(self) -> Sequence[ModelCard]:
        from lantern_bench.models.hosted import load_class

        file = self._file
        made = ModelCard(
            name=str(file.path),
            family="python",
            description=file.description or f"{file.python.stem}: {file.checkpoint.name}",
            mode="scd",  # it has no drafter
            defaults={**load_class(file).defaults, **file.defaults},
            prompt_set="examples",
            weights={"target": file.checkpoint, "code": file.python},
        )
        return [made]

    def check_prompt(self, text: str) -> None:
        if not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        from lantern_bench.models.family import CAPTIONS

        return {"examples": CAPTIONS}

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.hosted import load_hosted

        loaded = load_hosted(self._file, device, dtype)
        loaded.name = name
        return loaded


class _ExternalDrafterFamily:
    """The model of a file that gives a model another drafter, as a family of one model."""

    def __init__(self, file: ExternalDrafter) -> None:
        self._file, self._model = file, family_of(file.model)

    def cards(self) -> Sequence[ModelCard]:
        card, file = card_of(self._file.model), self._file
        drafter = file.drafter.path
        made = replace(
            card,
            name=str(file.path),
            description=file.description or f"{card.description}; drafter {drafter.name or drafter}",
            defaults={**card.defaults, **file.defaults},
            weights={**card.weights, "drafter": drafter},
            mode="lantern++",
            also_called=(),
        )
        return [made]

    def check_prompt(self, text: str) -> None:
        self._model.check_prompt(text)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        return self._model.prompt_sets()

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.eagle import load_drafter
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.files import hash_of
        from lantern_bench.models.loaded_model import transformer_of

        loaded, folder = load_model(self._file.model, device, dtype), self._file.drafter.path
        target = transformer_of(loaded)
        loaded.name = name
        loaded.drafter = load_drafter(folder, target, dtype=target.dtype, device=target.device)
        paths = (*open_checkpoint(folder).paths, folder / "config.json")
        loaded.weights = {**loaded.weights, "drafter": hash_of(paths)}
        return loaded


def _family_named(file: ModelFile) -> FromFile:
    """The family that takes a model file; raises `UserError` with the families that take any."""
    able = {name: family for name, family in families().items() if isinstance(family, FromFile)}
    for family in able.values():
        if family.takes(file):
            return family
    hint = did_you_mean(file.family, able)
    raise file.wrong("family", f"{file.family}: unknown family{hint}", f"The families are {', '.join(able) or 'none'}.")
