"""`lantern-bench curves`: draw acceptance by depth and quality against speedup, for one run or several.

What it writes it names on stdout, a file a line; how a curve looks is `report/curves.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.cli.places import RUN_HELP, locate
from lantern_bench.console import Console
from lantern_bench.errors import UserError

__all__ = ["curves"]


def curves(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=RUN_HELP + " Several are laid over each other.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; by default figures/ of the run. Needed for several runs.")
    ] = None,
) -> None:
    """Draw the curves of a run: PNG files, and the CSV behind each."""
    console: Console = ctx.obj
    folders = list(dict.fromkeys(locate(run) for run in runs))
    if out is None and len(folders) > 1:
        raise UserError("--out is missing: several runs have no figures folder in common", "Give --out FOLDER.")

    from lantern_bench.report.curves import draw_curves
    from lantern_bench.report.tables import read_tables

    tables = {folder.name: read_tables(folder) for folder in folders}
    for path in draw_curves(tables, out or folders[0] / "figures"):
        console.data(str(path))
