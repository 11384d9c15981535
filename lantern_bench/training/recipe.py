"""How a drafter is trained: the settings of a recipe, the recipes by name, and the flags of `train drafter`. No torch.

`published` is that of the LANTERN authors' training code (arXiv 2410.03355), with torch's default weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from lantern_bench.devices.names import DEVICE, DEVICES, DType
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import read_source

Share = Annotated[float, Field(ge=0, le=1)]
Device = Annotated[str, Field(pattern=DEVICE, description=DEVICES)]
_Model = TypeVar("_Model", bound=BaseModel)


class StrictSettings(BaseModel):
    """Settings that refuse names that they do not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optimisation(StrictSettings):
    """How weights change: AdamW, its schedule and the clipping of gradients.

    The learning rate rises linearly over `warmup` steps and falls to `final_lr` of itself by a half cosine or a line.
    """

    lr: PositiveFloat = 1e-4
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 0.5
    # Gradients are clipped by their norm, or each by its value.
    clip_by: Literal["norm", "value"] = "value"
    schedule: Literal["cosine", "linear"] = "linear"
    final_lr: Share = 0.0
    # None: the share `warmup_share` of the first epoch's steps
    warmup: NonNegativeInt | None = None
    steps: PositiveInt | None = None
    accumulate: PositiveInt = 1  # batches a step
    # matrix products in bfloat16, where the processor has instructions for it
    autocast: bool = True


class TrainSettings(Optimisation):
    """How to train. Either `steps` or `minutes` ends it, the first that comes; the learning rate falls until then."""

    minutes: PositiveFloat | None = None
    seed: NonNegativeInt = 0
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 100
    checkpoint: Path | None = None
    resume: bool = True
    # Weights and data that the training depends on: a checkpoint that was made with others is refused.
    depends_on: Mapping[str, Any] = {}

    def described(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on to be continued, as plain data without paths."""
        return self.model_dump(mode="json", exclude={"checkpoint", "resume", "depends_on"}) | dict(
            self.depends_on
        )


def flag_of(key: str) -> str:
    """Return the flag of a setting: `eval_every` -> `--eval-every`."""
    return f"--{key.replace('_', '-')}"


def checked(
    model: type[_Model], values: Mapping[str, Any], name_of: Callable[[str], str] = flag_of
) -> _Model:
    """Validate `values`; raises `UserError` with `name_of(key)`, the value and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        fields = model.model_fields
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            text = f"{name_of(key)}: unknown setting{did_you_mean(key, fields)}"
            raise UserError(text, f"The settings are {', '.join(fields)}.") from error
        # Pydantic says "Input should be greater than 0".
        allowed = fields[key].description or problem["msg"].replace("Input should", "must").replace(
            "'", ""
        )
        value = f"{values[key]:g}" if isinstance(values[key], float) else values[key]
        raise UserError(f"{name_of(key)} {value}: {allowed}") from error


# ---- Recipes of drafters


class DrafterRecipe(Optimisation):
    """The settings of a training; the defaults are the published ones."""

    warmup_share: Share = 0.03
    epochs: PositiveFloat = 20.0  # over the data, unless `steps` is set
    batch: PositiveInt = 4  # sequences
    # The loss is `feature_weight` times SmoothL1 between predicted and true feature plus `soft_weight` times
    # cross-entropy against the target's distribution plus `overlap_weight` times the total variation between the two,
    # the probability that a first draft token is rejected.
    feature_weight: NonNegativeFloat = 1.0
    soft_weight: NonNegativeFloat = 0.1
    overlap_weight: NonNegativeFloat = 0.0
    # uniform on the input features, at most this times 512 over their number
    noise: NonNegativeFloat = 0.1
    # share of sequences without their condition, or where `guided` without their guidance
    dropped: Share = 0.1
    # Levels of a draft that are trained; each takes the guesses of the one before and sees the true features before it,
    # as the levels of a tree do (HASS, arXiv 2408.15766), and weighs `level_decay` times the one before.
    levels: PositiveInt = 1
    level_decay: Share = 0.8
    # Every sequence has rows with and without its condition, and the loss compares the guided distributions that
    # decoding samples from.
    guided: bool = False
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05  # share of the data for evaluation

    def total_steps(self, sequences: int) -> int:
        """Return the steps over that many training sequences."""
        return self.steps or max(1, round(self.epochs * self.steps_per_epoch(sequences)))

    def steps_per_epoch(self, sequences: int) -> float:
        """Return the steps until every sequence was seen once."""
        return sequences / (self.batch * self.accumulate)

    def train_settings(self, sequences: int | None, **settings: Any) -> TrainSettings:
        """Return the loop's settings for that many sequences (None leaves the end open), changed by `settings`."""
        shared = self.model_dump(include=set(Optimisation.model_fields))
        if self.warmup is None:
            shared["warmup"] = round(self.warmup_share * self.steps_per_epoch(sequences or 0))
        shared["steps"] = None if sequences is None else self.total_steps(sequences)
        return TrainSettings(**shared | settings)


RECIPES = {
    "published": DrafterRecipe(),
    "lanterns": DrafterRecipe(
        **yaml.safe_load(Path(__file__).with_name("lanterns.yaml").read_text(encoding="utf-8"))
    ),
}


def _flag(default: Any, help: str, **limits: Any) -> Any:
    return Field(default, title=help, **limits)


class DrafterFlags(StrictSettings):
    """The flags of `train drafter`: a title is the help. Those of single settings are checked with the recipe."""

    target: str
    data: str
    captions: Path | None = _flag(None, "File names and captions (.jsonl, .csv, .tsv, .txt).")
    images: int | None = _flag(
        None, "Pictures of a folder, or to sample. Default: all; one per caption.", gt=0, le=10**6
    )
    mirror: bool = _flag(False, "Train on the pictures' mirror images as well.")
    recipe: str = _flag("published", "published, lanterns, or a YAML file of settings.")
    set: list[str] | None = _flag(None, "key=value: a setting of the recipe.")
    steps: int | None = _flag(None, "Steps; else the recipe's epochs.")
    epochs: float | None = _flag(None, "How often each picture is seen.")
    minutes: float | None = _flag(None, "Minutes of training instead.", gt=0)
    batch: int | None = _flag(None, "Sequences per batch.")
    accumulate: int | None = _flag(None, "Batches per step.")
    lr: float | None = _flag(None, "Learning rate.")
    init: str = _flag("random", "random; shipped, the model's own drafter; or a drafter's folder.")
    out: Path | None = _flag(None, "Folder of the drafter. Default: results/drafters/TARGET.")
    work: Path | None = _flag(None, "Folder of tokens and checkpoint. Default: OUT/work.")
    tree: str = _flag("eagle1-25", f"Tree of the evaluation: {', '.join(STATIC_TREES)}.")
    cfg_scale: float | None = _flag(
        None, "Guidance of sampling and evaluation. Default: the model's."
    )
    temperature: float = _flag(1.0, "Temperature of sampling and evaluation.")
    top_k: int | None = _flag(None, "Top-k of sampling and evaluation. Default: the model's.")
    eval_prompts: str | None = _flag(
        None, "Prompts of the evaluation, as --data. Default: the held-out captions."
    )
    eval_every: int = _flag(500, "Steps between evaluations; 0: only at the end.", ge=0)
    eval_images: int = _flag(8, "Images of each evaluation.", ge=0)
    final_images: int = _flag(32, "Images of the last evaluation, of both drafters.", ge=0)
    seed: int = _flag(0, "Seed of everything random.", ge=0, lt=2**63)
    device: Device = _flag("auto", "auto, cpu, mps, cuda or cuda:N.")
    dtype: DType = _flag("auto", "Of the target: auto, float32, bfloat16 or float16.")
    compile: bool = _flag(False, "Compile the training step; for long trainings.")
    resume: bool = _flag(True, "Continue from the checkpoint, or start again.")


def read_recipe(source: str) -> DrafterRecipe:
    """Return a recipe by name, or from a YAML file of its settings (and `base`, the recipe it starts from)."""
    if source in RECIPES:
        return RECIPES[source]
    names = ", ".join(RECIPES)
    if not source.lower().endswith((".yaml", ".yml")):
        problem = f"--recipe {source}: unknown recipe{did_you_mean(source, RECIPES)}"
        raise UserError(problem, f"The recipes are {names}; or give a YAML file.")
    try:
        file = read_source(
            Path(source), f"The settings are {', '.join(DrafterRecipe.model_fields)}."
        )
    except UserError as error:
        raise UserError(f"--recipe {error.message}", error.advice) from error
    values = {str(key): value for key, value in file.data.items()}
    base = values.pop("base", "published")
    if base not in RECIPES:
        raise UserError(
            f"--recipe {source}: base {base}: unknown recipe", f"The recipes are {names}."
        )
    changed = RECIPES[base].model_dump() | values
    return checked(
        DrafterRecipe, changed, lambda key: f"--recipe {source} line {file.line((key,))}: {key}"
    )


def recipe_of(flags: DrafterFlags) -> DrafterRecipe:
    """Return the recipe of `--recipe`, changed by `--set`, then by the flags of single settings."""
    values: dict[str, Any] = {}
    for text in flags.set or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: must be key=value", "For example --set noise=0.05.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not valid YAML") from error
    recipe = checked(
        DrafterRecipe, read_recipe(flags.recipe).model_dump() | values, lambda key: f"--set {key}"
    )
    single = flags.model_dump(
        include={"steps", "epochs", "batch", "accumulate", "lr"}, exclude_none=True
    )
    return checked(DrafterRecipe, recipe.model_dump() | single)
