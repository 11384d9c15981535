"""The run-wide settings of an experiment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lantern_bench.methods.parameters import COUNT, NATURAL, Count, Natural

Metric = Literal["speed", "quality"]
METRICS: tuple[Metric, ...] = ("speed", "quality")
_SWITCH = "must be true or false"


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


_Listed = BeforeValidator(_as_list)  # a single value is a list of one
_Unique = AfterValidator(lambda values: tuple(dict.fromkeys(values)))


class Settings(BaseModel):
    """The run-wide settings of an experiment; the description of a field says what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="must be letters, digits and . _ + - (it names a folder)",
    )
    description: str | None = Field(default=None, description="must be text")
    paper: dict[str, Any] | None = Field(default=None, description="must be a mapping")  # see paper.py
    model: Annotated[tuple[str, ...], _Listed, Field(min_length=1), _Unique] = Field(
        description="must be a model's name or a list of names"
    )
    prompts: str = Field(default="held-out", min_length=1, description="must be the name of a prompt set, or a file")
    # Images of each cell: prompts in order, then again with the next repeat; None: every prompt once.
    images: Count | None = Field(default=None, description=COUNT.allowed)
    repeats: Count = Field(default=1, description=COUNT.allowed)  # of that list of images, each with new seeds
    seed: Natural = Field(default=0, lt=2**63, description=NATURAL.allowed)
    # How pictures are scored; None: the model's own protocol.
    protocol: str | None = Field(default=None, min_length=1, description="must be the name of a quality protocol")
    # The reference pictures; None: those of the protocol.
    reference: str | None = Field(
        default=None, min_length=1, description="must be embedded, a folder, a .json or a .npz file"
    )
    metrics: Annotated[tuple[Metric, ...], _Listed, Field(min_length=1), _Unique] = Field(
        default=METRICS, description=f"must be a list of {' and '.join(METRICS)}"
    )
    # Images that are decoded at once; several values give several cells.
    batch: Annotated[tuple[Count, ...], _Listed, Field(min_length=1), _Unique] = Field(
        default=(1,), description=f"{COUNT.allowed}, or a list of them"
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="must be auto, cpu, mps, cuda or cuda:N"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="must be one of auto, float32, bfloat16, float16"
    )
    compile: bool = Field(default=False, description=_SWITCH)
    # New worker processes that make the images, one after the other.
    processes: Count = Field(default=1, description=COUNT.allowed)
    # That decode; None: as many as a calibration finds fastest.
    threads: Count | None = Field(default=None, description=COUNT.allowed)
    # Where code distances are measured (decoding/neighbours.py).
    neighbour_space: Literal["raw", "normalised"] | None = Field(
        default=None, description="must be raw or normalised; if absent, it is as published for the model"
    )
    baseline: bool = Field(default=True, description=_SWITCH)  # add an ar cell
    # Speedups of a run on several kinds of device are over all of them together.
    pool_devices: bool = Field(default=False, description=_SWITCH)


ALLOWED = {key: str(field.description) for key, field in Settings.model_fields.items()}
"""What each setting may be, by key."""
