"""A few prompts to begin with, for models that come with none: captions, and ImageNet classes.

They are no benchmark: a figure needs a published set (`measure.prompt_sets`).
"""

from __future__ import annotations

from lantern_bench.models.classes import class_prompt

__all__ = ["CAPTIONS", "some_classes"]

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
