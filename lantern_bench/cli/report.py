"""`lantern-bench report`: one HTML file that shows a run, or several side by side.

What is on the page is `report/html.py`; here only the place is decided, and told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.cli.places import RUN_HELP, locate_all
from lantern_bench.console import Console
from lantern_bench.errors import UserError

__all__ = ["report"]


def report(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=RUN_HELP + " Several stand on one page.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; by default report.html of the run. Needed for several runs.")
    ] = None,
) -> None:
    """Write one HTML file with tables, curves, pictures and maps; it needs no network."""
    console: Console = ctx.obj
    folders = locate_all(runs)
    if out is None and len(folders) > 1:
        raise UserError("--out is missing: several runs have no folder in common", "Give --out FILE.html.")
    place = out or folders[0] / "report.html"
    if place.is_dir():
        raise UserError(f"--out {place}: is a folder", "Give a file, such as report.html.")

    from lantern_bench.report.html import write_report

    write_report(folders, place)
    console.say(f"{place.stat().st_size / 1e6:.1f} MB; open it in a browser")
    console.data(str(place))
