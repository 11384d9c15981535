"""Write the sizing tables of docs/scale.md from the committed run: measured on its machine, predicted for GPUs.

    python -m docs.make_scale

The text above the marker is written by hand; everything below it is replaced.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lantern_bench.report.cost_model import devices
from lantern_bench.report.sizing import DEVICES, PROMPTS, measured_seconds, predicted_seconds, sizing_rows

PAGE = Path(__file__).with_name("scale.md")
SPEED = PAGE.parent.parent / "results" / "reference" / "speed.csv"
MARKER = "<!-- Below: python -m docs.make_scale -->\n"
MODELS = ("llamagen-t2i-stage1", "lumina-mgpt-7b-768")
GPUS = ("a100", "h100")


def render(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    speed = pd.read_csv(SPEED, keep_default_na=True)
    written, _, _ = page.partition(MARKER)
    text = f"{written}{MARKER}"
    found = {"`lanterns`, measured on one thread of the CPU of the committed run": measured_seconds(speed)}
    for model in MODELS:
        for name in GPUS:
            label = f"`{model}`, predicted for {devices()[name].about or name}"
            found[label] = predicted_seconds(speed, devices()[name], "compiled", model)
    for label, seconds in found.items():
        text += f"\n### {label}\n\n| prompts | cells | images | devices | images an hour | hours | device-hours |\n"
        text += "| --- | --- | --- | --- | --- | --- | --- |\n"
        for row in sizing_rows(seconds, label, PROMPTS, DEVICES):
            figures = [f"{row[name]:,.3g}" if row[name] < 1000 else f"{row[name]:,.0f}" for name in _FIGURES]
            cells = (row["prompt_set"], row["cells"], f"{row['images']:,}", row["devices"], *figures)
            text += f"| {' | '.join(map(str, cells))} |\n"
    return text


_FIGURES = ("images_per_hour", "hours", "device_hours")

if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
