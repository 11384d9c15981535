"""Certify or audit one model: run the trials of a plan and write the tables of their results.

The trials are in `trials.py`, their tests in `image_tests.py` and `tabular_model.py`. The tables
are the certificate, the power of its tests, and the audit (docs/algorithms.md, section 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
from scipy.special import ndtri

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.statistics import Interval, add_holm_p_values, proportion
from lantern_bench.checks import image_tests, tabular_model
from lantern_bench.checks.claims import CertificationPlan, Claim
from lantern_bench.checks.trials import Trial, lossless_decodings, plan_trials
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.decoding.filter_edge import edge_tolerance
from lantern_bench.decoding.loop import decode, image_generators
from lantern_bench.devices.compute import Compute, choose_compute
from lantern_bench.devices.machine import package_versions
from lantern_bench.models.load import compile_models, load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.storage.schema import Row, frame, write_csv
from lantern_bench.utils.clock import now
from lantern_bench.utils.files import write_json
from lantern_bench.utils.progress import Emit, Note, ProgressEvent, ignore_events
from lantern_bench.utils.text import duration

Rows: TypeAlias = list[Row]

LEVEL = 1e-3
"""Largest probability that the certificate of a correct model fails, over all its tests."""
BROKEN = 1e-6
"""P-value below which an audit must reject a broken rule on the tables."""
GREEDY = 8
"""Prompts whose greedy decoding is compared."""
_SEEN = 0.05  # p-value above which a mistake is not seen at all
_FIRST_IMAGES = 500  # of a broken rule on the tables; each further test has twice as many
_CALIBRATION_TOKENS = 16
_CALIBRATION_IMAGES = 500  # of the tables


@dataclass(frozen=True)
class TrialResult:
    """The p-values of a trial, and the tokens that were tested."""

    setting: str
    broken: str | None  # name of the planted mistake
    p_values: Mapping[str, float]  # by test
    images: int
    tokens: int
    edge: int = 0  # tokens left out, because rounding may change whether they pass the filters
    impossible: int = 0  # tokens that the target cannot give
    # On the tables: the distance from the target as two estimates, one too low and one too high.
    tv: tuple[float, float] | None = None
    claim: Claim | None = None  # in an audit

    @property
    def lowest(self) -> tuple[str, float]:
        """The test with the smallest p-value, and the p-value."""
        return min(self.p_values.items(), key=itemgetter(1))

    @property
    def too_few_tested(self) -> bool:
        """Whether rounding leaves fewer than half of the tokens to be tested."""
        return self.edge > self.tokens / 2


def certify(plan: CertificationPlan, folder: Path, emit: Emit) -> dict[str, Rows]:
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
    models = load_by_dtype(plan, compute, trials, emit=emit)
    model = models[compute.dtype_name]
    note = compile_models([model], compute) if settings.compile else None
    if note is not None:
        emit(note)
    for done, total in model.prepare([prompt.text for prompt in plan.prompts]):
        emit(ProgressEvent("captions", done, total))

    # 1. Estimate the seconds of each trial, for the progress.
    of_model = _token_seconds(plan, model, GREEDY) * model.target.image_tokens
    of_tables = _token_seconds(plan, tabular_model.table_model(), _CALIBRATION_IMAGES)
    seconds = []
    for trial in trials:
        of_image = of_model
        if not trial.dtype:
            of_image = of_tables * tabular_model.table_tokens(trial.decoding)
        seconds.append(trial.images * of_image)
    total_seconds = sum(seconds)
    on_tables = sum(not trial.dtype for trial in trials)
    emit(
        Note(
            f"{len(trials)} trials ({on_tables} on tables, {len(trials) - on_tables} with "
            f"{plan.model}): about {duration(total_seconds)}"
        )
    )
    before = 0.0

    def show_part(part: float, event: ProgressEvent) -> None:
        done = before + part * event.done / event.total
        emit(ProgressEvent("audit" if plan.claims else "certificate", done / total_seconds))

    # 2. Run the trials.
    level = rejection_level(trials) if plan.has_power else 0.0
    results = []
    for trial, part in zip(trials, seconds, strict=True):
        results.append(run_trial(trial, plan, models, level=level, emit=partial(show_part, part)))
        before += part

    # 3. Make the tables.
    tables: dict[str, Rows] = {}
    if plan.claims:
        # The trials of a claim follow each other.
        audited = [
            (claim, list(of_claim)) for claim, of_claim in groupby(results, attrgetter("claim"))
        ]
        tables["audit"], tables["lossless_tests"] = audit_rows(plan.model, audited)
    else:
        tables["certificate"], tables["lossless_tests"] = trial_rows(plan.model, results)
        if plan.has_power:
            tables["power"] = power_rows(plan.model, results, level)
        differences = image_tests.greedy_differences(
            model=model,
            prompts=list(dict.fromkeys(plan.prompts[:GREEDY])),
            decodings=lossless_decodings(plan, temperature=0),
            emit=emit,
        )
        for name, of_prompts in differences.items():
            tables["certificate"].append(
                identity_row(
                    plan.model, name, of_prompts, tolerance=image_tests.NEAR_TIE[compute.dtype_name]
                )
            )
    _write(plan, compute, model, folder=folder, tables=tables)
    return tables


def load_by_dtype(
    plan: CertificationPlan,
    compute: Compute,
    trials: Sequence[Trial],
    *,
    emit: Emit = ignore_events,
) -> dict[str, LoadedModel]:
    """Load the model in its own dtype and in the dtypes of the trials.

    Args:
        plan: Names the model.
        compute: The device and the model's own dtype.
        trials: The trials that will be run.
        emit: Receives remarks on the files, once.

    Returns:
        The models by dtype name.
    """
    names = {compute.dtype_name, *(trial.dtype for trial in trials if trial.dtype)}
    models = {}
    for name in sorted(names):
        of_type = compute._replace(dtype=getattr(torch, name))
        hears = emit if of_type == compute else ignore_events
        models[name] = load_models(plan.resolved, of_type, hears)[plan.model]
    return models


def rejection_level(trials: Sequence[Trial]) -> float:
    """Return the p-value below which a broken decoding is rejected.

    It is the level of the certificate divided by the number of tests of the trials that are not
    broken (Bonferroni's correction).
    """
    return LEVEL / sum(
        image_tests.TESTS if trial.dtype else tabular_model.TESTS
        for trial in trials
        if trial.broken is None
    )


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
    if trial.dtype:
        results = _results_on_model(trial, plan, models[trial.dtype])
    else:
        results = _results_on_tables(trial, plan.resolved.settings.seed)
    for result in results:
        emit(ProgressEvent(trial.setting, min(result.images, trial.images), trial.images))
        if trial.broken and result.lowest[1] < level:
            break
    return result


def _results_on_tables(trial: Trial, seed: int) -> Iterator[TrialResult]:
    """Yield the G-tests of all images, or of more and more images of a broken decoding."""
    decoding = trial.decoding
    tokens = torch.empty(0, tabular_model.table_tokens(decoding), dtype=torch.int64)
    while len(tokens) < trial.images:
        end = trial.images
        if trial.broken:
            end = min(end, max(_FIRST_IMAGES, 2 * len(tokens)))
        more = tabular_model.table_images(
            decoding=decoding,
            images=range(len(tokens), end),
            rule=trial.rule,
            seed=seed,
        )
        tokens = torch.cat([tokens, more])
        p_values, tv = tabular_model.g_tests(decoding, tokens)
        yield TrialResult(
            setting=trial.setting,
            broken=trial.broken,
            p_values=p_values,
            images=len(tokens),
            tokens=tokens.numel(),
            tv=tv,
            claim=trial.claim,
        )


def _results_on_model(
    trial: Trial, plan: CertificationPlan, model: LoadedModel
) -> Iterator[TrialResult]:
    """Yield the tests of whole images after each batch."""
    decoding = trial.decoding
    depth = drafting_of(decoding, model.target).depth if decoding.drafts else 0
    batches = []
    for batch in image_tests.decoded_evidence(
        model=model,
        prompts=plan.prompts,
        decoding=decoding,
        images=trial.images,
        tolerance=edge_tolerance(trial.dtype, decoding),
        seed=plan.resolved.settings.seed,
        rule=trial.rule,
    ):
        batches.append(batch)
        shown = image_tests.joined(batches)
        yield TrialResult(
            setting=trial.setting,
            broken=trial.broken,
            p_values=image_tests.p_values(shown, depth),
            images=len(shown.starts),
            tokens=shown.starts.size,
            edge=int(shown.edge.sum()),
            impossible=int(shown.impossible.sum()),
            claim=trial.claim,
        )


def _token_seconds(plan: CertificationPlan, model: LoadedModel, images: int) -> float:
    """Seconds per token of an image, after a warm-up."""
    tokens = min(_CALIBRATION_TOKENS, model.target.image_tokens)
    work = partial(
        decode,
        model=model,
        condition=model.condition([plan.prompts[0].text] * images),
        decoding=plan.sampling.autoregressive(),
        generators=image_generators(model, [0] * images),
        tokens=tokens,
    )
    work()
    began = now()
    work()
    return (now() - began) / images / tokens


def _write(
    plan: CertificationPlan,
    compute: Compute,
    model: LoadedModel,
    *,
    folder: Path,
    tables: Mapping[str, Rows],
) -> None:
    """Write the tables as CSV, and the settings of the measurement as `measurement.json`."""
    for name, rows in tables.items():
        write_csv(frame(name, rows), folder / f"{name}.csv")
    settings = plan.resolved.settings
    write_json(
        folder / "measurement.json",
        {
            "model": plan.model,
            "weights": dict(model.weights),
            "seed": settings.seed,
            "prompts": settings.prompts,
            "samples": plan.samples,
            "thorough": plan.is_thorough,
            "device": compute.device.type,
            "dtype": compute.dtype_name,
            "packages": package_versions(),
        },
    )


# ---- Rows of the tables


def trial_rows(model: str, results: Sequence[TrialResult]) -> tuple[Rows, Rows]:
    """Return the rows of `certificate` and of `lossless_tests` for the trials without a mistake.

    Holm's correction is over all tests of all these trials. A trial is `weak` if too few of its
    tokens can be tested.
    """
    right = _without_mistake(results)
    tests = _test_rows(model, right)
    smallest = _smallest_by_setting(tests)
    checks = []
    for result in right:
        p = smallest[result.setting]
        test, lowest_p = result.lowest
        notes = [f"{test}: p = {lowest_p:.2g}"]
        if result.edge:
            notes.append(
                f"{result.edge} tokens left out: rounding may change whether they pass the filter"
            )
        if result.impossible:
            notes.append(f"{result.impossible} tokens that the target cannot give")
        passed = _verdict(holds=p > LEVEL)
        if passed == "yes" and result.too_few_tested:
            passed = "weak"
            notes.append("too few tokens are tested: give --dtype float32")
        checks.append(
            Row(
                model=model,
                check=f"{'whole images' if result.tv is None else 'tables'} follow the target",
                setting=result.setting,
                figure=f"smallest of {len(result.p_values)} p-values, corrected for {len(tests)}",
                measured=p,
                n=result.images,
                wanted=f"> {LEVEL:g}",
                passed=passed,
                note=join_notes(notes),
            )
        )
    return checks, tests


def _without_mistake(results: Sequence[TrialResult]) -> list[TrialResult]:
    return [result for result in results if result.broken is None]


def _test_rows(model: str, results: Sequence[TrialResult]) -> Rows:
    """The rows of `lossless_tests`, corrected for all tests."""
    rows = []
    for result in results:
        for test, p in result.p_values.items():
            rows.append(
                Row(
                    model=model,
                    setting=result.setting,
                    test=test,
                    p_value=p,
                    images=result.images,
                    tokens=result.tokens,
                    edge_tokens=result.edge,
                )
            )
    return add_holm_p_values(rows, "p_value", into="p_holm")


def _smallest_by_setting(tests: Rows) -> Mapping[Any, float]:
    """The smallest corrected p-value of each setting."""
    return pd.DataFrame(tests).groupby("setting")["p_holm"].min().to_dict()


def power_rows(model: str, results: Sequence[TrialResult], level: float) -> Rows:
    """Return the rows of `power`: the images of each broken decoding until it was rejected.

    The z-score of a mistake grows with the square root of the images. For a mistake that was seen
    but not rejected, `images_needed` is extrapolated from the last p-value.

    Args:
        model: Name of the model.
        results: Results of trials; those without a mistake are left out.
        level: P-value below which a mistake is rejected.
    """
    rows = []
    for result in results:
        if result.broken is None:
            continue
        test, p = result.lowest
        needed = None
        # The smallest of several p-values is often below 0.05 by chance.
        if level <= p < _SEEN / len(result.p_values):
            z_ratio = ndtri(level / 2) / ndtri(p / 2)
            needed = round(result.images * z_ratio**2)
        rows.append(
            Row(
                model=model,
                fault=result.broken,
                setting=result.setting,
                tested_on="model" if result.tv is None else "tables",
                test=test,
                p_value=p,
                decoded=result.images,
                images=result.images if p < level else None,
                images_needed=needed,
            )
        )
    return rows


def audit_rows(
    model: str, audited: Sequence[tuple[Claim, Sequence[TrialResult]]]
) -> tuple[Rows, Rows]:
    """Return the rows of `audit` and of `lossless_tests`.

    Holm's correction is over the tests of all lossless claims, and separately over the tests of all
    relaxed claims. Only a lossless claim that this package makes can fail.

    Args:
        model: Name of the model.
        audited: Each claim with its results, of which the first is on the tables.
    """
    tests = []
    for is_lossless in (True, False):
        right = []
        for claim, results in audited:
            if claim.is_lossless is is_lossless:
                right += _without_mistake(results)
        tests += _test_rows(model, right)
    smallest = _smallest_by_setting(tests)
    return [_audit_row(claim, results, smallest) for claim, results in audited], tests


_VERDICTS = {
    (True, True): "lossless: no difference found",
    (True, False): "claimed lossless, measured: not",
    (False, False): "relaxed, as claimed",
    (False, True): "relaxed: no difference found",
}


def _audit_row(claim: Claim, results: Sequence[TrialResult], smallest: Mapping[Any, float]) -> Row:
    """The row of a claim; `smallest` has the smallest corrected p-value of each setting."""
    right = _without_mistake(results)
    on_tables, *on_model = right
    p = min(smallest[result.setting] for result in right)
    follows_target = p > LEVEL
    broken_p = [result.lowest[1] for result in results if result.broken is not None]

    passed = None
    if claim.is_lossless and claim.is_ours:
        passed = _verdict(holds=follows_target)
        has_power = all(p < BROKEN for p in broken_p)
        if follows_target and (not has_power or any(result.too_few_tested for result in right)):
            passed = "weak"
    distance = Interval(None)
    if on_tables.tv is not None and not follows_target:
        low, high = on_tables.tv
        distance = Interval((low + high) / 2, low, high)
    row = {
        **claim.cell.columns(),
        "form": claim.form or None,
        "source": claim.source or None,
        "claim": "lossless" if claim.is_lossless else "relaxed",
        "verdict": _VERDICTS[claim.is_lossless, follows_target],
        "p_holm": p,
        "table_images": on_tables.images,
        "power_p": max(broken_p, default=None),
        "passed": passed,
        **distance.columns("table_tv"),
    }
    columns = ("p_first", "p_joint", "p_later", "p_batch")
    row |= zip(columns, on_tables.p_values.values(), strict=True)
    for result in on_model:
        row |= {"images": result.images, "p_images": result.lowest[1]}
    return row


def identity_row(
    model: str,
    setting: str,
    differences: Sequence[tuple[int, float] | None],
    *,
    tolerance: float,
) -> Row:
    """Return the check that greedy speculation equals greedy decoding.

    Args:
        model: Name of the model.
        setting: Name of the decoding.
        differences: Of each prompt, the first different token and its margin, or None.
        tolerance: Margin below which a difference is a near-tie, which does not fail the check.
    """
    near_ties: list[str] = []
    others: list[str] = []
    for position, margin in filter(None, differences):
        group = near_ties if margin < tolerance else others
        group.append(f"token {position}, margin {margin:.1e}")
    notes = []
    if near_ties:
        notes.append("near-ties (rounding may choose either): " + ", ".join(near_ties))
    if others:
        notes.append("different: " + ", ".join(others))
    return Row(
        model=model,
        check="greedy identity",
        setting=setting,
        figure="share of prompts with equal tokens",
        n=len(differences),
        wanted="equal, or a near-tie",
        passed=_verdict(holds=not others),
        note=join_notes(notes),
        **proportion(differences.count(None), len(differences)).columns("measured"),
    )


def failures(rows: Rows, passed: str = "NO") -> list[str]:
    """Return the names of the checks with this verdict: `NO`, or `weak` if they show too little."""
    return [
        f"{row['check']} ({row['setting']})" if "check" in row else row["cell_id"]
        for row in rows
        if row["passed"] == passed
    ]


def _verdict(*, holds: bool) -> str:
    return "yes" if holds else "NO"
