"""From layers of values to the decodings of a grid.

A value is looked up in this order: flags, the cell, the block of the model, the top level of the file; if none states
it, `Decoding` takes the default. A list at any of these locations makes a grid. A parameter reaches only the cells
whose drafting and rule have it; one that is written in a cell and reaches nothing is a mistake.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lantern_bench.config.decoding import STRUCTURE, Decoding, MissingValueError, ParameterError
from lantern_bench.config.parse_experiment import CellEntry
from lantern_bench.config.values import Layer, Location, Problems
from lantern_bench.errors import RefusedError
from lantern_bench.methods.tables import (
    DRAFTINGS,
    MODES,
    PARAMETERS,
    RULES,
    can_decide,
    chain_problem,
    has_parameter,
    owners_of,
)


class Method(NamedTuple):
    """What decides which parameters a cell has."""

    mode: str
    drafting: str
    rule: str

    def has(self, key: str) -> bool:
        """Whether a cell of this method has the parameter."""
        return has_parameter(key, self.drafting, self.rule)


class Layers(NamedTuple):
    """The values beside those of the cells, from the strongest."""

    flags: Layer
    models: Mapping[str, Layer]  # of the blocks of `models`
    top: Layer  # of the top level of the file


_EMPTY = Layer({}, lambda _key: Location(""))


@dataclass
class Grid:
    """Expands the cells of one model."""

    layers: Layers
    model: str
    model_defaults: Mapping[str, Any]  # the model's own
    problems: Problems
    used_flags: set[str]  # collects the flags that reached a cell
    missing: list[tuple[Location, str]]  # collects what cells lack
    most: int | None = None  # a larger grid is refused
    _count: int = field(default=0, init=False)

    def expand(self, entry: CellEntry) -> Iterator[Decoding]:
        """Yield the decodings of one entry of `cells`, in fixed order, without those that have problems."""
        methods = list(self._methods(entry))
        for method in methods:
            yield from self._decodings(method, entry)
        self._note_unused(entry.layer, methods)

    def _layer_of(self, key: str, cell: Layer) -> Layer | None:
        of_model = self.layers.models.get(self.model, _EMPTY)
        layers = (self.layers.flags, cell, of_model, self.layers.top)
        return next((layer for layer in layers if key in layer.values), None)

    def _methods(self, entry: CellEntry) -> Iterator[Method]:
        for mode in entry.modes:
            row = MODES[mode]
            if not DRAFTINGS[row.drafting].drafts:
                self._note_drafting_without_drafts(entry)
                yield Method(mode, row.drafting, row.rule)
                continue
            stated = {key: self._layer_of(key, entry.layer) for key in ("drafting", "rule")}
            self.used_flags.update(key for key, layer in stated.items() if layer is self.layers.flags)
            draftings = stated["drafting"].values["drafting"] if stated["drafting"] else (row.drafting,)
            rules = stated["rule"].values["rule"] if stated["rule"] else (row.rule,)
            locations = {key: layer.location(key) if layer else entry.location for key, layer in stated.items()}
            drafting_is_typed = stated["drafting"] is self.layers.flags is not stated["rule"]
            for drafting, rule in itertools.product(draftings, rules):
                if "none" in (drafting, rule):
                    key = "drafting" if drafting == "none" else "rule"
                    text = f"mode {mode} drafts and needs a rule; without drafting write mode: ar"
                    self.problems.add(locations[key], text, "none")
                elif can_decide(rule, drafting):
                    yield Method(mode, drafting, rule)
                elif drafting_is_typed:  # the rule of the file is replaced
                    yield Method(mode, drafting, RULES[rule].greedy_rule)
                else:
                    text = chain_problem(rule, drafting, (), f"the drafting {drafting}") or ""
                    self.problems.add(locations["rule"], text, rule)

    def _note_drafting_without_drafts(self, entry: CellEntry) -> None:
        for key in ("drafting", "rule"):
            for value in entry.layer.values.get(key, ()):
                if value != "none" and len(entry.modes) == 1:
                    text = f"mode ar drafts nothing and has no {key}; leave it out"
                    self.problems.add(entry.layer.location(key), text, value)

    def _decodings(self, method: Method, entry: CellEntry) -> Iterator[Decoding]:
        stated = {key: layer for key in PARAMETERS if (layer := self._layer_of(key, entry.layer)) is not None}
        axes = {key: layer.values[key] for key, layer in stated.items() if key not in STRUCTURE and method.has(key)}
        self.used_flags.update(key for key in axes if stated[key] is self.layers.flags)
        self._count += math.prod(map(len, axes.values()))
        if self.most is not None and self._count > self.most:
            raise RefusedError(
                f"the grid has {self._count} cells or more for one model, and a sweep at most {self.most}",
                "Give fewer values; or, if this is meant, add --yes.",
            )
        cfg_default = float(self.model_defaults.get("cfg_scale") or 1.0)
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            values |= {"drafting": method.drafting, "rule": method.rule}
            try:
                yield Decoding(method.mode, **values, model_defaults=self.model_defaults, cfg_default=cfg_default)
            except MissingValueError as error:
                self.missing.append((entry.location, error.text))
            except ParameterError as error:
                if error.key == "tree" and stated["tree"] is self.layers.flags is not stated.get("rule"):
                    # The flag names the tree: it replaces a rule of the file that needs a chain.
                    values["rule"] = RULES[method.rule].greedy_rule
                    yield Decoding(method.mode, **values, model_defaults=self.model_defaults, cfg_default=cfg_default)
                    continue
                layer = stated.get(error.key or "")
                location = entry.location if layer is None else layer.location(str(error.key))
                value = values.get(error.key or "")
                self.problems.add(location, error.text, None if isinstance(value, tuple) else value)

    def _note_unused(self, cell: Layer, methods: list[Method]) -> None:
        """Note values of a cell that none of its methods has."""
        if not methods or "drafting" in self.layers.flags.values or "rule" in self.layers.flags.values:
            return
        mode, drafting, rule = methods[0]
        for key, values in cell.values.items():
            if key not in STRUCTURE and not any(method.has(key) for method in methods):
                text = f"mode {mode} has the drafting {drafting} and the rule {rule}; {key} belongs to {owners_of(key)}"
                self.problems.add(cell.location(key), text, values[0])
