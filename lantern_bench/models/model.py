"""A model before it is loaded: what listings, plans and captions need, without torch.

`registry.model_of` makes a `Model` of a name or of a model file. A package of its own adds one with an entry point
(docs/adding-a-model.md).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.models.transformer_config import TransformerConfig

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel

CAPTIONS = (
    "a red paper lantern hanging over a wooden door at night",
    "a bowl of ripe oranges on a blue table",
    "an old fishing boat on a calm lake at sunrise",
    "a small dog asleep on a green sofa",
    "a steam train crossing a stone bridge in the mountains",
    "a street market in the rain, seen from above",
    "a glass jar full of buttons beside a sewing machine",
    "a lighthouse on a cliff under heavy clouds",
)
"""Captions to begin with, for models that come with none."""


class Model(ABC):
    """A model that can be loaded, by name or from a model file."""

    name: str
    description: str
    family: str = ""  # the models whose quality is scored alike, and the heading of listings
    licence: str = ""
    aliases: Sequence[str] = ()  # other names of the same model
    defaults: Mapping[str, Any] = {}  # decoding values, by the names of an experiment file
    mode: str = "lantern++"  # of `generate` where none is given
    codes: int | None = None  # how many image codes there are; None: known when the model is loaded
    tokens: int | None = None  # of one picture, forced ones included
    parameters: int | None = None  # of the target
    classes: int | None = None  # for a model that takes classes and no captions
    sizes: TransformerConfig | None = None  # of the target, where it is this package's transformer
    prompt_sets: Mapping[str, Sequence[str]] = {"examples": CAPTIONS}  # the first is the default

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt that the model cannot take."""
        if not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def files(self) -> Mapping[str, Path]:
        """Return the file or folder of each part by name: where it is, or where a download puts it."""
        return {}

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model; raises `RefusedError` for missing weights, `UserError` for files that do not fit."""

    def with_random_weights(self) -> LoadedModel | None:
        """Return the model on the meta device, without weights; None where only its files tell its architecture."""
        return None


# ---- Classes as prompts: `class 207: golden retriever`

_CLASSES = (207, 360, 387, 974, 88, 979, 417, 279)


def some_classes(classes: int) -> tuple[str, ...]:
    """Return default prompts of a model with so many classes: some of ImageNet's, or its first ones."""
    numbers = [number for number in _CLASSES if number < classes] or range(min(classes, len(_CLASSES)))
    return tuple(class_prompt(number) for number in numbers)


def class_prompt(number: int, name: str = "") -> str:
    """Return the prompt of a class: `class 207`, or `class 207: golden retriever`; the name is for people and CLIP."""
    return f"class {number}: {name}" if name else f"class {number}"


def class_number(text: str, classes: int) -> int:
    """Return the class of a prompt: `207`, `class 207` or `class 207: name`; raises `UserError` for any other text."""
    match = re.fullmatch(r"(?:class\s+)?(\d{1,9})(?:\s*:.*)?", text.strip(), flags=re.IGNORECASE | re.DOTALL)
    if match is None:
        raise UserError(f"{text!r} is not a class", f"Give a number from 0 to {classes - 1}, or `class 207: its name`.")
    if int(match[1]) >= classes:
        raise UserError(f"class {match[1]}: there are {classes} classes", f"Give a number from 0 to {classes - 1}.")
    return int(match[1])
