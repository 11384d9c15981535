"""`lantern-bench verify`: check a run directory, and make anew what is missing or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.options import RUN_HELP, FormatOption, locate
from lantern_bench.cli.sweep import Renderer
from lantern_bench.errors import CheckFailedError

if TYPE_CHECKING:
    from lantern_bench.console import Console
    from lantern_bench.runs.verify import Checked


def verify(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    repair: Annotated[bool, typer.Option("--repair", help="Make anew what is missing or damaged.")] = False,
    format: FormatOption = None,
) -> None:
    """Check the lines, hashes and counts of a run, and name what is missing or damaged."""
    from lantern_bench.runs import verify as runs_verify

    console: Console = ctx.obj
    folder = locate(run)
    found = _check(folder)
    if repair and found.problems:
        _show(found, console, format)
        with console.progress() as progress:
            runs_verify.repair(folder, found, Renderer(console, progress).show)

        from lantern_bench.report.tables import write_tables

        write_tables(folder)
        found = _check(folder)
    if not found.problems:
        console.say(f"{found.records} records, {found.pictures} pictures and {found.scores} scores are whole")
        return
    _show(found, console, format)
    again = sum(problem.again for problem in found.problems)
    advice = None if repair or not again else f"`lantern-bench verify {folder} --repair` makes {again} of them anew."
    raise CheckFailedError(f"{folder}: {len(found.problems)} problems", advice)


def _check(folder: Path) -> Checked:
    """Check lines, pictures and counts, and the tables if the lines that they are made of are whole."""
    from lantern_bench.report.tables import stale_tables
    from lantern_bench.runs.verify import Problem
    from lantern_bench.runs.verify import verify as check

    found = check(folder)
    if found.lines_whole:
        for name in stale_tables(folder):
            found.problems.append(Problem(name, "not what the records give"))
    return found


def _show(found: Checked, console: Console, format: str | None) -> None:
    import pandas as pd

    rows = [(one.file, one.problem, "yes" if one.again else "no") for one in found.problems]
    console.table(pd.DataFrame(rows, columns=["file", "problem", "made_anew_by_repair"]), format=format)
