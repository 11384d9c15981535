"""How a drafter is trained: the settings of a recipe, the recipes by name, and the flags of `train drafter`. No torch.

`published` is the default of the LANTERN authors' training code (arXiv 2410.03355, after EAGLE, 2401.15077). That code
states no weight decay; torch's default .01 is taken. The file `lanterns.yaml` says what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lantern_bench.config.yaml_source import read_source
from lantern_bench.errors import UserError, did_you_mean
from lantern_bench.methods.trees import STATIC_TREES


# A description is what is allowed, in the words of an error message: "KEY VALUE: must be ...".
def _limits(description: str, **limits: Any) -> Any:
    return Field(strict=True, description=description, **limits)


_COUNT = _limits("a whole number of at least 1", ge=1)
_NATURAL = _limits("a whole number of at least 0", ge=0)
# YAML reads 1e-4, without a point, as text.
_Float = Annotated[float, BeforeValidator(lambda value: float(value) if isinstance(value, str) else value)]
Positive = Annotated[_Float, _limits("a number above 0", gt=0, allow_inf_nan=False)]
NotNegative = Annotated[_Float, _limits("a number of at least 0", ge=0, allow_inf_nan=False)]
Share = Annotated[_Float, _limits("a number from 0 to 1", ge=0, le=1)]
BelowOne = Annotated[_Float, _limits("a number of at least 0 and below 1", ge=0, lt=1)]
Count = Annotated[int, _COUNT]
Natural = Annotated[int, _NATURAL]
OptionalCount = Annotated[int | None, _COUNT]
OptionalNatural = Annotated[int | None, _NATURAL]
OptionalPositive = Annotated[float | None, _limits("a number above 0", gt=0, allow_inf_nan=False)]
Switch = Annotated[bool, _limits("true or false")]
ClipBy = Annotated[Literal["norm", "value"], Field(description="one of norm, value")]
Schedule = Annotated[Literal["cosine", "linear"], Field(description="one of cosine, linear")]
Device = Annotated[str, _limits("auto, cpu, mps, cuda or cuda:N", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]

_Model = TypeVar("_Model", bound=BaseModel)


class Settings(BaseModel):
    """Settings that cannot change and refuse names that they do not have."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Optimisation(Settings):
    """How weights change: AdamW, its schedule and the clipping of gradients.

    The learning rate rises linearly over `warmup` steps and falls to `final_lr` of itself by a half cosine or a line.
    """

    lr: Positive = 1e-3
    betas: Annotated[tuple[Share, Share], Field(description="two numbers from 0 to 1")] = (0.9, 0.95)
    weight_decay: NotNegative = 0.05
    clip: Positive = 1.0
    # Gradients are clipped by their norm, or each by its value.
    clip_by: ClipBy = "norm"
    schedule: Schedule = "cosine"
    final_lr: Share = 0.02
    warmup: OptionalNatural = 50
    steps: OptionalCount = None
    accumulate: Count = 1  # batches a step
    autocast: Switch = True  # matrix products in bfloat16, where the processor has instructions for it


class TrainSettings(Optimisation):
    """How to train. Either `steps` or `minutes` ends it; with both, whichever comes first.

    The learning rate falls over the steps when `steps` is given (reproducible), else over the minutes.
    """

    minutes: OptionalPositive = None
    seed: Natural = 0
    log_every: Count = 10
    checkpoint_every: Count = 100
    checkpoint: Path | None = None
    resume: bool = True
    # Weights and data that the training depends on: a checkpoint that was made with others is refused.
    depends_on: Mapping[str, Any] = {}

    def described(self) -> dict[str, Any]:
        """Return plain data for reports, without paths."""
        return self.model_dump(mode="json", exclude={"checkpoint", "resume", "depends_on"})

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on to be continued."""
        return {**self.described(), **self.depends_on}


def flag_of(key: str) -> str:
    """Return the flag of a setting: `eval_every` -> `--eval-every`."""
    return f"--{key.replace('_', '-')}"


def checked(model: type[_Model], values: Mapping[str, Any], name_of: Callable[[str], str] = flag_of) -> _Model:
    """Validate `values`; raises `UserError` with `name_of(key)`, the value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem, fields = error.errors()[0], model.model_fields
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            problem_text = f"{name_of(key)}: unknown setting{did_you_mean(key, fields)}"
            raise UserError(problem_text, f"The settings are {', '.join(fields)}.") from error
        value = f"{values[key]:g}" if isinstance(values[key], float) else values[key]
        raise UserError(f"{name_of(key)} {value}: must be {fields[key].description}") from error


# ---- Recipes of drafters


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
