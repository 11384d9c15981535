"""The decoding modes: names for the combinations of a drafting and an acceptance rule.

A mode is a row of a table, not a class: all of them run the same loop (algorithms.md, section 4). The table lives
here and not beside the loop, because a plan must be made without importing torch. Every part of a preset can be
overridden in an experiment, for ablations; what a mode fixes is only its name and its starting point.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["DRAFTINGS", "MODES", "RELAXED_RULES", "RULES", "Drafting", "ModePreset", "Rule"]

Drafting: TypeAlias = Literal["none", "static", "dynamic"]
Rule: TypeAlias = Literal["none", "strict", "additive", "multiplicative"]

DRAFTINGS: tuple[Drafting, ...] = ("none", "static", "dynamic")
RULES: tuple[Rule, ...] = ("none", "strict", "additive", "multiplicative")
RELAXED_RULES: frozenset[str] = frozenset({"additive", "multiplicative"})


class ModePreset(NamedTuple):
    """The drafting and the rule that a mode starts from."""

    drafting: Drafting
    rule: Rule


MODES: dict[str, ModePreset] = {
    "ar": ModePreset("none", "none"),
    "speculative": ModePreset("static", "strict"),
    "lantern": ModePreset("dynamic", "additive"),
    "lantern++": ModePreset("static", "multiplicative"),
}
