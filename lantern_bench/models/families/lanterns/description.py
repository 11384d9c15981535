"""The bundled model: sizes, files, vocabulary and captions.

A caption is one of 1,008 combinations of five attributes. Every tenth of a fixed shuffle is held
out of training.
"""

from __future__ import annotations

import itertools
import random  # noqa: TID251  # a seeded instance, which needs no torch and no numpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean

GUIDANCE = 2.0  # cfg_scale

# On two cores no chain or small tree is faster for strict rules (docs/engine.md). Relaxed rules
# gain from longer chains.
TREE = "chain-4"

MAX_WORDS = 10
TARGET_CONFIG = TransformerConfig(
    vocab_size=2048,
    dim=256,
    layers=8,
    heads=4,
    ffn_dim=704,
    prefix=MAX_WORDS,
    grid=(16, 16),
    prefix_rotary="identity",
)

WEIGHTS_FOLDER = Path(__file__).parent / "weights"

FILES: dict[str, str] = {
    "tokenizer": "tokenizer.safetensors",
    "features": "features.safetensors",
    "clip": "clip/open_clip_model.safetensors",
    "target": "target.safetensors",
    "drafter": "drafter.safetensors",
}
"""The file of each part, relative to the folder of weights."""

# ---- Captions

FIELDS: dict[str, tuple[str, ...]] = {
    "count": ("one", "two", "three"),
    "shape": ("round", "tall", "square"),
    "colour": ("red", "orange", "yellow", "green", "blue", "purple", "white"),
    "ground": ("a lake", "a meadow", "a desert", "the snow"),
    "sky": ("at dusk", "at night", "at dawn", "in a storm"),
}


@dataclass(frozen=True)
class Attributes:
    """The content of a scene: an index into each of the five sets of `FIELDS`, in their order."""

    count: int
    shape: int
    colour: int
    ground: int
    sky: int

    def caption(self) -> str:
        """Return the sentence, for example "two round red lanterns over a lake at dusk"."""
        pairs = zip(FIELDS.values(), self.indices(), strict=True)
        count, shape, colour, ground, sky = (values[index] for values, index in pairs)
        noun = "lantern" if self.count == 0 else "lanterns"
        return f"{count} {shape} {colour} {noun} over {ground} {sky}"

    def indices(self) -> tuple[int, ...]:
        """Return the five indices, in the order of `FIELDS`."""
        return tuple(vars(self).values())


_indices = itertools.product(*map(range, map(len, FIELDS.values())))
ALL_ATTRIBUTES = tuple(itertools.starmap(Attributes, _indices))
_BY_CAPTION = {attributes.caption(): attributes for attributes in ALL_ATTRIBUTES}

_shuffled = list(ALL_ATTRIBUTES)
random.Random(20241).shuffle(_shuffled)
HELD_OUT = tuple(_shuffled[: len(_shuffled) // 10])
TRAIN = tuple(_shuffled[len(HELD_OUT) :])

# Index 0 is the padding word; captions are padded on the left, as LlamaGen's text features are.
VOCABULARY = ("<pad>", *sorted(set(" ".join(_BY_CAPTION).split())))


def words(caption: str) -> list[int]:
    """Turn a caption into numbers of words in `VOCABULARY`.

    Raises:
        UserError: A word is unknown, or there are too many words or none.
    """
    tokens = caption.lower().replace(",", " ").rstrip(". ").split()
    numbers = {word: number for number, word in enumerate(VOCABULARY) if number}
    unknown = [word for word in tokens if word not in numbers]
    if unknown:
        raise UserError(
            f"caption {caption!r}: the bundled model does not know the word {unknown[0]!r}"
            f"{did_you_mean(unknown[0], numbers)}",
            f"it knows only: {' '.join(sorted(numbers))}; e.g. {ALL_ATTRIBUTES[0].caption()!r}",
        )
    if not 0 < len(tokens) <= MAX_WORDS:
        raise UserError(
            f"caption {caption!r} has {len(tokens)} words; the bundled model takes 1 to "
            f"{MAX_WORDS}",
            f"for example: {ALL_ATTRIBUTES[0].caption()!r}",
        )
    return [numbers[word] for word in tokens]


def attributes_of(captions: Sequence[str]) -> list[Attributes | None]:
    """Return the attributes that each caption names.

    A caption outside the grammar has None, and no prompt accuracy.
    """
    return [_BY_CAPTION.get(" ".join(caption.lower().rstrip(". ").split())) for caption in captions]
