"""The course of `lantern-bench certify`: what is checked and measured, in which order, and where it is written.

All that can be wrong is checked first, before torch is imported. What follows only puts together what `measure` and
`report` do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.certify.lossless import Law
    from lantern_bench.clock import OnProgress
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.config.experiment import Cell
    from lantern_bench.config.parse_experiment import Settings
    from lantern_bench.config.plan import Prompt
    from lantern_bench.console import Progress
    from lantern_bench.decoding.acceptance.tree_acceptance import Judge
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Place


Tables: TypeAlias = dict[str, list[dict[str, Any]]]

# Filters that leave few sequences of first tokens, so that the exact law of all of them can be tested.
_FIRST_TOKENS, _TOP_K, _PROMPTS = 3, 4, 2
_SMALL_TREE = {"nodes": 10, "depth": 2, "beam": 5}


class Sizes(NamedTuple):
    """How much is measured: places and draws of emitted TV, images of a G-test, greedy prompts, images of ambiguity."""

    positions: int
    draws: int
    samples: int
    greedy: int
    images: int


def make_certification(
    experiment: str, typed: dict[str, Any], modes: list[str] | None, settings: list[str], sizes: Sizes
) -> Certification:
    """Check everything that can be checked without models: the experiment, its cells, the prompts; no torch."""
    from lantern_bench.config.experiment import load_experiment, resolve
    from lantern_bench.config.methods import RELAXED_RULES
    from lantern_bench.config.values import Overrides
    from lantern_bench.models.registry import card_of, defaults_of, family_of
    from lantern_bench.prompts.sets import load_prompts
    from lantern_bench.runs.preflight import check_neighbours

    card = card_of(typed["model"][0])
    given = typed | {"model": [card.name], "prompts": typed["prompts"] or card.prompt_set}
    loaded = load_experiment(experiment, Overrides.from_flags(given, modes=modes, settings=settings))
    resolved = resolve(loaded, defaults_of([card.name]))
    check_neighbours(resolved)
    relaxed = [cell for cell in resolved.cells if cell.decoding.rule in RELAXED_RULES]
    for cell in relaxed:
        if cell.decoding.greedy:
            raise UserError(f"{cell.cell_id}: emitted TV is not defined at temperature 0", "Give a --temperature.")
    if not relaxed:
        raise UserError(f"{experiment}: no cell of it is relaxed", "Give another --experiment, or other --modes.")
    prompts = load_prompts(resolved.settings.prompts, family_of(card.name))
    scale = resolved.cfg_defaults[card.name]
    return Certification(card.name, resolved.settings, tuple(relaxed), prompts, sizes, scale, dict(card.defaults))


@dataclass
class Certification:
    """The checks of one model. `cells` are its relaxed ones; `scale` is its guidance, `defaults` what it suggests."""

    model: str
    settings: Settings
    cells: tuple[Cell, ...]
    prompts: Sequence[Prompt]
    sizes: Sizes
    scale: float
    defaults: Mapping[str, Any]

    @cached_property
    def place(self) -> Place:
        """The device and the number type."""
        from lantern_bench.runs.devices import choose_place

        return choose_place(self.settings.device, self.settings.dtype)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, loaded when it is first needed."""
        from lantern_bench.models.registry import load_model
        from lantern_bench.runs.devices import set_space

        model = load_model(self.model, self.place.device, self.place.dtype)
        set_space(model, self.settings.neighbour_space)
        return model

    def prepare(self, progress: Progress) -> None:
        """Let the model see all prompts: a text encoder is loaded, used and freed before anything is decoded."""
        for done, total in self.loaded.prepare([prompt.text for prompt in self.prompts]):
            progress.share("captions", done / total)

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raise `UserError` where the tables could not be written, before anything is measured."""
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"--out {folder}: {there} is a file, not a folder", "Give a folder that you may write to.")

    def certificate(self, progress: Progress) -> Tables:
        """Run every check; the tables `certificate`, `emitted_tv` and `emitted_tv_places`."""
        from lantern_bench.certify.tables import cost_check_rows, cost_rows, strict_row

        rows = [*self._lossless(progress.share), *self._greedy(progress.share)]
        strict = self._strict_cell()
        places = self._places([*self.cells, strict], progress.share)
        relaxed = [row for row in places if row["cell_id"] != strict.cell_id]
        means = list(cost_rows(relaxed))
        setting = f"dynamic {strict.decoding.tree_label}"
        rows.append(strict_row(self.model, setting, [row for row in places if row["cell_id"] == strict.cell_id]))
        rows += cost_check_rows(means, relaxed)
        return {"certificate": rows, "emitted_tv": means, "emitted_tv_places": relaxed}

    def emitted_tv(self, progress: Progress) -> Tables:
        """Measure the emitted TV of the relaxed cells: means, and the places behind them."""
        from lantern_bench.certify.tables import cost_rows

        places = self._places(self.cells, progress.share)
        return {"emitted_tv": list(cost_rows(places)), "emitted_tv_places": places}

    def ambiguity(self, progress: Progress) -> Tables:
        """Measure how sure the target is, with the sampling settings of each relaxed cell: means, and every token."""
        from lantern_bench.certify.contexts import plain
        from lantern_bench.certify.relaxation import ambiguity_rows
        from lantern_bench.certify.tables import ambiguity_table_rows

        tables: Tables = {"ambiguity": [], "ambiguity_places": []}
        for decoding in dict.fromkeys(plain(cell.decoding) for cell in self.cells):
            found = ambiguity_rows(
                self.loaded,
                decoding,
                self.prompts,
                self.sizes.images,
                seed=self.settings.seed,
                on_progress=progress.share,
            )
            places = list(found)
            tables["ambiguity"] += ambiguity_table_rows(places, self.loaded.grid[1])
            tables["ambiguity_places"] += places
        return tables

    def write(self, folder: Path, tables: Tables) -> None:
        """Write the tables as CSV, and what they were measured with as `measurement.json`."""
        from lantern_bench.models.io.files import write_atomically
        from lantern_bench.report.tables import frame, write_csv
        from lantern_bench.runs.machine import package_versions

        for name, rows in tables.items():
            write_csv(frame(name, rows), folder / f"{name}.csv")
        facts: dict[str, Any] = {"model": self.model, "weights": dict(self.loaded.weights)}
        facts |= {"seed": self.settings.seed, "prompts": self.settings.prompts, **self.sizes._asdict()}
        facts |= {"device": self.place.device.type, "dtype": self.place.dtype_name, "packages": package_versions()}
        write_atomically(folder / "measurement.json", (json.dumps(facts, indent=2) + "\n").encode())

    # ---- the checks

    def _drafted(self, **values: Any) -> dict[str, Decoding]:
        """Lossless decodings by the words for them: strict of each drafting, and a block; `values` are for all."""
        from lantern_bench.config.decoding import Decoding
        from lantern_bench.config.trees import is_chain

        common = {"mode": "speculative", "cfg_scale": self.scale, "cfg_default": self.scale} | values
        tree = {"tree": self.defaults["tree"]} if self.defaults.get("tree") else {}
        static = Decoding.model_validate({**common, "drafting": "static", **tree})
        small = Decoding.model_validate({**common, "drafting": "dynamic", **_SMALL_TREE})
        named = {f"{one.drafting} {one.tree_label}": one for one in (static, small)}
        if static.greedy:
            return named
        chain = static.tree if is_chain(static.paths) else None
        block = Decoding.model_validate({**common, "drafting": "static", "rule": "block", "tree": chain})
        return named | {f"static {block.tree_label}, block": block}

    def _lossless(self, heard: OnProgress) -> list[dict[str, Any]]:
        from lantern_bench.certify.lossless import first_tokens_test, judge_without_residual, law_of_first_tokens
        from lantern_bench.certify.tables import broken_row, lossless_row

        chosen = self.prompts[:_PROMPTS]
        rows: list[dict[str, Any]] = []
        laws: list[Law] = []
        for setting, decoding in self._drafted(top_k=_TOP_K).items():
            laws = laws or [law_of_first_tokens(self.loaded, p, decoding, _FIRST_TOKENS) for p in chosen]
            kinds: dict[str, Judge | None] = {f"first tokens, {setting}": None}
            kinds[f"first tokens, {setting}, broken on purpose"] = judge_without_residual
            found = [
                first_tokens_test(
                    self.loaded,
                    chosen,
                    laws,
                    decoding,
                    self.sizes.samples,
                    judge=judge,
                    seed=self.settings.seed,
                    on_progress=partial(_renamed, heard, about),
                )
                for about, judge in kinds.items()
            ]
            text = f"{setting}, {_FIRST_TOKENS} tokens, top-k {_TOP_K}"
            rows.append(lossless_row(self.model, text, found[0].p_value, found[0].samples, found[0].impossible))
            rows.append(broken_row(self.model, text, found[1].p_value, found[1].samples))
        return rows

    def _greedy(self, heard: OnProgress) -> list[dict[str, Any]]:
        from lantern_bench.certify.lossless import greedy_agreements
        from lantern_bench.certify.tables import identity_row

        named = self._drafted(temperature=0)
        prompts = [self.prompts[number % len(self.prompts)] for number in range(self.sizes.greedy)]
        found: dict[str, list[Any]] = {setting: [] for setting in named}
        for decoding, agreements in greedy_agreements(
            self.loaded, list(dict.fromkeys(prompts)), list(named.values()), on_progress=heard
        ):
            setting = next(words for words, one in named.items() if one == decoding)
            found[setting] += agreements
        rows = []
        for setting, agreements in found.items():
            differences = [(one, one.difference) for one in agreements if one.difference is not None]
            near = [place for one, place in differences if one.near_tie]
            others = [place for one, place in differences if not one.near_tie]
            rows.append(identity_row(self.model, setting, len(agreements) - len(near) - len(others), near, others))
        return rows

    def _strict_cell(self) -> Cell:
        """The strict rule with deterministic drafts, whose emitted TV is exact, and the sampling of the first cell."""
        from lantern_bench.certify.contexts import plain
        from lantern_bench.config.decoding import Decoding
        from lantern_bench.config.experiment import Cell

        sampling = plain(self.cells[0].decoding).model_dump(include={"temperature", "top_k", "top_p", "filter_order"})
        drafts = {"mode": "speculative", "drafting": "dynamic", **_SMALL_TREE}
        scales = {"cfg_scale": self.cells[0].decoding.cfg_scale, "cfg_default": self.scale}
        return Cell(self.model, Decoding.model_validate({**drafts, **sampling, **scales}))

    def _places(self, cells: Sequence[Cell], heard: OnProgress) -> list[dict[str, Any]]:
        from lantern_bench.certify.relaxation import CostSettings, emitted_tv_rows

        sizes = CostSettings(positions=self.sizes.positions, draws=self.sizes.draws, seed=self.settings.seed)
        return list(emitted_tv_rows(self.loaded, cells, self.prompts, sizes, heard))


def _renamed(heard: OnProgress, about: str, _what: str, done: float) -> None:
    """Tell progress under another name."""
    heard(about, done)
