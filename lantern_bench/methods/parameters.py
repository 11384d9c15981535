"""Decoding parameters of every cell or of several rules; those of one method stand with its row."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from pydantic import BeforeValidator, Field, TypeAdapter

Values: TypeAlias = Mapping[str, Any]  # of parameters, by name


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


LARGEST = 10**12
"""The largest number accepted: a product of three stays below the float32 maximum."""
MOST = 10**9
"""The largest whole number accepted: a product of two stays below the int64 maximum."""

_NO_BOOL = BeforeValidator(_refuse_bool)
Count = Annotated[int, _NO_BOOL, Field(ge=1, le=MOST)]
Natural = Annotated[int, _NO_BOOL, Field(ge=0)]
FilterOrder = Literal["top_k_first", "top_p_first"]
NeighbourMetric = Literal["l2", "cosine", "random"]


class Kind(NamedTuple):
    """The values that a parameter may have."""

    type: Any  # the annotation that pydantic validates
    allowed: str  # the same in words; completes "KEY VALUE: "
    dtype: Literal["int", "float", "string"]  # of its column
    choices: tuple[str, ...] = ()  # the words that are allowed; empty: it is a number, or any text
    most: float | None = None  # the largest number, where `allowed` does not say it


def whole_number(at_least: int, at_most: int = MOST) -> Kind:
    """Return the kind of whole numbers from `at_least` to `at_most`."""
    annotation = Annotated[int, _NO_BOOL, Field(ge=at_least, le=at_most)]
    return Kind(annotation, f"must be a whole number of at least {at_least}", "int", most=at_most)


def number(allowed: str, **limits: Any) -> Kind:
    """Return the kind of finite numbers of at most `LARGEST`.

    Args:
        allowed: Completes "KEY must ...".
        **limits: Limits of pydantic's `Field`.
    """
    most = None if {"lt", "le"} & limits.keys() else LARGEST
    limits = limits if most is None else {**limits, "le": most}
    return Kind(
        Annotated[float, _NO_BOOL, Field(allow_inf_nan=False, **limits)],
        f"must {allowed}",
        "float",
        most=most,
    )


def word(*choices: str) -> Kind:
    """Return the kind of parameters whose value is one of these words."""
    return Kind(type=Literal[choices], allowed="must be one of", dtype="string", choices=choices)


COUNT = whole_number(1)
NATURAL = whole_number(0)
SEVERAL = whole_number(2)
NOT_NEGATIVE = number("be a number of at least 0", ge=0)
ABOVE_0 = number("be a number above 0", gt=0)
ABOVE_1 = number("be a number above 1", gt=1)
BETWEEN_0_AND_1 = number("lie strictly between 0 and 1", gt=0, lt=1)
FROM_0_TO_1 = number("be a number from 0 to 1", ge=0, le=1)


@dataclass(frozen=True)
class Parameter:
    """A decoding parameter."""

    name: str
    kind: Kind
    help: str  # of its flag and of its column
    default: Any = None
    remark: str = ""  # completes what is allowed, in brackets
    # How a cell id writes it: as part of mode, drafting, rule or tree ("structure"); as `short` and
    # the value ("always"); or likewise if it is not the default ("changed").
    in_id: Literal["structure", "always", "changed"] = "always"
    short: str = ""  # in ids, in place of the name
    symbol: str | None = None  # of a rule's bound, on axes and in legends
    unit: str | None = ""  # of its column; None: it has no column
    sampled_only: bool = False  # greedy decoding ignores it
    rare: bool = False  # its flag is accepted everywhere, and only `--help-all` shows it
    # Which number of the model bounds it (`sweeps/request.py`), beside its kind.
    bounded_by: Literal["tokens", "codes", "other codes"] | None = None

    @property
    def column(self) -> tuple[str, str] | None:
        """The type and the unit of its column; None: it has none of its own."""
        return (
            None if self.unit is None or self.in_id == "structure" else (self.kind.dtype, self.unit)
        )


structure = partial(Parameter, in_id="structure")
rare = partial(Parameter, in_id="changed", rare=True)
"""An option whose default is right for most runs."""

SAMPLING_PARAMETERS = (
    Parameter(
        "temperature",
        NOT_NEGATIVE,
        "Sampling temperature; 0 is greedy.",
        default=1.0,
        remark="0 is greedy",
        short="t",
    ),
    Parameter(
        "top_k",
        NATURAL,
        "Keep the k most probable tokens; 0 is off.",
        default=0,
        remark="0 is off",
        in_id="changed",
        unit="tokens",
        sampled_only=True,
    ),
    Parameter(
        "top_p",
        number("be above 0 and at most 1", gt=0, le=1),
        "Keep the smallest set of tokens with this mass; 1 is off.",
        default=1.0,
        remark="1 is off",
        in_id="changed",
        sampled_only=True,
    ),
    rare(
        "filter_order",
        word(*get_args(FilterOrder)),
        "top_k_first or top_p_first.",
        default="top_k_first",
        unit=None,
        sampled_only=True,
    ),
    Parameter(
        "cfg_scale",
        NOT_NEGATIVE,
        "Guidance scale; 1 is off.",
        default=1.0,
        remark="1 is off",
        in_id="changed",
    ),
    rare(
        "seed_set",
        NATURAL,
        "Set of seeds: another set makes the same prompts again, to see how far figures vary.",
        default=0,
    ),
)
SAMPLING = tuple(parameter.name for parameter in SAMPLING_PARAMETERS)
"""The parameters of every cell; `mode` aside, all others belong to a drafting or to a rule."""

NEIGHBOURS = Parameter(
    "neighbours",
    NATURAL,
    "Number k of nearest codes that add to the neighbour mass.",
    short="k",
    unit="codes",
    bounded_by="other codes",
)
NEIGHBOUR_METRIC = rare(
    "neighbour_metric",
    word(*get_args(NeighbourMetric)),
    "Distance between codes: l2, cosine or random.",
    default="l2",
)
BOUND = Parameter("bound", ABOVE_0, "Bound of an external rule.", symbol="bound")
RESIDUAL = Parameter(
    "residual",
    word("exact", "official"),
    "What replaces p after a rejection: exact (keeps the bound) or official (as the LANTERN code).",
    default="exact",
    in_id="changed",
    sampled_only=True,
)


_Row = TypeVar("_Row")


def read_rows(name: str, row_class: type[_Row]) -> list[_Row]:
    """Return the checked rows of a TOML file beside this module."""
    rows = tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))["row"]
    return TypeAdapter(list[row_class]).validate_python(rows)  # type: ignore[valid-type]


Importable: TypeAlias = str | Callable[..., Any]
"""A function or class, or its name as "module:object", which is imported at the first use."""


def load_code(code: Importable) -> Callable[..., Any]:
    """Return the function or class; imports its module if the code is a name."""
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def fingerprint_of(code: Importable) -> str:
    """Return 16 hex digits that change when the file of the code changes."""
    try:
        text = Path(inspect.getfile(load_code(code))).read_bytes()
    # a strict rule has a name and no code
    except (OSError, TypeError, ImportError, AttributeError, ValueError):
        text = repr(code).encode()
    return hashlib.sha256(text).hexdigest()[:16]
