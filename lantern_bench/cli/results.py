"""Commands that read runs: `show`, `curves`, `compare`, `predict` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.options import (
    RUN_HELP,
    FormatOption,
    RunArgument,
    check_choice,
    locate,
    locate_all,
    split_words,
)
from lantern_bench.errors import CheckFailedError, RefusedError, UserError

if TYPE_CHECKING:
    from lantern_bench.console import Console

_TABLES = ("summary", "speed", "quality", "acceptance")
_FAIL_IF = ("worse", "different")


def show(
    ctx: typer.Context,
    run: RunArgument,
    table: Annotated[str, typer.Option(help=f"One of {', '.join(_TABLES)}.")] = "summary",
    format: FormatOption = None,
) -> None:
    """Rebuild the tables of a run from its records and print one."""
    console: Console = ctx.obj
    check_choice("--table", table, _TABLES)
    folder = locate(run)

    from lantern_bench.api import load_run
    from lantern_bench.report.tables import save_tables

    tables = load_run(folder).tables
    try:
        save_tables(tables, folder)
    except UserError as error:
        console.warn(error.message, "The printed table is built from the records; the CSV files are not updated.")
    console.table(tables[table], table, title=folder.name, format=format)


def curves(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=f"{RUN_HELP} Several runs share the axes.")],
    by: Annotated[str, typer.Option(help="Colour by mode, delta, lambda, bound, tree or temperature.")] = "mode",
    out: Annotated[
        Path | None, typer.Option(help="Output directory. Default: figures/ of the run; required for several runs.")
    ] = None,
) -> None:
    """Draw the curves of a run: PNG and SVG files, and the CSV behind each."""
    console: Console = ctx.obj
    folders = locate_all(runs)
    if out is None and len(folders) > 1:
        raise UserError("--out is missing: several runs have no figures directory in common", "Give --out FOLDER.")

    from lantern_bench.report.curves import curve_tables, draw_curves
    from lantern_bench.report.labels import check_grouping
    from lantern_bench.report.records import load_runs

    check_grouping(by)
    tables = {name: curve_tables(data) for name, data in load_runs(folders).items()}
    for path in draw_curves(tables, out or folders[0] / "figures", by):
        console.data(str(path))


def compare(
    ctx: typer.Context,
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help=RUN_HELP)],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run that is compared with RUN_A.")],
    across: Annotated[
        list[str] | None, typer.Option(help="Compare although these differ: weights, protocol, machine.")
    ] = None,
    fail_if: Annotated[
        str | None, typer.Option(help="Exit with 5 if a verdict is worse, or if any is different.")
    ] = None,
    format: FormatOption = None,
) -> None:
    """Compare two runs cell by cell, paired by prompt: ratio or difference, 95 % interval, verdict."""
    from lantern_bench.report.compare import ACROSS, SAME, WORSE, check_comparability, compare_runs, differences
    from lantern_bench.report.records import load_runs

    console: Console = ctx.obj
    allowed = split_words(across)
    for kind in allowed:
        check_choice("--across", kind, ACROSS)
    if fail_if is not None:
        check_choice("--fail-if", fail_if, _FAIL_IF)
    folders = (locate(run_a), locate(run_b))
    if folders[0].resolve() == folders[1].resolve():
        raise UserError(f"{run_b}: is the same run as {run_a}", "Give two runs.")
    names, (a, b) = zip(*load_runs(folders).items(), strict=True)
    unlike = differences(a, b)
    check_comparability(unlike, allowed)
    for difference in unlike:
        console.warn(f"the runs differ in {difference}")
    comparison = compare_runs(a, b)
    if not len(comparison.table):
        raise RefusedError(
            "the runs have no cell and prompt in common", "`lantern-bench show RUN` lists the cells of a run."
        )
    for side, cells in (("first", comparison.only_a), ("second", comparison.only_b)):
        if cells:
            console.say(f"only in the {side} run, left out: {', '.join(cells)}")
    console.table(comparison.table, "comparison", title=f"a: {names[0]}   b: {names[1]}", format=format)
    for note in comparison.notes:
        console.say(note)
    verdicts = comparison.table["verdict"].dropna()
    failed = verdicts == WORSE if fail_if == "worse" else verdicts != SAME
    if fail_if is not None and failed.any():
        raise CheckFailedError(f"--fail-if {fail_if}: true of {int(failed.sum())} of {len(verdicts)} verdicts")


def predict(
    ctx: typer.Context,
    run: RunArgument,
    device: Annotated[
        str | None,
        typer.Option(
            help="A device (rtx-3090, a100, h100, ...), or a YAML file of one. With --prompts: the run's own."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Predict with this model's sizes, at the run's acceptance.")] = None,
    stack: Annotated[str, typer.Option(help="compiled (this package) or eager (code as published).")] = "compiled",
    prompts: Annotated[int | None, typer.Option(min=1, help="Hours of each cell for so many prompts.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices that decode the prompts at the same time.")] = 1,
    format: FormatOption = None,
) -> None:
    """Predict the speedup of every cell on another device, and hours of a large run."""
    from lantern_bench.report.cost_model import (
        STACKS,
        find_device,
        hours_in_words,
        measured_elsewhere,
        measured_times,
        predict_run,
        terms_of,
        with_hours,
    )
    from lantern_bench.report.records import load_runs

    console: Console = ctx.obj
    check_choice("--stack", stack, STACKS)
    if device is None and prompts is None:
        raise UserError("--device is missing", "Give a device to predict for, or --prompts to plan with this one.")
    if device is None and model is not None:
        raise UserError(f"--model {model}: only predictions take another model", "Give --device too.")
    target = None if device is None else find_device(device)
    (data,) = load_runs([locate(run)]).values()
    if target is None:
        table, terms, title = measured_times(data), [], data.folder.name
    else:
        table, terms = predict_run(data, target, stack, model), terms_of(target, stack)
        terms += filter(None, [measured_elsewhere(data, target, stack, model)])
        title = f"{data.folder.name}, predicted for {target.name}"
    if prompts is not None:
        table = with_hours(table, prompts, devices)
        terms.append(hours_in_words(table, prompts, devices))
    console.table(table, "prediction", title=title, format=format)
    for term in terms:
        console.say(term)


def report(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=f"{RUN_HELP} Several runs share one page.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file. Default: report.html of the run; required for several runs.")
    ] = None,
) -> None:
    """Write one self-contained HTML file with tables, curves, pictures and maps."""
    console: Console = ctx.obj
    folders = locate_all(runs)
    if out is None and len(folders) > 1:
        raise UserError("--out is missing: several runs have no directory in common", "Give --out FILE.html.")
    path = out or folders[0] / "report.html"
    if path.is_dir():
        raise UserError(f"--out {path}: is a directory", "Give a file, such as report.html.")

    from lantern_bench.report.page import write_report

    write_report(folders, path)
    console.say(f"{path.stat().st_size / 1e6:.1f} MB; open it in a browser")
    console.data(str(path))
