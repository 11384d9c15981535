"""Predict the speed of a run on another device, with the acceptance that the run recorded.

Acceptance can be kept because it does not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lantern_bench.analysis.cells import CellRecords, join_notes, run_cells
from lantern_bench.analysis.tables import tables_of
from lantern_bench.devices.environment import device_in_words
from lantern_bench.methods.catalog import DRAFTINGS
from lantern_bench.methods.static_trees import check_topology, topology_name
from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Device,
    Draft,
    Workload,
    named_draft,
    prefill_seconds,
    step_seconds,
    tree_draft,
)
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import CELL_NAMES, Row, frame
from lantern_bench.utils.errors import RefusedError


def predict_run(run: RunData, device: Device, stack: str, model: str | None = None) -> pd.DataFrame:
    """Return the table `prediction` of a run.

    Args:
        run: The run, whose acceptance is used.
        device: The device to predict for.
        stack: `compiled` or `eager`.
        model: Model whose sizes are used. Default: the run's own.

    Raises:
        RefusedError: No step is recorded, or the sizes of the model are unknown.
    """
    rows = []
    for cell in run_cells(run):
        has_steps = cell.completed["committed_per_step"].str.len() > 0
        images = cell.completed[has_steps]
        if len(images):
            rows.append(
                _cell_prediction(
                    cell, images, manifest=run.manifest, device=device, stack=stack, model=model
                )
            )
    if not rows:
        raise RefusedError(
            f"{run.folder}: no image has recorded steps", "Give a run with completed images."
        )
    table = frame("prediction", rows)
    speed = tables_of(run)["speed"].set_index("cell_id")
    table["speedup_measured"] = table["cell_id"].map(speed["speedup"])
    if measured_elsewhere(run, device, stack, model=model) is None:
        table["speedup_error"] = table["speedup"] / table["speedup_measured"] - 1
    return table


def _cell_prediction(
    cell: CellRecords,
    images: pd.DataFrame,
    *,
    manifest: Mapping[str, Any],
    device: Device,
    stack: str,
    model: str | None,
) -> Row:
    """The row of a cell, given its images with recorded steps."""
    draft, assumed = _draft_of(cell, images, manifest)
    notes = []
    run_model = str(cell.columns["model"])
    name = model or run_model
    sizes = sizes_of(name)

    # 1. What a step commits, and how full the cache is on average.
    committed = images["committed_per_step"].explode().mean()
    tokens = images["tokens"].mean()
    filled = images["start_per_step"].explode().mean() / tokens
    if name != run_model:
        tokens = sizes.image_tokens
        notes.append(f"sizes of {name} at the acceptance of {run_model}: its own may differ")
    batch = int(cell.columns["batch"] or 1)
    if batch > 1 and draft is not None:
        notes.append("images of a batch that end early are not counted as idle")

    # 2. Seconds of an autoregressive step and of a step of the cell.
    code = KERNEL_COUNTS[stack]
    setting = Workload(
        sizes=sizes,
        batch=batch,
        guided=cell.columns["cfg_scale"] != 1,
        context=sizes.prefix + filled * tokens,
    )
    middle = setting._replace(context=sizes.prefix + tokens / 2)
    plain = step_seconds(device, code, middle, draft=None, committed=1.0)["total"].sum()
    parts = step_seconds(device, code, setting, draft=draft, committed=committed)
    step = parts.sum()

    # 3. Seconds of an image.
    prefill = prefill_seconds(device, code, setting)
    seconds = prefill + (tokens - 1) / committed * step["total"]
    plain_seconds = prefill + (tokens - 1) * plain
    return {
        **cell.columns,
        "model": name,
        "device": device.name,
        "stack": stack,
        "images": len(images),
        "mean_accepted_length": committed,
        "nodes": 1 if draft is None else draft.nodes,
        "drafter_forwards_per_step": 0 if draft is None else draft.drafter_forwards,
        "speedup": plain_seconds / seconds,
        "latency_s": seconds / batch,
        "ar_ms": 1e3 * plain,
        "step_ms": 1e3 * step["total"],
        **(1e3 * parts["total"]).add_suffix("_ms"),
        **(1e3 * step.drop("total")).add_suffix("_ms"),
        "note": join_notes([*notes, assumed]),
    }


def sizes_of(name: str) -> Any:
    """Return the sizes of a model, a `TransformerConfig`; raises `RefusedError` if not known."""
    sizes = model_of(name).sizes
    if sizes is None:
        raise RefusedError(
            f"the sizes of {name} are not known",
            "Give a published model with --model, such as llamagen-t2i-stage1.",
        )
    return sizes


def _draft_of(
    cell: CellRecords, images: pd.DataFrame, manifest: Mapping[str, Any]
) -> tuple[Draft | None, str | None]:
    """The draft of a cell, None for autoregressive decoding, and what is assumed about it."""
    drafting = cell.columns["drafting"]
    label = str(cell.columns["tree"])
    if drafting == "none":
        return None, None
    draft = named_draft(label)
    experiment = manifest.get("experiment") or {}
    for settings in experiment.get("cells") or ():
        tree = settings.get("tree")
        if isinstance(tree, list) and topology_name(check_topology(tree)) == label:
            draft = tree_draft(tree)
    if draft is not None:
        return draft, None
    if drafting in DRAFTINGS and not DRAFTINGS[drafting].drafts:
        # One more than it draws: the last token of a row is scored without drawing one.
        nodes = int(images["committed_per_step"].explode().max()) + 1
        return (
            Draft(nodes=nodes, levels=None, depth=nodes - 1, fanout=1),
            f"a step of {drafting} is costed as a verified chain of {nodes - 1}",
        )
    depth = images["offered_depth_per_step"].explode().max()
    steps = images["start_per_step"].str.len().sum()
    forwards = round(images["drafter_forwards"].sum() / steps)
    levels = (1,) * (forwards - 1) if forwards else None
    return (
        Draft(nodes=depth + 1, levels=levels, depth=depth, fanout=1),
        f"the nodes of {drafting} are not recorded: a chain of {depth} is assumed",
    )


def measured_elsewhere(
    run: RunData, device: Device, stack: str, model: str | None = None
) -> str | None:
    """Say how the run was measured; None if the prediction is for the same device and code.

    Args:
        run: The run.
        device: The device to predict for.
        stack: `compiled` or `eager`.
        model: Model whose sizes are used. Default: the run's own.
    """
    run_stack = "compiled" if run.manifest.get("compile") else "eager"
    # A device that a user has measured stands for the code that it was fitted to.
    predicted_stack = device.code if stack == "compiled" else stack
    measured = f"{device_in_words(run.manifest)}, {run_stack}"
    predicted = f"{device.about or device.name}, {predicted_stack}"
    others = set(run.records["model"]) - {model}
    if model is not None and others:
        measured = f"{', '.join(sorted(others))} on {measured}"
    if measured == predicted:
        return None
    return f"The run was measured on {measured}; predicted is {predicted}."


def terms_of(device: Device, stack: str) -> list[str]:
    """Return the constants of a prediction as sentences, each with its source."""
    code = stack
    kernel_us = device.eager_kernel_us
    if stack == "compiled":
        code = device.code
        kernel_us = device.kernel_us
    return [
        f"Predicted for {device.about or device.name}, not measured: "
        f"read {device.read_gb_s:g} GB/s x {device.read_share:g}, "
        f"{device.multiply_tflops:g} Tflop/s x {device.multiply_share:g}; "
        f"{kernel_us:g} us a kernel ({code}), {device.step_us:g} us of host work a step.",
        *device.sources,
        "Acceptance is the run's. "
        "Formulas, kernel counts, errors against published figures: docs/prediction.md.",
    ]


def measured_times(run: RunData) -> pd.DataFrame:
    """Return the table `prediction` with the measured columns of a run alone.

    Raises:
        RefusedError: The run has no seconds.
    """
    speed = tables_of(run)["speed"]
    timed = speed[speed["latency_s"].notna()]
    if not len(timed):
        raise RefusedError(
            "the run has no seconds", "Give one that measured speed, or a --device to predict for."
        )
    rows = timed[[*CELL_NAMES, "images", "mean_accepted_length", "latency_s"]].assign(
        device=device_in_words(run.manifest), speedup_measured=timed["speedup"]
    )
    return frame("prediction", rows_of(rows))


def with_hours(table: pd.DataFrame, prompts: int, devices: int) -> pd.DataFrame:
    """Return the table with the hours of each cell.

    Args:
        table: The table `prediction`.
        prompts: Number of prompts; each stays on one device with all its cells.
        devices: Number of devices that decode at the same time.
    """
    hours = math.ceil(prompts / devices) * table["latency_s"] / 3600
    return table.assign(hours=hours, device_hours=hours * devices)


def hours_in_words(table: pd.DataFrame, prompts: int, devices: int) -> str:
    """Return a sentence on the hours of all cells together.

    Args:
        table: A table of `with_hours`.
        prompts: Number of prompts.
        devices: Number of devices.
    """
    hours = float(table["hours"].sum())
    plural = "s" if devices > 1 else ""
    return (
        f"{prompts:,} prompts in all {len(table)} cells, {prompts * len(table):,} images: "
        f"{hours:.3g} hours on {devices} device{plural}, {devices * hours:.3g} device-hours. "
        "Loading, compiling, text encoding, pixels and scoring are not counted."
    )
