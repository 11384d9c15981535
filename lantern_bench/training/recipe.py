"""How a drafter is trained: recipes, their settings, and the flags of `train drafter`. No torch.

The recipe `published` has the settings of the LANTERN authors' training code (arXiv 2410.03355),
with torch's default weight decay.
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

from lantern_bench.devices.environment import DEVICE, DEVICES, DType
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import Source, problems_of, read_source, show

Fraction = Annotated[float, Field(ge=0, le=1)]
Device = Annotated[str, Field(pattern=DEVICE, description=DEVICES)]
_Model = TypeVar("_Model", bound=BaseModel)


class StrictSettings(BaseModel):
    """Settings that refuse unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optimisation(StrictSettings):
    """AdamW, its schedule and the clipping of gradients.

    The learning rate rises linearly over `warmup` steps and falls to `final_lr * lr`, by a half
    cosine or linearly.
    """

    lr: PositiveFloat = 1e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 0.5
    # Clip the norm of all gradients, or the value of each one.
    clip_by: Literal["norm", "value"] = "value"
    schedule: Literal["cosine", "linear"] = "linear"
    final_lr: Fraction = 0.0
    warmup: NonNegativeInt | None = None  # steps; None: `warmup_share` of the first epoch
    steps: PositiveInt | None = None
    accumulate: PositiveInt = 1  # batches per step
    # Matrix products in bfloat16, if the processor has instructions for it.
    autocast: bool = True


class TrainSettings(Optimisation):
    """How to train. Training ends after `steps` or `minutes`, whichever comes first."""

    minutes: PositiveFloat | None = None
    seed: NonNegativeInt = 0
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 100
    checkpoint: Path | None = None
    resume: bool = True
    # Weights and data that the training depends on. A checkpoint made with others is refused.
    depends_on: Mapping[str, Any] = {}

    def described(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on to be continued, as plain data without paths."""
        shared = self.model_dump(mode="json", exclude={"checkpoint", "resume", "depends_on"})
        return {**self.depends_on, **shared}


def flag_of(key: str) -> str:
    """Return the flag of a setting: `eval_every` -> `--eval-every`."""
    return f"--{key.replace('_', '-')}"


def checked(
    model: type[_Model], values: Mapping[str, Any], name_of: Callable[[str], str] = flag_of
) -> _Model:
    """Validate settings.

    Args:
        model: The class of the settings.
        values: Their values.
        name_of: Name of a key in messages, such as its flag.

    Raises:
        UserError: A value is not allowed, or a key is unknown.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        source = Source("", Path(), dict(values))
        key, text, value = next(problems_of(error, source, model))
        shown = "" if value is None else f" {show(value)}"
        raise UserError(f"{name_of(key.text)}{shown}: {text}") from error


# ---- Recipes of drafters


class DrafterRecipe(Optimisation):
    """The settings of a drafter's training. The defaults are the published ones.

    loss = feature_weight * SmoothL1(predicted feature, true feature)
           + soft_weight * cross-entropy(p, q) + overlap_weight * TV(p, q)

    TV(p, q), the total variation, is the probability that a first draft token is rejected.
    """

    warmup_share: Fraction = 0.03  # of the steps of the first epoch
    epochs: PositiveFloat = 20.0  # unless `steps` is set
    batch: PositiveInt = 4  # sequences
    feature_weight: NonNegativeFloat = 1.0
    soft_weight: NonNegativeFloat = 0.1
    overlap_weight: NonNegativeFloat = 0.0
    # Uniform noise on the input features, of at most noise * 512 / (their number).
    noise: NonNegativeFloat = 0.1
    # Fraction of sequences without their condition; if `guided`, without guidance.
    dropped: Fraction = 0.1
    # Levels of a draft that are trained. Each level takes the guesses of the level before and sees
    # the true features before it, as in a draft tree (HASS, arXiv 2408.15766). The loss of level k
    # has weight level_decay ** k.
    levels: PositiveInt = 1
    level_decay: Fraction = 0.8
    # Compute every sequence with and without its condition, and compare the guided distributions
    # that decoding samples from.
    guided: bool = False
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05  # fraction of the data for evaluation

    @property
    def step_sequences(self) -> int:
        """The number of sequences of one step."""
        return self.batch * self.accumulate

    def total_steps(self, sequences: int) -> int:
        """Return the number of steps for a number of training sequences."""
        return self.steps or max(1, round(self.epochs * self.steps_per_epoch(sequences)))

    def steps_per_epoch(self, sequences: int) -> float:
        """Return the number of steps until every sequence was seen once."""
        return sequences / self.step_sequences

    def train_settings(self, **settings: Any) -> TrainSettings:
        """Return the settings of the training loop; `settings` replace the recipe's."""
        shared = self.model_dump(include=set(Optimisation.model_fields))
        return TrainSettings(**shared | settings)


_LANTERNS = yaml.safe_load(Path(__file__).with_name("lanterns.yaml").read_bytes())
RECIPES = {"published": DrafterRecipe(), "lanterns": DrafterRecipe(**_LANTERNS)}


class DrafterFlags(StrictSettings):
    """The flags of `train drafter`; the title of a field is its help.

    Flags that are settings of the recipe are checked with the recipe.
    """

    target: str
    data: str
    captions: Annotated[
        Path | None, Field(title="File names and captions (.jsonl, .csv, .tsv, .txt).")
    ] = None
    images: Annotated[
        int | None,
        Field(
            gt=0,
            le=10**6,
            title="Pictures of a folder, or to sample. Default: all; one per caption.",
        ),
    ] = None
    mirror: Annotated[bool, Field(title="Train on the pictures' mirror images as well.")] = False
    recipe: Annotated[str, Field(title="published, lanterns, or a YAML file of settings.")] = (
        "published"
    )
    set: Annotated[list[str] | None, Field(title="key=value: a setting of the recipe.")] = None
    steps: Annotated[int | None, Field(title="Steps. Default: the recipe's epochs.")] = None
    epochs: Annotated[float | None, Field(title="How often each picture is seen.")] = None
    minutes: Annotated[float | None, Field(gt=0, title="Minutes of training instead.")] = None
    batch: Annotated[int | None, Field(title="Sequences per batch.")] = None
    accumulate: Annotated[int | None, Field(title="Batches per step.")] = None
    lr: Annotated[float | None, Field(title="Learning rate.")] = None
    init: Annotated[
        str, Field(title="random; shipped, the model's own drafter; or a drafter's folder.")
    ] = "random"
    out: Annotated[
        Path | None, Field(title="Folder of the drafter. Default: results/drafters/TARGET.")
    ] = None
    work: Annotated[
        Path | None, Field(title="Folder of tokens and checkpoint. Default: OUT/work.")
    ] = None
    tree: Annotated[str, Field(title=f"Tree of the evaluation: {', '.join(STATIC_TREES)}.")] = (
        "eagle1-25"
    )
    cfg_scale: Annotated[
        float | None, Field(title="Guidance of sampling and evaluation. Default: the model's.")
    ] = None
    temperature: Annotated[float, Field(title="Temperature of sampling and evaluation.")] = 1.0
    top_k: Annotated[
        int | None, Field(title="Top-k of sampling and evaluation. Default: the model's.")
    ] = None
    eval_prompts: Annotated[
        str | None,
        Field(title="Prompts of the evaluation, as for --data. Default: the held-out captions."),
    ] = None
    eval_every: Annotated[
        int, Field(ge=0, title="Steps between evaluations; 0 for the end only.")
    ] = 500
    eval_images: Annotated[int, Field(ge=0, title="Images of each evaluation.")] = 8
    final_images: Annotated[
        int, Field(ge=0, title="Images of the last evaluation, of both drafters.")
    ] = 32
    seed: Annotated[int, Field(ge=0, lt=2**63, title="Seed of everything random.")] = 0
    device: Annotated[Device, Field(title="auto, cpu, mps, cuda or cuda:N.")] = "auto"
    dtype: Annotated[DType, Field(title="Of the target: auto, float32, bfloat16 or float16.")] = (
        "auto"
    )
    compile: Annotated[bool, Field(title="Compile the training step; for long trainings.")] = False
    resume: Annotated[bool, Field(title="Continue from the checkpoint, or start again.")] = True


def recipe_of(flags: DrafterFlags) -> DrafterRecipe:
    """Return the recipe of `--recipe`, changed by `--set`, then by flags such as `--lr`.

    A YAML file of settings may have `base`, the name of the recipe whose settings it changes.
    """
    base = flags.recipe
    values: dict[str, Any] = {}
    places = {"base": "--recipe"}  # where a setting is written, for messages
    if base.lower().endswith((".yaml", ".yml")):
        try:
            file = read_source(
                Path(base), f"The settings are {', '.join(DrafterRecipe.model_fields)}."
            )
        except UserError as error:
            raise UserError(f"--recipe {error.message}", error.advice) from error
        values = {str(key): value for key, value in file.data.items()}
        for key in values:
            places[key] = f"--recipe {base} line {file.lines[key,]}: {key}"
        base = str(values.pop("base", "published"))
    if base not in RECIPES:
        raise UserError(
            f"{places['base']} {base}: unknown recipe{did_you_mean(base, RECIPES)}",
            f"The recipes are {', '.join(RECIPES)}; or give a YAML file.",
        )
    for text in flags.set or ():
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            raise UserError(f"--set {text}: must be key=value", "For example --set noise=0.05.")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not valid YAML") from error
        places[key] = f"--set {key}"
    single = flags.model_dump(include=set(DrafterRecipe.model_fields), exclude_none=True)
    for key in single:
        places[key] = flag_of(key)
    return checked(
        DrafterRecipe,
        RECIPES[base].model_dump() | values | single,
        lambda key: places.get(key, key),
    )
