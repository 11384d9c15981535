"""Settings of a whole run, and the flags that override an experiment file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lantern_bench.config.decoding import is_tree
from lantern_bench.devices.names import DEVICE, DEVICES, DType
from lantern_bench.methods.parameters import COUNT, NATURAL, Count, Natural
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.yaml_file import (
    Location,
    load_yaml,
)

_SWITCH = "must be true or false"
_MOST_PARALLEL = 1024  # processes, threads
_T = TypeVar("_T")


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


# A single value is a list of one; values that come twice count once.
_Unique = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
Several: TypeAlias = Annotated[
    tuple[_T, ...], BeforeValidator(_as_list), Field(min_length=1), _Unique
]


class Settings(BaseModel):
    """The run-wide settings of an experiment; the description of a field says what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="must be letters, digits and . _ + - (it names a folder)",
    )
    description: str | None = Field(default=None, description="must be text")
    # see paper.py
    paper: dict[str, Any] | None = Field(default=None, description="must be a mapping")
    model: Several[str] = Field(description="must be a model's name or a list of names")
    prompts: str = Field(
        default="held-out", min_length=1, description="must be the name of a prompt set, or a file"
    )
    # Of each cell: prompts in order, then again with the next repeat; None: every prompt once.
    images: Count | None = Field(default=None, description=COUNT.allowed)
    # of that list of images, each with new seeds
    repeats: Count = Field(default=1, description=COUNT.allowed)
    seed: Natural = Field(default=0, lt=2**63, description=NATURAL.allowed)
    # How pictures are scored; None: the model's own protocol.
    protocol: str | None = Field(
        default=None, min_length=1, description="must be the name of a quality protocol"
    )
    # The reference pictures; None: those of the protocol.
    reference: str | None = Field(
        default=None, min_length=1, description="must be embedded, a folder, a .json or a .npz file"
    )
    metrics: Several[Literal["speed", "quality", "distance"]] = Field(
        default=("speed", "quality", "distance"),
        description="must be a list of speed, quality and distance",
    )
    # Images that are decoded at once; several values give several cells.
    batch: Several[Count] = Field(default=(1,), description=f"{COUNT.allowed}, or a list of them")
    device: str = Field(default="auto", pattern=DEVICE, description=DEVICES)
    dtype: DType = Field(default="auto", description=f"must be one of {', '.join(get_args(DType))}")
    compile: bool = Field(default=False, description=_SWITCH)
    # New worker processes that make the images, one after the other.
    processes: Count = Field(default=1, le=_MOST_PARALLEL, description=COUNT.allowed)
    # CPU threads that decode; None: the fastest number is measured.
    threads: Count | None = Field(default=None, le=_MOST_PARALLEL, description=COUNT.allowed)
    # Where code distances are measured (decoding/neighbours.py).
    neighbour_space: Literal["raw", "normalised"] | None = Field(
        default=None,
        description="must be raw or normalised; if absent, it is as published for the model",
    )
    baseline: bool = Field(default=True, description=_SWITCH)  # add an ar cell
    # Speedups of a run on several kinds of device are over all of them together.
    pool_devices: bool = Field(default=False, description=_SWITCH)


ALLOWED = {key: str(field.description) for key, field in Settings.model_fields.items()}


@dataclass(frozen=True)
class Overrides:
    """The flags that override an experiment file."""

    # by key of the file; several are a grid
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    modes: Sequence[str] = ()  # the modes to keep; empty: all
    from_set: frozenset[str] = frozenset()  # the keys that were given by `--set`, for the messages
    many: bool = False  # allow any number of cells

    @classmethod
    def from_flags(
        cls,
        flags: Mapping[str, Any],
        *,
        modes: str | Sequence[str] | None = None,
        settings: Sequence[str] = (),
    ) -> Overrides:
        """Return the overrides given by flags (by key; None: not given), `--modes` and `--set`."""
        values = {
            key.replace("-", "_"): _split(value, f"--{key}")
            for key, value in flags.items()
            if value is not None
        }
        from_set = set()
        for setting in settings:
            key, equals, text = setting.partition("=")
            key = key.strip().replace("-", "_")
            if not equals or not key or not text.strip():
                raise UserError(
                    f"--set {setting}: must have the form key=value",
                    "For example: --set temperature=0.9",
                )
            values[key] = _split(text, f"--set {key}=")
            from_set.add(key)
        return cls(
            values,
            tuple(_split(modes, "--modes")) if modes is not None else (),
            frozenset(from_set),
        )

    def location(self, key: str) -> Location:
        """Return the flag of a key."""
        return Location(f"--set {key}=" if key in self.from_set else f"--{key.replace('_', '-')}")


def _split(value: Any, flag: str) -> list[Any]:
    """Return the values of a flag: of a text those between commas, or those of a YAML list."""
    if isinstance(value, list | tuple):
        return [item for element in value for item in _split(element, flag)]
    if not isinstance(value, str):
        return [value]
    if value.strip().startswith("["):
        try:
            parsed = load_yaml(value, "")[0]
        except UserError as error:
            problem = error.message.partition("not valid YAML: ")[2] or error.message
            raise UserError(f"{flag} {value[:200]}: not a valid list: {problem}") from error
        return [parsed] if is_tree(parsed) else list(parsed)
    return [text.strip() for text in value.split(",") if text.strip()]
