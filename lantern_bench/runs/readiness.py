"""Whether loaded models can do a plan: drafter, tables of nearest codes, features of captions, all at hand before it.

This comes before the run's folder is made, so that what is missing leaves no trace of a run; and outside every timed
window. What can be known without torch is `admission`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from lantern_bench.clock import now
from lantern_bench.decode.loop import drafter_and_table
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.runs.store import done_images
from lantern_bench.spec.plan import Plan

__all__ = ["Preparing", "Ready", "Readying", "get_ready"]


@dataclass(frozen=True)
class Preparing:
    """A model's text encoder is at work: captions encoded, and how many there are to encode."""

    model: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """Nothing is missing; all of it took so many seconds."""

    seconds: float


Readying: TypeAlias = Preparing | Ready


def get_ready(plan: Plan, models: Mapping[str, LoadedModel], folder: Path) -> Iterator[Readying]:
    """Make what the images of `plan` that `folder` lacks will need, and free what only making it needed.

    Raises `RefusedError` for a missing drafter, text encoder or codebook and for a damaged table or feature, and
    `UserError` for files that are malformed or ask for what their model has not.
    """
    began = now()
    done = done_images(folder)
    groups = [
        group for group in plan.batches() if any((u.cell.cell_id, u.prompt.id, u.repeat) not in done for u in group)
    ]
    for cell in dict.fromkeys(group[0].cell for group in groups):
        if cell.decoding.drafting != "none":
            with torch.inference_mode():
                drafter_and_table(models[cell.model], cell.decoding)
    for name, model in models.items():
        prompts = [unit.prompt.text for group in groups for unit in group if unit.cell.model == name]
        for count, total in model.prepare(list(dict.fromkeys(prompts))):
            yield Preparing(name, count, total)
    yield Ready(now() - began)
