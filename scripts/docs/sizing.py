"""Write the sizing table of docs/scale.md: measured on the run's machine, predicted for GPUs.

    python -m scripts.docs.sizing

The text above the marker is written by hand; everything below it is replaced.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pandas as pd

from lantern_bench.models.registry import model_of
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Device,
    Workload,
    devices,
    named_draft,
    prefill_seconds,
    step_seconds,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
SPEED = ROOT / "results" / "reference" / "speed.csv"
MARKER = "<!-- Below: python -m scripts.docs.sizing -->\n"
MODELS = ("llamagen-t2i-stage1", "lumina-mgpt-7b-768")
GPUS = ("h100",)
PROMPTS = 30_000
DEVICES = (1, 8, 64)


def render(page: str) -> str:
    """Return the text of the page with its table made anew."""
    speed = pd.read_csv(SPEED, keep_default_na=True)
    written, _, _ = page.partition(MARKER)
    head = ["model", "device", "images an hour on 1", *(f"hours on {count}" for count in DEVICES)]
    lines = []
    timed = speed[speed["latency_s"].notna()]
    measured = dict(zip(timed["cell_id"], timed["latency_s"], strict=True))
    rows = [("lanterns", "CPU of the committed run, one thread (measured)", measured)]
    for model, name in itertools.product(MODELS, GPUS):
        rows.append(
            (
                model,
                f"{devices()[name].about or name} (predicted)",
                predicted_seconds(speed, devices()[name], model),
            )
        )
    for model, device, seconds in rows:
        hours = [math.ceil(PROMPTS / count) * sum(seconds.values()) / 3600 for count in DEVICES]
        rate = PROMPTS * len(seconds) / hours[0]
        lines.append(
            [
                f"`{model}`",
                device,
                *(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in (rate, *hours)),
            ]
        )
    first, *others = (f"| {' | '.join(line)} |\n" for line in [head, *lines])
    return f"{written}{MARKER}\n{first}{'|---' * len(head)}|\n{''.join(others)}"


def predicted_seconds(speed: pd.DataFrame, device: Device, model: str) -> dict[str, float]:
    """Return predicted seconds per image on another device, by cell id.

    The committed run has no records, so half of the image is taken to be in the cache. Cells whose
    draft is not told by its name are left out.
    """
    seconds = {}
    kernels = KERNEL_COUNTS["compiled"]
    for row in speed.to_dict("records"):
        sizes = model_of(model).sizes
        is_ar = row["drafting"] == "none"
        draft = None if is_ar else named_draft(str(row["tree"]))
        length = 1.0 if is_ar else row["mean_accepted_length"]
        if (draft is None and not is_ar) or not length > 0:
            continue
        batch = int(row["batch"] or 1)
        setting = Workload(
            sizes=sizes,
            batch=batch,
            guided=row["cfg_scale"] != 1,
            context=sizes.prefix + sizes.image_tokens / 2,
        )
        step = step_seconds(
            device=device, stack=kernels, setting=setting, draft=draft, committed=length
        )["total"].sum()
        steps = (sizes.image_tokens - 1) / length
        seconds[str(row["cell_id"])] = (
            prefill_seconds(device, kernels, setting) + steps * step
        ) / batch
    return seconds


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
