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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from lantern_bench.errors import RefusedError

RULE_GROUP, DRAFTING_GROUP = "lantern_bench.rules", "lantern_bench.draftings"
_NAME, _KEY = r"[a-z][a-z0-9_-]*", r"[a-z][a-z0-9_]*"

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

    make: (decoding, target, batch) -> an object as `DraftMethod` of decoding/protocol.py. parameters: names of shipped
    parameters, or a `Parameter` that the drafting brings. defaults: their values if none is given. needs_drafter:
    whether the model's drafter is asked. sampled: children are drawn from q; otherwise a draft is deterministic and its
    q is 1. chain: the drafts never branch (static trees say so themselves). redrawn: whether every step draws all of
    its drafts with new random numbers, for these values; rules that look ahead need that. label: how ids and tables
    write the drafts. adapt: (defaults, given values) -> defaults that fit the given
    values. problem: (key, sentence) for values that do not go together, else None. presets: short words for this
    drafting with some values fixed. small: values of a draft that is small enough for exact checks.
    published: as `make`, for `form: published`: what its authors' code does where that is not lossless.
    """

    name: str
    make: Code
    about: str
    parameters: tuple[str | Parameter, ...] = ()
    defaults: Values = field(default_factory=dict)
    needs_drafter: bool = True
    sampled: bool = True
    chain: bool = False
    redrawn: Callable[[Values], bool] = lambda _values: True
    label: Callable[[Values], str | None] = lambda _values: None
    adapt: Callable[[Values, Values], Values] = lambda defaults, _given: defaults
    problem: Callable[[Values], tuple[str, str] | None] = lambda _values: None
    presets: Mapping[str, Values] = field(default_factory=dict)
    small: Values = field(default_factory=dict)
    published: Code = ""
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
    """What a relaxed rule may look at when it decides on drafts x: tensors [...] for many at once.

    `limit` sees the drafts that were made, [n]; `chance` sees every token that they could have been, [n, V]. A shape
    may be one that broadcasts to that. p and q are the current ones: after a rejection p is the residual, and q has
    lost the rejected draft. What a rule does not ask for is not computed.
    """

    @property
    def token(self) -> Any:
        """Number of x, int64 [...]."""
        ...

    @property
    def p_x(self) -> Any:
        """Probability p(x) [...]."""
        ...

    @property
    def q_x(self) -> Any:
        """Probability [...] of x under the distribution that it was drawn from; None for a deterministic draft (1)."""
        ...

    @property
    def strict_ratio(self) -> Any:
        """p(x) / q(x) [...], p(x) for a deterministic draft: what the strict rule accepts with."""
        ...

    @property
    def p(self) -> Any:
        """The distribution p [..., V], or one that broadcasts to it."""
        ...

    @property
    def neighbour_tokens(self) -> Any:
        """Numbers of the k nearest codes of x, int64 [..., k], nearest first."""
        ...

    @property
    def neighbour_p(self) -> Any:
        """Probability p of the k nearest codes of x [..., k]."""
        ...

    @property
    def distances(self) -> Any:
        """Euclidean distances of the k nearest codes from x [..., k], between rows of `codebook`."""
        ...

    @property
    def codebook(self) -> Any:
        """Embeddings of the codes [V, d], in the space that neighbours are measured in; zeros for forced tokens."""
        ...

    @property
    def depth(self) -> Any:
        """Depth of x in the draft tree, int64 [...]; 1 for children of the root."""
        ...

    @property
    def position(self) -> Any:
        """Place of x in the image, int64 [...]: how many tokens come before it."""
        ...


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    A relaxed rule gives one of two functions of (`DraftView`, values of its parameters by name):
    `limit` -> the most neighbour mass m(x) [...] that a draft x may take; neighbours are taken in order while their
    mass keeps it (docs/algorithms.md, section 4). `chance` -> f [n, V], the probability that a draft is accepted, for
    every token that it could have been; values outside 0 to 1 are clamped (docs/algorithms.md, section 8.4).
    A rule that decides on whole trees gives `accept` (`Accept` in decoding/acceptance/tree_acceptance.py). A rule with
    none of them accepts one child after another, strictly.

    bound: the parameter that every cell must give; it lies strictly between `low` and `high`, and `example` is a value
    to begin with. parameters: its other parameters, and `bound` where it is not a shipped one: names, or `Parameter`
    objects. defaults: their values where a `Parameter` has none. neighbours: the default k; None: `chance` reads no
    neighbours, `limit` has 10. codebook: whether it reads `codebook` or `distances`. published: what replaces p after a
    rejection under `residual: official`, of a rule with `chance`: max(p - q f, 0) (`exact`: then cells have no
    `residual`), max(p - q, 0) (`plain`) or p itself (`none`). tensor_bound: the functions compute with tensors in place
    of its float parameters, so that one compiled program serves all values. chains: the rule decides only on chains of
    sampled drafts, by default on `tree`. looks_ahead: whether it keeps a draft depends on what is behind the draft
    (docs/algorithms.md, section 8.1). greedy: the rule that takes its place at temperature 0; `strict` for a rule with
    `chance`. drafting: of the mode that a rule from another package brings. in_id: whether cell ids name the rule
    where the mode does not. source: arXiv number of the paper.
    """

    name: str
    limit: Code | None = None
    low: float = 0.0
    high: float = float("inf")
    example: float = 0.1
    neighbours: int | None = None
    drafting: str = "static"
    label: str | None = None
    colour: str | None = None
    about: str = "a rule from another package"
    bound: str = "bound"
    tensor_bound: bool = False
    accept: Code | None = None
    chains: bool = False
    looks_ahead: bool = False
    tree: str | None = None
    greedy: str | None = None
    in_id: bool = True
    source: str = ""
    chance: Code | None = None
    parameters: tuple[str | Parameter, ...] = ()
    defaults: Values = field(default_factory=dict)
    codebook: bool = False
    published: Literal["exact", "plain", "none"] = "exact"

    def __post_init__(self) -> None:
        if self.limit is not None and self.neighbours is None:
            object.__setattr__(self, "neighbours", 10)
        if self.chance is not None and self.greedy is None:
            object.__setattr__(self, "greedy", "strict")

    @property
    def lossless(self) -> bool:
        """Whether the tokens keep the target's distribution: the rule is not relaxed."""
        return self.limit is None and self.chance is None

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the parameters whose values `limit` and `chance` get: the bound first."""
        names = (one if isinstance(one, str) else one.name for one in self.parameters)
        return () if self.lossless else tuple(dict.fromkeys((self.bound, *names)))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters that cells of this rule have."""
        near = () if self.neighbours is None else ("neighbours", "neighbour_metric")
        twofold = self.limit is not None or (self.chance is not None and self.published != "exact")
        return (*near, *self.own_names, *(("residual",) if twofold else ()))

    @property
    def default_values(self) -> Values:
        """Default values; a bound has none."""
        own = {one.name: one.default for one in own_parameters([self]) if one.default is not None}
        return ({} if self.neighbours is None else {"neighbours": self.neighbours}) | own | dict(self.defaults)

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
        return _fingerprint(self.limit or self.chance or self.accept or self.name)


def _fingerprint(code: Code) -> str:
    try:
        text = Path(inspect.getfile(load_code(code))).read_bytes()
    except (OSError, TypeError, ImportError, ValueError):  # ImportError: a strict rule without code of its own
        text = repr(code).encode()
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class Mode:
    """A name for a drafting and a rule, which an experiment may override; `label` and `colour` are for legends.

    defaults: values that take the place of the defaults of drafting and rule, where a cell has the parameter.
    claim: what its authors say of its tokens; None: as its rule. source: the arXiv number of their paper, by default
    the rule's. variants: values beside its own that the audit (certify/audit.py) tests as well. published: values that
    make the form of the authors' code where ours differs: then the claim that is audited is theirs alone.
    """

    name: str
    drafting: str
    rule: str
    label: str
    colour: str | None = None
    defaults: Values = field(default_factory=dict)
    claim: Literal["lossless", "relaxed"] | None = None
    source: str = ""
    variants: tuple[Values, ...] = ()
    published: tuple[Values, ...] = ()


_Row = TypeVar("_Row", Rule, Drafting)


def find_rows(
    group: str,
    kind: type[_Row],
    taken: Collection[str],
    draftings: Collection[str] = (),
    entries: Iterable[metadata.EntryPoint] | None = None,
) -> tuple[dict[str, _Row], dict[str, RefusedError]]:
    """All rows of a kind from other packages, by name, and an error for each that cannot be used, by its name.

    `taken` are names that they and their parameters may not have, `draftings` those that a rule may name, `entries` the
    entry points to read, by default the installed ones of the group. A row is refused if it cannot be imported, is no
    such row, or has a name that is taken; all others can be used.
    """
    rows: dict[str, _Row] = {}
    refused: dict[str, RefusedError] = {}
    noun, held = kind.__name__.lower(), set(taken)
    for entry in sorted(entries or metadata.entry_points(group=group), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else "unknown"
        row: Any = None
        who = f"the {noun} {entry.name} of the package {package}"
        try:
            row = entry.load()
            wrong = _wrong(row, kind, held, draftings)
            problem = wrong and f"{who} cannot be used: {wrong}"
        except Exception as error:  # whatever another package raises when it is imported or looked at
            problem = f"{who} cannot be loaded: {type(error).__name__}: {error}"
        if problem:
            refusal = RefusedError(problem, f"Mend the package {package}, or remove it.")
            refused |= dict.fromkeys({entry.name, str(getattr(row, "name", entry.name))}, refusal)
        else:
            rows[row.name] = row
            held |= {row.name, *(one.name for one in own_parameters([row]))}
    return rows, refused


def own_parameters(rows: Iterable[Rule | Drafting]) -> Iterator[Parameter]:
    """The parameters that rows bring, in their order."""
    return (one for row in rows for one in row.parameters if isinstance(one, Parameter))


def _wrong(row: object, kind: type[Rule | Drafting], taken: Collection[str], draftings: Collection[str]) -> str | None:
    if not isinstance(row, kind):
        return f"its entry point is no lantern_bench.plugins.{kind.__name__} but {type(row).__name__}"
    if not re.fullmatch(_NAME, row.name):
        return f"its name {row.name!r} must be lower-case letters, digits, _ and -"
    if row.name in taken:
        return f"the name {row.name} is taken"
    for one in own_parameters([row]):
        if not re.fullmatch(_KEY, one.name):
            return f"its parameter {one.name!r} must be lower-case letters, digits and _"
        if one.name in taken:
            return f"the name of its parameter {one.name} is taken"
        if any(type(text) is not str for text in (one.allowed, one.help)):
            return f"its parameter {one.name} needs texts for `allowed` and `help`"
    if isinstance(row, Rule) and row.drafting not in draftings:
        return f"its drafting {row.drafting!r} must be one of {', '.join(draftings)}"
    if isinstance(row, Rule) and (row.limit is not None) + (row.chance is not None) + (row.accept is not None) > 1:
        return "it has more than one of `limit`, `chance` and `accept`"
    if isinstance(row, Rule) and not row.lossless:
        if not row.allows(row.example):
            return f"its example {row.example:g} {row.allowed}"
        if row.neighbours is not None and row.neighbours < 1:
            return f"its neighbours {row.neighbours} must be at least 1"
    return None


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before it is loaded.

    `defaults` are the decoding values the model suggests (cfg_scale, tree, ...), by the names of an experiment file;
    `prompt_set` names the prompts to use where none are given. `weights` maps a part to its file, for listings;
    `vocab_size` is the number of image codes, where it is known; `tokens` those of one picture; `parameters` the
    target's. `classes` is their number, for a model that takes classes and no captions. `also_called` are other names
    of the same model. `sizes` is the target's `TransformerConfig`, where it is known without files. `mode` is the mode
    of `generate` where none is given.
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
    mode: str = "lantern++"
