"""Certify or audit one model: run the trials of a plan and write the tables of their results.

The trials are in `trials.py`, their tests in `image_tests.py` and `tabular_model.py`, and the rows
and bars in `certificate_rows.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lantern_bench.checks import certificate_rows, image_tests, tabular_model
from lantern_bench.checks.certificate_rows import TrialResult
from lantern_bench.checks.claims import CertificationPlan
from lantern_bench.checks.trials import Trial, lossless_decodings, plan_trials
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.decoding.loop import decode
from lantern_bench.devices.compute import Compute, choose_compute
from lantern_bench.devices.machine import package_versions
from lantern_bench.models.load import compile_models, load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.storage.schema import frame, write_csv
from lantern_bench.utils.clock import now
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, Note, ProgressEvent
from lantern_bench.utils.text import duration

Tables: TypeAlias = dict[str, list[dict[str, Any]]]

GREEDY = 8
"""Prompts whose greedy decoding is compared."""
_FIRST_IMAGES = 500  # of a broken rule on the tables; each further test has twice as many
_CALIBRATION_TOKENS = 16
_CALIBRATION_IMAGES = 500  # of the tables


def certify(plan: CertificationPlan, folder: Path, emit: Emit) -> Tables:
    """Run every trial of a plan and write the tables into a directory.

    Args:
        plan: The certificate or the audit of one model.
        folder: Directory of the CSV files and of `measurement.json`.
        emit: Receives notes and progress.

    Returns:
        The rows of each table, by its name.
    """
    settings = plan.resolved.settings
    compute = choose_compute(settings.device, settings.dtype, fast=True)
    trials = plan_trials(plan, compute.dtype_name)
    models = load_by_dtype(plan, compute, trials)
    model = models[compute.dtype_name]
    note = compile_models([model], compute) if settings.compile else None
    if note is not None:
        emit(note)
    for done, total in model.prepare([prompt.text for prompt in plan.prompts]):
        emit(ProgressEvent("captions", done, total))

    # 1. Estimate the seconds of each trial, for the progress.
    greedy = {} if plan.claims else lossless_decodings(plan, temperature=0)
    image_seconds = _image_seconds(plan, model)
    seconds = _trial_seconds(trials, image_seconds)
    greedy_seconds = image_seconds * GREEDY * (1 + len(greedy)) / 2
    total_seconds = sum(seconds) + greedy_seconds
    on_tables = sum(not trial.dtype for trial in trials)
    counts = f"{on_tables} on tables, {len(trials) - on_tables} with {plan.model}"
    emit(Note(f"{len(trials)} trials ({counts}): about {duration(total_seconds)}"))
    description = "audit" if plan.claims else "certificate"
    before = 0.0

    def show_part(part: float, event: ProgressEvent) -> None:
        done = before + part * event.done / event.total
        emit(ProgressEvent(description, done / total_seconds))

    # 2. Run the trials.
    level = rejection_level(trials) if plan.has_power else 0.0
    results = []
    for trial, part in zip(trials, seconds, strict=True):
        show = partial(show_part, part)
        results.append(run_trial(trial, plan, models, level=level, emit=show))
        before += part

    # 3. Make the tables.
    if plan.claims:
        tables = _audit_tables(plan, trials, results)
    else:
        tables = _certificate_tables(plan, results, level)
        differences = image_tests.greedy_differences(
            model=model,
            prompts=list(dict.fromkeys(plan.prompts[:GREEDY])),
            decodings=greedy,
            emit=partial(show_part, greedy_seconds),
        )
        tolerance = image_tests.NEAR_TIE[compute.dtype_name]
        tables["certificate"] += [
            certificate_rows.identity_row(plan.model, name, rows, tolerance=tolerance)
            for name, rows in differences.items()
        ]
    _write(plan, compute, model, folder=folder, tables=tables)
    return tables


def load_by_dtype(
    plan: CertificationPlan, compute: Compute, trials: Sequence[Trial]
) -> dict[str, LoadedModel]:
    """Load the model in its own dtype and in the dtypes of the trials.

    Args:
        plan: Names the model.
        compute: The device and the model's own dtype.
        trials: The trials that will be run.

    Returns:
        The models by dtype name.
    """
    names = {compute.dtype_name, *(trial.dtype for trial in trials if trial.dtype)}
    return {
        name: load_models(plan.resolved, compute._replace(dtype=getattr(torch, name)))[plan.model]
        for name in sorted(names)
    }


def rejection_level(trials: Sequence[Trial]) -> float:
    """Return the p-value below which a broken decoding is rejected.

    It is the level of the certificate divided by the number of tests of the trials that are not
    broken (Bonferroni's correction).
    """
    counts = [
        image_tests.TESTS if trial.dtype else tabular_model.TESTS
        for trial in trials
        if trial.broken is None
    ]
    return certificate_rows.LEVEL / sum(counts)


def run_trial(
    trial: Trial,
    plan: CertificationPlan,
    models: Mapping[str, LoadedModel],
    *,
    level: float,
    emit: Emit,
) -> TrialResult:
    """Decode and test the images of a trial.

    Args:
        trial: The decoding and the number of its images.
        plan: Gives seed and prompts.
        models: The model in each dtype (see `load_by_dtype`).
        level: A broken decoding is decoded only until a p-value falls below this level.
        emit: Receives progress.
    """
    level = level if trial.broken else 0.0
    if trial.dtype:
        return _run_on_model(trial, plan, models[trial.dtype], level=level, emit=emit)
    seed = plan.resolved.settings.seed
    return _run_on_tables(trial, seed, level=level, emit=emit)


def _run_on_tables(trial: Trial, seed: int, *, level: float, emit: Emit) -> TrialResult:
    """Run the G-tests of a trial."""
    decoding = trial.decoding
    decoded = 0
    tokens = torch.empty(0, tabular_model.table_tokens(decoding), dtype=torch.int64)
    while True:
        end = trial.images
        if trial.broken:
            end = min(end, max(_FIRST_IMAGES, 2 * decoded))
        more = tabular_model.table_images(
            decoding=decoding,
            images=range(decoded, end),
            rule=trial.rule,
            drafting=trial.drafting,
            seed=seed,
        )
        tokens = torch.cat([tokens, more])
        decoded = end
        p_values, tv = tabular_model.g_tests(decoding, tokens)
        emit(ProgressEvent(trial.setting, decoded, trial.images))
        if decoded == trial.images or min(p_values.values()) < level:
            return TrialResult(
                setting=trial.setting,
                broken=trial.broken,
                p_values=p_values,
                images=decoded,
                tokens=tokens.numel(),
                tv=tv,
            )


def _run_on_model(
    trial: Trial, plan: CertificationPlan, model: LoadedModel, *, level: float, emit: Emit
) -> TrialResult:
    """Run the tests of whole images of a trial."""
    decoding = trial.decoding
    depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
    batches = []
    images = 0
    p_values: dict[str, float] = {}
    for batch in image_tests.decoded_evidence(
        model=model,
        prompts=plan.prompts,
        decoding=decoding,
        images=trial.images,
        tolerance=image_tests.edge_tolerance(trial.dtype, decoding),
        seed=plan.resolved.settings.seed,
        rule=trial.rule,
        drafting=trial.drafting,
    ):
        batches.append(batch)
        images += len(batch.starts)
        emit(ProgressEvent(trial.setting, min(images, trial.images), trial.images))
        p_values = image_tests.p_values(batches, depth)
        if min(p_values.values()) < level:
            break
    return TrialResult(
        setting=trial.setting,
        broken=trial.broken,
        p_values=p_values,
        images=images,
        tokens=sum(batch.starts.size for batch in batches),
        edge=sum(int(batch.edge.sum()) for batch in batches),
        impossible=sum(int(batch.impossible.sum()) for batch in batches),
    )


def _certificate_tables(
    plan: CertificationPlan, results: Sequence[TrialResult], level: float
) -> Tables:
    right = [result for result in results if result.broken is None]
    rows, tests = certificate_rows.trial_rows(plan.model, right)
    tables = {"certificate": rows, "lossless_tests": tests}
    if plan.has_power:
        broken = [result for result in results if result.broken is not None]
        tables["power"] = certificate_rows.power_rows(plan.model, broken, level)
    return tables


def _audit_tables(
    plan: CertificationPlan, trials: Sequence[Trial], results: Sequence[TrialResult]
) -> Tables:
    audited = []
    for claim in plan.claims:
        pairs = zip(trials, results, strict=True)
        audited.append((claim, [result for trial, result in pairs if trial.claim is claim]))
    rows, tests = certificate_rows.audit_rows(plan.model, audited)
    return {"audit": rows, "lossless_tests": tests}


# ---- Estimates of time


def _trial_seconds(trials: Sequence[Trial], image_seconds: float) -> list[float]:
    """Estimate the seconds of each trial; those on the tables from a few images."""
    of_token = 0.0
    on_tables = [trial.decoding for trial in trials if not trial.dtype]
    if on_tables:
        images = range(_CALIBRATION_IMAGES)
        seconds = _second_run(lambda: tabular_model.table_images(on_tables[0], images))
        of_token = seconds / len(images) / tabular_model.table_tokens(on_tables[0])
    estimates = []
    for trial in trials:
        of_tables = of_token * tabular_model.table_tokens(trial.decoding)
        estimates.append(trial.images * (image_seconds if trial.dtype else of_tables))
    return estimates


def _image_seconds(plan: CertificationPlan, model: LoadedModel) -> float:
    """Estimate the seconds of one image of the model."""
    condition = model.condition([plan.prompts[0].text] * GREEDY)
    plain = plan.sampling.autoregressive()
    device = model.target.device

    def decode_few_tokens() -> None:
        decode(
            model=model,
            condition=condition,
            decoding=plain,
            generators=[torch.Generator(device).manual_seed(0) for _ in range(GREEDY)],
            tokens=_CALIBRATION_TOKENS,
        )

    tokens = GREEDY * _CALIBRATION_TOKENS
    return _second_run(decode_few_tokens) * model.target.image_tokens / tokens


def _second_run(work: Callable[[], Any]) -> float:
    """The seconds of some work when it is done for the second time."""
    work()
    began = now()
    work()
    return now() - began


def _write(
    plan: CertificationPlan, compute: Compute, model: LoadedModel, *, folder: Path, tables: Tables
) -> None:
    """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
    for name, rows in tables.items():
        write_csv(frame(name, rows), folder / f"{name}.csv")
    settings = plan.resolved.settings
    measurement = {
        "model": plan.model,
        "weights": dict(model.weights),
        "seed": settings.seed,
        "prompts": settings.prompts,
        "samples": plan.samples,
        "thorough": plan.is_thorough,
        "device": compute.device.type,
        "dtype": compute.dtype_name,
        "packages": package_versions(),
    }
    text = json.dumps(measurement, indent=2) + "\n"
    write_file(folder / "measurement.json", text.encode())
