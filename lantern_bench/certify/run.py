"""Certify or audit one model: plan the trials and measurements, run them, and write the tables.

Planning checks the whole request before torch is imported. Bars and rows are in `tables.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.certify import tables
from lantern_bench.certify.claims import Claim, claim_of
from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell, ResolvedExperiment, load_experiment
from lantern_bench.config.plan import Prompt
from lantern_bench.config.values import Overrides
from lantern_bench.errors import UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts import load_prompts
from lantern_bench.report.tables import frame, write_csv
from lantern_bench.runs.request import check_neighbours

if TYPE_CHECKING:
    from lantern_bench.certify.trials import Trial
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Compute

Tables: TypeAlias = dict[str, list[dict[str, Any]]]

_SMALL_TREE = {"mode": "speculative", "drafting": "dynamic", "nodes": 10, "depth": 2, "beam": 5}


class Sizes(NamedTuple):
    """How much is measured."""

    positions: int  # of emitted TV
    draws: int  # of emitted TV, a position
    samples: int  # images of a trial
    greedy: int  # prompts of the greedy identity check


def plan_certificate(
    experiment: str, flags: dict[str, Any], modes: list[str] | None, settings: list[str], sizes: Sizes
) -> Certification:
    """Resolve the relaxed cells and the prompts of an experiment; raises `UserError`, imports no torch."""
    model = model_of(flags["model"][0])
    flags = flags | {"model": [model.name], "prompts": flags["prompts"] or next(iter(model.prompt_sets))}
    overrides = Overrides.from_flags(flags, modes=modes, settings=settings)
    resolved = load_experiment(experiment, defaults_of, overrides)
    check_neighbours(resolved)
    relaxed = tuple(cell for cell in resolved.cells if not cell.decoding.rule_row.lossless)
    check_cells(relaxed)
    if not relaxed:
        raise UserError(f"{experiment}: has no relaxed cell", "Give another --experiment, or other --modes.")
    prompts = load_prompts(resolved.settings.prompts, model)
    return Certification(model.name, resolved, relaxed, prompts, sizes)


def plan_audit(resolved: ResolvedExperiment, sizes: Sizes) -> Certification:
    """Plan the audit of cells that `audited_cells` lists; raises `UserError`, imports no torch."""
    for cell in resolved.cells:
        if cell.decoding.greedy:
            problem = f"{cell.cell_id}: at temperature 0 there is no distribution to test"
            raise UserError(problem, "Give a --temperature above 0.")
    claims = tuple(map(claim_of, resolved.cells))
    relaxed = tuple(claim.cell for claim in claims if not claim.is_lossless)
    model = model_of(resolved.settings.model[0])
    prompts = load_prompts(resolved.settings.prompts, model)
    return Certification(model.name, resolved, relaxed, prompts, sizes, claims)


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise `UserError` where emitted TV is undefined: at temperature 0, and without drafts."""
    for cell in cells:
        if cell.decoding.greedy:
            raise UserError(f"{cell.cell_id}: emitted TV is not defined at temperature 0", "Give a --temperature.")
        if not cell.decoding.drafts:
            raise UserError(f"{cell.cell_id}: drafts nothing and has no emitted TV", "Leave the mode ar out.")


@dataclass
class Certification:
    """The planned certificate of one model, or with `claims` its audit."""

    model: str
    resolved: ResolvedExperiment
    relaxed: tuple[Cell, ...]  # the cells whose emitted TV is measured
    prompts: Sequence[Prompt]
    sizes: Sizes
    claims: tuple[Claim, ...] = ()

    @cached_property
    def compute(self) -> Compute:
        """The device and the number type."""
        from lantern_bench.runs.devices import choose_compute

        return choose_compute(self.resolved.settings.device, self.resolved.settings.dtype, fast=True)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, loaded on first use."""
        from lantern_bench.runs.devices import load_models

        return load_models(self.resolved, self.compute)[self.model]

    @cached_property
    def exact(self) -> LoadedModel:
        """The model in float32, where rounding moves few tokens across a filter's edge, not compiled."""
        import torch

        from lantern_bench.runs.devices import load_models

        if self.compute.dtype == torch.float32:
            return self.loaded
        return load_models(self.resolved, self.compute._replace(dtype=torch.float32))[self.model]

    @property
    def tree(self) -> Any:
        """The model's own static tree: a name, paths, or None."""
        return model_of(self.model).defaults.get("tree")

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raise `UserError` before the measurement if the tables cannot be written there."""
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            problem = f"--out {folder}: {existing} is a file, not a folder"
            raise UserError(problem, "Give a folder that you may write to.")

    def measure(self, emitted_tv: bool, on_progress: OnProgress) -> Tables:
        """Return the tables of the audit or of the certificate, or those of emitted TV alone."""
        # All prompts at once: a text encoder is loaded, used and freed before decoding starts.
        for done, total in self.loaded.prepare([prompt.text for prompt in self.prompts]):
            on_progress("captions", done / total)
        if emitted_tv:
            return means_of(self._emitted_tv(self.relaxed, on_progress))
        return self._audit(on_progress) if self.claims else self._certificate(on_progress)

    def write(self, folder: Path, measured: Tables) -> None:
        """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
        from lantern_bench.runs.machine import package_versions

        for name, rows in measured.items():
            write_csv(frame(name, rows), folder / f"{name}.csv")
        settings = self.resolved.settings
        facts: dict[str, Any] = {"model": self.model, "weights": dict(self.loaded.weights)}
        facts |= {"seed": settings.seed, "prompts": settings.prompts, **self.sizes._asdict()}
        facts |= {"device": self.compute.device.type, "dtype": self.compute.dtype_name, "packages": package_versions()}
        write_atomically(folder / "measurement.json", (json.dumps(facts, indent=2) + "\n").encode())

    def _audit(self, on_progress: OnProgress) -> Tables:
        from lantern_bench.certify.trials import audit_trials

        audited = []
        for claim in self.claims:
            trials = audit_trials(claim, self.loaded, self.compute.dtype_name, self.sizes.samples)
            audited.append((claim, [self.run(trial, on_progress) for trial in trials]))
        costs = means_of(self._emitted_tv(self.relaxed, on_progress) if self.relaxed else [])
        rows, tests = tables.audit_rows(self.model, audited, costs["emitted_tv"])
        return {"audit": rows, "lossless_tests": tests, **costs}

    def _certificate(self, on_progress: OnProgress) -> Tables:
        from lantern_bench.certify.trials import certificate_trials

        first, cfg_default = self.relaxed[0].decoding, self.resolved.cfg_defaults[self.model]
        dtype, samples = self.compute.dtype_name, self.sizes.samples
        trials = certificate_trials(first, self.tree, cfg_default, self.loaded, dtype, samples)
        rows, tests = tables.whole_image_rows(self.model, [self.run(trial, on_progress) for trial in trials])
        rows += self._greedy(on_progress)
        # The strict rule with deterministic drafts, because their emitted TV is exact; sampling as in the first cell.
        sampling = {key: first.value(key) for key in ("temperature", "top_k", "top_p", "filter_order")}
        scales = {"cfg_scale": first.cfg_scale, "cfg_default": cfg_default}
        strict = Cell(self.model, Decoding(**{**_SMALL_TREE, **sampling, **scales}))
        places = self._emitted_tv([*self.relaxed, strict], on_progress)
        of_strict = [row for row in places if row["cell_id"] == strict.cell_id]
        costs = means_of([row for row in places if row["cell_id"] != strict.cell_id])
        rows.append(tables.strict_row(self.model, f"dynamic {strict.decoding.tree_label}", of_strict))
        rows += tables.cost_check_rows(costs["emitted_tv"], costs["emitted_tv_places"])
        return {"certificate": rows, "lossless_tests": tests, **costs}

    def run(self, trial: Trial, on_progress: OnProgress) -> tables.TrialResult:
        """Decode the images of a trial and test their tokens."""
        return self._run_on_tables(trial, on_progress) if trial.on_tables else self._run_with_model(trial, on_progress)

    def _run_on_tables(self, trial: Trial, on_progress: OnProgress) -> tables.TrialResult:
        from lantern_bench.certify.tabular import TOKENS, g_tests, table_model

        on_progress(trial.name, 0.0)
        tests = g_tests(table_model(), trial.decoding, trial.images, trial.mistake)
        mistake, tokens = trial.mistake and trial.mistake.name, tests.images * TOKENS
        tv = (tests.low, tests.high)
        return tables.TrialResult(trial.setting, mistake, tests.p_values, tests.images, tokens, tv=tv)

    def _run_with_model(self, trial: Trial, on_progress: OnProgress) -> tables.TrialResult:
        """Test whole images; with a mistake only until a p-value falls below the trial's level."""
        from lantern_bench.certify.whole_image import decoded_evidence, edge_tolerance, p_values
        from lantern_bench.decoding.drafting import drafting_of

        decoding, mistake = trial.decoding, trial.mistake
        model = self.loaded if trial.dtype == self.compute.dtype_name else self.exact
        depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
        batches, images = [], 0
        for batch in decoded_evidence(
            model,
            self.prompts,
            decoding,
            trial.images,
            tolerance=edge_tolerance(trial.dtype, decoding),
            seed=self.resolved.settings.seed,
            mistake=mistake,
        ):
            batches.append(batch)
            images += len(batch.starts)
            on_progress(f"whole images, {trial.name}", min(1.0, images / trial.images))
            if mistake and min(p_values(batches, depth).values()) < trial.level:
                break
        edge, impossible = (sum(int(getattr(batch, key).sum()) for batch in batches) for key in ("edge", "impossible"))
        tokens = sum(batch.starts.size for batch in batches)
        name = mistake.name if mistake else None
        return tables.TrialResult(trial.setting, name, p_values(batches, depth), images, tokens, edge, impossible)

    def _greedy(self, on_progress: OnProgress) -> list[dict[str, Any]]:
        """Whether each drafting at temperature 0 gives the tokens of greedy decoding."""
        from lantern_bench.certify.greedy_identity import NEAR_TIE, greedy_differences
        from lantern_bench.certify.trials import lossless_decodings

        named = lossless_decodings(self.tree, self.resolved.cfg_defaults[self.model], temperature=0)
        prompts = list(dict.fromkeys(self.prompts[: self.sizes.greedy]))
        differences = greedy_differences(self.loaded, prompts, list(named.values()), on_progress=on_progress)
        tolerance = NEAR_TIE[self.compute.dtype_name]
        return [
            tables.identity_row(self.model, setting, differences[decoding], tolerance)
            for setting, decoding in named.items()
        ]

    def _emitted_tv(self, cells: Sequence[Cell], on_progress: OnProgress) -> list[dict[str, Any]]:
        """The emitted TV of the cells at sampled positions, one row per position and cell."""
        from lantern_bench.certify.relaxation import CostSettings, emitted_tv_rows

        settings = CostSettings(self.sizes.positions, draws=self.sizes.draws, seed=self.resolved.settings.seed)
        return list(emitted_tv_rows(self.loaded, cells, self.prompts, settings, on_progress))


def means_of(places: list[dict[str, Any]]) -> Tables:
    """Return the table of means of emitted TV, and the rows of places that it is computed from."""
    return {"emitted_tv": list(tables.cost_rows(places)), "emitted_tv_places": places}
