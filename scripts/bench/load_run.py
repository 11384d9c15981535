"""The run of `make bench-load`.

A sweep decodes a few images of every cell. Their records are then repeated for other prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lantern_bench.config.plan import ImageTask
from lantern_bench.config.settings import Overrides
from lantern_bench.devices.compute import choose_compute
from lantern_bench.models import registry
from lantern_bench.models.load import load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.storage.records import line_of, record_key
from lantern_bench.storage.run_directory import MANIFEST, RECORDS, done_images, read_records
from lantern_bench.sweeps.decode_missing import key_fields
from lantern_bench.sweeps.request import Request, prepare
from lantern_bench.sweeps.run import run
from tests.helpers.tiny_model import CODES, TinyModel, TinyPixels, TinyTarget

REAL = 2  # images of each cell that are decoded
PROCESSES = 5  # that the repeated records seem to come from
WORDS = (
    "a photo of red blue white round tall small lanterns over the lake bridge street market at dusk"
)


class OneToken(TinyModel):
    """The tiny model with images of one token, and prompts of any words."""

    # A draft cannot be deeper than an image.
    tokens = 1
    defaults: ClassVar = {**TinyModel.defaults, "tree": [[0], [1]], "depth": 1}

    def check_prompt(self, text: str) -> None:
        """Take every prompt."""

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the tables with a grid of one code."""
        model = super().load(device, dtype)
        for part in (model.target, model.drafter):
            assert isinstance(part, TinyTarget)
            part.image_tokens = 1
        model.grid = (1, 1)
        model.pixels = Dots()
        return model


class Dots(TinyPixels):
    """A picture of one colour."""

    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens [B, 1] -> uint8 [B, 8, 8, 3]."""
        grey = (tokens.reshape(-1, 1, 1, 1) * (255 // CODES)).to(torch.uint8)
        return grey.expand(-1, 8, 8, 3).contiguous()


def use_family() -> None:
    """Let commands of this process find this model, and no other."""
    registry.models = lambda: {"tiny": OneToken()}  # type: ignore[assignment]


def request_of(folder: Path, images: int | None = None) -> Request:
    """Return the checked sweep; cells and prompts are in files beside the run."""
    content = json.loads(folder.with_suffix(".json").read_text())
    content["prompts"] = str(folder.with_suffix(".txt"))
    if images is not None:
        content["images"] = images
    return prepare(content, Overrides(), out=folder)


def describe(folder: Path, cells: int, prompts: int) -> None:
    """Write the experiment and the prompts."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    each = (cells - 2) // 2
    bounds = [round(0.001 * (number + 1), 3) for number in range(each + cells % 2)]
    factors = [round(1 + bound, 3) for bound in bounds[:each]]
    content = {
        "name": "load",
        "model": "tiny",
        "metrics": ["speed"],
        "compile": False,
        "cells": [
            {"mode": "ar"},
            {"mode": "speculative"},
            {"mode": "lantern", "drafting": "static", "neighbours": 3, "delta": bounds},
            {"mode": "lantern++", "neighbours": 3, "lambda": factors},
        ],
    }
    folder.with_suffix(".json").write_text(json.dumps(content))
    noise = np.random.default_rng(0)
    words = WORDS.split()
    lines = (f"{' '.join(noise.choice(words, 9))} {number}" for number in range(prompts))
    folder.with_suffix(".txt").write_text("\n".join(lines) + "\n")


def build(folder: Path, cells: int, prompts: int) -> int:
    """Make the run; return the number of its records."""
    use_family()
    describe(folder, cells, prompts)
    run(request_of(folder, REAL), lambda _event: None)
    real: dict[str, list[dict[str, Any]]] = {}
    for row in read_records(folder):
        real.setdefault(row["cell_id"], []).append(dict(row))
    request = request_of(folder)
    settings = request.experiment.settings
    compute = choose_compute(settings.device, settings.dtype, fast=True)
    key = key_fields(
        models=load_models(request.experiment, compute),
        settings=settings,
        compute=compute,
        cells=request.plan.cells,
    )
    assert key == json.loads((folder / MANIFEST).read_text())["key"]
    noise = np.random.default_rng(1)
    finished = done_images(folder)

    def record(task: ImageTask) -> dict[str, Any]:
        copied = dict(real[task.cell.cell_id][task.image_index % REAL])
        slower = float(noise.lognormal(0.0, 0.05))
        for name, value in copied.items():
            if name.endswith("seconds") and value:
                copied[name] = value * slower
        return copied | {
            "record_key": record_key(task, key),
            "prompt_id": task.prompt.id,
            "prompt": task.prompt.text,
            "prompt_source": task.prompt.source or None,
            "seed": task.seed,
            "repeat": task.repeat,
            "order_index": task.order_index,
            "image": task.image,
            "process": task.image_index * PROCESSES // prompts,
        }

    count = len(finished)
    with (folder / RECORDS).open("ab") as file:
        for task in request.plan.tasks:
            if task.key not in finished:
                file.write(line_of(record(task)))
                count += 1
    return count
