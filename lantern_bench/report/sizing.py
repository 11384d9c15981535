"""How long a run would take on how many devices: from the seconds an image of a run's cells, measured or predicted.

A prompt stays on one device with all its cells. Loading, compiling, text encoding, pixels and scoring
are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError
from lantern_bench.models.registry import model_of
from lantern_bench.report.cost_model import STACKS, Device, Setting, named_draft, prefill_seconds, step_seconds
from lantern_bench.report.tables import frame

if TYPE_CHECKING:
    import pandas as pd

PROMPTS = {"COCO-5k": 5_000, "COCO-30k": 30_000}
"""Prompt sets of published tables: captions of MS-COCO's validation set, one a picture, and 30,000 of them."""

DEVICES = (1, 8, 64)


def measured_seconds(speed: pd.DataFrame) -> dict[str, float]:
    """Return seconds an image by cell id of a run's table `speed`; raises `RefusedError` for a run without seconds."""
    timed = speed[speed["latency_s"].notna()]
    if not len(timed):
        raise RefusedError("the run has no seconds", "Give one that measured speed, or a --device to predict for.")
    return {str(cell): float(seconds) for cell, seconds in zip(timed["cell_id"], timed["latency_s"], strict=True)}


def predicted_seconds(speed: pd.DataFrame, device: Device, stack: str, model: str | None = None) -> dict[str, float]:
    """Return seconds an image by cell id on another device, at the accepted lengths of a run's table `speed`.

    Half of the image is in the cache (`cost_model.py`). Cells whose draft is not known by its name are left out. Raises
    `RefusedError` for a model of unknown sizes, `UserError` for an unknown model.
    """
    found, kernels = {}, STACKS[stack]
    for row in speed.to_dict("records"):
        sizes = model_of(model or str(row["model"])).sizes
        if sizes is None:
            raise RefusedError(f"the sizes of {model or row['model']} are not known", "Give a published --model.")
        plain = row["drafting"] == "none"
        draft = None if plain else named_draft(str(row["tree"]))
        length = row["mean_accepted_length"]
        if (draft is None and not plain) or not length > 0:
            continue
        batch = int(row["batch"] or 1)
        at = Setting(sizes, batch, row["cfg_scale"] != 1, sizes.prefix + sizes.image_tokens / 2)
        step = step_seconds(device, kernels, at, draft, 1.0 if plain else length).total
        steps = (sizes.image_tokens - 1) / (1.0 if plain else length)
        found[str(row["cell_id"])] = (prefill_seconds(device, kernels, at) + steps * step) / batch
    if not found:
        raise RefusedError("no cell of the run can be predicted", "Give a run with ar or with drafts of static trees.")
    return found


def sizing_rows(
    seconds: dict[str, float],
    where: str,
    prompts: dict[str, int],
    devices: Sequence[int],
    cells: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table `sizing`; `cells` scales the mean of the cells to another number of them."""
    count = cells or len(seconds)
    a_prompt = sum(seconds.values()) / len(seconds) * count
    for name, number in prompts.items():
        for many in devices:
            hours = math.ceil(number / many) * a_prompt / 3600
            images = number * count
            row = {"where": where, "prompt_set": name, "cells": count, "images": images, "devices": many}
            row |= {"s_per_image": a_prompt / count, "images_per_hour": images / hours, "hours": hours}
            yield row | {"device_hours": many * hours}


def sizing(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as the table `sizing`."""
    return frame("sizing", rows)
