"""The captions of the bundled model: 1,008 combinations of five attributes, one sentence each.

The grammar is fixed, so that each attribute of a picture can be checked. Every tenth combination of a fixed shuffle is
held out of training and serves as an evaluation prompt. No torch here: captions are checked before a model is loaded.
"""

from __future__ import annotations

import difflib
import itertools
import random  # noqa: TID251  # a seeded instance of its own, which needs no torch and no numpy
from collections.abc import Sequence
from dataclasses import dataclass

from lantern_bench.errors import UserError

COUNTS = ("one", "two", "three")
SHAPES = ("round", "tall", "square")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "white")
GROUNDS = ("a lake", "a meadow", "a desert", "the snow")
SKIES = ("at dusk", "at night", "at dawn", "in a storm")

FIELDS: dict[str, tuple[str, ...]] = {
    "count": COUNTS,
    "shape": SHAPES,
    "colour": COLOURS,
    "ground": GROUNDS,
    "sky": SKIES,
}

MAX_WORDS = 10


@dataclass(frozen=True, order=True)
class Attributes:
    """What one scene shows: an index into each of the five sets of `FIELDS`, in that order."""

    count: int
    shape: int
    colour: int
    ground: int
    sky: int

    def caption(self) -> str:
        """The sentence of this combination, e.g. "two round red lanterns over a lake at dusk"."""
        noun = "lantern" if self.count == 0 else "lanterns"
        return (
            f"{COUNTS[self.count]} {SHAPES[self.shape]} {COLOURS[self.colour]} {noun} "
            f"over {GROUNDS[self.ground]} {SKIES[self.sky]}"
        )

    def indices(self) -> tuple[int, int, int, int, int]:
        """The five indices, in the order of `FIELDS`."""
        return (self.count, self.shape, self.colour, self.ground, self.sky)


ALL_ATTRIBUTES: tuple[Attributes, ...] = tuple(
    Attributes(*indices) for indices in itertools.product(*(range(len(values)) for values in FIELDS.values()))
)


_shuffled = list(ALL_ATTRIBUTES)
random.Random(20241).shuffle(_shuffled)
TRAIN, HELD_OUT = tuple(_shuffled[len(_shuffled) // 10 :]), tuple(_shuffled[: len(_shuffled) // 10])

# Index 0 is the padding word; captions are padded on the left, as LlamaGen's text features are.
VOCABULARY: tuple[str, ...] = (
    "<pad>",
    *sorted({word for attributes in ALL_ATTRIBUTES for word in attributes.caption().split()}),
)

_BY_CAPTION = {attributes.caption(): attributes for attributes in ALL_ATTRIBUTES}


def words(caption: str) -> list[int]:
    """Turn a caption into word numbers of `VOCABULARY`, without padding.

    Raises `UserError` for an empty caption, one of more than `MAX_WORDS` words, and a word outside the vocabulary.
    """
    tokens = caption.lower().replace(",", " ").rstrip(". ").split()
    numbers = {word: number for number, word in enumerate(VOCABULARY) if number}
    unknown = [word for word in tokens if word not in numbers]
    if unknown:
        near = difflib.get_close_matches(unknown[0], numbers, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"caption {caption!r}: the bundled model does not know the word {unknown[0]!r}{hint}",
            f"it knows only: {' '.join(sorted(numbers))}; e.g. {ALL_ATTRIBUTES[0].caption()!r}",
        )
    if not 0 < len(tokens) <= MAX_WORDS:
        raise UserError(
            f"caption {caption!r} has {len(tokens)} words; the bundled model takes 1 to {MAX_WORDS}",
            f"for example: {ALL_ATTRIBUTES[0].caption()!r}",
        )
    return [numbers[word] for word in tokens]


def attributes_of(captions: Sequence[str]) -> list[Attributes | None]:
    """The attributes each caption names; None for a caption outside the grammar (it has no prompt accuracy)."""
    return [_BY_CAPTION.get(" ".join(caption.lower().rstrip(". ").split())) for caption in captions]
