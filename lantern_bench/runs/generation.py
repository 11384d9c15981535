"""Images of a few prompts outside a run, for `lantern-bench generate`: decoded in memory, returned as file contents."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from lantern_bench.clock import settle_garbage
from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.plan import Prompt, Unit, record_seed
from lantern_bench.decoding.loop import drafter_and_table
from lantern_bench.errors import RecordsFailedError, RefusedError
from lantern_bench.models.io.condition_file import read_condition
from lantern_bench.models.io.files import file_sha256
from lantern_bench.models.loaded_model import LoadedModel, NoPixels
from lantern_bench.models.random_model import blueprint, sizes_of
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


def decode_units(
    model: LoadedModel, place: Place, units: Sequence[Unit], keep_logits: bool, timed: bool = False
) -> Iterator[Made]:
    """Yield the images one by one, without pixels if the model has no tokenizer; raises `RecordsFailedError`.

    Every cell decodes a part of an image first where the model is compiled or the images are `timed`.
    """
    tokens = model.target.image_tokens if isinstance(model.pixels, NoPixels) else None
    warm_ups = [unit for unit in units if unit.image_index == 0 and (model.engine.compile or timed)]
    for number, unit in enumerate([*warm_ups, *units]):
        warm_up = number < len(warm_ups)
        if timed and number == len(warm_ups):
            settle_garbage()
        try:
            # A quarter of an image runs every program of a step more than once.
            count = max(16, model.target.image_tokens // 4) if warm_up else tokens
            made = make_images(model, [unit], place, tokens=count, keep_logits=keep_logits)
        except (RuntimeError, MemoryError) as error:
            raise RecordsFailedError(f"{unit.cell.cell_id}: {type(error).__name__}: {error}") from error
        if not warm_up:
            yield from made


def read_prompts(path: Path, model: LoadedModel) -> list[str]:
    """Read features from a file, make the model use them as conditions, and return a name for each of their rows.

    The names hold the hash of the content, so that equal features get equal seeds wherever the file is.
    """
    rows = read_condition(path, model)
    digest = file_sha256(path)[:12]
    named = {f"{path.name} {digest} row {number}": row for number, row in enumerate(rows)}

    def condition(prompts: Sequence[str]) -> Any:
        chosen = [named[text] for text in prompts]
        return type(chosen[0])(*(torch.cat(parts) for parts in zip(*chosen, strict=True)))

    model.condition = condition
    return list(named)


def picture_png(made: Sequence[Made], columns: int) -> bytes:
    """Put all images into one PNG: a column per cell, a row per image."""
    rows = len(made) // columns
    pixels = [torch.cat([one.pixels for one in made[start : start + rows]]) for start in range(0, len(made), rows)]
    return png_bytes(torch.cat(pixels, dim=1))


def tokens_npz(made: Sequence[Made]) -> bytes:
    """Tokens int32 [n, N], accept_lengths int32 [n, steps] (accepted drafts, padded with -1), and kept logits."""
    arrays: dict[str, Any] = {"tokens": torch.stack([one.tokens for one in made]).cpu().numpy().astype(np.int32)}
    # Uncut: the last step may exceed the image, and the published code counts it whole.
    steps = [[count - 1 for count in one.trace.uncut] for one in made]
    arrays["accept_lengths"] = np.full((len(made), max(map(len, steps))), -1, np.int32)
    for row, counts in zip(arrays["accept_lengths"], steps, strict=True):
        row[: len(counts)] = counts
    if logits := [one.logits for one in made if one.logits is not None]:
        arrays["logits"] = torch.stack(logits).float().cpu().numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


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
    _name, _family, parts = blueprint(resolved.settings.model[0])
    nodes = max(1 + (cell.decoding.nodes or len(cell.decoding.paths)) for cell in resolved.cells)
    guided = any(cell.decoding.cfg_scale != 1 for cell in resolved.cells)
    sizes = sizes_of(parts, place.dtype, guided=guided, nodes=nodes, batch=max(resolved.settings.batch))
    total, parameters = sum(size.bytes for size in sizes), sum(size.parameters for size in sizes)
    rows = [(one.part, one.parameters or None, str(one.dtype).removeprefix("torch."), one.bytes) for one in sizes]
    table = pd.DataFrame([*rows, ("all", parameters, "", total)], columns=["part", "parameters", "dtype", "gigabytes"])
    table["gigabytes"] = (table["gigabytes"] / 1e9).round(3)
    return table.astype({"parameters": "Int64"}), total
