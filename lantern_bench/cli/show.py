"""`lantern-bench show`: rebuild the tables of a run and print one of them.

The records are the truth: what is printed is made from them, never read from the CSV files, which are made anew.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lantern_bench.cli.places import RUN_HELP, locate
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import UserError

__all__ = ["show"]

_TABLES = ("summary", "speed", "quality", "acceptance")


def show(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    table: Annotated[str, typer.Option(help=f"One of {', '.join(_TABLES)}.")] = "summary",
    format: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(FORMATS)}. Without it: table on a terminal, CSV elsewhere."),
    ] = None,
) -> None:
    """Rebuild the tables of a run from its records and print one."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    if table not in _TABLES:
        raise UserError(f"--table {table}: unknown", f"The tables are {', '.join(_TABLES)}.")
    folder = locate(run)

    from lantern_bench.report.tables import read_tables, save_tables

    tables = read_tables(folder)
    try:
        save_tables(tables, folder)
    except UserError as error:
        console.warn(error.message, "What is printed is made from the records; only the CSV files are not rewritten.")
    console.table(tables[table], table, title=folder.name, format=chosen)
