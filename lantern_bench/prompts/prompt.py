"""A prompt, and how class numbers and captions become one."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property

from lantern_bench.utils.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """A prompt; its id depends on its text alone, so that lists may be reordered and extended."""

    text: str
    source: str = field(default="", compare=False)  # what its set calls it, such as coco:391895

    @cached_property
    def id(self) -> str:
        """12 hex digits of a hash of the text."""
        return hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()


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

_CLASSES = (207, 360, 387, 974, 88, 979, 417, 279)


def some_classes(classes: int) -> tuple[str, ...]:
    """Return default prompts of a model with so many classes: some of ImageNet's, or its first ones."""
    numbers = [number for number in _CLASSES if number < classes] or range(
        min(classes, len(_CLASSES))
    )
    return tuple(class_prompt(number) for number in numbers)


def class_prompt(number: int, name: str = "") -> str:
    """Return the prompt of a class: `class 207`, or `class 207: golden retriever`; the name is for people and CLIP."""
    return f"class {number}: {name}" if name else f"class {number}"


def class_number(text: str, classes: int) -> int:
    """Return the class of a prompt: `207`, `class 207` or `class 207: name`; raises `UserError` for any other text."""
    match = re.fullmatch(
        r"(?:class\s+)?(\d{1,9})(?:\s*:.*)?", text.strip(), flags=re.IGNORECASE | re.DOTALL
    )
    if match is None:
        raise UserError(
            f"{text!r} is not a class",
            f"Give a number from 0 to {classes - 1}, or `class 207: its name`.",
        )
    if int(match[1]) >= classes:
        raise UserError(
            f"class {match[1]}: there are {classes} classes",
            f"Give a number from 0 to {classes - 1}.",
        )
    return int(match[1])
