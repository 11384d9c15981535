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
_POSITIVE = _limits("a number above 0", gt=0, allow_inf_nan=False)
# YAML reads 1e-4, without a point, as text.
_Float = Annotated[float, BeforeValidator(lambda value: float(value) if isinstance(value, str) else value)]
Positive = Annotated[_Float, _POSITIVE]
NotNegative = Annotated[_Float, _limits("a number of at least 0", ge=0, allow_inf_nan=False)]
Share = Annotated[_Float, _limits("a number from 0 to 1", ge=0, le=1)]
BelowOne = Annotated[_Float, _limits("a number of at least 0 and below 1", ge=0, lt=1)]
Count = Annotated[int, _COUNT]
Natural = Annotated[int, _NATURAL]
OptionalCount = Annotated[int | None, _COUNT]
OptionalNatural = Annotated[int | None, _NATURAL]
OptionalPositive = Annotated[float | None, _POSITIVE]
Switch = Annotated[bool, _limits("true or false")]
Device = Annotated[str, _limits("auto, cpu, mps, cuda or cuda:N", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]


class DrafterRecipe(BaseModel):
    """The settings of a training; the defaults are the published recipe.

    `epochs` over the data unless `steps` is set; a step is `accumulate` batches of `batch` sequences. `warmup` steps,
    or where None the share `warmup_share` of the first epoch's. The loss is `feature_weight` times SmoothL1 between
    predicted and true feature plus `soft_weight` times cross-entropy against the target's distribution. Uniform noise
    of at most `noise` is added to the input features, times 512 over their number where `noise_by_length`. `dropped`
    is the share of sequences without their condition; `guessed` the share of input features that are the drafter's own
    guesses. `held_out` is the share of the data kept for evaluation. `autocast`: matrix products in bfloat16, where the
    processor has instructions for it.

    `levels` of a draft are trained; each takes the guesses of the one before and sees the true features before it, as
    the levels of a tree do (HASS, arXiv 2408.15766); each weighs `level_decay` times the one before. `guided`: every
    sequence has rows with and without its condition, and the loss compares the guided distributions that decoding
    samples from; a share `dropped` is not guided. `overlap_weight` weighs the total variation between the two, the
    probability that a first draft token is rejected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Positive = 1e-4
    betas: Annotated[tuple[Share, Share], Field(description="two numbers from 0 to 1")] = (0.9, 0.95)
    weight_decay: NotNegative = 0.01
    clip: Positive = 0.5
    clip_by: Annotated[Literal["norm", "value"], Field(description="one of norm, value")] = "value"
    schedule: Annotated[Literal["cosine", "linear"], Field(description="one of cosine, linear")] = "linear"
    final_lr: Share = 0.0
    warmup: OptionalNatural = None
    warmup_share: Share = 0.03
    epochs: Positive = 20.0
    steps: OptionalCount = None
    batch: Count = 4
    accumulate: Count = 1
    feature_weight: NotNegative = 1.0
    soft_weight: NotNegative = 0.1
    noise: NotNegative = 0.1
    noise_by_length: Switch = True
    dropped: Share = 0.1
    guessed: Share = 0.0
    levels: Count = 1
    level_decay: Share = 0.8
    guided: Switch = False
    overlap_weight: NotNegative = 0.0
    held_out: BelowOne = 0.05
    autocast: Switch = True

    def total_steps(self, sequences: int) -> int:
        """Steps over that many training sequences."""
        return self.steps or max(1, round(self.epochs * self.steps_per_epoch(sequences)))

    def steps_per_epoch(self, sequences: int) -> float:
        """Steps until every sequence was seen once."""
        return sequences / (self.batch * self.accumulate)

    def warmup_steps(self, sequences: int) -> int:
        """Steps in which the learning rate rises."""
        return self.warmup if self.warmup is not None else round(self.warmup_share * self.steps_per_epoch(sequences))


RECIPES = {
    "published": DrafterRecipe(),
    "lanterns": DrafterRecipe(**yaml.safe_load(Path(__file__).with_name("lanterns.yaml").read_text(encoding="utf-8"))),
}


def _flag(default: Any, help: str) -> Any:
    return Field(default, title=help)


class DrafterFlags(BaseModel):
    """What `train drafter` was asked for: a field with a title is a flag, and the title is its help.

    The flags of single settings of the recipe are checked with the recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    features: Annotated[Literal["live", "shards"], Field(description="live or shards")] = _flag(
        "live", "live: computed at each step; shards: computed once, kept in --work."
    )
    out: Path | None = _flag(None, "Folder of the drafter. Default: results/drafters/TARGET.")
    work: Path | None = _flag(None, "Folder of tokens, features, checkpoint. Default: OUT/work.")
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


_Model = TypeVar("_Model", bound=BaseModel)


def flag_of(key: str) -> str:
    """The flag of a setting: `eval_every` -> `--eval-every`."""
    return f"--{key.replace('_', '-')}"


def checked(model: type[_Model], values: Mapping[str, Any], place: Callable[[str], str] = flag_of) -> _Model:
    """Validate `values`; raises `UserError` with `place(key)`, the value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem, known = error.errors()[0], model.model_fields
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(key, known)
            raise UserError(f"{place(key)}: unknown setting{hint}", f"The settings are {', '.join(known)}.") from error
        value = f"{values[key]:g}" if isinstance(values[key], float) else values[key]
        raise UserError(f"{place(key)} {value}: must be {known[key].description}") from error


def read_recipe(source: str) -> DrafterRecipe:
    """A recipe by name, or from a YAML file of its settings (and `base`, the recipe it starts from; default published).

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
    """The recipe of `--recipe`, changed by `--set` and then by the flags of single settings; raises `UserError`."""
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
