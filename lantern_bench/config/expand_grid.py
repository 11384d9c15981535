"""From layers of given values to the cells of a grid.

A value is looked for in this order: flags, the cell, the model's block, the top level of the file, the model's own
defaults, the general fallbacks. A list at any of these places makes a grid. A parameter reaches only the cells whose
drafting and rule have it; one that is written in a cell and reaches nothing is a mistake and is reported as such.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lantern_bench.config.decoding import PARAMETERS, Decoding, fallbacks, most_nodes, not_a_chain, too_many_nodes
from lantern_bench.config.methods import MODES, OUTSIDE_RULES
from lantern_bench.config.trees import is_chain, topology_of
from lantern_bench.config.values import Given, Layer, Place, Problems

_STRUCTURE_KEYS = ("mode", "drafting", "rule")
_UNSTATED = Place("")


class Structure(NamedTuple):
    """What decides which parameters a cell has; `chain` is the drafting's short word for static with chain-5."""

    mode: str
    drafting: str
    rule: str
    chain: bool = False

    def has(self, key: str) -> bool:
        """Return whether a cell of this structure has the parameter."""
        return PARAMETERS[key].belongs(self.drafting, self.rule) and not (self.chain and key == "tree")


@dataclass
class Expansion:
    """Expands the cells of one model.

    `model_defaults` are the model's own values; with None they are not known yet, and what is missing is no problem
    yet. `used_flags` gathers the flags that reached a cell.
    """

    flags: Layer
    model_layer: Layer
    top: Layer
    model_defaults: Mapping[str, Any] | None
    problems: Problems
    used_flags: set[str] = field(default_factory=set)

    def expand(self, cell: Layer, place: Place) -> list[Decoding]:
        """Return the decodings of one cell's grid in fixed order; problems are noted, their cells left out."""
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
        own = {name: value for name, value in (self.model_defaults or {}).items() if value is not None}
        defaults = fallbacks(structure.drafting, structure.rule) | own
        return (Given(defaults[key], _UNSTATED),) if key in defaults else ()

    def _structures(self, cell: Layer, place: Place) -> Iterator[Structure]:
        for mode in (given.value for given in cell.get("mode", ())):
            preset = MODES[mode]
            if preset.drafting == "none":
                self._note_drafting_ar(cell)
                yield Structure(mode, *preset)
                continue
            draftings = self._choice("drafting", cell, preset.drafting, place)
            rules = self._choice("rule", cell, preset.rule, place)
            for drafting, rule in itertools.product(draftings, rules):
                if self._drafts(mode, drafting) and self._drafts(mode, rule) and self._fit(drafting, rule):
                    chain = drafting.value == "chain"
                    gives_way = rule.value == "block" and drafting.value == "dynamic"
                    kept = "strict" if gives_way else rule.value
                    yield Structure(mode, "static" if chain else drafting.value, kept, chain)

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
        """Whether a block is drafted as a chain; a file's block gives way to branching drafts that are typed."""
        typed = drafting.place.is_flag and not rule.place.is_flag
        fits: bool = rule.value != "block" or drafting.value != "dynamic" or typed
        if not fits:
            self.problems.add(rule.place, not_a_chain("a dynamic tree"), rule.value)
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
            if not values and key in ("delta", "lambda", "bound"):
                complete = False
                self._note_missing(key, structure, place)
        if complete:
            for combination in itertools.product(*axes):
                decoding = self._decoding(structure, dict(zip(keys, combination, strict=True)))
                if decoding is not None:
                    yield decoding

    def _decoding(self, structure: Structure, given: dict[str, Given]) -> Decoding | None:
        values = {key: item.value for key, item in given.items()}
        if structure.chain:
            values["tree"] = "chain-5"
        elif not isinstance(values.get("tree", ""), str):
            values["topology"] = values.pop("tree")
        rule_name = structure.rule
        if rule_name == "block" and not is_chain(values.get("topology") or topology_of(values["tree"])):
            place = given["tree"].place
            if place is _UNSTATED:
                _put_a_chain(values)
            elif not place.is_flag or "rule" in self.flags:
                self.problems.add(place, not_a_chain("it"), values.get("tree"))
                return None
            else:
                rule_name = "strict"
        if structure.drafting == "dynamic" and values["nodes"] > most_nodes(values["depth"], values["beam"]):
            if given["nodes"].place is not _UNSTATED:
                at = given["nodes"].place
                self.problems.add(at, too_many_nodes(values["depth"], values["beam"]), values["nodes"])
                return None
            values["nodes"] = most_nodes(values["depth"], values["beam"])
        rule = OUTSIDE_RULES.get(structure.rule)
        if rule is not None and not rule.allows(values["bound"]):
            self.problems.add(given["bound"].place, rule.allowed, values["bound"])
            return None
        scale = (self.model_defaults or {}).get("cfg_scale")
        return Decoding.model_validate(
            {"mode": structure.mode, "drafting": structure.drafting, "rule": rule_name, **values}
            | {"cfg_default": 1.0 if scale is None else scale}
        )

    def _note_missing(self, key: str, structure: Structure, place: Place) -> None:
        if self.model_defaults is None:
            return
        rule = OUTSIDE_RULES.get(structure.rule)
        example = f"{rule.example:g}" if rule is not None else {"delta": "0.1", "lambda": "2"}[key]
        self.problems.add(
            place,
            f"mode {structure.mode} has the rule {structure.rule} and needs {key}; "
            f"write {key}: {example} in the cell, or type --{key} {example}",
        )

    def _note_unused(self, cell: Layer, structures: list[Structure]) -> None:
        if not structures or "drafting" in self.flags or "rule" in self.flags:
            return
        for key, values in cell.items():
            if key in _STRUCTURE_KEYS or key not in PARAMETERS or any(one.has(key) for one in structures):
                continue
            one, given = structures[0], values[0]
            if one.chain and key == "tree":
                text = "the drafting chain is static with the tree chain-5; leave tree out, or write drafting: static"
            else:
                text = (
                    f"mode {one.mode} has the drafting {one.drafting} and the rule {one.rule}; "
                    f"{key} belongs to {PARAMETERS[key].to}"
                )
            self.problems.add(given.place, text, given.value)


def _put_a_chain(values: dict[str, Any]) -> None:
    """A model's own tree gives way to the one of the rule `block`."""
    values.pop("topology", None)
    values["tree"] = fallbacks("static", "block")["tree"]
