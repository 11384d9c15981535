"""Settings of a whole run, and flags that override an experiment file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lantern_bench.config.decoding import is_tree
from lantern_bench.devices.environment import DEVICE, DEVICES, DType
from lantern_bench.methods.catalog import PARAMETERS
from lantern_bench.methods.parameters import COUNT, NATURAL, Count, Natural
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import listed, split_words
from lantern_bench.utils.yaml_file import Location, load_yaml

_SWITCH = "must be true or false"
_MOST_PARALLEL = 1024  # processes, and threads
_T = TypeVar("_T")


def as_list(value: Any) -> Sequence[Any]:
    """Return a single value as a list of one."""
    return value if isinstance(value, list | tuple) else [value]


# A single value is a list of one. Repeated values count once.
_Unique = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
Several: TypeAlias = Annotated[
    tuple[_T, ...], BeforeValidator(as_list), Field(min_length=1), _Unique
]


class Settings(BaseModel):
    """Run-wide settings of an experiment.

    The title of a field is the help of its flag. The description says what is allowed and completes
    an error message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="must be letters, digits and . _ + - (it names a folder)",
    )
    description: str | None = Field(default=None, description="must be text")
    # Published figures, see `paper.py`.
    paper: dict[str, Any] | None = Field(default=None, description="must be a mapping")
    model: Several[str] = Field(
        title="One or several models. Default: the experiment's.",
        description="must be a model's name or a list of names",
    )
    prompts: str = Field(
        default="held-out",
        min_length=1,
        title="Prompt set, file, coco:FILE, parti:FILE or imagenet; append #100 to take one "
        "hundred of them.",
        description="must be the name of a prompt set, or a file",
    )
    # None: the column with a usual name.
    prompt_column: str | None = Field(
        default=None,
        min_length=1,
        title="Column or key of the text in the file of prompts. Default: prompt, caption, text.",
        description="must be the name of a column of the file of prompts",
    )
    # Images of each cell. They go through the prompts in order, then again with the next repeat.
    # None: every prompt once.
    images: Count | None = Field(
        default=None,
        title="Images per cell; published tables use 1,000 to 5,000.",
        description=COUNT.allowed,
    )
    metrics: Several[Literal["speed", "quality", "distance"]] = Field(
        default=("speed", "quality", "distance"),
        title="speed, quality (of pictures), distance (from the target). Default: all.",
        description="must be a list of speed, quality and distance",
    )
    # How pictures are scored. None: by the model's own protocol.
    protocol: str | None = Field(
        default=None,
        min_length=1,
        title="The quality protocol; see `score -h`.",
        description="must be the name of a quality protocol",
    )
    # The reference pictures. None: the reference of the protocol.
    reference: str | None = Field(
        default=None,
        min_length=1,
        title="What fidelity is measured against; see `score -h`.",
        description="must be embedded, a folder, a .json or a .npz file",
    )
    # Worker processes that make the images, one after the other.
    processes: Count = Field(
        default=1,
        le=_MOST_PARALLEL,
        title="Worker processes that run in turn; 3 or more give speedups an interval.",
        description=COUNT.allowed,
    )
    # How often these images are made, each time with new seeds.
    repeats: Count = Field(
        default=1,
        title="Repeat the images this many times, with new seeds.",
        description=COUNT.allowed,
    )
    # Images that are decoded at once. Several values give several cells.
    batch: Several[Count] = Field(
        default=(1,),
        title="Batch size, or a list; published figures use 1.",
        description=f"{COUNT.allowed}, or a list of them",
    )
    baseline: bool = Field(
        default=True, title="Add an ar cell if there is none.", description=_SWITCH
    )
    pool_devices: bool = Field(
        default=False,
        title="Give one speedup over several kinds of device.",
        description=_SWITCH,
    )
    redecode_disturbed: bool = Field(
        default=True,
        title="Decode disturbed images again, which favours cells with short images.",
        description=_SWITCH,
    )
    seed: Natural = Field(default=0, lt=2**63, title="Random seed.", description=NATURAL.allowed)
    device: str = Field(
        default="auto", pattern=DEVICE, title="auto, cpu, mps, cuda or cuda:N.", description=DEVICES
    )
    dtype: DType = Field(
        default="auto",
        title="auto, float32, bfloat16 or float16. auto: bfloat16 on CUDA and, in sweeps, fast "
        "CPUs.",
        description=f"must be one of {', '.join(get_args(DType))}",
    )
    compile: bool = Field(default=False, title="Compile the decode steps.", description=_SWITCH)
    # CPU threads. None: the fastest number is measured.
    threads: Count | None = Field(
        default=None,
        le=_MOST_PARALLEL,
        title="CPU threads. Default: sweeps measure the fastest number; others use all cores.",
        description=COUNT.allowed,
    )
    # Where code distances are measured (decoding/neighbours.py).
    neighbour_space: Literal["raw", "normalised"] | None = Field(
        default=None,
        title="Space of code distances: raw or normalised. Default: as published.",
        description="must be raw or normalised; if absent, it is as published for the model",
    )

    @property
    def redecodes(self) -> bool:
        """Whether disturbed images are decoded again; only seconds gain by it."""
        return self.redecode_disturbed and "speed" in self.metrics


OF_RESULTS = ("metrics", "protocol", "reference", "pool_devices")
"""Settings that say what is computed from decoded images."""

ALLOWED = {key: str(field.description) for key, field in Settings.model_fields.items()}


@dataclass(frozen=True)
class Overrides:
    """Flags that override an experiment file."""

    # Values by key of the file. Several values are a grid.
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # Modes to keep; empty for all.
    modes: Sequence[str] = ()
    # How keys that `--set` gives are written, for messages.
    from_set: Mapping[str, str] = field(default_factory=dict)
    # Allow any number of cells.
    many: bool = False

    @classmethod
    def from_flags(
        cls,
        flags: Mapping[str, Any],
        *,
        modes: str | Sequence[str] | None = None,
        settings: Sequence[str] | None = None,
        many: bool = False,
    ) -> Overrides:
        """Return the overrides that flags give.

        Args:
            flags: Values by key of the file, `lambda_` for `lambda`; None for flags that are not
                given.
            modes: The values of `--modes`.
            settings: The values of `--set`, each `key=value`.
            many: Allow any number of cells.

        Raises:
            UserError: A value cannot be read.
        """
        values = {}
        for key, value in flags.items():
            if value is not None:
                name = key.rstrip("_")  # Python has its own `lambda`
                values[name.replace("-", "_")] = _values_of(value, f"--{name}")
        from_set = {}
        for setting in settings or ():
            key, equals, text = setting.partition("=")
            key = key.strip().replace("-", "_")
            if not equals or not key or not text.strip():
                raise UserError(
                    f"--set {setting}: must have the form key=value",
                    "For example: --set temperature=0.9",
                )
            from_set[key] = f"--set {key}="
            given = _values_of(text, from_set[key])
            before = values.get(key, given)
            if list(map(str, before)) != list(map(str, given)):
                raise UserError(
                    f"--set {setting}: the same key has another value before it",
                    "Give one of the two.",
                )
            values[key] = given
        return cls(
            values=values,
            modes=tuple(_values_of(modes or (), "--modes")),
            from_set=from_set,
            many=many,
        )

    def location(self, key: str) -> Location:
        """Return the flag that gives a key."""
        return Location(self.from_set.get(key, f"--{key.replace('_', '-')}"))


def _values_of(value: Any, flag: str) -> list[Any]:
    """Return the values of a flag: words between commas, or the elements of a YAML list."""
    if isinstance(value, list | tuple):
        values = []
        for element in value:
            values += _values_of(element, flag)
        return values
    if not isinstance(value, str):
        return [value]
    if value.strip().startswith("["):
        try:
            parsed = load_yaml(value, "")[0]
        except UserError as error:
            problem = error.message.partition("not valid YAML: ")[2] or error.message
            raise UserError(f"{flag} {value[:200]}: not a valid list: {problem}") from error
        return [parsed] if is_tree(parsed) else list(parsed)
    return split_words([value])


def decimal_commas(flags: Mapping[str, Any], settings: Sequence[str] | None) -> list[str]:
    """Return notes on lists of whole numbers that may have decimal commas: `0,7` and `0,75,1`.

    Args:
        flags: Values by key of the file; None for flags that are not given.
        settings: The values of `--set`, each `key=value`.
    """
    written = [(f"--{key.rstrip('_')} ", key, as_list(value)) for key, value in flags.items()]
    for setting in settings or ():
        key, _, text = setting.partition("=")
        written.append((f"--set {key}=", key, [text]))
    notes = []
    for flag, key, texts in written:
        parameter = PARAMETERS.get(key.strip().rstrip("_").replace("-", "_"))
        if parameter is None or parameter.kind.dtype != "float":
            continue
        for text in texts:
            if re.fullmatch(r"\d+(,\d+)+", str(text).strip()):
                values = split_words([str(text)])
                notes.append(
                    f"{flag.replace('_', '-')}{text}: read as {len(values)} values, "
                    f"{listed(values)}. A decimal number is written {values[0]}.{values[1]}."
                )
    return notes
