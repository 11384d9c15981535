"""Images of a few prompts outside a run, for `lantern-bench generate`: decoded in memory, returned as file contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import torch

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.plan import Prompt, Unit, record_seed
from lantern_bench.decoding.loop import drafter_and_table
from lantern_bench.errors import RecordsFailedError, RefusedError
from lantern_bench.models.loaded_model import LoadedModel, NoPixels
from lantern_bench.models.random_model import meta_model, sizes_of
from lantern_bench.runs.devices import Place
from lantern_bench.runs.runner import Made, make_images, png_bytes


def units_of(cells: Sequence[Cell], seed: int, prompts: Sequence[str], images: int) -> list[Unit]:
    """Return the images to decode, cell by cell; all cells use the same seeds."""
    slots = [(prompt, repeat) for prompt in map(Prompt, prompts) for repeat in range(images)]
    return [
        Unit(cell, prompt, repeat, record_seed(seed, prompt.id, repeat, cell.decoding.seed_set), index, index)
        for cell in cells
        for index, (prompt, repeat) in enumerate(slots)
    ]


def runnable(model: LoadedModel, cells: Sequence[Cell]) -> tuple[tuple[Cell, ...], list[str]]:
    """Return the cells that the model has all parts for, and why each of the others is left out."""
    kept, reasons = [], []
    for cell in cells:
        try:
            if cell.decoding.drafts:
                drafter_and_table(model, cell.decoding)
            kept.append(cell)
        except RefusedError as error:
            reasons.append(f"{cell.cell_id} is left out: {error.message}")
    return tuple(kept), reasons


def decode_units(model: LoadedModel, place: Place, units: Sequence[Unit], keep_logits: bool) -> Iterator[Made]:
    """Yield the images one by one, without pixels if the model has no tokenizer; raises `RecordsFailedError`.

    Every cell of a compiled model decodes a part of an image first.
    """
    tokens = model.target.image_tokens if isinstance(model.pixels, NoPixels) else None
    # A quarter of an image runs every program of a step more than once.
    warm_up_tokens = max(16, model.target.image_tokens // 4)
    warm_ups = [(unit, warm_up_tokens) for unit in units if unit.image_index == 0 and model.engine.compile]
    for number, (unit, count) in enumerate([*warm_ups, *((unit, tokens) for unit in units)]):
        try:
            images = make_images(model, [unit], place, tokens=count, keep_logits=keep_logits)
        except (RuntimeError, MemoryError) as error:
            raise RecordsFailedError(f"{unit.cell.cell_id}: {type(error).__name__}: {error}") from error
        if number >= len(warm_ups):
            yield from images


def picture_png(made: Sequence[Made], columns: int) -> bytes:
    """Put all images into one PNG: a column per cell, a row per image."""
    rows = len(made) // columns
    pixels = [torch.cat([one.pixels for one in made[start : start + rows]]) for start in range(0, len(made), rows)]
    return png_bytes(torch.cat(pixels, dim=1))


def numbers_table(units: Sequence[Unit], made: Sequence[Made]) -> pd.DataFrame:
    """How each image was decoded, one row per image."""
    rows = []
    for unit, one in zip(units, made, strict=True):
        trace = one.trace
        row = {"cell_id": unit.cell.cell_id, "image": unit.image_index, "tokens": trace.tokens}
        row |= {"target_forwards": trace.target_forwards, "mean_accepted_length": trace.mean_accepted_length}
        row |= {"step_compression": trace.step_compression, "seconds": trace.seconds}
        rows.append(row | {"pixel_seconds": one.pixel_seconds})
    return pd.DataFrame(rows)


def memory_table(resolved: ResolvedExperiment, place: Place) -> tuple[pd.DataFrame, int]:
    """The memory of each part of the model and the bytes in total; allocates nothing and opens no file."""
    model = meta_model(resolved.settings.model[0])
    nodes = max(1 + (cell.decoding.nodes or len(cell.decoding.paths)) for cell in resolved.cells)
    guided = any(cell.decoding.cfg_scale != 1 for cell in resolved.cells)
    sizes = sizes_of(model, place.dtype, guided=guided, nodes=nodes, batch=max(resolved.settings.batch))
    total, parameters = sum(size.bytes for size in sizes), sum(size.parameters for size in sizes)
    rows = [(one.part, one.parameters or None, str(one.dtype).removeprefix("torch."), one.bytes) for one in sizes]
    table = pd.DataFrame([*rows, ("all", parameters, "", total)], columns=["part", "parameters", "dtype", "gigabytes"])
    table["gigabytes"] = (table["gigabytes"] / 1e9).round(3)
    return table.astype({"parameters": "Int64"}), total
