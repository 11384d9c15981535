"""From layers of given values to the cells of a grid.

A value is looked for in this order: flags, the cell, the model's block, the top level of the file, the model's own
defaults, the general fallbacks. A list at any of these places makes a grid. A parameter reaches only the cells whose
drafting and rule have it; one that is written in a cell and reaches nothing is a mistake and is reported as such.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.values import Given, Layer, Place, Problems
from lantern_bench.errors import RefusedError
from lantern_bench.methods.tables import (
    DRAFTINGS,
    MODES,
    PARAMETERS,
    PRESETS,
    RULES,
    can_decide,
    chain_problem,
    defaults_for,
    fresh_drafts_problem,
    has_parameter,
    owners_of,
)
from lantern_bench.methods.trees import topology_of

_STRUCTURE_KEYS = ("mode", "drafting", "rule")
_UNSTATED = Place("")


class Structure(NamedTuple):
    """What decides which parameters a cell has; `preset` is the word that was given for the drafting, else empty."""

    mode: str
    drafting: str
    rule: str
    preset: str = ""

    @property
    def fixed(self) -> Mapping[str, Any]:
        """The values that the preset fixes."""
        return PRESETS[self.preset][1] if self.preset else {}

    def has(self, key: str) -> bool:
        """Return whether a cell of this structure has the parameter."""
        return has_parameter(key, self.drafting, self.rule) and key not in self.fixed


@dataclass
class Expansion:
    """Expands the cells of one model.

    `model_defaults` are the model's own values; None: not known yet, so that a missing value is not a problem.
    `used_flags` collects the flags that reached a cell. `most` is the number of cells beyond which a grid is refused.
    """

    flags: Layer
    model_layer: Layer
    top: Layer
    model_defaults: Mapping[str, Any] | None
    problems: Problems
    used_flags: set[str] = field(default_factory=set)
    most: int | None = None
    _cells: int = 0

    def expand(self, cell: Layer, place: Place) -> list[Decoding]:
        """Return the decodings of one cell's grid in fixed order, without cells that have problems."""
        structures = list(self._structures(cell, place))
        found = [decoding for structure in structures for decoding in self._grid(structure, cell, place)]
        self._note_unused(cell, structures)
        return found

    def _layers(self, cell: Layer) -> tuple[Layer, ...]:
        return self.flags, cell, self.model_layer, self.top

    def _lookup(self, key: str, cell: Layer, structure: Structure) -> tuple[Given, ...]:
        for layer in self._layers(cell):
            if key in layer:
                return layer[key]
        defaults = defaults_for(structure.drafting, structure.rule, structure.mode, self.model_defaults)
        return (Given(defaults[key], _UNSTATED),) if key in defaults else ()

    def _structures(self, cell: Layer, place: Place) -> Iterator[Structure]:
        for mode in (given.value for given in cell.get("mode", ())):
            mode_row = MODES[mode]
            if not DRAFTINGS[mode_row.drafting].drafts:
                self._note_drafting_ar(cell)
                yield Structure(mode, mode_row.drafting, mode_row.rule)
                continue
            draftings = self._choice("drafting", cell, mode_row.drafting, place)
            rules = self._choice("rule", cell, mode_row.rule, place)
            for drafting, rule in itertools.product(draftings, rules):
                if self._drafts(mode, drafting) and self._drafts(mode, rule) and self._fit(drafting, rule):
                    preset = drafting.value if drafting.value in PRESETS else ""
                    name = PRESETS[preset][0] if preset else drafting.value
                    row = RULES[rule.value]
                    yield Structure(
                        mode, name, row.greedy if row.greedy and _unfit(row.name, name) else row.name, preset
                    )

    def _choice(self, key: str, cell: Layer, preset: str, place: Place) -> tuple[Given, ...]:
        if key in self.flags:
            self.used_flags.add(key)
        return next((layer[key] for layer in self._layers(cell) if key in layer), (Given(preset, place),))

    def _drafts(self, mode: str, given: Given) -> bool:
        if given.value == "none":
            self.problems.add(
                given.place, f"mode {mode} drafts and needs a rule; without drafting write mode: ar", "none"
            )
        return bool(given.value != "none")

    def _fit(self, drafting: Given, rule: Given) -> bool:
        """Whether drafting and rule go together; a drafting flag overrides a file's rule for chains."""
        name = PRESETS[drafting.value][0] if drafting.value in PRESETS else drafting.value
        typed = drafting.place.is_flag and not rule.place.is_flag
        fits = not _unfit(rule.value, name) or typed
        if not fits:
            text = chain_problem(rule.value, name, (), f"the drafting {name}")
            self.problems.add(rule.place, str(text), rule.value)
        return fits

    def _note_drafting_ar(self, cell: Layer) -> None:
        for key in ("drafting", "rule"):
            for given in cell.get(key, ()):
                if given.value != "none" and len(cell["mode"]) == 1:
                    self.problems.add(
                        given.place, f"mode ar drafts nothing and has no {key}; leave it out", given.value
                    )

    def _grid(self, structure: Structure, cell: Layer, place: Place) -> Iterator[Decoding]:
        keys = [key for key in PARAMETERS if key not in _STRUCTURE_KEYS and structure.has(key)]
        self.used_flags.update(key for key in keys if key in self.flags)
        axes = [self._lookup(key, cell, structure) for key in keys]
        complete = True
        for key, values in zip(keys, axes, strict=True):
            if not values:
                complete = False
                self._note_missing(key, structure, place)
        if complete:
            self._cells += math.prod(map(len, axes))
            if self.most is not None and self._cells > self.most:
                raise RefusedError(
                    f"the grid has {self._cells} cells or more for one model, and a sweep at most {self.most}",
                    "Give fewer values; or, if this is meant, add --yes.",
                )
            for combination in itertools.product(*axes):
                decoding = self._decoding(structure, dict(zip(keys, combination, strict=True)), place)
                if decoding is not None:
                    yield decoding

    def _decoding(self, structure: Structure, given: dict[str, Given], place: Place) -> Decoding | None:
        values = {key: item.value for key, item in given.items()} | dict(structure.fixed)
        if not isinstance(values.get("tree", ""), str):
            values["topology"] = values.pop("tree")
        rule = RULES[structure.rule]
        if rule.chains:
            paths = values.get("topology") or (topology_of(values["tree"]) if "tree" in values else ())
            problem = chain_problem(rule.name, structure.drafting, paths, "it")
            if problem and given["tree"].place is _UNSTATED:
                # The model's own tree does not suit the rule: take the rule's.
                values = {key: value for key, value in values.items() if key != "topology"} | {"tree": rule.tree}
            elif problem and (not given["tree"].place.is_flag or "rule" in self.flags):
                self.problems.add(given["tree"].place, problem, values.get("tree"))
                return None
            elif problem and rule.greedy:
                # A tree flag overrides the file's rule for chains.
                rule = RULES[rule.greedy]
        if values["temperature"] and (problem := fresh_drafts_problem(rule.name, structure.drafting, values)):
            self.problems.add(place, problem)
            return None
        drafting = DRAFTINGS[structure.drafting]
        problem_at = drafting.problem(values)
        if problem_at:
            key, text = problem_at
            if given[key].place is not _UNSTATED:
                self.problems.add(given[key].place, text, values[key])
                return None
            values = {**values, key: drafting.adapt({**values, key: drafting.defaults[key]}, values)[key]}
        if not rule.lossless and not rule.allows(values[rule.bound]):
            self.problems.add(given[rule.bound].place, rule.allowed, values[rule.bound])
            return None
        scale = (self.model_defaults or {}).get("cfg_scale")
        return Decoding.model_validate(
            {"mode": structure.mode, "drafting": structure.drafting, "rule": rule.name, **values}
            | {"cfg_default": 1.0 if scale is None else scale}
        )

    def _note_missing(self, key: str, structure: Structure, place: Place) -> None:
        if self.model_defaults is None:
            return
        rule = RULES[structure.rule]
        example = f"{rule.example:g}" if key == rule.bound else "VALUE"
        self.problems.add(
            place,
            f"mode {structure.mode} has the rule {structure.rule} and needs {key}; "
            f"write {key}: {example} in the cell, or type --{key.replace('_', '-')} {example}",
        )

    def _note_unused(self, cell: Layer, structures: list[Structure]) -> None:
        if not structures or "drafting" in self.flags or "rule" in self.flags:
            return
        for key, values in cell.items():
            if key in _STRUCTURE_KEYS or key not in PARAMETERS or any(one.has(key) for one in structures):
                continue
            one, given = structures[0], values[0]
            if key in one.fixed:
                fixed = ", ".join(f"the {name} {value}" for name, value in one.fixed.items())
                text = (
                    f"the drafting {one.preset} is {one.drafting} with {fixed}; "
                    f"leave {key} out, or write drafting: {one.drafting}"
                )
            else:
                text = (
                    f"mode {one.mode} has the drafting {one.drafting} and the rule {one.rule}; "
                    f"{key} belongs to {owners_of(key)}"
                )
            self.problems.add(given.place, text, given.value)


def _unfit(rule: str, drafting: str) -> bool:
    """Whether the rule can decide on none of the drafts of the drafting."""
    return not can_decide(rule, drafting)
