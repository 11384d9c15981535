"""What a way to draft, an acceptance rule and a model say of themselves, and how other packages bring their own.

Each is one row: the shipped draftings, rules and modes are rows of `config/methods.py`; a row of another package is an
object under the entry point groups `lantern_bench.rules` and `lantern_bench.draftings`. Flags, validation, cell ids,
columns, legends and checks are derived from the rows. Nothing here imports torch, and a package that brings a row
should not either: a row names its code as "module:object", or holds functions that get tensors handed to them.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from lantern_bench.errors import RefusedError

RULE_GROUP, DRAFTING_GROUP = "lantern_bench.rules", "lantern_bench.draftings"
_NAME = r"[a-z][a-z0-9_]*"

Code: TypeAlias = str | Callable[..., Any]
"""A function or class, or where it is, as "module:object": then it is imported when it is first used."""


def load_code(code: Code) -> Callable[..., Any]:
    """Return the function or class; imports its module where it is given by name."""
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


@dataclass(frozen=True)
class Parameter:
    """A decoding parameter: what is allowed, its flag, its column, and how a cell id writes it.

    type: the annotation that pydantic validates. allowed: completes "KEY VALUE: ". help: of the flag and of the column.
    in_id: "structure" (part of mode, drafting, rule or tree), "always" (as `short` and the value, where the cell has
    the parameter) or "changed" (where it is not `default`). column: dtype and unit in the tables; None for no column.
    symbol: of a bound, on axes and in legends. sampled_only: greedy decoding ignores it. omit_default: record keys omit
    the default, because runs older than the parameter do.
    """

    name: str
    type: Any
    allowed: str
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    in_id: Literal["structure", "always", "changed"] = "always"
    short: str = ""
    symbol: str | None = None
    column: tuple[str, str] | None = None
    sampled_only: bool = False
    omit_default: bool = False


Values: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Drafting:
    """A way to draft.

    make: (decoding, target, batch) -> an object as `DraftMethod` of decoding/interface.py. parameters: names of shipped
    parameters, or a `Parameter` that the drafting brings. defaults: their values if none is given. needs_drafter:
    whether the model's drafter is asked. sampled: children are drawn from q; otherwise a draft is deterministic and its
    q is 1. label: how ids and tables write the drafts. adapt: (defaults, given values) -> defaults that fit the given
    values. problem: (key, sentence) for values that do not go together, else None. presets: short words for this
    drafting with some values fixed. small: values of a draft that is small enough for exact checks. search: what lists
    its trees for `profile --search` (profile/tree_search.py); empty: its drafts are not searched.
    """

    name: str
    make: Code
    about: str
    parameters: tuple[str | Parameter, ...] = ()
    defaults: Values = field(default_factory=dict)
    needs_drafter: bool = True
    sampled: bool = True
    label: Callable[[Values], str | None] = lambda _values: None
    adapt: Callable[[Values, Values], Values] = lambda defaults, _given: defaults
    problem: Callable[[Values], tuple[str, str] | None] = lambda _values: None
    presets: Mapping[str, Values] = field(default_factory=dict)
    small: Values = field(default_factory=dict)
    search: Code = ""
    legend: str | None = None
    colour: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether there are drafts at all."""
        return bool(self.make)

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names of its parameters."""
        return frozenset(one if isinstance(one, str) else one.name for one in self.parameters)

    def fingerprint(self) -> str:
        """16 hex digits that change with the file of its code."""
        return _fingerprint(self.make)


class DraftView(Protocol):
    """What a relaxed rule may look at when it decides on a draft x: tensors in the dtype of p, for many drafts."""

    @property
    def own(self) -> Any:
        """Probability p(x) [...]."""
        ...

    @property
    def near(self) -> Any:
        """Probability p of the k nearest codes of x [..., k], nearest first."""
        ...

    @property
    def whole(self) -> Any:
        """The current distribution p [..., V], or one that is broadcast to it; made when it is asked for."""
        ...


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    A relaxed rule gives `limit`: (what is known of the draft x, the value of its bound) -> the most neighbour mass m(x)
    [...] that x may take; neighbours are taken in order while their mass keeps it (docs/algorithms.md, section 4).
    A rule that decides on whole trees gives `accept` (`Accept` in decoding/acceptance/tree_acceptance.py). A rule with
    neither accepts one child after another, strictly.

    bound: the parameter that `limit` gets; it lies strictly between `low` and `high`, and `example` is a value to begin
    with. neighbours: the default k. tensor_bound: `limit` computes with a tensor in place of the number, so
    that one compiled program serves every value. chains: the rule decides only on chains of sampled drafts, by default
    on `tree`. greedy: the rule that takes its place at temperature 0. drafting: of the mode that a rule from another
    package brings. in_id: whether cell ids name the rule where the mode does not.
    """

    name: str
    limit: Code | None = None
    low: float = 0.0
    high: float = float("inf")
    example: float = 0.1
    neighbours: int = 10
    drafting: str = "static"
    label: str | None = None
    colour: str | None = None
    about: str = "a rule from another package"
    bound: str = "bound"
    tensor_bound: bool = False
    accept: Code | None = None
    chains: bool = False
    tree: str | None = None
    greedy: str | None = None
    in_id: bool = True

    @property
    def lossless(self) -> bool:
        """Whether the tokens keep the target's distribution: no neighbour mass is ever taken."""
        return self.limit is None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that cells of this rule have."""
        return () if self.limit is None else ("neighbours", "neighbour_metric", self.bound, "residual")

    @property
    def defaults(self) -> Values:
        """Default values; a bound has none."""
        return {} if self.limit is None else {"neighbours": self.neighbours}

    @property
    def allowed(self) -> str:
        """What the bound may be, to complete `bound 2: `."""
        if self.high == float("inf"):
            return f"must be a number above {self.low:g}"
        return f"must lie strictly between {self.low:g} and {self.high:g} for the rule {self.name}"

    def allows(self, bound: float) -> bool:
        """Whether the bound may have this value."""
        return self.low < bound < self.high

    def fingerprint(self) -> str:
        """16 hex digits that change with the file of its code: pictures of two versions are never mixed in a run."""
        return _fingerprint(self.limit or self.accept or self.name)


def _fingerprint(code: Code) -> str:
    try:
        text = Path(inspect.getfile(load_code(code))).read_bytes()
    except (OSError, TypeError, ImportError, ValueError):  # ImportError: a strict rule without code of its own
        text = repr(code).encode()
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class Mode:
    """A name for a drafting and a rule, which an experiment may override; `label` and `colour` are for legends."""

    name: str
    drafting: str
    rule: str
    label: str
    colour: str | None = None


_Row = TypeVar("_Row", Rule, Drafting)


def find_rows(
    group: str,
    kind: type[_Row],
    taken: Collection[str],
    draftings: Collection[str] = (),
    entries: Iterable[metadata.EntryPoint] | None = None,
) -> tuple[dict[str, _Row], list[RefusedError]]:
    """All rows of a kind from other packages, by name, and an error for each that cannot be used.

    `taken` are names they may not have, `draftings` those that a rule may name, `entries` the entry points to read, by
    default the installed ones of the group. A row is refused if it cannot be imported, is no such row, or has a name
    that is taken; all others can be used.
    """
    rows: dict[str, _Row] = {}
    refused: list[RefusedError] = []
    noun, advice = kind.__name__.lower(), "Mend the package that it comes from, or remove it."
    for entry in sorted(entries or metadata.entry_points(group=group), key=lambda entry: entry.name):
        try:
            row = entry.load()
        except Exception as error:  # whatever another package raises when it is imported
            text = f"the {noun} {entry.name} cannot be loaded: {type(error).__name__}: {error}"
            refused.append(RefusedError(text, advice))
            continue
        wrong = _wrong(row, kind, {*taken, *rows}, draftings)
        if wrong:
            refused.append(RefusedError(f"the {noun} {entry.name} cannot be used: {wrong}", advice))
        else:
            rows[row.name] = row
    return rows, refused


def _wrong(row: object, kind: type[Rule | Drafting], taken: Collection[str], draftings: Collection[str]) -> str | None:
    if not isinstance(row, kind):
        return f"its entry point is no lantern_bench.plugins.{kind.__name__} but {type(row).__name__}"
    if not re.fullmatch(_NAME, row.name):
        return f"its name {row.name!r} must be lower-case letters, digits and _"
    if row.name in taken:
        return f"the name {row.name} is taken"
    if isinstance(row, Rule) and row.drafting not in draftings:
        return f"its drafting {row.drafting!r} must be one of {', '.join(draftings)}"
    if isinstance(row, Rule) and row.limit is not None:
        if not row.allows(row.example):
            return f"its example {row.example:g} {row.allowed}"
        if row.neighbours < 1:
            return f"its neighbours {row.neighbours} must be at least 1"
    return None


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before it is loaded.

    `defaults` are the decoding values the model suggests (cfg_scale, tree, ...), by the names of an experiment file;
    `prompt_set` names the prompts to use where none are given. `weights` maps a part to its file, for listings;
    `vocab_size` is the number of image codes, where it is known; `tokens` those of one picture; `parameters` the
    target's. `classes` is their number, for a model that takes classes and no captions. `also_called` are other names
    of the same model. `sizes` is the target's `TransformerConfig`, where it is known without files.
    """

    name: str
    family: str
    description: str
    defaults: Mapping[str, Any]
    prompt_set: str
    licence: str = ""
    weights: Mapping[str, Path] = field(default_factory=dict)
    vocab_size: int | None = None
    tokens: int | None = None
    parameters: int | None = None
    classes: int | None = None
    also_called: tuple[str, ...] = ()
    sizes: Any = field(default=None, repr=False)
