"""Which models there are: families found by entry point, each with cards that say what can be known without loading.

A family is an object under the entry point group `lantern_bench.families`; the embedded one comes the same way as a
stranger's. A model is named, or described by a user's own YAML file (`model_file`). Plans, captions and listings need
only this module, so it imports no torch and opens no weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lantern_bench.errors import RefusedError, UserError, did_you_mean
from lantern_bench.models.io.hub_files import SOURCES, require_part
from lantern_bench.models.io.model_file import ExternalDrafter, ModelFile, is_model_file, read_model_file
from lantern_bench.plugins import ModelCard

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from lantern_bench.models.io.neighbour_cache import Codes
    from lantern_bench.models.loaded_model import LoadedModel, Parts


GROUP = "lantern_bench.families"


class Family(Protocol):
    """A kind of model: what it is called, what it may be asked, how it is loaded."""

    def cards(self) -> Sequence[ModelCard]:
        """The models of the family; opens no weights."""
        ...

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt the family cannot take; needs no torch."""
        ...

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """The prompts the family comes with, by the name of their set; needs no torch."""
        ...

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load a model; raises `RefusedError` when its weights are missing."""
        ...


@runtime_checkable
class FromFile(Protocol):
    """A family whose models a user can describe in a YAML file."""

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` of the file names this family; opens no checkpoint unless the name leaves it open."""
        ...

    def card_of_file(self, file: ModelFile) -> ModelCard:
        """The card of the model; its name is `file.path` as typed. Raises `UserError` for sizes that cannot be."""
        ...

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """As `Family.check_prompt`, for the model of the file."""
        ...

    def load_file(self, file: ModelFile, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load it; raises `UserError` for checkpoints that are malformed or of another model or stage."""
        ...


@runtime_checkable
class Buildable(Protocol):
    """A family whose models can be made without their files: random weights, sizes without allocating."""

    def build(self, name: str) -> Parts:
        """Fresh modules of the full shape; under `torch.device("meta")` nothing is allocated."""
        ...

    def assemble(self, name: str, parts: Parts, weights: Mapping[str, str]) -> LoadedModel:
        """Put parts that have their weights together; `weights` maps a part to the hash that records carry."""
        ...

    def random_condition(self, name: str, parts: Parts) -> Callable[[Sequence[str]], Any]:
        """What stands for the text encoder when weights are random: a function of the prompts alone."""
        ...


@runtime_checkable
class HasTokenizer(Protocol):
    """A family that loads a tokenizer without its target, which may be gigabytes."""

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> WithCodes:
        """Load the tokenizer in a file; `config` is what a model file says of it. Raises `UserError` for another's."""
        ...


class WithCodes(Protocol):
    """A loaded tokenizer."""

    def codebook(self) -> Tensor:
        """The codes, rows [V, d] as stored."""
        ...


@functools.cache
def families() -> dict[str, Family]:
    """All families by the name of their entry point; raises `RefusedError` for one that cannot be imported."""
    found: dict[str, Family] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except (ImportError, AttributeError) as error:
            raise RefusedError(
                f"the model family {entry.name} cannot be loaded: {error}",
                "Install the package that it comes from again, or remove it.",
            ) from error
    return found


def cards() -> dict[str, ModelCard]:
    """The card of every model of every family, by name."""
    return {card.name: card for family in families().values() for card in family.cards()}


def card_of(model: str) -> ModelCard:
    """The card of a model, by name or by its file; raises `UserError` with the models there are, and the nearest."""
    if is_model_file(model):
        return family_of(model).cards()[0]
    known = cards()
    if model in known:
        return known[model]
    for card in known.values():
        if model in card.also_called:
            return card
    hint = did_you_mean(model, known)
    raise UserError(
        f"--model {model}: unknown model{hint}",
        f"The models are {', '.join(known) or 'none'}; or give a YAML file that describes one.",
    )


def defaults_of(models: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The decoding values every model suggests, by name; `models` adds those given by file or by another name."""
    known = {name: card.defaults for name, card in cards().items()}
    others = {name for card in cards().values() for name in card.also_called}
    for model in models:
        if model not in known and (is_model_file(model) or model in others):
            known[model] = card_of(model).defaults
    return known


def family_of(model: str) -> Family:
    """The family a model belongs to; raises `UserError` as `card_of`."""
    if is_model_file(model):
        file = read_model_file(Path(model))
        return _FileFamily(file) if isinstance(file, ModelFile) else _ExternalDrafterFamily(file)
    name = card_of(model).name
    return next(family for family in families().values() if any(card.name == name for card in family.cards()))


def load_model(model: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a model on a device; raises `UserError` for an unknown one, `RefusedError` without its weights."""
    name = model if is_model_file(model) else card_of(model).name
    return family_of(model).load(name, device, dtype)


def load_codes(model: str) -> Codes:
    """The codes of a model on the CPU, from its tokenizer alone where its family can.

    Raises as `load_model`, and `UserError` for a model without a tokenizer.
    """
    import torch

    from lantern_bench.models.io.neighbour_cache import Codes

    device = torch.device("cpu")
    if is_model_file(model):
        file = read_model_file(Path(model))
        if isinstance(file, ExternalDrafter):
            return load_codes(file.model)
        described = _family_named(file)
        if isinstance(described, HasTokenizer) and file.tokenizer is not None:
            path = file.tokenizer.path
            return Codes(described.load_tokenizer(path, device, file.tokenizer.config).codebook(), path.parent)
    else:
        model = card_of(model).name
        family = family_of(model)
        if isinstance(family, HasTokenizer) and model in SOURCES:
            found = require_part(model, "tokenizer")
            return Codes(family.load_tokenizer(found.path, device).codebook(), found.folder)
    loaded = load_model(model, device, torch.float32)
    if loaded.codebook is None:
        raise UserError(f"{model}: has no tokenizer, so nobody knows its codes", "Name one in the model's file.")
    return Codes(loaded.codebook, loaded.table_folder, loaded.neighbour_space)


class _FileFamily:
    """The one model of a model file, as a family of its own."""

    def __init__(self, file: ModelFile) -> None:
        self._file, self._family = file, _family_named(file)

    def cards(self) -> Sequence[ModelCard]:
        return [self._family.card_of_file(self._file)]

    def check_prompt(self, text: str) -> None:
        self._family.check_prompt_of_file(self._file, text)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        # What a family may say of prompts is not asked of one that describes models: both are optional there.
        own = getattr(self._family, "prompt_sets_of_file", None)
        sets: Mapping[str, tuple[str, ...]] = (
            own(self._file) if own is not None else getattr(self._family, "prompt_sets", dict)()
        )
        return sets

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        loaded = self._family.load_file(self._file, device, dtype)
        loaded.name = name
        return loaded


class _ExternalDrafterFamily:
    """The one model of a file that gives a model another drafter."""

    def __init__(self, file: ExternalDrafter) -> None:
        self._file, self._model = file, family_of(file.model)

    def cards(self) -> Sequence[ModelCard]:
        card, file = card_of(self._file.model), self._file
        return [
            replace(
                card,
                name=str(file.path),
                description=file.description
                or f"{card.description}; drafter {file.drafter.path.name or file.drafter.path}",
                defaults=dict(card.defaults) | dict(file.defaults),
                weights=dict(card.weights) | {"drafter": file.drafter.path},
                also_called=(),
            )
        ]

    def check_prompt(self, text: str) -> None:
        self._model.check_prompt(text)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        return self._model.prompt_sets()

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        from lantern_bench.models.external_drafter import with_drafter

        loaded = with_drafter(load_model(self._file.model, device, dtype), self._file.drafter.path)
        loaded.name = name
        return loaded


def _family_named(file: ModelFile) -> FromFile:
    """The family that takes a file; raises `UserError` with those that can be described."""
    able = {name: family for name, family in families().items() if isinstance(family, FromFile)}
    for family in able.values():
        if family.takes(file):
            return family
    hint = did_you_mean(file.family, able)
    raise file.wrong("family", f"{file.family}: unknown family{hint}", f"The families are {', '.join(able) or 'none'}.")
