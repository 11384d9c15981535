"""Commands that read runs: `show`, `curves`, `compare`, `recommend` and `report`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    RUN_HELP,
    FormatOption,
    RunArgument,
    RunsArgument,
    check_choice,
)
from lantern_bench.storage.run_directory import find_run
from lantern_bench.utils.errors import CheckFailedError, RefusedError, UserError
from lantern_bench.utils.text import split_words

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.cli.console import Console


_TABLES = ("summary", "speed", "quality", "acceptance")


def show(
    ctx: typer.Context,
    run: RunArgument,
    table: Annotated[str, typer.Option(help=f"One of {', '.join(_TABLES)}.")] = "summary",
    format: FormatOption = None,
) -> None:
    """Rebuild the tables of a run from its records and print one of them."""
    console: Console = ctx.obj
    check_choice("--table", table, _TABLES)

    from lantern_bench.analysis.tables import save_tables
    from lantern_bench.api import load_run

    loaded = load_run(run)
    tables = loaded.tables
    try:
        if len(loaded.records):
            save_tables(tables, run)
    except UserError as error:
        console.warn(
            error.message,
            "The printed table is built from the records; the CSV files are not updated.",
        )
    console.table(tables[table], table, title=run.name, format=format)


def curves(
    ctx: typer.Context,
    runs: RunsArgument,
    by: Annotated[
        str, typer.Option(help="Colour by mode, delta, lambda, bound, tree or temperature.")
    ] = "mode",
    cells: Annotated[
        list[str] | None, typer.Option(help="Only cells of these ids or modes; * is any text.")
    ] = None,
    width: Annotated[
        str, typer.Option(help="one or two columns of a page: 3.3 or 6.9 inches.")
    ] = "two",
    out: Annotated[
        Path | None, typer.Option(help="Output directory. Default, of one run: its figures/.")
    ] = None,
) -> None:
    """Draw the curves of runs as PNG, SVG and PDF files, each with its data as CSV."""
    console: Console = ctx.obj
    folder = out or _of_only_run(runs) / "figures"

    from lantern_bench.report.draw import draw_curves

    for path in draw_curves(
        runs=runs, folder=folder, by=by, cells=split_words(cells or []), width=width
    ):
        console.data(str(path))


def _of_only_run(runs: Sequence[Path]) -> Path:
    if len(runs) > 1:
        raise UserError("--out is missing: several runs have no directory in common", "Give --out.")
    return runs[0]


def _limit(text: str) -> tuple[str, float]:
    """Parse NAME=NUMBER."""
    match = re.fullmatch(r"(\w+)=(\d*\.?\d+)", text)
    if match is None:
        raise UserError(
            f"{text}: is no name with a positive number", "For example clip_score=0.005."
        )
    return match[1], float(match[2])


def compare(
    ctx: typer.Context,
    run_a: Annotated[Path, typer.Argument(parser=find_run, metavar="RUN_A", help=RUN_HELP)],
    run_b: Annotated[
        Path,
        typer.Argument(parser=find_run, metavar="RUN_B", help="The run to compare with RUN_A."),
    ],
    across: Annotated[
        list[str] | None, typer.Option(help="What may differ: weights, protocol, machine.")
    ] = None,
    fail_if: Annotated[
        str | None, typer.Option(help="worse or different: exit with 5 if a verdict is.")
    ] = None,
    margin: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_limit, metavar="NAME=MARGIN", help="Test for equivalence within this margin."
        ),
    ] = None,
    fail_below: Annotated[
        float | None,
        typer.Option(help="Exit with 5 if the whole interval of a ratio of speedups is below."),
    ] = None,
    format: FormatOption = None,
) -> None:
    """Compare two runs cell by cell, paired by prompt: effects with 95% intervals and verdicts."""
    from lantern_bench.analysis.compare import (
        ACROSS,
        BETTER,
        WORSE,
        check_comparability,
        compare_runs,
        differences,
    )
    from lantern_bench.storage.run_directory import load_runs

    console: Console = ctx.obj
    allowed = split_words(across or [])
    for kind in allowed:
        check_choice("--across", kind, ACROSS)
    check_choice("--fail-if", fail_if or "worse", ("worse", "different"))
    if math.isnan(fail_below or 0.0):
        raise UserError(f"--fail-below {fail_below:g}: must be a number", "For example 0.95.")
    if run_a.resolve() == run_b.resolve():
        raise UserError(f"{run_b}: is the same run as {run_a}", "Give two runs.")
    names, (a, b) = zip(*load_runs([run_a, run_b]).items(), strict=True)
    unlike = differences(a, b)
    check_comparability(unlike, allowed)
    for difference in unlike:
        console.warn(f"the runs differ in {difference}")
    comparison = compare_runs(a, b, dict(margin or ()))
    if not len(comparison.table):
        raise RefusedError(
            "the runs have no cell and prompt in common",
            "`lantern-bench show RUN` lists the cells.",
        )
    sides = (("first", comparison.only_a), ("second", comparison.only_b))
    for side, cells in filter(itemgetter(1), sides):
        console.say(f"only in the {side} run, left out: {', '.join(cells)}")
    console.table(
        comparison.table, "comparison", title=f"a: {names[0]}   b: {names[1]}", format=format
    )
    for note in comparison.notes:
        console.say(note)
    if fail_if is not None:
        failing = [WORSE] if fail_if == "worse" else [WORSE, BETTER]
        _check_verdicts(comparison.table["verdict"].dropna(), failing, fail_if)
    if fail_below is not None:
        _check_speedups(comparison.table, fail_below)


def _check_verdicts(verdicts: pd.Series, failing: Sequence[str], fail_if: str) -> None:
    """Raise `CheckFailedError` if a verdict is one of the failing ones."""
    failed = verdicts.isin(failing)
    if failed.any():
        raise CheckFailedError(
            f"--fail-if {fail_if}: true of {int(failed.sum())} of {len(verdicts)} verdicts"
        )


def _check_speedups(table: pd.DataFrame, fail_below: float) -> None:
    """Raise `CheckFailedError` if the whole interval of a ratio of speedups is too low."""
    speedups = table.query("quantity == 'speedup'")
    if speedups.empty:
        raise RefusedError(
            f"--fail-below {fail_below:g}: the runs have no speedup in common",
            "Compare timed runs.",
        )
    slower = speedups["effect_high"].fillna(speedups["effect"]) < fail_below
    if slower.any():
        slow = ", ".join(speedups.loc[slower, "cell_id"])
        raise CheckFailedError(
            f"--fail-below {fail_below:g}: true of {int(slower.sum())} of {len(slower)}, {slow}"
        )


def recommend(
    ctx: typer.Context,
    run: RunArgument,
    quality_run: Annotated[
        Path | None,
        typer.Argument(
            parser=find_run, metavar="QUALITY_RUN", help="The run with the figures. Default: RUN."
        ),
    ] = None,
    max_distance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest distance. Default: 0.01.")
    ] = None,
    within: Annotated[
        Any,
        typer.Option(
            parser=_limit, metavar="NAME=MARGIN", help="How much worse than ar a score may be."
        ),
    ] = None,
    format: FormatOption = None,
) -> None:
    """Name the fastest cell that keeps a limit on quality, and the fastest lossless cell."""
    from lantern_bench.analysis.recommend import condition_of, recommendation
    from lantern_bench.api import load_run

    console: Console = ctx.obj
    condition = condition_of(max_distance, within)
    speed = load_run(run).tables
    quality = load_run(quality_run).tables if quality_run else speed
    console.table(
        recommendation(speed, quality, condition), "recommendation", title=run.name, format=format
    )
    console.say(
        f"The whole 95% interval has to keep {condition}; "
        "cells that break it or have no figure are left out."
    )


def report(
    ctx: typer.Context,
    runs: RunsArgument,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Output file. Default, of one run: its report.html."),
    ] = None,
) -> None:
    """Write one self-contained HTML file with the tables, curves and pictures of runs."""
    console: Console = ctx.obj
    path = out or _of_only_run(runs) / "report.html"

    from lantern_bench.api import write_report

    write_report(runs, path)
    console.say(f"{path.stat().st_size / 1e6:.1f} MB; open it in a browser")
    console.data(str(path))
