"""Certify or audit one model: run the trials and measurements of a plan, and write the tables.

Bars and rows are in `tables.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lantern_bench.certify import tables
from lantern_bench.certify.plan import Measurement
from lantern_bench.certify.relaxation import emitted_tv_rows
from lantern_bench.certify.tabular import TOKENS, g_tests, table_model
from lantern_bench.certify.trials import Trial, audit_trials, certificate_trials, lossless_decodings
from lantern_bench.certify.whole_image import NEAR_TIE, decoded_evidence, edge_tolerance, greedy_differences, p_values
from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from lantern_bench.report.tables import frame, write_csv
from lantern_bench.runs.devices import Compute, choose_compute, load_models, package_versions

Tables: TypeAlias = dict[str, list[dict[str, Any]]]

_SMALL_TREE = {"mode": "speculative", "drafting": "dynamic", "nodes": 10, "depth": 2, "beam": 5}


class Certification:
    """The measurements of one plan."""

    def __init__(self, plan: Measurement) -> None:
        self.plan, self.model, self.resolved = plan, plan.model, plan.resolved
        self.tree = model_of(plan.model).defaults.get("tree")
        settings = plan.resolved.settings
        self.compute: Compute = choose_compute(settings.device, settings.dtype, fast=True)
        self.loaded: LoadedModel = load_models(plan.resolved, self.compute)[plan.model]

    @cached_property
    def exact(self) -> LoadedModel:
        """The model in float32, where rounding moves few tokens across a filter's edge, not compiled."""
        if self.compute.dtype == torch.float32:
            return self.loaded
        return load_models(self.resolved, self.compute._replace(dtype=torch.float32))[self.model]

    def measure(self, emitted_tv: bool, on_progress: OnProgress) -> Tables:
        """Return the tables of the audit or of the certificate, or those of emitted TV alone."""
        # All prompts at once: a text encoder is loaded, used and freed before decoding starts.
        for done, total in self.loaded.prepare([prompt.text for prompt in self.plan.prompts]):
            on_progress("captions", done / total)
        if emitted_tv:
            return means_of(self._emitted_tv(self.plan.relaxed, on_progress))
        return self._audit(on_progress) if self.plan.claims else self._certificate(on_progress)

    def write(self, folder: Path, measured: Tables) -> None:
        """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
        for name, rows in measured.items():
            write_csv(frame(name, rows), folder / f"{name}.csv")
        settings = self.resolved.settings
        measurement = {
            "model": self.model,
            "weights": dict(self.loaded.weights),
            "seed": settings.seed,
            "prompts": settings.prompts,
            **self.plan.sizes._asdict(),
            "device": self.compute.device.type,
            "dtype": self.compute.dtype_name,
            "packages": package_versions(),
        }
        write_atomically(folder / "measurement.json", (json.dumps(measurement, indent=2) + "\n").encode())

    def _audit(self, on_progress: OnProgress) -> Tables:
        audited = []
        for claim in self.plan.claims:
            trials = audit_trials(claim, self.loaded, self.compute.dtype_name, self.plan.sizes.samples)
            audited.append((claim, [self.run(trial, on_progress) for trial in trials]))
        costs = means_of(self._emitted_tv(self.plan.relaxed, on_progress) if self.plan.relaxed else [])
        rows, tests = tables.audit_rows(self.model, audited, costs["emitted_tv"])
        return {"audit": rows, "lossless_tests": tests, **costs}

    def _certificate(self, on_progress: OnProgress) -> Tables:
        first, cfg_default = self.plan.relaxed[0].decoding, self.resolved.cfg_defaults[self.model]
        dtype, samples = self.compute.dtype_name, self.plan.sizes.samples
        trials = certificate_trials(first, self.tree, cfg_default, self.loaded, dtype, samples)
        rows, tests = tables.whole_image_rows(self.model, [self.run(trial, on_progress) for trial in trials])
        rows += self._greedy(on_progress)
        # The strict rule with deterministic drafts, because their emitted TV is exact; sampling as in the first cell.
        sampling = {key: first.value(key) for key in ("temperature", "top_k", "top_p", "filter_order")}
        scales = {"cfg_scale": first.cfg_scale, "cfg_default": cfg_default}
        strict = Cell(self.model, Decoding(**{**_SMALL_TREE, **sampling, **scales}))
        places = self._emitted_tv([*self.plan.relaxed, strict], on_progress)
        of_strict = [row for row in places if row["cell_id"] == strict.cell_id]
        costs = means_of([row for row in places if row["cell_id"] != strict.cell_id])
        rows.append(tables.strict_row(self.model, f"dynamic {strict.decoding.tree_label}", of_strict))
        rows += tables.cost_check_rows(costs["emitted_tv"], costs["emitted_tv_places"])
        return {"certificate": rows, "lossless_tests": tests, **costs}

    def run(self, trial: Trial, on_progress: OnProgress) -> tables.TrialResult:
        """Decode the images of a trial and test their tokens."""
        return self._run_on_tables(trial, on_progress) if trial.on_tables else self._run_with_model(trial, on_progress)

    def _run_on_tables(self, trial: Trial, on_progress: OnProgress) -> tables.TrialResult:
        on_progress(trial.name, 0.0)
        tests = g_tests(table_model(), trial.decoding, trial.images, trial.broken_rule)
        broken = trial.broken_rule.name if trial.broken_rule else None
        tokens, tv = tests.images * TOKENS, (tests.low, tests.high)
        return tables.TrialResult(trial.setting, broken, tests.p_values, tests.images, tokens, tv=tv)

    def _run_with_model(self, trial: Trial, on_progress: OnProgress) -> tables.TrialResult:
        """Test whole images; of a broken rule only until a p-value falls below the trial's level."""
        decoding, broken_rule = trial.decoding, trial.broken_rule
        model = self.loaded if trial.dtype == self.compute.dtype_name else self.exact
        depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
        batches, images = [], 0
        for batch in decoded_evidence(
            model,
            self.plan.prompts,
            decoding,
            trial.images,
            tolerance=edge_tolerance(trial.dtype, decoding),
            seed=self.resolved.settings.seed,
            rule=broken_rule,
        ):
            batches.append(batch)
            images += len(batch.starts)
            on_progress(f"whole images, {trial.name}", min(1.0, images / trial.images))
            if broken_rule and min(p_values(batches, depth).values()) < trial.level:
                break
        edge, impossible = (sum(int(getattr(batch, key).sum()) for batch in batches) for key in ("edge", "impossible"))
        tokens = sum(batch.starts.size for batch in batches)
        broken = broken_rule.name if broken_rule else None
        return tables.TrialResult(trial.setting, broken, p_values(batches, depth), images, tokens, edge, impossible)

    def _greedy(self, on_progress: OnProgress) -> list[dict[str, Any]]:
        """Whether each drafting at temperature 0 gives the tokens of greedy decoding."""
        named = lossless_decodings(self.tree, self.resolved.cfg_defaults[self.model], temperature=0)
        prompts = list(dict.fromkeys(self.plan.prompts[: self.plan.sizes.greedy]))
        differences = greedy_differences(self.loaded, prompts, list(named.values()), on_progress=on_progress)
        tolerance = NEAR_TIE[self.compute.dtype_name]
        return [
            tables.identity_row(self.model, setting, differences[decoding], tolerance)
            for setting, decoding in named.items()
        ]

    def _emitted_tv(self, cells: Sequence[Cell], on_progress: OnProgress) -> list[dict[str, Any]]:
        """The emitted TV of the cells at sampled positions, one row per position and cell."""
        sizes, seed = self.plan.sizes, self.resolved.settings.seed
        rows = emitted_tv_rows(
            self.loaded,
            cells,
            self.plan.prompts,
            positions=sizes.positions,
            draws=sizes.draws,
            seed=seed,
            on_progress=on_progress,
        )
        return list(rows)


def means_of(places: list[dict[str, Any]]) -> Tables:
    """Return the table of means of emitted TV, and the rows of places that it is computed from."""
    return {"emitted_tv": list(tables.cost_rows(places)), "emitted_tv_places": places}
