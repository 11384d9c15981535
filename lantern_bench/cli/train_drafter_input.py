"""What `train drafter` was typed with, read and checked before a model is loaded: recipe, data, decoding.

Every problem is one line that names the flag, its value and what to type. The command itself is `train_drafter`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.models.registry import Family, ModelCard
    from lantern_bench.spec.decoding import Decoding
    from lantern_bench.train.drafter_recipe import DrafterRecipe
    from lantern_bench.train.examples import Data

__all__ = ["check_numbers", "check_words", "chosen_recipe", "examined_with", "given_data", "prompts_of", "target_of"]


def check_numbers(values: Mapping[str, int | None], least: int) -> None:
    """Refuse whole numbers, by flag, that are below `least`."""
    for flag, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: must be a whole number of at least {least}")


def check_words(device: str, dtype: str, features: str, minutes: float | None) -> None:
    """Refuse words that mean nothing, before torch is imported."""
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UserError(f"--minutes {minutes:g}: must be a number above 0")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: unknown device", "The devices are auto, cpu, mps, cuda and cuda:N.")
    for flag, value, words in (
        ("--dtype", dtype, ("auto", "float32", "bfloat16", "float16")),
        ("--features", features, ("live", "shards")),
    ):
        if value not in words:
            raise UserError(f"{flag} {value}: unknown", f"One of {', '.join(words)}.")


def chosen_recipe(source: str, typed: dict[str, Any], settings: Sequence[str]) -> DrafterRecipe:
    """The recipe with what was typed over it; a flag goes before `--set`."""
    import yaml

    from lantern_bench.train.drafter_recipe import read_recipe, with_settings

    values: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: must be key=value", "For example --set noise=0.05.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: cannot be read as a value") from error
    recipe = with_settings(read_recipe(source), values, "--set")
    for key, value in typed.items():
        if value is not None:
            recipe = with_settings(recipe, {key: value}, "--")
    return recipe


def target_of(name: str) -> tuple[ModelCard, Family]:
    """The card and the family of the target; raises `UserError` that names `--target`."""
    from lantern_bench.models.registry import card_of, family_of

    try:
        return card_of(name), family_of(name)
    except UserError as error:
        raise UserError(error.message.replace("--model", "--target"), error.advice) from error


def given_data(source: str, captions: Path | None, images: int | None, mirror: bool, family: Family) -> Data:
    """A folder is pictures; anything else captions alone."""
    from lantern_bench.train.examples import Data

    folder = Path(source)
    if folder.is_dir():
        from lantern_bench.measure.captioned import read_captioned

        found = read_captioned(folder, captions, family)
        if images is not None and images > len(found):
            raise UserError(f"--images {images}: --data {source} holds {len(found)} pictures")
        found = found[:images]
        made = Data([item.caption for item in found], [item.path for item in found], mirror)
    else:
        for flag, wrong in (("--captions", captions is not None), ("--mirror", mirror)):
            if wrong:
                raise UserError(f"{flag}: goes with pictures, and --data {source} is no folder", "Leave it out.")
        texts = prompts_of(source, "--data", family)
        made = Data([texts[number % len(texts)] for number in range(images or len(texts))])
    if len(made) < 2:
        raise UserError(f"--data {source}: one picture is too few", "Some are held out; give two at least.")
    return made


def prompts_of(source: str, flag: str, family: Family) -> list[str]:
    """The prompts of a set or a file; what is wrong is said of the flag they were typed with."""
    from lantern_bench.measure.prompts import load_prompts

    try:
        return [prompt.text for prompt in load_prompts(source, family)]
    except UserError as error:
        advice = error.advice
        if flag == "--data" and "no such file" in error.message:
            advice = f"{advice or ''} Or a folder of pictures with captions.".strip()
        raise UserError(error.message.replace("--prompts", flag), advice) from error


def examined_with(values: dict[str, Any], defaults: dict[str, Any]) -> Decoding:
    """Lossless speculative decoding with a stated tree, at the model's guidance where nothing is said."""
    from lantern_bench.spec.decoding import Decoding
    from lantern_bench.spec.values import Place, Problems, read_parameter

    problems, read = Problems("train drafter"), dict[str, Any]()
    for key in ("cfg_scale", "temperature", "top_k", "tree"):
        value = values[key] if values[key] is not None else defaults.get(key)
        if value is not None:
            for one in read_parameter(key, value, Place(f"--{key.replace('_', '-')}"), problems):
                read["topology" if isinstance(one.value, tuple) else key] = one.value
    problems.raise_all()
    usual = defaults.get("cfg_scale", 1.0)
    return Decoding(mode="speculative", drafting="static", rule="strict", cfg_default=usual, **read)
