"""`lantern-bench report`: one HTML file that shows a run, or several side by side.

What is on the page is `report/page.py`; here only the place is decided, and told.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.options import RUN_HELP, locate, locate_all
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import CheckFailedError, RefusedError, UserError

if TYPE_CHECKING:
    from lantern_bench.report.compare import Comparison
    from lantern_bench.runs.store import RunData


# ---- `lantern-bench show`: rebuild the tables of a run and print one of them


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


# ---- `lantern-bench curves`: acceptance, accepted lengths and speed against quality, for one run or several


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

    from lantern_bench.report.curve_data import curve_tables
    from lantern_bench.report.labels import check_grouping
    from lantern_bench.report.records import read_named

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


# ---- `lantern-bench compare`: is the second run faster or better than the first?


_FAIL_IF = ("worse", "different")


def compare(
    ctx: typer.Context,
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help=RUN_HELP)],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run that is judged.")],
    across: Annotated[
        list[str] | None,
        typer.Option(help="Compare although these differ: weights, protocol, machine."),
    ] = None,
    fail_if: Annotated[
        str | None, typer.Option(help="Exit with 5 when a verdict is worse, or when any is different.")
    ] = None,
    format: Annotated[str | None, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Compare two runs cell by cell, paired by prompt: ratio or difference, 95 % interval, verdict."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    allowed = _checked_across(across or [])
    if fail_if is not None and fail_if not in _FAIL_IF:
        raise UserError(f"--fail-if {fail_if}: unknown", f"One of {', '.join(_FAIL_IF)}.")
    folders = (locate(run_a), locate(run_b))

    from lantern_bench.report.compare import compare_runs
    from lantern_bench.report.records import read_named

    if folders[0].resolve() == folders[1].resolve():
        raise UserError(f"{run_b}: is the same run as {run_a}", "Give two runs.")
    names, (a, b) = zip(*read_named(folders).items(), strict=True)
    _tell_differences(a, b, allowed, console)
    found = compare_runs(a, b)
    if not len(found.table):
        raise RefusedError("the runs have no cell and prompt in common", "lantern-bench show RUN lists a run's cells.")
    _tell_unmatched(found, console)
    console.table(found.table, "comparison", title=f"a: {names[0]}   b: {names[1]}", format=chosen)
    for note in found.notes:
        console.say(note)
    _check(found, fail_if)


def _checked_across(typed: list[str]) -> list[str]:
    from lantern_bench.report.compare import ACROSS

    kinds = [kind.strip() for text in typed for kind in text.split(",")]
    for kind in kinds:
        if kind not in ACROSS:
            raise UserError(f"--across {kind}: unknown", f"One of {', '.join(ACROSS)}.")
    return kinds


def _tell_differences(a: RunData, b: RunData, allowed: list[str], console: Console) -> None:
    from lantern_bench.report.compare import check_likeness, differences

    found = differences(a, b)
    check_likeness(found, allowed)
    for one in found:
        console.warn(f"the runs differ in {one}")


def _tell_unmatched(found: Comparison, console: Console) -> None:
    for side, cells in (("first", found.only_a), ("second", found.only_b)):
        if cells:
            console.say(f"only in the {side} run, left out: {', '.join(cells)}")


def _check(found: Comparison, fail_if: str | None) -> None:
    from lantern_bench.report.compare import SAME, WORSE

    verdicts = found.table["verdict"].dropna()
    wrong = verdicts == WORSE if fail_if == "worse" else verdicts != SAME
    if fail_if is not None and wrong.any():
        raise CheckFailedError(f"--fail-if {fail_if}: {int(wrong.sum())} of {len(verdicts)} verdicts are")


# ----


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

    from lantern_bench.report.page import write_report

    write_report(folders, place)
    console.say(f"{place.stat().st_size / 1e6:.1f} MB; open it in a browser")
    console.data(str(place))
