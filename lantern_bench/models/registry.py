"""Which models there are: families found by entry point, each with cards that say what can be known without loading.

A family is an object under the entry point group `lantern_bench.families`; the embedded one comes the same way as a
stranger's. Plans, captions and listings need only this module, so it imports no torch and opens no weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.spec.values import did_you_mean

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded import LoadedModel

__all__ = ["GROUP", "Family", "ModelCard", "card_of", "cards", "families", "family_of", "load_model"]

GROUP = "lantern_bench.families"


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before it is loaded.

    `defaults` are the decoding values the model suggests (cfg_scale, tree, ...), by the names of an experiment file;
    `prompt_set` names the prompts to use where none are given. `weights` maps a part to its file, for listings;
    `vocab_size` is the number of image codes, where it is known.
    """

    name: str
    family: str
    description: str
    defaults: Mapping[str, Any]
    prompt_set: str
    licence: str = ""
    weights: Mapping[str, Path] = field(default_factory=dict)
    vocab_size: int | None = None


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
    """The card of a model; raises `UserError` with the models there are, and the nearest name."""
    known = cards()
    if model not in known:
        hint = did_you_mean(model, known)
        raise UserError(f"--model {model}: unknown model{hint}", f"The models are {', '.join(known) or 'none'}.")
    return known[model]


def family_of(model: str) -> Family:
    """The family a model belongs to; raises `UserError` as `card_of`."""
    card = card_of(model)
    return next(family for family in families().values() if card in family.cards())


def load_model(model: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a model on a device; raises `UserError` for an unknown one, `RefusedError` without its weights."""
    return family_of(model).load(model, device, dtype)
