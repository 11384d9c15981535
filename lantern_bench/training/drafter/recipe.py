"""How a drafter is trained: the settings of a recipe, the recipes by name, and the flags of `train drafter`. No torch.

`published` is the default of the LANTERN authors' training code (arXiv 2410.03355, after EAGLE, 2401.15077). That code
states no weight decay; torch's default .01 is taken. The file `lanterns.yaml` says what it changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from lantern_bench.config.yaml_source import read_source
from lantern_bench.errors import UserError, did_you_mean
from lantern_bench.methods.trees import STATIC_TREES
from lantern_bench.training.settings import (
    BelowOne,
    ClipBy,
    Count,
    Device,
    Natural,
    NotNegative,
    Optimisation,
    OptionalCount,
    OptionalNatural,
    OptionalPositive,
    Positive,
    Schedule,
    Settings,
    Share,
    Switch,
    TrainSettings,
    checked,
)


class DrafterRecipe(Optimisation):
    """The settings of a training; the defaults are the published recipe."""

    lr: Positive = 1e-4
    weight_decay: NotNegative = 0.01
    clip: Positive = 0.5
    clip_by: ClipBy = "value"
    schedule: Schedule = "linear"
    final_lr: Share = 0.0
    warmup: OptionalNatural = None  # None: the share `warmup_share` of the first epoch's steps
    warmup_share: Share = 0.03
    epochs: Positive = 20.0  # over the data, unless `steps` is set
    batch: Count = 4  # sequences
    # The loss is `feature_weight` times SmoothL1 between predicted and true feature plus `soft_weight` times
    # cross-entropy against the target's distribution plus `overlap_weight` times the total variation between the two,
    # the probability that a first draft token is rejected.
    feature_weight: NotNegative = 1.0
    soft_weight: NotNegative = 0.1
    overlap_weight: NotNegative = 0.0
    noise: NotNegative = 0.1  # uniform on the input features, at most this times 512 over their number
    dropped: Share = 0.1  # share of sequences without their condition, or where `guided` without their guidance
    # Levels of a draft that are trained; each takes the guesses of the one before and sees the true features before it,
    # as the levels of a tree do (HASS, arXiv 2408.15766), and weighs `level_decay` times the one before.
    levels: Count = 1
    level_decay: Share = 0.8
    # Every sequence has rows with and without its condition, and the loss compares the guided distributions that
    # decoding samples from.
    guided: Switch = False
    held_out: BelowOne = 0.05  # share of the data for evaluation

    def total_steps(self, sequences: int) -> int:
        """Return the steps over that many training sequences."""
        return self.steps or max(1, round(self.epochs * self.steps_per_epoch(sequences)))

    def steps_per_epoch(self, sequences: int) -> float:
        """Return the steps until every sequence was seen once."""
        return sequences / (self.batch * self.accumulate)

    def train_settings(self, sequences: int | None, **settings: Any) -> TrainSettings:
        """Return the loop's settings for that many sequences (None leaves the end open), changed by `settings`."""
        shared = {name: getattr(self, name) for name in Optimisation.model_fields}
        if self.warmup is None:
            shared["warmup"] = round(self.warmup_share * self.steps_per_epoch(sequences or 0))
        shared["steps"] = None if sequences is None else self.total_steps(sequences)
        return TrainSettings(**shared | settings)


RECIPES = {
    "published": DrafterRecipe(),
    "lanterns": DrafterRecipe(**yaml.safe_load(Path(__file__).with_name("lanterns.yaml").read_text(encoding="utf-8"))),
}


def _flag(default: Any, help: str) -> Any:
    return Field(default, title=help)


class DrafterFlags(Settings):
    """What `train drafter` was asked for: a field with a title is a flag, and the title is its help.

    The flags of single settings of the recipe are checked with the recipe.
    """

    target: str
    data: str
    captions: Path | None = _flag(None, "File names and captions (.jsonl, .csv, .tsv, .txt).")
    images: OptionalCount = _flag(None, "Pictures to use of a folder, or to sample. Default: all; one per caption.")
    mirror: bool = _flag(False, "Train on the pictures' mirror images as well.")
    recipe: str = _flag("published", "published, lanterns, or a YAML file of settings.")
    set: list[str] | None = _flag(None, "key=value: a setting of the recipe.")
    steps: int | None = _flag(None, "Steps; else the recipe's epochs.")
    epochs: float | None = _flag(None, "How often each picture is seen.")
    minutes: OptionalPositive = _flag(None, "Minutes of training instead.")
    batch: int | None = _flag(None, "Sequences per batch.")
    accumulate: int | None = _flag(None, "Batches per step.")
    lr: float | None = _flag(None, "Learning rate.")
    init: str = _flag("random", "random; shipped, the model's own drafter; or a drafter's folder.")
    out: Path | None = _flag(None, "Folder of the drafter. Default: results/drafters/TARGET.")
    work: Path | None = _flag(None, "Folder of tokens and checkpoint. Default: OUT/work.")
    tree: str = _flag("eagle1-25", f"Tree of the evaluation: {', '.join(STATIC_TREES)}.")
    cfg_scale: float | None = _flag(None, "Guidance of sampling and evaluation. Default: the model's.")
    temperature: float = _flag(1.0, "Temperature of sampling and evaluation.")
    top_k: int | None = _flag(None, "Top-k of sampling and evaluation. Default: the model's.")
    eval_prompts: str | None = _flag(None, "Prompts of the evaluation, as --data. Default: the held-out captions.")
    eval_every: Natural = _flag(500, "Steps between evaluations; 0: only at the end.")
    eval_images: Natural = _flag(8, "Images of each evaluation.")
    final_images: Natural = _flag(32, "Images of the last evaluation, of both drafters.")
    seed: Natural = _flag(0, "Seed of everything random.")
    device: Device = _flag("auto", "auto, cpu, mps, cuda or cuda:N.")
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Field(description="auto, float32, bfloat16 or float16")
    ] = _flag("auto", "Of the target: auto, float32, bfloat16 or float16.")
    compile: bool = _flag(False, "Compile the training step; for long trainings.")
    resume: bool = _flag(True, "Continue from the checkpoint, or start again.")
    log_every: int = 10
    checkpoint_every: int = 100


def read_recipe(source: str) -> DrafterRecipe:
    """Return a recipe by name, or from a YAML file of its settings (and `base`, the recipe it starts from).

    Raises `UserError` that names `--recipe`, the line, the setting, its value and what is allowed.
    """
    if source in RECIPES:
        return RECIPES[source]
    names = ", ".join(RECIPES)
    if not source.lower().endswith((".yaml", ".yml")):
        hint = did_you_mean(source, RECIPES)
        raise UserError(f"--recipe {source}: unknown recipe{hint}", f"The recipes are {names}; or give a YAML file.")
    try:
        file = read_source(Path(source), f"The settings are {', '.join(DrafterRecipe.model_fields)}.")
    except UserError as error:
        raise UserError(f"--recipe {error.message}", error.advice) from error
    values = {str(key): value for key, value in file.data.items()}
    base = values.pop("base", "published")
    if base not in RECIPES:
        raise UserError(f"--recipe {source}: base {base}: unknown recipe", f"The recipes are {names}.")
    changed = RECIPES[base].model_dump() | values
    return checked(DrafterRecipe, changed, lambda key: f"--recipe {source} line {file.line((key,))}: {key}")


def recipe_of(flags: DrafterFlags) -> DrafterRecipe:
    """Return the recipe of `--recipe`, changed by `--set`, then by the flags of single settings; raises `UserError`."""
    values: dict[str, Any] = {}
    for text in flags.set or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: must be key=value", "For example --set noise=0.05.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not valid YAML") from error
    recipe = checked(DrafterRecipe, read_recipe(flags.recipe).model_dump() | values, lambda key: f"--set {key}")
    single = flags.model_dump(include={"steps", "epochs", "batch", "accumulate", "lr"}, exclude_none=True)
    return checked(DrafterRecipe, recipe.model_dump() | single)
