"""What a decoding parameter is, and the parameters in parameters.toml.

Parameters of one rule stand with its function (rules.py).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter

from lantern_bench.methods.static_trees import MOST_NODES

Values: TypeAlias = Mapping[str, Any]  # of parameters, by name


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


LARGEST = 10**12
"""The largest number accepted: a product of three stays below the float32 maximum."""
MOST = 10**9
"""The largest whole number accepted: a product of two stays below the int64 maximum."""

_NO_BOOL = BeforeValidator(_refuse_bool)
Count = Annotated[int, _NO_BOOL, Field(ge=1, le=MOST)]
Natural = Annotated[int, _NO_BOOL, Field(ge=0)]
# The types of two parameters, whose words parameters.toml lists.
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

# The kinds that parameters.toml names.
KINDS = {
    "natural": NATURAL,
    "size": whole_number(1, MOST_NODES),
    "not negative": NOT_NEGATIVE,
    "above 0": ABOVE_0,
    "above 0, at most 1": number("be above 0 and at most 1", gt=0, le=1),
    "from 0 to 1": number("be a number from 0 to 1", ge=0, le=1),
}


def _read_kind(written: str | list[str]) -> Kind:
    """Return the kind of a name in `KINDS`, or of a list of words."""
    return KINDS[written] if isinstance(written, str) else word(*written)


@dataclass(frozen=True)
class Parameter:
    """A decoding parameter."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of rows in parameters.toml

    name: str
    kind: Annotated[Kind, PlainValidator(_read_kind)]
    help: str  # of its flag and of its column
    default: Any = None
    remark: str = ""  # completes what is allowed, in brackets
    # How a cell id writes it: as part of mode, drafting, rule or tree ("structure"); as `short` and
    # the value ("always"); or likewise if it is not the default ("changed").
    in_id: Literal["structure", "always", "changed"] = "always"
    short: str = ""  # in ids, in place of the name
    symbol: str | None = None  # of the bound of a rule, in LaTeX
    unit: str = ""  # of its column
    has_column: bool = True  # where it is no part of the cell's structure
    sampled_only: bool = False  # greedy decoding ignores it
    rare: bool = False  # only `--help-all` shows its flag
    # Which number of the model bounds it (`sweeps/request.py`), beside its kind.
    bounded_by: Literal["tokens", "codes", "other codes"] | None = None

    @property
    def column(self) -> tuple[str, str] | None:
        """The type and the unit of its column; None: it has none of its own."""
        if self.in_id == "structure" or not self.has_column:
            return None
        return self.kind.dtype, self.unit


rare = partial(Parameter, in_id="changed", rare=True)
"""An option whose default is right for most runs."""

_Row = TypeVar("_Row")


def read_rows(name: str, row_class: type[_Row]) -> dict[str, list[_Row]]:
    """Return the checked rows of each table in a TOML file beside this module."""
    tables = tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, list[row_class]]).validate_python(tables)  # type: ignore[valid-type]


SHARED = read_rows("parameters.toml", Parameter)
"""The parameters that do not belong to a single rule, by table of the file."""
SAMPLING = tuple(parameter.name for parameter in SHARED["sampling"])
"""The parameters of every cell; `mode` aside, all others belong to a drafting or to a rule."""


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
