"""Reads the blocks of an experiment file, and the flags over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pydantic import ValidationError

from lantern_bench.config.decoding import read_values
from lantern_bench.config.paper import read_paper
from lantern_bench.config.settings import ALLOWED, Overrides, Settings, as_list
from lantern_bench.methods.catalog import DRAFTINGS, MODES, PARAMETERS, RULES
from lantern_bench.utils.text import did_you_mean
from lantern_bench.utils.yaml_file import (
    KeyPath,
    Location,
    Problems,
    Source,
    problems_of,
)

# ---- The file

UNNAMED = "unnamed"
"""Replaces a wrong name, so that reading continues."""

_PARAMETERS = tuple(key for key in PARAMETERS if key != "mode")
_BLOCKS = ("models", "model_defaults", "cells")
_LISTS = ("model", "metrics", "batch")
# Settings that a block of `models` may hold, for experiments that run with one model at a time.
_SETTINGS_OF_MODEL = ("prompts", "prompt_column", "images", "protocol", "reference")


class Stated(NamedTuple):
    """The checked values of a parameter, which are a grid, and where they are written."""

    values: tuple[Any, ...]
    location: Location


_Settings: TypeAlias = dict[str, tuple[Any, Location]]

Layer: TypeAlias = Mapping[str, Stated]
"""The parameters of one block of a file, or of the flags."""


class CellEntry(NamedTuple):
    """One entry of `cells`."""

    modes: tuple[str, ...]  # empty if they were wrong
    location: Location
    layer: Layer  # without the modes
    models: tuple[str, ...] = ()  # models that it is for; empty for all


class ExperimentReader:
    """Reads the blocks of one file and the flags over them.

    Wrong values are collected in `problems`, so that one message can list them all. Raises
    `RefusedError` if the file names an installed rule or drafting that cannot be used.
    """

    def __init__(self, source: Source, overrides: Overrides) -> None:
        self.source = source
        self.data = {str(key): value for key, value in source.data.items()}
        self.overrides = overrides
        self.problems = Problems(source.name)
        self.blocks = self._blocks("models")
        self.top = self._layer(self.data, (), (*ALLOWED, *_BLOCKS))
        self.models = {
            name: self._layer(block, ("models", name), _SETTINGS_OF_MODEL)
            for name, block in self.blocks.items()
        }
        self.flags: dict[str, Stated] = {}
        self._settings_of_flags: _Settings = {}
        self._read_flags()

    def _note(self, path: KeyPath, text: str, value: object = None) -> None:
        self.problems.add(self.source.location(path), text, value)

    def _blocks(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the block of each model under a key of the file."""
        blocks = self._mapping(
            self.data.get(name, {}), (name,), "a mapping of model names to values"
        )
        return {
            model: self._mapping(
                {} if block is None else block, (name, model), "a mapping of keys to values"
            )
            for model, block in blocks.items()
        }

    def settings(self) -> Settings:
        """Read the run-wide settings.

        Blocks of models replace settings of the file, and flags replace both. The blocks of
        different models must agree.
        """
        stated: _Settings = {
            key: (self.data[key], self.source.location((key,)))
            for key in ALLOWED
            if key in self.data
        }
        if self.blocks:
            stated.setdefault("model", (list(self.blocks), Location("model")))
        stated |= self._settings_of_flags
        if "model" in stated:
            stated |= self._settings_of_models(as_list(stated["model"][0]))
        self._stated = stated
        settings = self._checked_settings(stated)
        try:
            read_paper(settings.paper)
        except ValidationError as error:
            for item in error.errors():
                text = item["msg"]
                self._note(("paper", *item["loc"]), text[:1].lower() + text[1:])
        return settings

    def _settings_of_models(self, models: Sequence[Any]) -> _Settings:
        """Return the settings in the blocks of the models of this run, which no flag replaces."""
        found: _Settings = {}
        for name in map(str, models):
            for key, value in self.blocks.get(name, {}).items():
                if key not in _SETTINGS_OF_MODEL or key in self._settings_of_flags:
                    continue
                path = ("models", name, key)
                first, _ = found.setdefault(key, (value, self.source.location(path)))
                if first != value:
                    self._note(
                        path, "differs from another model's; run one of them, with --model", value
                    )
        return found

    def _checked_settings(self, stated: _Settings) -> Settings:
        """Check the values. Wrong values are replaced by defaults, so that reading continues."""
        values: dict[str, Any] = {"name": Path(self.source.name).stem}
        values |= {key: value for key, (value, _) in stated.items()}
        try:
            return Settings.model_validate(values)
        except ValidationError as error:
            for location, text, value in problems_of(error, Source("", Path(), values), Settings):
                key = location.text.partition(".")[0]
                place = stated[key][1] if key in stated else location
                shown = "(empty)" if key in stated and value is None else value
                self.problems.add(place, text, shown)
                values.pop(key, None)
            return Settings.model_validate({"name": UNNAMED, "model": UNNAMED} | values)

    def model_defaults(self) -> dict[str, dict[str, Any]]:
        """Read the values by model that a resolved experiment records."""
        defaults = {}
        for name, block in self._blocks("model_defaults").items():
            layer = self._layer(block, ("model_defaults", name), ())
            defaults[name] = {key: stated.values[0] for key, stated in layer.items()}
        return defaults

    def _read_flags(self) -> None:
        """Read the flags: parameters, which may be a grid, and settings."""
        for key, typed in self.overrides.values.items():
            location = self.overrides.location(key)
            if key in _PARAMETERS:
                values = read_values(key, list(typed), location, problems=self.problems)
                if values:
                    self.flags[key] = Stated(values, location)
            elif key in _LISTS:
                self._settings_of_flags[key] = (list(typed), location)
            elif key in ALLOWED and len(typed) == 1:
                self._settings_of_flags[key] = (typed[0], location)
            elif key in ALLOWED:
                self.problems.add(location, "takes one value", ",".join(map(str, typed)))
            else:
                hint = did_you_mean(key, (*_PARAMETERS, *ALLOWED))
                if key == "mode":
                    hint = "; cells are picked with --modes"
                list_keys = " (`lantern-bench sweep --help-all` lists the keys, as flags)"
                text = f"unknown key{hint or list_keys}"
                self.problems.add(location, text, ",".join(map(str, typed)))

    def cells(self, settings: Settings) -> list[CellEntry]:
        """Read `cells`; keep the modes of `--modes`, and `ar` unless `--no-baseline` is given."""
        written = self.data.get("cells")
        if not isinstance(written, list) or not written:
            self._note(
                ("cells",),
                "must be a list of cells, for example: "
                "cells: [{mode: ar}, {mode: lantern, delta: 0.1}]",
            )
            return []
        entries = [self._entry(block, ("cells", number)) for number, block in enumerate(written)]
        present = set[str]().union(*(entry.modes for entry in entries))

        # The modes to keep. A mode that the file lacks is added.
        typed = list(self.overrides.modes)
        picked: tuple[str, ...] = ()
        if typed:
            picked = read_values("mode", typed, Location("--modes"), problems=self.problems)
        wanted = set(picked or MODES)
        if settings.baseline:
            wanted.add("ar")
            present.add("ar")  # the grid adds its cell
        elif "baseline" in self.overrides.values and "ar" not in typed:
            wanted.discard("ar")
        lacking = [mode for mode in dict.fromkeys(picked) if mode not in present]
        entries += [self._preset_cell(mode, entries) for mode in lacking]

        remaining = []
        for entry in entries:
            modes = tuple(mode for mode in entry.modes if mode in wanted)
            if modes or not entry.modes:
                remaining.append(entry._replace(modes=modes))
        if not remaining and not settings.baseline:
            self.problems.add(Location("--no-baseline"), "leaves no cell to run")
        return remaining

    def _preset_cell(self, mode: str, entries: Sequence[CellEntry]) -> CellEntry:
        """Return a cell of a mode that the file lacks.

        It has the defaults of the model, and the tree of the file's other cells.
        """
        location = Location("--modes")
        drafting = DRAFTINGS[MODES[mode].drafting]
        rule = RULES[MODES[mode].rule]
        stated = set().union(self.top, self.flags, *self.models.values())
        layer = {}
        if not rule.lossless and rule.bound not in stated:
            layer[rule.bound] = Stated((rule.example,), location)
        for key in ("tree", "nodes", "depth", "beam"):
            trees = [entry.layer[key].values[0] for entry in entries if key in entry.layer]
            if trees and key in drafting.parameter_names and key not in stated and not rule.chains:
                layer[key] = Stated((trees[0],), location)
        return CellEntry((mode,), location, layer)

    def _entry(self, block: object, path: KeyPath) -> CellEntry:
        mapping = self._mapping(block, path, "a cell such as {mode: lantern, delta: 0.1}")
        layer = self._layer(mapping, path, ("model",), parameters=tuple(PARAMETERS))
        if mapping and "mode" not in mapping:
            self._note(path, f"has no mode; the modes are {', '.join(MODES)}")
        modes = layer.pop("mode").values if "mode" in layer else ()
        written = mapping.get("model", ())
        models = tuple(as_list(written))
        if written == [] or not all(isinstance(name, str) for name in models):
            self._note(
                (*path, "model"), ALLOWED["model"], "(empty)" if written is None else written
            )
            models = ()
        return CellEntry(modes, self.source.location(path), layer, models=models)

    def _mapping(self, block: object, path: KeyPath, expected: str) -> dict[str, Any]:
        if isinstance(block, dict):
            return {str(key): value for key, value in block.items()}
        self._note(path, f"must be {expected}", "(empty)" if block is None else block)
        return {}

    def _layer(
        self,
        block: Mapping[str, Any],
        path: KeyPath,
        other_keys: tuple[str, ...],
        parameters: tuple[str, ...] = _PARAMETERS,
    ) -> dict[str, Stated]:
        """Read the parameters of a block; keys other than these and `other_keys` are problems."""
        layer = {}
        for key, written in block.items():
            location = self.source.location((*path, key))
            if key in parameters:
                values = read_values(
                    key=key,
                    written=written,
                    location=location,
                    problems=self.problems,
                    folder=self.source.folder,
                )
                if values:
                    layer[key] = Stated(values, location)
            elif key not in other_keys:
                text = "unknown key" + did_you_mean(key, (*parameters, *other_keys))
                if path and (key in ALLOWED or key in _BLOCKS):
                    text = "belongs at the top level of the file, not here"
                elif key == "mode":
                    text = "belongs in cells, for example: cells: [{mode: lantern}]"
                self.problems.add(location, text)
        return layer

    def check_models(
        self, settings: Settings, models: Collection[str], entries: list[CellEntry]
    ) -> None:
        """Note unknown models, cells of models that the run lacks, and misspelt blocks.

        With `--model`, cells and blocks of other models are no problem.

        Args:
            settings: The settings of the file.
            models: The names of all known models.
            entries: The entries of `cells`.
        """
        for name in settings.model:
            if name not in models and name != UNNAMED:
                self.problems.add(
                    self._stated["model"][1],
                    f"unknown model{did_you_mean(name, models)} "
                    f"(the models are {', '.join(models)})",
                    name,
                )
        if "model" in self.overrides.values:
            return
        suspects = [
            (name, self.source.location(("models", name)))
            for name in self.blocks
            if did_you_mean(name, settings.model)
        ]
        for entry in entries:
            suspects += [(name, entry.location) for name in entry.models if name not in self.blocks]
        for name, location in suspects:
            if name not in settings.model:
                self.problems.add(
                    location,
                    f"the model {name} is not among the experiment's models "
                    f"({', '.join(settings.model)})",
                )
