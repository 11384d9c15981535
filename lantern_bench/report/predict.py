"""The speedup of every cell of a run on another device, from its recorded steps and `cost_model`.

Acceptance is the run's: which tokens a step commits does not depend on the device. Costs are the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError
from lantern_bench.methods.trees import check_topology, topology_name
from lantern_bench.models.registry import model_of
from lantern_bench.report.cost_model import (
    NOTHING,
    STACKS,
    Device,
    Draft,
    Setting,
    StepSeconds,
    named_draft,
    prefill_seconds,
    step_seconds,
    tree_draft,
)
from lantern_bench.report.records import CellRecords, join_notes, run_cells
from lantern_bench.report.reproduction import device_in_words
from lantern_bench.report.tables import frame, tables_of
from lantern_bench.runs.records import rows_of
from lantern_bench.runs.store import RunData
from lantern_bench.schema import CELL_COLUMNS

if TYPE_CHECKING:
    import pandas as pd


_READ = ("committed_per_step", "start_per_step", "offered_depth_per_step", "tokens", "drafter_forwards")
"""What a prediction reads of a record."""


def predict_run(run: RunData, device: Device, stack: str, model: str | None = None) -> pd.DataFrame:
    """Return the table `prediction` of a run, with the speedups that it measured; raises as `prediction_rows`."""
    import pandas as pd

    rows = list(prediction_rows(run, device, stack, model))
    measured = tables_of(run)["speed"].set_index("cell_id")["speedup"]
    same_device = measured_elsewhere(run, device, stack, model) is None
    for row in rows:
        speedup = measured.get(row["cell_id"])
        row["speedup_measured"] = speedup
        row["speedup_error"] = row["speedup"] / speedup - 1 if same_device and not pd.isna(speedup) else None
    return frame("prediction", rows)


def measured_times(run: RunData) -> pd.DataFrame:
    """Return the table `prediction` with what a run measured, to plan a larger one on its own device.

    Raises `RefusedError` for a run without seconds.
    """
    speed = tables_of(run)["speed"]
    timed = speed[speed["latency_s"].notna()]
    if not len(timed):
        raise RefusedError("the run has no seconds", "Give one that measured speed, or a --device to predict for.")
    names = [column.name for column in CELL_COLUMNS] + ["images", "mean_accepted_length", "latency_s"]
    rows = timed[names].assign(device=device_in_words(run.manifest), speedup_measured=timed["speedup"])
    return frame("prediction", rows_of(rows))


def with_hours(table: pd.DataFrame, prompts: int, devices: int) -> pd.DataFrame:
    """Return the table `prediction` with the hours that each cell takes for so many prompts.

    A prompt stays on one device with all its cells.
    """
    hours = math.ceil(prompts / devices) * table["latency_s"] / 3600
    return table.assign(hours=hours, device_hours=hours * devices)


def hours_in_words(table: pd.DataFrame, prompts: int, devices: int) -> str:
    """Return a sentence on the hours of all cells together."""
    hours, images = float(table["hours"].sum()), prompts * len(table)
    return (
        f"{prompts:,} prompts in all {len(table)} cells, {images:,} images: {hours:.3g} hours on {devices} "
        f"device{'s' if devices > 1 else ''}, {devices * hours:.3g} device-hours. Loading, compiling, text encoding, "
        "pixels and scoring are not counted."
    )


def measured_elsewhere(run: RunData, device: Device, stack: str, model: str | None = None) -> str | None:
    """Say with which model, device and code the run was measured; None where these are the predicted ones."""
    measured = device_in_words(run.manifest), "compiled" if run.manifest.get("compile") else "eager"
    predicted = device.about or device.name, _code(device, stack)
    others = set(run.records["model"]) - {model} if model is not None else set()
    if not others and measured == predicted:
        return None
    run_of = f"{', '.join(sorted(others))} on " if others else ""
    return f"The run was measured on {run_of}{', '.join(measured)}; predicted is {', '.join(predicted)}."


def _code(device: Device, stack: str) -> str:
    """What is predicted: an own device stands for the code that it was fitted to."""
    return device.code if stack == "compiled" else stack


def prediction_rows(run: RunData, device: Device, stack: str, model: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table `prediction`, in the order of the other tables.

    `model` replaces the run's sizes and not its acceptance. Raises `RefusedError` for a run without recorded steps and
    for a model of unknown sizes, `UserError` for an unknown model.
    """
    cells, kernels = run_cells(run), STACKS[stack]
    if not any(any(cell.good["committed_per_step"]) for cell in cells):
        raise RefusedError(f"{run.folder}: no image has recorded steps", "Give a run with completed images.")
    for cell in cells:
        good = [row for row in rows_of(cell.good[list(_READ)]) if row["committed_per_step"]]
        if not good:
            continue
        name = model or str(cell.columns["model"])
        sizes, notes = _sizes(name), []
        if model is not None and model != cell.columns["model"]:
            notes.append(f"sizes of {model} at the acceptance of {cell.columns['model']}: its own may differ")
        steps = [count for row in good for count in row["committed_per_step"]]
        length, tokens = sum(steps) / len(steps), sum(row["tokens"] for row in good) / len(good)
        progress = sum(start for row in good for start in row["start_per_step"]) / len(steps) / tokens
        if name != cell.columns["model"]:
            tokens = sizes.image_tokens
        batch, guided = int(cell.columns["batch"] or 1), cell.columns["cfg_scale"] != 1
        setting = Setting(sizes, batch, guided, sizes.prefix + progress * tokens)
        draft, assumed = _draft(cell, good, run.manifest)
        if batch > 1 and draft is not None:
            notes.append("images of a batch that end early are not counted as idle")
        plain = step_seconds(device, kernels, setting._replace(context=sizes.prefix + tokens / 2), None, 1.0)
        step = step_seconds(device, kernels, setting, draft, length)
        prefill = prefill_seconds(device, kernels, setting)
        before = prefill + (tokens - 1) * plain.total
        seconds = prefill + (tokens - 1) / length * step.total
        row = {**cell.columns, "model": name, "device": device.name, "stack": stack, "images": len(good)}
        row |= {"mean_accepted_length": length, "nodes": 1 if draft is None else draft.nodes}
        row |= {"drafter_forwards_per_step": 0 if draft is None or draft.levels is None else 1 + len(draft.levels)}
        row |= {"speedup": before / seconds, "latency_s": seconds / batch, "ar_ms": 1e3 * plain.total}
        yield row | _terms(step) | {"note": join_notes([*notes, *assumed])}


def terms_of(device: Device, stack: str) -> list[str]:
    """Return the constants of a prediction as sentences, each with its source."""
    shares = f"{device.read_gb_s:g} GB/s x {device.read_share:g}, {device.multiply_tflops:g} Tflop/s x "
    kernel = device.kernel_us if stack == "compiled" else device.eager_kernel_us
    return [
        f"Predicted for {device.about or device.name}, not measured: read {shares}{device.multiply_share:g}; "
        f"{kernel:g} us a kernel ({_code(device, stack)}), {device.step_us:g} us of host work a step.",
        *device.sources,
        "Acceptance is that of the run. Formulas, kernel counts, errors against published figures: docs/prediction.md.",
    ]


def _terms(step: StepSeconds) -> dict[str, float]:
    """Milliseconds of a step, by program and by what they are spent on."""
    row = {"step_ms": step.total, "draft_ms": step.draft.total, "target_ms": step.target.total}
    row |= {"verify_ms": step.verify.total, "other_ms": step.host}
    total = sum((step.draft, step.target, step.verify), NOTHING)
    row |= {"read_ms": total.read, "multiply_ms": total.multiply, "launch_ms": total.launch}
    return {name: 1e3 * value for name, value in row.items()}


def _sizes(model: str) -> Any:
    sizes = model_of(model).sizes
    if sizes is None:
        raise RefusedError(
            f"the sizes of {model} are not known", "Give a published model with --model, such as llamagen-t2i-stage1."
        )
    return sizes


def _draft(cell: CellRecords, good: list[Any], manifest: Mapping[str, Any]) -> tuple[Draft | None, list[str]]:
    """The draft of a cell, None for autoregressive decoding, and what is assumed about it."""
    columns, label = cell.columns, str(cell.columns["tree"])
    if columns["drafting"] == "none":
        return None, []
    if (named := named_draft(label)) is not None:
        return named, []
    for settings in (manifest.get("experiment") or {}).get("cells") or ():
        if isinstance(settings.get("tree"), list):
            paths = check_topology(settings["tree"])
            if topology_name(paths) == label:
                return tree_draft(paths), []
    depth = max(offered for row in good for offered in row["offered_depth_per_step"])
    forwards = round(sum(row["drafter_forwards"] for row in good) / sum(len(row["start_per_step"]) for row in good))
    levels = (1,) * (forwards - 1) if forwards else None
    note = f"the nodes of {columns['drafting']} are not recorded: a chain of {depth} is assumed"
    return Draft(depth + 1, levels, depth, 1), [note]
