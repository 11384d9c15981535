"""How a drafter is trained, as numbers: the published recipe, the embedded family's, or a user's YAML. No torch.

`published` is what the LANTERN authors' training code has by default (arXiv 2410.03355, after EAGLE, 2401.15077). Their
optimiser's weight decay is stated nowhere; torch's own .01 is taken. What `lanterns` changes is in `recipe_drafter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from lantern_bench.errors import UserError, did_you_mean


@dataclass(frozen=True)
class DrafterRecipe:
    """The numbers of a training; the default is the published recipe.

    `epochs` over the data unless `steps` says otherwise; a step is `accumulate` batches of `batch` sequences.
    `warmup` steps, or where None the share `warmup_share` of the first epoch's. The loss is `feature_weight` times
    SmoothL1 between predicted and true feature plus `soft_weight` times cross-entropy against the target's
    distribution. Uniform noise of at most `noise` is added to the features that go in, times 512 over their number
    where `noise_by_length`. `dropped` is the share of sequences without their condition; `guessed` the share of
    features that go in as the drafter's own guesses. `held_out` is the share of the data kept for evaluation.
    `autocast`: matrix products in bfloat16.

    `levels` of a draft are followed, each fed the guesses of the one before and seeing the true features before it, as
    a tree's levels are (HASS, arXiv 2408.15766); each weighs `level_decay` times the one before. `guided`: every
    sequence is shown with and without its condition, and what is compared are the guided distributions that decoding
    draws from; a share `dropped` is not guided. `overlap_weight` weighs the total variation between the two, the share
    of first drafts that is rejected.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    clip_by: Literal["norm", "value"] = "value"
    schedule: Literal["cosine", "linear"] = "linear"
    final_lr: float = 0.0
    warmup: int | None = None
    warmup_share: float = 0.03
    epochs: float = 20.0
    steps: int | None = None
    batch: int = 4
    accumulate: int = 1
    feature_weight: float = 1.0
    soft_weight: float = 0.1
    noise: float = 0.1
    noise_by_length: bool = True
    dropped: float = 0.1
    guessed: float = 0.0
    levels: int = 1
    level_decay: float = 0.8
    guided: bool = False
    overlap_weight: float = 0.0
    held_out: float = 0.05
    autocast: bool = True

    def total_steps(self, sequences: int) -> int:
        """Steps over that many training sequences."""
        return self.steps or max(1, round(self.epochs * self.steps_an_epoch(sequences)))

    def steps_an_epoch(self, sequences: int) -> float:
        """Steps until every sequence was seen once."""
        return sequences / (self.batch * self.accumulate)

    def warmup_steps(self, sequences: int) -> int:
        """Steps in which the learning rate rises."""
        return self.warmup if self.warmup is not None else round(self.warmup_share * self.steps_an_epoch(sequences))


RECIPES: dict[str, DrafterRecipe] = {
    "published": DrafterRecipe(),
    # Image tokens are ambiguous: matching the distribution that is decoded from counts more here than the feature.
    # Found on the embedded model, whose drafter sees each picture about once.
    "lanterns": DrafterRecipe(
        lr=1e-3,
        weight_decay=0.05,
        clip=1.0,
        clip_by="norm",
        schedule="cosine",
        final_lr=0.02,
        warmup=100,
        epochs=1.0,
        batch=16,
        feature_weight=0.1,
        soft_weight=0.3,
        overlap_weight=1.0,
        noise=0.0,
        noise_by_length=False,
        levels=3,
        guided=True,
    ),
}
_POSITIVE = {"lr", "clip", "epochs", "steps", "batch", "accumulate", "levels"}
_SHARES = {"final_lr", "warmup_share", "dropped", "guessed", "level_decay", "held_out"}


def read_recipe(source: str) -> DrafterRecipe:
    """A recipe by name, or from a YAML file of its keys (and `base`, the recipe it starts from; default published).

    Raises `UserError` that names `--recipe`, the key, its value and what is allowed.
    """
    if source in RECIPES:
        return RECIPES[source]
    path = Path(source)
    if path.suffix.lower() not in (".yaml", ".yml"):
        hint = did_you_mean(source, RECIPES)
        raise UserError(
            f"--recipe {source}: unknown recipe{hint}", f"The recipes are {', '.join(RECIPES)}; or give a YAML file."
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"--recipe {source}: no such file") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--recipe {source}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise UserError(f"--recipe {source}: must be a mapping of settings", f"The keys are {', '.join(_names())}.")
    base = data.get("base", "published")
    if base not in RECIPES:
        raise UserError(f"--recipe {source}: base {base}: unknown recipe", f"The recipes are {', '.join(RECIPES)}.")
    return with_settings(RECIPES[base], {k: v for k, v in data.items() if k != "base"}, f"--recipe {source}:")


def with_settings(recipe: DrafterRecipe, values: Mapping[str, Any], place: str) -> DrafterRecipe:
    """A recipe with other values; raises `UserError` for a key or value that cannot be, `place` in front.

    `place` is what was typed, such as `--set`; `--` alone for flags with the keys' names.
    """
    place = place if place == "--" else f"{place} "
    hints, changed = get_type_hints(DrafterRecipe), dict[str, Any]()
    for key, value in values.items():
        if key not in hints:
            hint = did_you_mean(str(key), hints)
            raise UserError(f"{place}{key}: unknown setting{hint}", f"The settings are {', '.join(_names())}.")
        wanted, read = _read(key, hints[key], value)
        if wanted is not None:
            raise UserError(f"{place}{key} {value}: must be {wanted}")
        changed[key] = read
    return replace(recipe, **changed)


def _names() -> list[str]:
    return [field.name for field in fields(DrafterRecipe)]


def _read(key: str, kind: Any, value: Any) -> tuple[str | None, Any]:
    """What is wanted instead of `value`, or None and the value as the recipe has it."""
    if key == "betas":
        pair = isinstance(value, list | tuple) and len(value) == 2 and all(_number(one, 0, 1) for one in value)
        return (None, tuple(map(float, value))) if pair else ("two numbers from 0 to 1", None)
    if kind is float and isinstance(value, str):
        value = _as_number(value)  # YAML takes 1e-4, without a point, for text
    if kind is bool:
        return (None, value) if isinstance(value, bool) else ("true or false", None)
    choices = get_args(kind)
    if choices and isinstance(choices[0], str):
        return (None, value) if value in choices else (f"one of {', '.join(choices)}", None)
    if kind is not float:
        least = int(key in _POSITIVE)
        whole = type(value) is int and value >= least
        return (None, value) if whole else (f"a whole number of at least {least}", None)
    if key in _SHARES:
        fits = _number(value, 0, 1) and not (key == "held_out" and value >= 1)
        return (None, float(value)) if fits else ("a number from 0 to 1", None)
    if not _number(value, 0, float("inf")) or (key in _POSITIVE and value == 0):
        return f"a number {'above' if key in _POSITIVE else 'of at least'} 0", None
    return None, float(value)


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _number(value: Any, low: float, high: float) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and low <= value <= high and value != float("inf")


def described(recipe: DrafterRecipe) -> dict[str, Any]:
    """The recipe as plain data."""
    return asdict(recipe) | {"betas": list(recipe.betas)}
