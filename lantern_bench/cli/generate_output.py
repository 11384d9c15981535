"""What `lantern-bench generate` leaves and shows: the picture, the tokens, the table of numbers, the sizes.

Files are checked before anything is made and written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.console import Console
from lantern_bench.errors import RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.runs.runner import Made
    from lantern_bench.spec.experiment import ResolvedExperiment
    from lantern_bench.spec.plan import Unit

__all__ = ["check_file", "memory_table", "numbers_table", "write_picture", "write_tokens"]

_GIGABYTE = 1e9


def check_file(flag: str, path: Path, suffix: str, force: bool) -> None:
    """Refuse a file that is of another kind, is there already, or cannot be."""
    import os

    if path.suffix.lower() != suffix:
        raise UserError(f"{flag} {path}: must end with {suffix}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: cannot be written", "Give a file in a folder that is there.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{flag} {path}: cannot be written", "Give a file that you may write.")
    if path.exists() and not force:
        raise RefusedError(f"{flag} {path}: is there already", "Give another name, or --force to write over it.")


def write_picture(path: Path, made: list[list[Made]]) -> None:
    """Write all images as one picture: a column for each cell, a row for each image."""
    import torch

    from lantern_bench.runs.jsonl import write_atomically
    from lantern_bench.runs.runner import png_bytes

    columns = [torch.cat([one.pixels for one in column], dim=0) for column in made]
    _written("--out", path, lambda: write_atomically(path, png_bytes(torch.cat(columns, dim=1))))


def write_tokens(path: Path, made: list[Made], with_logits: bool) -> None:
    """Write tokens int32 [n, N], accept_lengths int32 [n, steps] (drafts accepted, -1 behind the last), logits."""
    import io

    import numpy as np
    import torch

    from lantern_bench.runs.jsonl import write_atomically

    arrays: dict[str, Any] = {"tokens": torch.stack([one.tokens for one in made]).cpu().numpy().astype(np.int32)}
    # Uncut: the last step may run over the end, as the published code counts it.
    steps = [[count - 1 for count in one.trace.uncut] for one in made]
    arrays["accept_lengths"] = np.full((len(made), max(map(len, steps))), -1, np.int32)
    for row, counts in zip(arrays["accept_lengths"], steps, strict=True):
        row[: len(counts)] = counts
    if with_logits:
        logits = [one.logits for one in made if one.logits is not None]
        arrays["logits"] = torch.stack(logits).float().cpu().numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    _written("--save-tokens", path, lambda: write_atomically(path, buffer.getvalue()))


def _written(flag: str, path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror}") from error


def numbers_table(columns: Sequence[Sequence[Unit]], made: Sequence[Sequence[Made]]) -> pd.DataFrame:
    """How every image was decoded."""
    import pandas as pd

    rows = []
    units = [unit for column in columns for unit in column]
    for unit, one in zip(units, [one for column in made for one in column], strict=True):
        trace = one.trace
        row = {"cell_id": unit.cell.cell_id, "image": unit.image_index, "tokens": trace.tokens}
        row |= {"target_forwards": trace.target_forwards, "mean_accepted_length": trace.mean_accepted_length}
        row |= {"step_compression": trace.step_compression, "seconds": trace.seconds}
        rows.append(row | {"pixel_seconds": one.pixel_seconds})
    return pd.DataFrame(rows)


def memory_table(resolved: ResolvedExperiment, console: Console) -> pd.DataFrame:
    """What the model's parts take, by part and in all; nothing of it is allocated, no file is opened."""
    import pandas as pd
    import psutil

    from lantern_bench.models.random_weights import blueprint
    from lantern_bench.models.sizes import sizes_of
    from lantern_bench.runs.local import choose_place

    place = choose_place(resolved.settings.device, resolved.settings.dtype)
    _name, _family, parts = blueprint(resolved.settings.model[0])
    nodes = max(1 + (cell.decoding.nodes or len(cell.decoding.paths)) for cell in resolved.cells)
    guided = any(cell.decoding.cfg_scale != 1 for cell in resolved.cells)
    sizes = sizes_of(parts, place.dtype, guided=guided, nodes=nodes, batch=max(resolved.settings.batch))
    total = sum(size.bytes for size in sizes)
    rows = [
        {
            "part": size.part,
            "parameters": size.parameters or None,
            "dtype": str(size.dtype).removeprefix("torch."),
            "gigabytes": round(size.bytes / _GIGABYTE, 3),
        }
        for size in sizes
    ]
    rows.append({"part": "all", "parameters": sum(size.parameters for size in sizes), "dtype": "", "gigabytes": None})
    rows[-1]["gigabytes"] = round(total / _GIGABYTE, 3)
    console.say(f"memory needed: {total / _GIGABYTE:.2f} GB on {place.device}, and what a forward takes beside it")
    if place.device.type == "cpu":
        there = psutil.virtual_memory().available
        console.say(f"free here: {there / _GIGABYTE:.2f} GB" + ("" if there > total else ": not enough"))
    frame = pd.DataFrame(rows)
    return frame.astype({"parameters": "Int64"})
