"""Write the tables of docs/prediction.md: errors of predicted speedups, and the devices.

    python -m scripts.docs.prediction_tables

The text above the marker is written by hand; everything below it is replaced. The command prints
every predicted row. scripts/docs/published_speed.csv holds the published figures, and no parameter
was fitted to them.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from lantern_bench.models.networks.transformer_config import TransformerConfig
from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Device,
    Draft,
    KernelCounts,
    Workload,
    devices,
    fit_device,
    named_draft,
    prefill_seconds,
    step_samples,
    step_seconds,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "prediction.md"
REFERENCE = ROOT / "results" / "reference"
MARKER = "<!-- Below: python -m scripts.docs.prediction_tables -->\n"
# transformers 5.23, Emu3TextConfig; 8,193 tokens of an image (papers: 8,193 forwards).
EMU3 = TransformerConfig(
    vocab_size=184_622,
    dim=4096,
    layers=32,
    heads=32,
    ffn_dim=14_336,
    prefix=64,
    grid=(90, 91),
    kv_heads=8,
)
# Where no device is stated: eager code waits for its host, and every device of the file gives the
# same speedup.
ANY_DEVICE = "a100"


def published_rows() -> list[dict[str, Any]]:
    """The rows of published_speed.csv with `predicted` and `error`."""
    with Path(__file__).with_name("published_speed.csv").open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row["predicted"] = predicted(row)
        row["error"] = row["predicted"] / float(row["speedup"]) - 1
    return rows


def predicted(row: dict[str, Any], stack: KernelCounts = KERNEL_COUNTS["eager"]) -> float:
    """Return the predicted speedup of a published row from its compression.

    `rounds` is how many drafts are made for each target forward.
    """
    sizes = EMU3 if row["model"] == "emu3" else model_of(row["model"]).sizes
    at = Workload(sizes=sizes, batch=1, guided=True, context=sizes.prefix + sizes.image_tokens / 2)
    device = devices()[row["device"] or ANY_DEVICE]
    compression = float(row["compression"])
    step = step_seconds(
        device=device, stack=stack, setting=at, draft=draft_of(row["draft"]), committed=compression
    )["total"]
    plain = step_seconds(device=device, stack=stack, setting=at, draft=None, committed=1.0)[
        "total"
    ].sum()
    return float(compression * plain / (step.sum() + (float(row["rounds"]) - 1) * step["draft"]))


def draft_of(name: str) -> Draft:
    """Read the draft of a row: a static tree, `58n5d10b`, or `window-16`.

    A window is a Jacobi window, which needs no drafter and is verified in one forward.
    """
    if name.startswith("window-"):
        return Draft(nodes=int(name.removeprefix("window-")), levels=None, depth=1, fanout=1)
    draft = named_draft(name)
    assert draft is not None, name
    return draft


def held_out() -> list[dict[str, Any]]:
    """Compare measured and predicted speedups of the reference runs.

    The CPU is fitted to ar and three trees, and predicts the other cells.
    """
    found: list[dict[str, Any]] = []
    for path in (REFERENCE / "speed.csv", REFERENCE / "trees" / "speed.csv"):
        table = pd.read_csv(path)
        sizes = model_of(table["model"][0]).sizes
        drafts = [named_draft(str(tree)) for tree in table["tree"]]
        at = Workload(
            sizes=sizes, batch=1, guided=True, context=sizes.prefix + sizes.image_tokens // 2
        )
        parts = table[["draft_ms", "target_ms", "verify_ms", "other_ms"]].fillna(0.0)
        known = sorted({draft for draft in drafts if draft is not None})
        fitted = [None, known[0], known[len(known) // 2], known[-1]]
        samples = []
        steps = parts.to_dict("records")
        for draft, tree, step in zip(drafts, table["tree"], steps, strict=True):
            if draft in fitted and (draft is not None or pd.isna(tree)):
                samples += step_samples(setting=at, draft=draft, weight_bytes=2, step=step)
        host = 1e3 * parts["other_ms"][table["tree"].notna()].median()
        device = fit_device(samples, name="reference", kind="cpu", step_us=host)
        plain = step_seconds(
            device=device, stack=KERNEL_COUNTS["compiled"], setting=at, draft=None, committed=1.0
        )["total"].sum()
        ours = parts.sum(axis=1)
        # The step that the cells are compared to. The parts share the prefill among the steps.
        before = float(ours[table["tree"].isna() & (table["temperature"] == 1)].iloc[0])
        for draft, cell, length, after in zip(
            drafts, table["cell_id"], table["mean_accepted_length"], ours, strict=True
        ):
            if draft is not None and draft not in fitted:
                made = (
                    length
                    * plain
                    / step_seconds(
                        device=device,
                        stack=KERNEL_COUNTS["compiled"],
                        setting=at,
                        draft=draft,
                        committed=length,
                    )["total"].sum()
                )
                row = {
                    "run": path.parent.name,
                    "cell": cell,
                    "measured": length * before / after,
                    "predicted": made,
                }
                found.append(row | {"error": made / row["measured"] - 1})
    return found


def of_a_cell(row: Any, device: Device, sizes: Any) -> float:
    """The speedup of a row of speed.csv, one image at a time, by this package's compiled steps."""
    stack = KERNEL_COUNTS["compiled"]
    at = Workload(sizes=sizes, batch=1, guided=True, context=sizes.prefix + sizes.image_tokens / 2)
    asked = round(row.drafter_forwards / (row.target_forwards - 1))
    draft = named_draft(row.tree)
    if draft is None and (window := re.match(r"w(\d+)", row.tree)):
        depth = int(window[1])
        draft = Draft(
            nodes=depth + 1, levels=(1,) * (asked - 1) if asked else None, depth=depth, fanout=1
        )
    assert draft is not None, row.tree
    plain = step_seconds(device=device, stack=stack, setting=at, draft=None, committed=1.0)[
        "total"
    ].sum()
    before = prefill_seconds(device, stack, at)
    step = step_seconds(
        device=device, stack=stack, setting=at, draft=draft, committed=row.mean_accepted_length
    )["total"].sum()
    left = sizes.image_tokens - 1
    return (before + left * plain) / (before + left / row.mean_accepted_length * step)


def on_gpu() -> list[dict[str, Any]]:
    """Compare measured and predicted speedups of the bundled model on an H200.

    Its constants are those of an H100.
    """
    table = pd.read_csv(REFERENCE / "frontier-h200" / "speed.csv")
    device = devices()["h200"]
    sizes = model_of(table["model"][0]).sizes
    found: list[dict[str, Any]] = []
    sampled = (table["drafting"] != "none") & (table["temperature"] == 1)
    for row in table[sampled].itertuples():
        made = of_a_cell(row, device, sizes)
        cell = {
            "run": "frontier-h200",
            "cell": row.cell_id,
            "measured": row.speedup,
            "predicted": made,
        }
        found.append(cell | {"error": made / row.speedup - 1})
    return found


def groups() -> dict[str, list[dict[str, Any]]]:
    """Group the published rows by what their paper states.

    A row states both figures on a named device, or borrows its compression, or names no device.
    """
    rows = published_rows()
    named = [row for row in rows if row["device"]]
    return {
        "Device stated": [row for row in named if row["confidence"] != "borrowed"],
        "Device stated, compression from another paper": [
            row for row in named if row["confidence"] == "borrowed"
        ],
        "Device not stated": [row for row in rows if not row["device"]],
    }


def summary(name: str, rows: list[dict[str, Any]]) -> str:
    """How far a group of rows is off: a row of the page's table."""
    errors = [abs(row["error"]) for row in rows]
    near = sum(error <= 0.15 for error in errors)
    free = [
        abs(float(row["compression"]) / float(row["speedup"]) - 1)
        for row in rows
        if "compression" in row
    ]
    figures = (f"{median(errors):.1%}", f"{near} of {len(rows)}", f"{max(errors):.0%}")
    return " | ".join((name, *figures, f"{median(free):.1%}" if free else "")) + "\n"


def render(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    written, _, _ = page.partition(MARKER)
    own = {
        "Held-out cells on a CPU": held_out(),
        "Compiled steps on an H200": on_gpu(),
    }
    text = f"{written}{MARKER}\n## Errors\n\n"
    text += "speedups | median error | within 15% | largest | "
    text += "median error with drafts and verification for free\n"
    text += "--- | --- | --- | --- | ---\n"
    text += "".join(summary(name, rows) for name, rows in (groups() | own).items())
    text += "\n## Devices\n\nname | device | read, GB/s | Tflop/s | source\n"
    text += "--- | --- | --- | --- | ---\n"
    for device in (device for device in devices().values() if device.kind == "gpu"):
        cells = (device.name, device.about, f"{device.read_gb_s:g}", f"{device.multiply_tflops:g}")
        text += f"{' | '.join((*cells, '; '.join(device.sources)))}\n"
    return text


def every_row() -> str:
    """All predicted speedups beside the published and the measured ones."""
    published = pd.DataFrame(published_rows())[
        ["paper", "method", "params", "model", "speedup", "predicted", "error"]
    ]
    own = pd.DataFrame(held_out() + on_gpu())
    return f"{published.round(3).to_string(index=False)}\n\n{own.round(3).to_string(index=False)}\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(every_row())
