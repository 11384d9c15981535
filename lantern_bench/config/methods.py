"""The decoding modes: names for the combinations of a drafting and an acceptance rule.

A mode is a row of a table, not a class: all of them run the same loop (algorithms.md, section 4). The table lives
here and not beside the loop, because a plan must be made without importing torch. Every part of a preset can be
overridden in an experiment, for ablations; what a mode fixes is only its name and its starting point. Rules from
outside the package (`rules.py`) bring a mode of their name each; they are found when this module is imported.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

from lantern_bench.plugins import RelaxedRule, find_rules

Drafting: TypeAlias = Literal["none", "static", "dynamic"]

DRAFTINGS: tuple[Drafting, ...] = get_args(Drafting)
PUBLISHED_RULES = ("none", "strict", "additive", "multiplicative")
LOSSLESS_RULES = ("strict", "block")
_RELAXED = ("additive", "multiplicative")


class ModePreset(NamedTuple):
    """The drafting and the rule that a mode starts from."""

    drafting: str
    rule: str


MODES: dict[str, ModePreset] = {
    "ar": ModePreset("none", "none"),
    "speculative": ModePreset("static", "strict"),
    "lantern": ModePreset("dynamic", "additive"),
    "lantern++": ModePreset("static", "multiplicative"),
}

OUTSIDE_RULES: dict[str, RelaxedRule] = find_rules({*MODES, *DRAFTINGS, *PUBLISHED_RULES, *LOSSLESS_RULES, "all"})
"""Relaxed rules that other packages bring, by name."""

RULES: tuple[str, ...] = ("none", *LOSSLESS_RULES, *_RELAXED, *OUTSIDE_RULES)
RELAXED_RULES: frozenset[str] = frozenset({*_RELAXED, *OUTSIDE_RULES})

MODES.update({name: ModePreset(rule.drafting, name) for name, rule in OUTSIDE_RULES.items()})
