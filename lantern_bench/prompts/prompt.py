"""A prompt, and what prompt files need to know of a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from lantern_bench.utils.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Its id depends on the text alone, so that prompt files may be reordered and extended.
    """

    text: str
    source: str = field(default="", compare=False)  # its name in the prompt set: coco:391895
    # What its file says beside the text, such as its id and its category. Values of JSON.
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def id(self) -> str:
        """12 hex digits of a hash of the text."""
        return hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()


class PromptedModel(Protocol):
    """A model, as far as prompts are concerned."""

    @property
    def prompt_sets(self) -> Mapping[str, Sequence[str]]:
        """The model's own prompt sets by name; the first is the default."""

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a prompt that the model cannot take."""


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


# ---- Classes as prompts: `class 207: golden retriever`

_CLASSES = (207, 360, 387, 974, 88, 979, 417, 279)  # ImageNet classes for examples
_CLASS = re.compile(r"(?:class\s+)?(\d{1,9})(?:\s*:.*)?", flags=re.IGNORECASE | re.DOTALL)


def some_classes(classes: int) -> tuple[str, ...]:
    """Return example prompts for a model of that many classes.

    They are classes of ImageNet where the model has them, and its first classes otherwise.
    """
    numbers = [number for number in _CLASSES if number < classes]
    if not numbers:
        numbers = list(range(min(classes, len(_CLASSES))))
    return tuple(class_prompt(number) for number in numbers)


def class_prompt(number: int, name: str = "") -> str:
    """Return the prompt of a class: `class 207`, or `class 207: golden retriever`.

    Only readers and CLIP use the name. The model uses the number.
    """
    return f"class {number}: {name}" if name else f"class {number}"


def class_number(text: str, classes: int) -> int:
    """Return the class of a prompt such as `207`, `class 207` or `class 207: name`.

    Raises `UserError` for any other text, and for a number that is not below `classes`.
    """
    match = _CLASS.fullmatch(text.strip())
    numbers = f"Give a number from 0 to {classes - 1}"
    if match is None:
        raise UserError(f"{text!r} is not a class", f"{numbers}, or `class 207: its name`.")
    number = int(match[1])
    if number >= classes:
        raise UserError(f"class {number}: there are {classes} classes", f"{numbers}.")
    return number
