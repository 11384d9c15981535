"""The settings of a whole run: what stands at the top of an experiment file besides the decoding defaults.

A pydantic model holds types and defaults; the table of phrases says in one sentence what is allowed. Decoding
parameters are not here but in `decoding.py`, since they belong to cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from lantern_bench.spec.decoding import Count, Natural
from lantern_bench.spec.values import Place, Problems, did_you_mean

__all__ = ["ALLOWED", "METRICS", "Settings", "read_settings"]

Metric = Literal["speed", "quality"]
METRICS: tuple[Metric, ...] = ("speed", "quality")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_numbers(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


Names = Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Settings(BaseModel):
    """The run-wide part of an experiment.

    `images` counts per cell: prompts in order, then again with the next repeat; None is every prompt once. `repeats`
    makes that list of images so many times over, with fresh seeds. `batch` is how many images are decoded at once;
    every cell is made with each of several. `protocol` names how quality is judged (None: the model's own way),
    `reference` the pictures it is judged against (None: the protocol's own). `neighbour_space` is where codes are near
    each other (`decode/neighbours.py`); None is what was published for the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    description: str | None = None
    paper: dict[str, Any] | None = None
    model: Names
    prompts: str = Field(default="held-out", min_length=1)
    images: Count | None = None
    repeats: Count = 1
    seed: Annotated[Natural, Field(lt=2**63)] = 0
    protocol: str | None = Field(default=None, min_length=1)
    reference: str | None = Field(default=None, min_length=1)
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(_as_list), Field(min_length=1)] = METRICS
    batch: Annotated[tuple[Count, ...], BeforeValidator(_as_numbers), Field(min_length=1)] = (1,)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool = False
    neighbour_space: Literal["raw", "normalised"] | None = None
    baseline: bool = True

    @field_validator("model", "metrics")
    @classmethod
    def _no_name_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names))

    @field_validator("batch")
    @classmethod
    def _no_number_twice(cls, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(numbers))


ALLOWED: dict[str, str] = {
    "name": "must be letters, digits and . _ + - (it names a folder)",
    "description": "must be text",
    "paper": "must be a mapping",
    "model": "must be a model's name or a list of names",
    "prompts": "must be the name of a prompt set, or a file",
    "images": "must be a whole number of at least 1",
    "repeats": "must be a whole number of at least 1",
    "seed": "must be a whole number of at least 0",
    "protocol": "must be the name of a quality protocol",
    "reference": "must be embedded, a folder, a .json or a .npz file",
    "metrics": f"must be a list of {' and '.join(METRICS)}",
    "batch": "must be a whole number of at least 1, or a list of them",
    "device": "must be auto, cpu, mps, cuda or cuda:N",
    "dtype": f"must be one of {', '.join(_DTYPES)}",
    "compile": "must be true or false",
    "neighbour_space": "must be raw or normalised; left out, it is what was published for the model",
    "baseline": "must be true or false",
}
_STAND_IN = {"name": "unnamed", "model": "unnamed"}
_WORDS = {"metrics": METRICS, "dtype": _DTYPES, "neighbour_space": ("raw", "normalised")}


def read_settings(values: Mapping[str, Any], places: Mapping[str, Place], problems: Problems) -> Settings:
    """Check the run-wide values; what is wrong goes to `problems`, and its default stands in to read on."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        wrong = set()
        for item in error.errors():
            key = str(item["loc"][0])
            wrong.add(key)
            place = places.get(key, Place(key))
            if item["type"] == "missing":
                problems.add(place, f"missing; {ALLOWED[key]}")
                continue
            hint = did_you_mean(item["input"], _WORDS.get(key, ()))
            shown = "(empty)" if item["input"] is None else item["input"]
            problems.add(place, ALLOWED[key] + hint, shown)
    return Settings.model_validate(_STAND_IN | {key: value for key, value in values.items() if key not in wrong})
