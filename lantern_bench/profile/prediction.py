"""Predict the speed of a run on another device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lantern_bench.analysis.cells import CellRecords, join_notes, run_cells
from lantern_bench.analysis.tables import tables_of
from lantern_bench.devices.names import device_in_words
from lantern_bench.methods.static_trees import check_topology, topology_name
from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import (
    STACKS,
    Draft,
    Setting,
    named_draft,
    prefill_seconds,
    step_seconds,
    tree_draft,
)
from lantern_bench.profile.device_specs import Device
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import CELL_COLUMNS, Row, frame
from lantern_bench.utils.errors import RefusedError

# ---- The predictions of a run

_READ = [
    "committed_per_step",
    "start_per_step",
    "offered_depth_per_step",
    "tokens",
    "drafter_forwards",
]


def predict_run(run: RunData, device: Device, stack: str, model: str | None = None) -> pd.DataFrame:
    """Return the table `prediction` of a run; `model` replaces the run's sizes, not its acceptance.

    Raises `RefusedError` for a run without recorded steps and for a model of unknown sizes.
    """
    table = frame("prediction", prediction_rows(run=run, device=device, stack=stack, model=model))
    table["speedup_measured"] = table["cell_id"].map(
        tables_of(run)["speed"].set_index("cell_id")["speedup"]
    )
    if measured_elsewhere(run=run, device=device, stack=stack, model=model) is None:
        table["speedup_error"] = table["speedup"] / table["speedup_measured"] - 1
    return table


def prediction_rows(
    run: RunData, device: Device, stack: str, model: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `predict_run` without what the run measured."""
    cells = run_cells(run)
    kernels = STACKS[stack]
    if not any(any(cell.completed["committed_per_step"]) for cell in cells):
        raise RefusedError(
            f"{run.folder}: no image has recorded steps", "Give a run with completed images."
        )
    for cell in cells:
        completed = [row for row in rows_of(cell.completed[_READ]) if row["committed_per_step"]]
        if not completed:
            continue
        run_model = str(cell.columns["model"])
        name = model or run_model
        notes = []
        sizes = model_of(name).sizes
        if sizes is None:
            advice = "Give a published model with --model, such as llamagen-t2i-stage1."
            raise RefusedError(f"the sizes of {name} are not known", advice)
        counts = [count for row in completed for count in row["committed_per_step"]]
        length = sum(counts) / len(counts)
        tokens = sum(row["tokens"] for row in completed) / len(completed)
        progress = (
            sum(start for row in completed for start in row["start_per_step"])
            / len(counts)
            / tokens
        )
        if name != run_model:
            tokens = sizes.image_tokens
            notes.append(f"sizes of {name} at the acceptance of {run_model}: its own may differ")
        batch = int(cell.columns["batch"] or 1)
        guided = cell.columns["cfg_scale"] != 1
        setting = Setting(
            sizes=sizes, batch=batch, guided=guided, context=sizes.prefix + progress * tokens
        )
        draft, assumed = _draft(cell, completed, run.manifest)
        if batch > 1 and draft is not None:
            notes.append("images of a batch that end early are not counted as idle")
        middle = setting._replace(context=sizes.prefix + tokens / 2)
        plain = step_seconds(
            device=device, stack=kernels, setting=middle, draft=None, committed=1.0
        )["total"].sum()
        programs = step_seconds(
            device=device, stack=kernels, setting=setting, draft=draft, committed=length
        )
        step = programs.sum()
        prefill = prefill_seconds(device, kernels, setting)
        seconds = prefill + (tokens - 1) / length * step["total"]
        yield {
            **cell.columns,
            "model": name,
            "device": device.name,
            "stack": stack,
            "images": len(completed),
            "mean_accepted_length": length,
            "nodes": 1 if draft is None else draft.nodes,
            "drafter_forwards_per_step": 0
            if draft is None or draft.levels is None
            else 1 + len(draft.levels),
            "speedup": (prefill + (tokens - 1) * plain) / seconds,
            "latency_s": seconds / batch,
            "ar_ms": 1e3 * plain,
            "step_ms": 1e3 * step["total"],
            **(1e3 * programs["total"]).add_suffix("_ms"),
            **(1e3 * step.drop("total")).add_suffix("_ms"),
            "note": join_notes([*notes, assumed]),
        }


def _draft(
    cell: CellRecords, completed: Sequence[Row], manifest: Mapping[str, Any]
) -> tuple[Draft | None, str | None]:
    """The draft of a cell, None for autoregressive decoding, and what is assumed about it."""
    drafting = cell.columns["drafting"]
    label = str(cell.columns["tree"])
    if drafting == "none":
        return None, None
    if (named := named_draft(label)) is not None:
        return named, None
    for settings in (manifest.get("experiment") or {}).get("cells") or ():
        if isinstance(settings.get("tree"), list):
            paths = check_topology(settings["tree"])
            if topology_name(paths) == label:
                return tree_draft(paths), None
    depth = max(offered for row in completed for offered in row["offered_depth_per_step"])
    forwards = round(
        sum(row["drafter_forwards"] for row in completed)
        / sum(len(row["start_per_step"]) for row in completed)
    )
    levels = (1,) * (forwards - 1) if forwards else None
    note = f"the nodes of {drafting} are not recorded: a chain of {depth} is assumed"
    return Draft(nodes=depth + 1, levels=levels, depth=depth, fanout=1), note


def measured_elsewhere(
    run: RunData, device: Device, stack: str, model: str | None = None
) -> str | None:
    """Say with what the run was measured; None where that is what is predicted."""
    measured = device_in_words(run.manifest), "compiled" if run.manifest.get("compile") else "eager"
    # A device of a user stands for the code that it was fitted to.
    predicted = device.about or device.name, device.code if stack == "compiled" else stack
    others = set(run.records["model"]) - {model} if model is not None else set()
    if not others and measured == predicted:
        return None
    run_of = f"{', '.join(sorted(others))} on " if others else ""
    return f"The run was measured on {run_of}{', '.join(measured)}; predicted is {', '.join(predicted)}."


def terms_of(device: Device, stack: str) -> list[str]:
    """Return the constants of a prediction as sentences, each with its source."""
    shares = (
        f"{device.read_gb_s:g} GB/s x {device.read_share:g}, {device.multiply_tflops:g} Tflop/s x "
    )
    kernel, code = (
        (device.kernel_us, device.code) if stack == "compiled" else (device.eager_kernel_us, stack)
    )
    return [
        f"Predicted for {device.about or device.name}, not measured: read {shares}{device.multiply_share:g}; "
        f"{kernel:g} us a kernel ({code}), {device.step_us:g} us of host work a step.",
        *device.sources,
        "Acceptance is that of the run. Formulas, kernel counts, errors against published figures: docs/prediction.md.",
    ]


def measured_times(run: RunData) -> pd.DataFrame:
    """Return the table `prediction` with what a run measured; raises `RefusedError` without seconds."""
    speed = tables_of(run)["speed"]
    timed = speed[speed["latency_s"].notna()]
    if not len(timed):
        raise RefusedError(
            "the run has no seconds", "Give one that measured speed, or a --device to predict for."
        )
    names = [column.name for column in CELL_COLUMNS] + [
        "images",
        "mean_accepted_length",
        "latency_s",
    ]
    rows = timed[names].assign(
        device=device_in_words(run.manifest), speedup_measured=timed["speedup"]
    )
    return frame("prediction", rows_of(rows))


def with_hours(table: pd.DataFrame, prompts: int, devices: int) -> pd.DataFrame:
    """Return the table with hours; a prompt stays on one device with all its cells."""
    hours = math.ceil(prompts / devices) * table["latency_s"] / 3600
    return table.assign(hours=hours, device_hours=hours * devices)


def hours_in_words(table: pd.DataFrame, prompts: int, devices: int) -> str:
    """Return a sentence on the hours of all cells together."""
    hours = float(table["hours"].sum())
    images = prompts * len(table)
    return (
        f"{prompts:,} prompts in all {len(table)} cells, {images:,} images: {hours:.3g} hours on {devices} "
        f"device{'s' if devices > 1 else ''}, {devices * hours:.3g} device-hours. Loading, compiling, text encoding, "
        "pixels and scoring are not counted."
    )
