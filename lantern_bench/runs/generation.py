"""Images of a few prompts outside a run, for `lantern-bench generate`: decoded in memory, returned as file contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import torch

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.plan import ImageTask, Prompt, record_seed
from lantern_bench.decoding.loop import drafter_and_rule
from lantern_bench.errors import RecordsFailedError, RefusedError
from lantern_bench.models.loaded_model import LoadedModel, NoPixels
from lantern_bench.models.random_model import meta_model, sizes_of
from lantern_bench.runs.devices import Compute
from lantern_bench.runs.images import DecodedImage, png_bytes
from lantern_bench.runs.runner import decode_batch


def tasks_of(cells: Sequence[Cell], seed: int, prompts: Sequence[str], images: int) -> list[ImageTask]:
    """Return the tasks of `images` images of each prompt, cell by cell; all cells use the same seeds."""
    slots = [(prompt, repeat) for prompt in map(Prompt, prompts) for repeat in range(images)]
    return [
        ImageTask(cell, prompt, repeat, record_seed(seed, prompt.id, repeat, cell.decoding.seed_set), index, index)
        for cell in cells
        for index, (prompt, repeat) in enumerate(slots)
    ]


def decode_tasks(
    model: LoadedModel, compute: Compute, tasks: Sequence[ImageTask], *, logits: bool = False
) -> Iterator[DecodedImage]:
    """Yield the images one by one, without pixels if the model has no tokenizer; raises `RecordsFailedError`.

    Every cell of a compiled model decodes a part of an image first.
    """
    tokens = model.target.image_tokens if isinstance(model.pixels, NoPixels) else None
    # A quarter of an image runs every program of a step more than once.
    warm_up_tokens = max(16, model.target.image_tokens // 4)
    warm_ups = [(task, warm_up_tokens) for task in tasks if task.image_index == 0 and model.engine.compile]
    for number, (task, count) in enumerate([*warm_ups, *((task, tokens) for task in tasks)]):
        try:
            images = decode_batch(model, [task], compute, tokens=count, logits=logits)
        except (RuntimeError, MemoryError) as error:
            raise RecordsFailedError(f"{task.cell.cell_id}: {type(error).__name__}: {error}") from error
        if number >= len(warm_ups):
            yield from images


def runnable(model: LoadedModel, cells: Sequence[Cell]) -> tuple[tuple[Cell, ...], list[str]]:
    """Return the cells that the model has all parts for, and why each of the others is left out."""
    complete, reasons = [], []
    for cell in cells:
        try:
            if cell.decoding.drafts:
                drafter_and_rule(model, cell.decoding)
            complete.append(cell)
        except RefusedError as error:
            reasons.append(f"{cell.cell_id} is left out: {error.message}")
    return tuple(complete), reasons


def picture_png(decoded: Sequence[DecodedImage], columns: int) -> bytes:
    """Put all images into one PNG: a column per cell, a row per image."""
    rows = len(decoded) // columns
    pixels = [image.pixels for image in decoded if image.pixels is not None]
    cells = [torch.cat(pixels[start : start + rows]) for start in range(0, len(pixels), rows)]
    return png_bytes(torch.cat(cells, dim=1))


def numbers_table(tasks: Sequence[ImageTask], decoded: Sequence[DecodedImage]) -> pd.DataFrame:
    """Return how each image was decoded, one row per image."""
    rows = []
    for task, image in zip(tasks, decoded, strict=True):
        trace = image.trace
        row = {"cell_id": task.cell.cell_id, "image": task.image_index, "tokens": trace.tokens}
        row |= {"target_forwards": trace.target_forwards, "mean_accepted_length": trace.mean_accepted_length}
        row |= {"step_compression": trace.step_compression, "seconds": trace.seconds}
        rows.append(row | {"pixel_seconds": image.pixel_seconds})
    return pd.DataFrame(rows)


def memory_table(resolved: ResolvedExperiment, compute: Compute) -> tuple[pd.DataFrame, int]:
    """The memory of each part of the model and the bytes in total; allocates nothing and opens no file."""
    model = meta_model(resolved.settings.model[0])
    nodes = max(1 + (cell.decoding.nodes or len(cell.decoding.paths)) for cell in resolved.cells)
    guided = any(cell.decoding.cfg_scale != 1 for cell in resolved.cells)
    sizes = sizes_of(model, compute.dtype, guided=guided, nodes=nodes, batch=max(resolved.settings.batch))
    total, parameters = sum(size.bytes for size in sizes), sum(size.parameters for size in sizes)
    rows = [(size.part, size.parameters or None, str(size.dtype).removeprefix("torch."), size.bytes) for size in sizes]
    table = pd.DataFrame([*rows, ("all", parameters, "", total)], columns=["part", "parameters", "dtype", "gigabytes"])
    table["gigabytes"] = (table["gigabytes"] / 1e9).round(3)
    return table.astype({"parameters": "Int64"}), total
