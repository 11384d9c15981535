"""`lantern-bench neighbours MODEL`: make or check a model's table of nearest codes before a sweep needs it.

A sweep makes the table by itself; here it can be made ahead, wider, in the other space, or written as the LANTERN
authors' code reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import UserError

__all__ = ["neighbours"]

_SPACES = "raw (rows as stored, as published) or normalised (unit length, as LlamaGen looks codes up)"


def neighbours(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model, or the YAML file of one.")],
    space: Annotated[str | None, typer.Option(help=f"{_SPACES}. Default: the model's published one.")] = None,
    k_max: Annotated[int, typer.Option("--k-max", min=1, help="Columns: the largest k that is read from disk.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="Folder of the table. Default: beside the weights.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write it as .npy, uint16 [V, k], as LANTERN does.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew even if it is there.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "cpu",
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Make a model's table of nearest codes, and say what it is."""
    import pandas as pd

    from lantern_bench.decode.neighbours import SPACES

    console: Console = ctx.obj
    chosen_format = console.checked_format(format) if format is not None else None
    if space is not None and space not in SPACES:
        raise UserError(f"--space {space}: unknown space", f"The spaces are {', '.join(SPACES)}.")
    if export is not None and export.suffix != ".npy":
        raise UserError(f"--export {export}: must end with .npy")

    from lantern_bench.models.files import cache_folder
    from lantern_bench.models.registry import load_model
    from lantern_bench.models.tables import export_table, neighbour_table, table_path
    from lantern_bench.runs.local import choose_place

    place = choose_place(device, "float32")
    loaded = load_model(model, place.device, place.dtype)
    chosen = next((one for one in SPACES if one == space), loaded.neighbour_space)
    if loaded.codebook is None:
        raise UserError(f"{model}: has no tokenizer, so nobody knows its codes", "Name one in the model's file.")
    codes = len(loaded.codebook)
    folder = out or loaded.table_folder or cache_folder() / "tables"
    path = table_path(folder, loaded.codebook, chosen)
    if force:
        path.unlink(missing_ok=True)
    there = path.is_file()
    with console.progress() as progress:
        if not there:
            progress.start(codes, "codes")
        table = neighbour_table(
            loaded.codebook, chosen, min(k_max, codes - 1), folder, k_max, place.device, progress.advance
        )
    if not path.is_file():
        raise UserError(f"--out {folder}: cannot be written", "Give a folder that you may write to.")
    if export is not None:
        export_table(table, export)
    row = {"model": model, "space": chosen, "codes": codes, "k_max": table.shape[1], "type": str(table.dtype)[6:]}
    row |= {"mb": path.stat().st_size / 1e6, "state": "was there" if there else "made"}
    console.table(pd.DataFrame([row]), format=chosen_format)
    console.say(f"table: {path}" + (f", exported: {export}" if export is not None else ""))
