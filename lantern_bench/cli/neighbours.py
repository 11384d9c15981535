"""`lantern-bench neighbours MODEL`: make or check a model's table of nearest codes before a sweep needs it.

A sweep makes the table by itself; here it can be made ahead, wider, in the other space, or written as the LANTERN
authors' code reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from lantern_bench.decode.neighbours import Space

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

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    _check(space, export)

    from lantern_bench.models.tables import export_table

    made = _make(model, space, k_max, out, force, device, console)
    if export is not None:
        export_table(made.table, export)
    codes, columns = made.table.shape
    row = {"model": model, "space": made.space, "codes": codes, "k_max": columns, "type": str(made.table.dtype)[6:]}
    row |= {"mb": made.path.stat().st_size / 1e6, "state": made.state}
    console.table(pd.DataFrame([row]), format=chosen)
    console.say(f"table: {made.path}" + (f", exported: {export}" if export is not None else ""))


class _Made(NamedTuple):
    """A table, the space it is of, its file, and whether it `was there` or was `made`."""

    table: Tensor
    space: Space
    path: Path
    state: str


def _check(space: str | None, export: Path | None) -> None:
    from lantern_bench.decode.neighbours import SPACES

    if space is not None and space not in SPACES:
        raise UserError(f"--space {space}: unknown space", f"The spaces are {', '.join(SPACES)}.")
    if export is not None and export.suffix != ".npy":
        raise UserError(f"--export {export}: must end with .npy")


def _make(
    model: str, space: str | None, k_max: int, out: Path | None, force: bool, device: str, console: Console
) -> _Made:
    """Read or make the table of a model; `UserError` for one without codes, and where nothing can be written."""
    from lantern_bench.decode.neighbours import SPACES
    from lantern_bench.models.files import cache_folder
    from lantern_bench.models.registry import load_codes
    from lantern_bench.models.tables import neighbour_table, table_path
    from lantern_bench.runs.local import choose_place

    place = choose_place(device, "float32")
    known = load_codes(model)
    chosen = next((one for one in SPACES if one == space), known.space)
    codes, folder = len(known.rows), out or known.folder or cache_folder() / "tables"
    path = table_path(folder, known.rows, chosen)
    if force:
        path.unlink(missing_ok=True)
    heard = 0
    with console.progress() as progress:

        def rows_done(count: int) -> None:
            nonlocal heard
            if not heard:
                progress.start(codes, "codes")
            heard += count
            progress.reach(heard)

        columns = min(k_max, codes - 1)
        table = neighbour_table(known.rows, chosen, columns, folder, k_max, place.device, rows_done)
    if not path.is_file():
        raise UserError(f"--out {folder}: cannot be written", "Give a folder that you may write to.")
    return _Made(table, chosen, path, "made" if heard else "was there")
