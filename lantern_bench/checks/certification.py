"""Certify or audit one model: run the trials of `trials.py`, and write the tables of their results.

Bars and rows are in `tables.py`, the tests in `whole_image.py` and `tabular.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lantern_bench.checks import certificate_rows, image_tests
from lantern_bench.checks.claims import CertificationPlan
from lantern_bench.checks.tabular_model import g_tests, table_images, table_tokens
from lantern_bench.checks.trials import Trial, audit_trials, certificate_trials, lossless_decodings
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.decoding.loop import decode
from lantern_bench.devices.compute import Compute, choose_compute
from lantern_bench.devices.machine import package_versions
from lantern_bench.models.load import load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.schema import frame, write_csv
from lantern_bench.utils.clock import now
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, ProgressEvent

Tables: TypeAlias = dict[str, list[dict[str, Any]]]

GREEDY = 8
"""Prompts whose greedy decoding is compared."""
_FIRST_IMAGES = 500  # of a broken rule on the tables; each further test has twice as many
_CALIBRATION = 16  # tokens


def _on_tables(trial: Trial, seed: int, level: float, emit: Emit) -> certificate_rows.TrialResult:
    """The G-tests of a trial."""
    decoded = 0
    tokens = torch.empty(0, table_tokens(trial.decoding), dtype=torch.int64)
    while True:
        end = min(trial.images, max(_FIRST_IMAGES, 2 * decoded)) if trial.broken else trial.images
        more = table_images(
            decoding=trial.decoding,
            images=range(decoded, end),
            rule=trial.rule,
            drafting=trial.drafting,
            seed=seed,
        )
        tokens = torch.cat([tokens, more])
        decoded = end
        p_values, tv = g_tests(trial.decoding, tokens)
        emit(ProgressEvent(trial.setting, decoded, trial.images))
        if decoded == trial.images or min(p_values.values()) < level:
            return certificate_rows.TrialResult(
                setting=trial.setting,
                broken=trial.broken,
                p_values=p_values,
                images=decoded,
                tokens=tokens.numel(),
                tv=tv,
            )


def _on_model(
    trial: Trial,
    model: LoadedModel,
    prompts: Sequence[Prompt],
    seed: int,
    level: float,
    emit: Emit,
) -> certificate_rows.TrialResult:
    """The tests of whole images of a trial."""
    decoding = trial.decoding
    batches = []
    images = 0
    depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
    sampled = (model, prompts, decoding, trial.images)
    tolerance = image_tests.edge_tolerance(trial.dtype, decoding)
    for batch in image_tests.decoded_evidence(
        *sampled, tolerance=tolerance, seed=seed, rule=trial.rule, drafting=trial.drafting
    ):
        batches.append(batch)
        images += len(batch.starts)
        emit(ProgressEvent(trial.setting, min(images, trial.images), trial.images))
        p_values = image_tests.p_values(batches, depth)
        if min(p_values.values()) < level:
            break
    edge, impossible = (
        sum(int(getattr(batch, key).sum()) for batch in batches) for key in ("edge", "impossible")
    )
    tokens = sum(batch.starts.size for batch in batches)
    return certificate_rows.TrialResult(
        setting=trial.setting,
        broken=trial.broken,
        p_values=p_values,
        images=images,
        tokens=tokens,
        edge=edge,
        impossible=impossible,
    )


class Certification:
    """The measurements of one plan."""

    def __init__(self, plan: CertificationPlan) -> None:
        self.plan = plan
        settings = plan.resolved.settings
        self.compute: Compute = choose_compute(settings.device, settings.dtype, fast=True)
        self._models: dict[str, LoadedModel] = {}
        dtype = self.compute.dtype_name
        self.loaded = self.model_in(dtype)
        tree = model_of(plan.model).defaults.get("tree")
        cfg_default = plan.resolved.cfg_defaults[plan.model]
        self._of_claims = [
            audit_trials(claim=claim, model=plan.model, dtype=dtype, samples=plan.samples)
            for claim in plan.claims
        ]
        of_claims = list(itertools.chain.from_iterable(self._of_claims))
        self.trials = of_claims or certificate_trials(
            plan=plan, tree=tree, cfg_default=cfg_default, dtype=dtype
        )
        self._greedy = {} if plan.claims else lossless_decodings(tree, cfg_default, temperature=0)

    def model_in(self, dtype: str) -> LoadedModel:
        """Return the model in a dtype, loaded once."""
        if dtype not in self._models:
            compute = self.compute._replace(dtype=getattr(torch, dtype))
            self._models[dtype] = load_models(self.plan.resolved, compute)[self.plan.model]
        return self._models[dtype]

    def run(self, trial: Trial, level: float, emit: Emit) -> certificate_rows.TrialResult:
        """Decode and test the images of a trial; of a broken one only until a p-value falls below `level`."""
        level = level if trial.broken else 0.0
        seed = self.plan.resolved.settings.seed
        if not trial.dtype:
            return _on_tables(trial=trial, seed=seed, level=level, emit=emit)
        return _on_model(
            trial=trial,
            model=self.model_in(trial.dtype),
            prompts=self.plan.prompts,
            seed=seed,
            level=level,
            emit=emit,
        )

    def prepare(self, emit: Emit) -> None:
        """Encode the prompts."""
        for done, total in self.loaded.prepare([prompt.text for prompt in self.plan.prompts]):
            emit(ProgressEvent("captions", done, total))

    @cached_property
    def seconds(self) -> list[float]:
        """Estimates for each trial, and for greedy decoding; from a short piece of work of each kind."""

        def seconds(work: Callable[[], Any]) -> float:
            work()
            before = now()
            work()
            return now() - before

        ar = self.plan.sampling
        plan = self.plan
        condition = self.loaded.condition([plan.prompts[0].text] * GREEDY)

        def few_tokens() -> None:
            streams = [
                torch.Generator(self.loaded.target.device).manual_seed(0) for _ in range(GREEDY)
            ]
            decode(
                model=self.loaded,
                condition=condition,
                decoding=ar.autoregressive(),
                generators=streams,
                tokens=_CALIBRATION,
            )

        of_image = seconds(few_tokens) / GREEDY * self.loaded.target.image_tokens / _CALIBRATION
        small = next((trial.decoding for trial in self.trials if not trial.dtype), None)
        of_token = (
            0.0
            if small is None
            else seconds(lambda: table_images(small, range(500))) / 500 / table_tokens(small)
        )
        estimates = [
            trial.images * (of_image if trial.dtype else of_token * table_tokens(trial.decoding))
            for trial in self.trials
        ]
        return [*estimates, of_image * GREEDY * (1 + len(self._greedy)) / 2]

    def measure(self, emit: Emit) -> Tables:
        """Return the tables."""
        description = "audit" if self.plan.claims else "certificate"
        total = sum(self.seconds)
        before = 0.0
        results = []
        # Of a broken rule: Bonferroni over the tests of the trials that are not.
        count = sum(
            4 if not trial.dtype else image_tests.TESTS for trial in self.trials if not trial.broken
        )
        level = certificate_rows.LEVEL / count if self.plan.has_power else 0.0

        def progress(seconds: float, event: ProgressEvent) -> None:
            done = before + seconds * event.done / event.total
            emit(ProgressEvent(description, done / total))

        for trial, seconds in zip(self.trials, self.seconds, strict=False):
            results.append(self.run(trial, level, partial(progress, seconds)))
            before += seconds
        if self.plan.claims:
            several = iter(results)
            audited = []
            for claim, trials in zip(self.plan.claims, self._of_claims, strict=True):
                audited.append((claim, [next(several) for _ in trials]))
            rows, tests = certificate_rows.audit_rows(self.plan.model, audited)
            return {"audit": rows, "lossless_tests": tests}
        rows, tests = certificate_rows.trial_rows(
            self.plan.model, [result for result in results if result.broken is None]
        )
        rows += self._greedy_rows(partial(progress, self.seconds[-1]))
        broken = [result for result in results if result.broken is not None]
        power = (
            {"power": certificate_rows.power_rows(self.plan.model, broken, level)}
            if self.plan.has_power
            else {}
        )
        return {"certificate": rows, "lossless_tests": tests} | power

    def write(self, folder: Path, measured: Tables) -> None:
        """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
        for name, rows in measured.items():
            write_csv(frame(name, rows), folder / f"{name}.csv")
        settings = self.plan.resolved.settings
        measurement = {
            "model": self.plan.model,
            "weights": dict(self.loaded.weights),
            "seed": settings.seed,
            "prompts": settings.prompts,
            "samples": self.plan.samples,
            "thorough": self.plan.is_thorough,
            "device": self.compute.device.type,
            "dtype": self.compute.dtype_name,
            "packages": package_versions(),
        }
        write_file(folder / "measurement.json", (json.dumps(measurement, indent=2) + "\n").encode())

    def _greedy_rows(self, emit: Emit) -> list[dict[str, Any]]:
        """Whether each drafting at temperature 0 gives the tokens of greedy decoding."""
        prompts = list(dict.fromkeys(self.plan.prompts[:GREEDY]))
        differences = image_tests.greedy_differences(
            model=self.loaded, prompts=prompts, decodings=self._greedy, emit=emit
        )
        tolerance = image_tests.NEAR_TIE[self.compute.dtype_name]
        return [
            certificate_rows.identity_row(
                model=self.plan.model, setting=name, differences=rows, tolerance=tolerance
            )
            for name, rows in differences.items()
        ]
