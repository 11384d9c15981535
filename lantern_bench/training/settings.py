"""Settings of a training, checked by pydantic; a recipe inherits them and adds its own. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lantern_bench.errors import UserError, did_you_mean


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
