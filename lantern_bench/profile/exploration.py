"""Predict length, distance and speedup of many settings from a walk on each tree.

Settings that sample and draft alike share a walk (`shadow_walk.py`). docs/prediction.md, "Many
settings from one walk", says what is exact, what is assumed, and what was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.statistics import Interval, ratio_of_sums
from lantern_bench.analysis.token_distance import FeatureSums, distance
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import ImageTask
from lantern_bench.config.settings import OF_RESULTS, Overrides
from lantern_bench.devices.compute import choose_compute, set_threads
from lantern_bench.methods.catalog import LOSSLESS, output_of
from lantern_bench.models.load import compile_models, load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Device,
    Workload,
    named_draft,
    prefill_seconds,
    step_seconds,
    tree_draft,
)
from lantern_bench.profile.prediction import sizes_of
from lantern_bench.profile.shadow_walk import WalkSums, feature_names, strict_of
from lantern_bench.profile.step_costs import step_costs
from lantern_bench.profile.walks import parts_of, walk_in_two_processes, walked
from lantern_bench.report.charts import is_dominated
from lantern_bench.report.draw import SURFACE
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import ENDS, Row, frame, write_csv
from lantern_bench.sweeps.choose_threads import choose_threads
from lantern_bench.sweeps.decode_missing import key_fields
from lantern_bench.sweeps.request import Request, prepare
from lantern_bench.sweeps.run import run
from lantern_bench.utils.errors import UserError, joined
from lantern_bench.utils.files import check_writable
from lantern_bench.utils.progress import Emit, Note, ProgressEvent

IMAGES = 16
"""Default number of images of a walk."""

PREDICTABLE = ("static", "dynamic")
"""Draftings whose drafts depend on the committed tokens alone."""


def check_predictable(cells: Iterable[Cell]) -> None:
    """Raise `UserError` for cells that a walk cannot predict, by name."""
    refused: dict[str, list[str]] = {}
    for cell in cells:
        decoding = cell.decoding
        if decoding.mode == "ar":
            continue
        if not decoding.drafts:
            reason = f"{decoding.mode} verifies no drafts, so there is no rule to explore"
        elif decoding.greedy:
            reason = "temperature 0 draws no token, so nothing has a probability of acceptance"
        elif decoding.drafting not in PREDICTABLE:
            reason = f"drafts of {decoding.drafting} depend on what the setting accepted before"
        elif cell.batch > 1:
            reason = "steps are measured with one image at a time, so give --batch 1"
        else:
            continue
        refused.setdefault(reason, []).append(cell.cell_id)
    if refused:
        reasons = [f"{reason}: {', '.join(ids)}" for reason, ids in refused.items()]
        raise UserError(
            f"these cells cannot be explored. {'. '.join(reasons)}",
            "Leave them out, for example with --modes speculative,lantern; a sweep measures them.",
        )


def explore_request(
    source: str | Path | Mapping[str, Any], overrides: Overrides, *, out: Path | None = None
) -> Request:
    """Check an exploration and return it as the request of a sweep, with its own folder.

    Nothing is loaded. The strict rule is added for each tree, because every other rule is compared
    with it.

    Args:
        source: The experiment, as in `prepare`.
        overrides: Flags over the experiment. Without `images`, there are 16.
        out: The folder, by default `results/explore-<run name>`.

    Raises:
        UserError: As `prepare`; also for cells that a walk cannot predict, and for overrides of
            what a sweep computes from its images.
        RefusedError: As `prepare`; also if models are missing.
    """
    for key in OF_RESULTS:
        if key in overrides.values:
            raise UserError(
                f"{overrides.location(key)}: an exploration makes no pictures",
                "Leave it out; length, speed and distance are always predicted.",
            )
    values = {"images": (IMAGES,), **overrides.values, "metrics": ("speed",)}
    request = prepare(source, replace(overrides, values=values))
    check_predictable(request.experiment.cells)
    drafting = [cell for cell in request.experiment.cells if cell.decoding.drafts]
    if not drafting:
        raise UserError(
            "these cells cannot be explored. None of them has drafts",
            "Add a cell with drafts, for example `mode: speculative`.",
        )
    if request.lacking:
        raise joined(request.lacking)
    folder = out or request.folder.with_name(f"explore-{request.experiment.run_name}")
    check_writable(folder)
    strict = [replace(cell, decoding=strict_of(cell.decoding)) for cell in drafting]
    cells = {(cell.model, cell.decoding): cell for cell in [*strict, *drafting]}
    experiment = replace(request.experiment, cells=tuple(cells.values()))
    return replace(request, experiment=experiment, folder=folder)


def explore(request: Request, emit: Emit, device: Device | None = None) -> pd.DataFrame:
    """Predict every cell, and write and return the table `surface`.

    Args:
        request: A request of `explore_request`. Parts of walks that its folder has are read.
        emit: Receives progress.
        device: Speedups are predicted for it. Default: for this machine, whose steps are measured.

    Raises:
        RefusedError: Weights are missing, or memory does not suffice.
        LogitsError: A model gave NaN or infinite logits.
    """
    experiment = request.experiment
    for name in experiment.settings.model if device is not None else ():
        sizes_of(name)  # refused before it is loaded
    set_threads(experiment.settings.threads)
    compute = choose_compute(experiment.settings.device, experiment.settings.dtype, fast=True)
    images = _images(request)
    rows: list[Row] = []
    for name, model in load_models(experiment, compute, emit).items():
        for done, total in model.prepare([task.prompt.text for task in images]):
            emit(ProgressEvent(f"captions for {name}", done, total))
        cells = {cell.decoding: cell for cell in experiment.cells if cell.model == name}

        # 1. Walk, uncompiled.
        fields = key_fields({name: model}, experiment.settings, compute, cells=cells.values())
        figures = _predicted(request, model, list(cells), fields=fields, emit=emit)

        # 2. Measure steps as a sweep takes them, or model them.
        if device is not None:
            times = {
                decoding: modelled_times(
                    name, decoding, device=device, length=row["mean_accepted_length"]
                )
                for decoding, row in figures.items()
            }
        else:
            if experiment.settings.compile:
                problem = compile_models([model], compute)
                emit(problem or Note("steps are compiled", level="detail"))
            threads = torch.get_num_threads()
            try:
                times = measured_times(model, list(cells), images[0], emit=emit)
            finally:
                torch.set_num_threads(threads)
        for decoding, cell in cells.items():
            row = cell.columns() | figures[decoding]
            row |= speed_columns(row, times[decoding], tokens=model.target.image_tokens)
            rows.append(row)
    table = with_fronts(frame("surface", rows))
    write_csv(table, request.folder / SURFACE)
    return table


def _images(request: Request) -> list[ImageTask]:
    """Return the images of one cell; all cells have the same prompts and seeds."""
    first = request.plan.cells[0]
    return [task for task in request.plan.tasks if task.cell == first]


def _predicted(
    request: Request,
    model: LoadedModel,
    settings: Sequence[Decoding],
    *,
    fields: Mapping[str, Any],
    emit: Emit,
) -> dict[Decoding, Row]:
    """Walk once for each group of settings, and return the figures of each setting."""
    images = _images(request)
    groups: dict[Decoding, list[Decoding]] = {}
    for setting in settings:
        groups.setdefault(strict_of(setting), []).append(setting)
    walks = [
        parts_of(
            strict,
            group,
            images,
            vocab_size=model.target.vocab_size,
            folder=request.folder,
            fields=fields,
        )
        for strict, group in groups.items()
    ]
    every = list(itertools.chain.from_iterable(walks))
    walk_in_two_processes(request, model, parts=every, emit=emit)
    prompts = [task.prompt.id for task in images]
    found = {}
    for group, parts in zip(groups.values(), walks, strict=True):
        sums = walked(model, parts, emit)
        for index, setting in enumerate(group):
            found[setting] = _figures(sums, index, setting=setting, model=model, prompts=prompts)
    return found


def _figures(
    sums: WalkSums,
    index: int,
    *,
    setting: Decoding,
    model: LoadedModel,
    prompts: Sequence[str],
) -> Row:
    """Return the predicted figures of one setting but its speed."""
    tokens = sums.reach[index].sum(axis=1)
    accepted = sums.committed[index, :, 1:]
    tested = sums.tested[index, :, :-1]
    row: Row = {
        "output": output_of(setting.drafting, setting.rule),
        "images": len(prompts),
    }
    row |= ratio_of_sums(tokens, sums.steps, prompts).columns("mean_accepted_length")
    row |= ratio_of_sums(accepted.sum(axis=1), tested.sum(axis=1), prompts).columns(
        "acceptance_rate"
    )
    reached = tested.sum(axis=0) > 0
    by_depth = accepted.sum(axis=0)[reached] / tested.sum(axis=0)[reached]
    row["acceptance_by_depth"] = " ".join(f"{rate:.3f}" for rate in by_depth)
    if setting.rule_row.lossless:
        return row | dict.fromkeys(["distance", "emitted_tv", "surprise", "impossible"], 0.0)

    names = feature_names(model, setting)
    columns = sums.features[index].reshape(len(prompts), -1)
    surprise = FeatureSums.of(columns, len(names)).sums[..., 0].sum(axis=1)
    of_prompts = pd.DataFrame(columns).assign(tokens=tokens).groupby(list(prompts)).sum()
    shift = _distance(
        FeatureSums.of(of_prompts.drop(columns="tokens").to_numpy(), len(names)),
        of_prompts["tokens"].to_numpy(),
    )
    row |= shift.columns("distance")
    row |= ratio_of_sums(surprise, tokens, prompts).columns("surprise")
    row["impossible"] = sums.impossible[index].sum() / tokens.sum()
    problem = setting.emitted_tv_problem
    if problem is None:
        row |= ratio_of_sums(sums.emitted_tv[index], tokens, prompts).columns("emitted_tv")
    else:
        problem = f"no emitted TV: {problem}"
    return row | {"note": join_notes([shift.note, problem])}


def _distance(features: FeatureSums, tokens: Any) -> Interval:
    """Return the distance with a jackknife interval over prompts.

    A walk has no noise of tokens, for which the interval of `distance` allows.
    """
    found = distance(features, tokens)
    prompts = len(tokens)
    if found.value is None or found.low is None:
        return found
    others = []
    for left_out in range(prompts):
        kept = np.arange(prompts) != left_out
        part = FeatureSums(features.sums[kept], features.covariance[kept])
        others.append(distance(part, tokens[kept]).value)
    spread = np.array(others, dtype=float)
    error = np.sqrt((prompts - 1) * spread.var())
    return Interval(found.value, found.value - 1.96 * error, found.value + 1.96 * error)


# ---- Speed


class StepTimes(NamedTuple):
    """Milliseconds."""

    prefill: float
    ar: float  # a step of autoregressive decoding
    step: float  # a step of the setting


def measured_times(
    model: LoadedModel, settings: Sequence[Decoding], image: ImageTask, *, emit: Emit
) -> dict[Decoding, StepTimes]:
    """Measure one step for each walk, rule and residual, with the most neighbours of a setting.

    Settings of one walk draft and score alike, so the time of both is a mean over their rules.
    Autoregressive steps are measured before the others and after them, because the speed of a
    machine drifts and every speedup depends on these steps.

    Args:
        model: Decodes the images.
        settings: The settings.
        image: Is decoded.
        emit: Receives progress.
    """

    def kind(setting: Decoding) -> tuple[Any, ...]:
        return (strict_of(setting), setting.rule, setting.residual)

    ordered = sorted(settings, key=lambda setting: setting.neighbours or 0)
    timed = {kind(setting): setting for setting in ordered}
    plain = list(dict.fromkeys(setting.autoregressive() for setting in settings))
    prompt = image.prompt.text
    choose_threads(model, prompt, [*plain, *reversed(timed.values())], emit=emit)
    costs = step_costs(model, [*plain, *timed.values(), *plain], [prompt], emit=emit)
    first = dict(zip(plain, costs, strict=False))
    last = dict(zip(plain, costs[-len(plain) :], strict=True))

    parts = pd.DataFrame([cost.parts for cost in costs[len(plain) : -len(plain)]])
    walks = [strict.cell_id for strict, *_ in timed]
    shared = parts[["draft_ms", "target_ms"]].groupby(walks).transform("mean")
    steps = dict(zip(timed, parts.assign(**shared).sum(axis=1), strict=True))
    times = {}
    for setting in settings:
        both = [of[setting.autoregressive()] for of in (first, last)]
        times[setting] = StepTimes(
            prefill=1e3 * sum(cost.traces[0].phases["prefill"] for cost in both) / 2,
            ar=sum(cost.total for cost in both) / 2,
            step=steps[kind(setting)],
        )
    return times


def modelled_times(name: str, setting: Decoding, *, device: Device, length: float) -> StepTimes:
    """Return the milliseconds of compiled steps on another device, by its cost model.

    Args:
        name: The model.
        setting: The setting.
        device: The device.
        length: Tokens that a step of the setting commits.

    Raises:
        RefusedError: The sizes of the model are not known.
    """
    sizes = sizes_of(name)
    workload = Workload(
        sizes=sizes,
        batch=1,
        guided=setting.cfg_scale != 1,
        context=sizes.prefix + sizes.image_tokens / 2,
    )
    draft = tree_draft(setting.paths) if setting.paths else named_draft(str(setting.tree_label))
    stack = KERNEL_COUNTS["compiled"]
    plain = step_seconds(device, stack, workload, draft=None, committed=1.0)
    step = step_seconds(device, stack, workload, draft=draft, committed=length)
    return StepTimes(
        prefill=1e3 * prefill_seconds(device, stack, workload),
        ar=1e3 * plain["total"].sum(),
        step=1e3 * step["total"].sum(),
    )


def speed_columns(row: Row, times: StepTimes, *, tokens: int) -> Row:
    """Return the columns of the predicted speedup; its interval is computed from the length.

    Args:
        row: Has the columns of `mean_accepted_length`.
        times: Milliseconds.
        tokens: Tokens of an image, the first of which comes from the prefill.
    """
    columns: Row = {"step_ms": times.step}
    for end in ENDS:
        length = row[f"mean_accepted_length{end}"]
        if length is not None:
            plain = times.prefill + (tokens - 1) * times.ar
            seconds = times.prefill + (tokens - 1) / length * times.step
            columns[f"predicted_speedup{end}"] = plain / seconds
    return columns


def with_fronts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `surface` with its column `dominated`."""
    points = table.assign(run="")
    beaten = is_dominated(points, "predicted_speedup", "distance", less_is_better=True)
    return table.assign(dominated=pd.array(beaten, dtype="Int64"))


def best_settings(table: pd.DataFrame, max_distance: float, count: int) -> pd.DataFrame:
    """Return the fastest settings of each model within a limit, and the fastest lossless one.

    Args:
        table: The table `surface`.
        max_distance: The largest distance; tokens that the target cannot give break any limit.
        count: How many settings of each model.
    """
    ordered = table.sort_values("predicted_speedup", ascending=False, kind="stable")
    is_near = (ordered["distance"] <= max_distance) & ~(ordered["impossible"] > 0)
    within = ordered[is_near].groupby("model", sort=False).head(count)
    lossless = ordered[ordered["output"] == LOSSLESS].groupby("model", sort=False).head(1)
    return pd.concat([within, lossless]).drop_duplicates("cell_id").reset_index(drop=True)


# ---- Measured beside predicted


def verify_best(
    request: Request, table: pd.DataFrame, max_distance: float, count: int, *, emit: Emit
) -> pd.DataFrame:
    """Sweep the best settings, and write and return the table `verified`.

    Each relaxed setting is also walked along, to predict the length of the strict rule from the
    images of the setting. If settings hardly change what is drafted, both walks give this length.

    Args:
        request: A request of `explore_request`.
        table: The table `surface` of the request.
        max_distance: As in `best_settings`.
        count: As in `best_settings`.
        emit: Receives the progress of the walks and of the sweep.
    """
    predicted = best_settings(table, max_distance, count)
    chosen = [
        cell for cell in request.experiment.cells if cell.cell_id in set(predicted["cell_id"])
    ]
    experiment = replace(request.experiment, cells=tuple(chosen))
    source = experiment.to_dict() | {"metrics": ["speed", "distance"]}
    sweep = prepare(source, Overrides(), out=request.folder / "verified")
    measured = run(sweep, emit)["summary"].set_index("cell_id")

    images = _images(request)
    settings = experiment.settings
    compute = choose_compute(settings.device, settings.dtype, fast=True)
    models = load_models(experiment, compute)
    rows = []
    for row in rows_of(predicted):
        name = row["cell_id"]
        cell = next(cell for cell in chosen if cell.cell_id == name)
        found: Row = {"cell_id": name, "model": row["model"], "images": len(images)}
        for end in ENDS:
            found[f"predicted_speedup{end}"] = row[f"predicted_speedup{end}"]
            found[f"predicted_length{end}"] = row[f"mean_accepted_length{end}"]
            found[f"predicted_distance{end}"] = row[f"distance{end}"]
            for figure in ("speedup", "mean_accepted_length", "distance"):
                found[figure + end] = measured.at[name, figure + end]
        strict = strict_of(cell.decoding)
        model = models[cell.model]
        parts = parts_of(
            cell.decoding,
            [strict],
            images,
            vocab_size=model.target.vocab_size,
            folder=request.folder,
            fields=key_fields({cell.model: model}, settings, compute, cells=[cell]),
        )
        sums = walked(model, parts, emit)
        found["strict_length"] = sums.reach.sum() / sums.steps.sum()
        rows.append(found)
    verified = frame("verified", rows)
    write_csv(verified, request.folder / "verified.csv")
    return verified
