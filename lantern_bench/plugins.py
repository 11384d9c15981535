"""Relaxed rules from outside the package: what such a rule says of itself, and how it is found.

A rule is an object under the entry point group `lantern_bench.rules`, found when modes and rules are first needed; it
brings a mode of its own name. Nothing here imports torch, and a rule's module should not either: what it computes with
is handed to it. How a limit is kept, and the limits of the published rules, are `decoding/acceptance/relaxation.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from lantern_bench.errors import RefusedError

GROUP = "lantern_bench.rules"
_NAME = r"[a-z][a-z0-9_]*"


class DraftView(Protocol):
    """What a rule may look at when a draft x is judged: tensors in the dtype of p, for many drafts at once."""

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
class RelaxedRule:
    """A relaxed rule: how much probability m(x) the nearest codes of a draft x may lend it (algorithms.md, section 4).

    name: of the rule, and of the mode that it brings. limit: (what is known of the draft, the value of `bound`) -> the
    most m(x) [...]; neighbours are taken in order while their mass keeps it. low, high: `bound` lies strictly between.
    example: a value to begin with, for messages and single pictures. neighbours: k where nothing is said. drafting: of
    its mode. label: its name in legends, by default the name.
    """

    name: str
    limit: Callable[[DraftView, float], Any]
    low: float
    high: float
    example: float
    neighbours: int = 10
    drafting: str = "static"
    label: str | None = None

    @property
    def allowed(self) -> str:
        """What `bound` may be, to complete `bound 2: `."""
        return f"must lie strictly between {self.low:g} and {self.high:g} for the rule {self.name}"

    def allows(self, bound: float) -> bool:
        """Whether `bound` may have this value."""
        return self.low < bound < self.high

    def fingerprint(self) -> str:
        """16 hex digits that change with the file of its code: pictures of two versions are never mixed in a run."""
        try:
            code = Path(inspect.getfile(self.limit)).read_bytes()
        except (OSError, TypeError):
            code = repr(self.limit).encode()
        return hashlib.sha256(code).hexdigest()[:16]


def find_rules(taken: Collection[str]) -> dict[str, RelaxedRule]:
    """All rules from outside, by name; `taken` names they may not have.

    Raises `RefusedError` for one that cannot be imported, is none, or has a name that is taken.
    """
    return checked_rules(_loaded(), taken)


def _loaded() -> Iterable[tuple[str, object]]:
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            yield entry.name, entry.load()
        except Exception as error:  # whatever a stranger's module raises when it is imported
            raise RefusedError(
                f"the rule {entry.name} cannot be loaded: {type(error).__name__}: {error}",
                "Mend the package that it comes from, or remove it.",
            ) from error


def checked_rules(loaded: Iterable[tuple[str, object]], taken: Collection[str]) -> dict[str, RelaxedRule]:
    """Return the rules by name; raises `RefusedError` for one that cannot be used."""
    rules: dict[str, RelaxedRule] = {}
    for entry, rule in loaded:
        wrong = _wrong(rule, {*taken, *rules})
        if wrong or not isinstance(rule, RelaxedRule):
            raise RefusedError(f"the rule {entry} cannot be used: {wrong}", "Mend the package that it comes from.")
        rules[rule.name] = rule
    return rules


def _wrong(rule: object, taken: Collection[str]) -> str | None:
    if not isinstance(rule, RelaxedRule):
        return f"its entry point is no lantern_bench.plugins.RelaxedRule but {type(rule).__name__}"
    if not re.fullmatch(_NAME, rule.name):
        return f"its name {rule.name!r} must be lower-case letters, digits and _"
    if rule.name in taken:
        return f"the name {rule.name} is taken"
    if rule.drafting not in ("static", "dynamic"):
        return f"its drafting {rule.drafting!r} must be static or dynamic"
    if not rule.allows(rule.example):
        return f"its example {rule.example:g} {rule.allowed}"
    return None if rule.neighbours >= 1 else f"its neighbours {rule.neighbours} must be at least 1"


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before it is loaded.

    `defaults` are the decoding values the model suggests (cfg_scale, tree, ...), by the names of an experiment file;
    `prompt_set` names the prompts to use where none are given. `weights` maps a part to its file, for listings;
    `vocab_size` is the number of image codes, where it is known; `tokens` those of one picture; `parameters` the
    target's. `classes` is their number, for a model that takes classes and no captions. `also_called` are other names
    of the same model.
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
