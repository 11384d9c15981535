"""Class labels as prompts: `class 207: golden retriever`, so that plans, records and seeds work as for captions.

The number decides the picture, the name after it is for people and for CLIP. No torch here.
"""

from __future__ import annotations

import re

from lantern_bench.errors import UserError

# ---- A few prompts to begin with, for models that come with none: captions, and ImageNet classes


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
_CLASSES = (207, 360, 387, 974, 88, 979, 417, 279)


def some_classes(classes: int) -> tuple[str, ...]:
    """Prompts of a few classes of a model that has so many: of ImageNet's, those that it has; else its first."""
    numbers = [number for number in _CLASSES if number < classes] or range(min(classes, len(_CLASSES)))
    return tuple(class_prompt(number) for number in numbers)


# ----


def class_prompt(number: int, name: str = "") -> str:
    """The prompt of a class: `class 207`, or `class 207: golden retriever` where it has a name."""
    return f"class {number}: {name}" if name else f"class {number}"


def class_number(text: str, classes: int) -> int:
    """The class a prompt stands for: `207`, `class 207` or `class 207: name`; raises `UserError` for any other."""
    match = re.fullmatch(r"(?:class\s+)?(\d{1,9})(?:\s*:.*)?", text.strip(), flags=re.IGNORECASE | re.DOTALL)
    if match is None:
        raise UserError(f"{text!r} is no class", f"Give a number from 0 to {classes - 1}, or `class 207: its name`.")
    if int(match[1]) >= classes:
        raise UserError(f"class {match[1]}: there are {classes} classes", f"Give a number from 0 to {classes - 1}.")
    return int(match[1])
