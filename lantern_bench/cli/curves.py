"""`lantern-bench curves`: acceptance, accepted lengths and speed against quality, for one run or several.

What it writes it names on stdout, a file a line; `--terminal` draws small ones there instead and writes nothing. How a
curve looks is `report/drawing.py`, and in the terminal `console/charts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.cli.places import RUN_HELP, locate_all
from lantern_bench.console import Console
from lantern_bench.errors import UserError

__all__ = ["curves"]


def curves(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=RUN_HELP + " Several are laid over each other.")],
    by: Annotated[
        str, typer.Option(help="What colours tell apart: mode, delta, lambda, bound, tree or temperature.")
    ] = "mode",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; by default figures/ of the run. Needed for several runs.")
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw small ones as text; write no file.")] = False,
) -> None:
    """Draw the curves of a run: PNG and SVG files, and the CSV behind each."""
    console: Console = ctx.obj
    folders = locate_all(runs)
    if out is None and len(folders) > 1 and not terminal:
        raise UserError("--out is missing: several runs have no figures folder in common", "Give --out FOLDER.")
    if terminal and out is not None:
        raise UserError(f"--out {out}: --terminal writes no files", "Leave one of the two out.")

    from lantern_bench.report.named_runs import read_named
    from lantern_bench.report.naming import check_grouping
    from lantern_bench.report.points import curve_tables

    check_grouping(by)
    tables = {name: curve_tables(data) for name, data in read_named(folders).items()}
    if terminal:
        from lantern_bench.console.charts import plain, terminal_curves

        drawn = "\n\n".join(terminal_curves(tables, by, console.width))
        console.data(drawn if console.writes_blocks else plain(drawn))
        return

    from lantern_bench.report.curves import draw_curves

    for path in draw_curves(tables, out or folders[0] / "figures", by):
        console.data(str(path))
