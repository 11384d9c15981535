"""Commands that read runs: `score`, `show`, `curves`, `compare`, `recommend` and `report`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import (
    RUN_HELP,
    DeviceOption,
    RunArgument,
    RunsArgument,
    SettingsOption,
    check_choice,
    resolve_flags,
    with_format,
)
from lantern_bench.metrics.protocols import PROTOCOLS
from lantern_bench.storage.run_directory import find_run
from lantern_bench.utils.errors import CheckFailedError, RefusedError, UserError
from lantern_bench.utils.text import split_words

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.report.charts import Tables
    from lantern_bench.storage.run_directory import RunData


@with_format
def score(
    console: Console,
    run: Annotated[
        Path | None, typer.Argument(parser=find_run, metavar="RUN", help=RUN_HELP)
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PROTOCOLS)}; default: the run's own.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="embedded, a folder, a COCO .json (or FILE.json=FOLDER), or a .npz (mu, sigma)."
        ),
    ] = None,
    infinity: Annotated[
        bool,
        typer.Option(
            "--fid-infinity", help="Also extrapolate FID to infinitely many pictures.", hidden=True
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Score pictures again that these scorers have scored.")
    ] = False,
    device: DeviceOption = "auto",
    tokens: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Instead of RUN: tokens of another engine (.npz, .safetensors, .jsonl).",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --tokens: the model.")] = None,
    mode: Annotated[str, typer.Option(help="With --tokens: the mode that they are scored as.")] = (
        "ar"
    ),
    settings: SettingsOption = None,
    out: Annotated[Path | None, typer.Option(help="With --tokens: the new run directory.")] = None,
) -> None:
    """Score the pictures of a run by a quality protocol. Nothing is decoded."""
    if tokens is not None:
        of_run = {"RUN": run, "--protocol": protocol, "--reference": reference}
        _check_absent(of_run | {"--fid-infinity": infinity, "--again": again}, "with --tokens")
        if model is None:
            raise UserError("score --tokens: needs the model of the tokens", "Give --model MODEL.")
        flags = {"model": [model], "device": [device]}
        _score_tokens(console, tokens, flags, mode=mode, settings=settings, out=out)
        return

    of_tokens = {"--model": model, "--set": settings, "--out": out, "--mode": mode != "ar"}
    _check_absent(of_tokens, "without --tokens")
    if run is None:
        raise UserError("score: needs RUN, or --tokens FILE with --model MODEL", "Give one.")

    from lantern_bench.metrics.score_run import score_run_directory

    with console.events() as emit:
        scored_by, count = score_run_directory(
            run,
            emit,
            protocol=protocol,
            reference=reference,
            device=device,
            infinity=infinity,
            rescore=again,
        )

    from lantern_bench.analysis.tables import write_tables

    quality = write_tables(run)["quality"]
    rows = quality[quality["protocol"] == scored_by.name].reset_index(drop=True)
    console.table(
        rows, "quality", title=f"{run.name}: {scored_by.name}, version {scored_by.version}"
    )
    message = (
        f"{count} scores added"
        if count
        else "nothing to add: these scorers have scored everything (--again)"
    )
    console.say(f"{message}; {run / 'scores.jsonl'}")


def _check_absent(values: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` for the flags that have a value."""
    given = [flag for flag, value in values.items() if value]
    if given:
        raise UserError(f"score: {', '.join(given)} has no meaning {where}", "Leave it out.")


def _score_tokens(
    console: Console,
    tokens: Path,
    flags: Mapping[str, Any],
    *,
    mode: str,
    settings: Sequence[str] | None,
    out: Path | None,
) -> None:
    """Make a run of a token file and show its quality."""
    from lantern_bench.analysis.tables import write_tables
    from lantern_bench.sweeps.token_files import score_token_file

    experiment = resolve_flags("tokens", flags, mode=[mode], settings=settings)
    with console.events() as emit:
        run = score_token_file(
            path=tokens,
            experiment=experiment,
            out=out,
            emit=emit,
            command=f"lantern-bench score --tokens {tokens.name}",
        )
    console.table(write_tables(run)["quality"], "quality", title=run.name)
    console.say(f"run: {run}")


_TABLES = ("summary", "speed", "quality", "acceptance")


@with_format
def show(
    console: Console,
    runs: RunsArgument,
    table: Annotated[str, typer.Option(help=f"One of {', '.join(_TABLES)}.")] = "summary",
    by: Annotated[
        str | None,
        typer.Option(help="By a column of the prompts: category, or another one of their file."),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Also write all tables as CSV files of the run.")
    ] = False,
) -> None:
    """Build the tables of runs from their records and print one of them. Writes no file.

    The summary of several runs has a row for each cell, with columns of each run.
    """
    check_choice("--table", table, _TABLES)

    from lantern_bench.analysis.prompt_groups import tables_by
    from lantern_bench.analysis.tables import save_tables, tables_of
    from lantern_bench.storage.run_directory import load_runs

    loaded = load_runs(runs, tables_suffice=not save, empty_shards=True)
    tables = {}
    for name, data in loaded.items():
        tables[name] = tables_of(data, [table]) if by is None else tables_by(data, by)
        if save:
            save_tables(tables_of(data), data.folder)
    if len(runs) > 1:
        _show_several(console, loaded, tables, table=table, by=by)
        return
    ((name, of_run),) = tables.items()
    console.table(of_run[table], table, title=_title([name], by))


def _title(names: Sequence[str], by: str | None) -> str:
    title = "   ".join(names)
    return title if by is None else f"{title} by {by}"


def _show_several(
    console: Console,
    runs: Mapping[str, RunData],
    tables: Mapping[str, Tables],
    *,
    table: str,
    by: str | None,
) -> None:
    """Print a table of several runs, under what they differ in."""
    from lantern_bench.analysis.compare import stated_differences
    from lantern_bench.report.charts import stack_runs
    from lantern_bench.report.format_tables import join_runs

    differences = stated_differences(runs)
    names = [f"{name} ({run.images})" if len(run.records) else name for name, run in runs.items()]
    title = "\n".join([_title(names, by), *differences])
    is_for_people = console.format not in ("csv", "json")
    if is_for_people and table == "summary":
        joined = join_runs({name: of_run[table] for name, of_run in tables.items()})
        console.table(joined.frame, title=title, notes=joined.notes)
        return
    if not is_for_people:
        for difference in differences:
            console.warn(difference)
    rows = stack_runs(tables, table).set_index("run").reset_index()
    console.table(rows, table, title=title)


def curves(
    ctx: typer.Context,
    runs: RunsArgument,
    by: Annotated[
        str,
        typer.Option(
            help="Colour by mode, delta, lambda, bound, tree, temperature, or a column of the "
            "prompts such as category (curves of acceptance)."
        ),
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

    files = draw_curves(
        runs=runs, folder=folder, by=by, cells=split_words(cells or []), width=width
    )
    pictures = [path for path in files if path.suffix == ".png"]
    console.say(f"{len(pictures)} charts in {folder}, each as PNG, SVG, PDF and CSV. The main one:")
    of_quality = [path for path in pictures if path.name.startswith("speed-quality")]
    console.data(str(of_quality[0] if of_quality else pictures[0]))


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


@with_format
def compare(
    console: Console,
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
) -> None:
    """Compare two runs cell by cell, paired by prompt: effects with 95% intervals and verdicts."""
    from lantern_bench.analysis.compare import (
        ACROSS,
        check_comparability,
        compare_runs,
        differences,
    )
    from lantern_bench.storage.run_directory import load_runs

    allowed = split_words(across or [])
    for kind in allowed:
        check_choice("--across", kind, ACROSS)
    check_choice("--fail-if", fail_if or "worse", ("worse", "different"))
    if math.isnan(fail_below or 0.0):
        raise UserError(f"--fail-below {fail_below:g}: must be a number", "For example 0.95.")
    if run_a.resolve() == run_b.resolve():
        raise UserError(f"{run_b}: is the same run as {run_a}", "Give two runs.")
    runs = load_runs([run_a, run_b])
    a, b = runs.values()
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
    console.say(comparison.summary)
    table = comparison.table
    tested = table[table["verdict"].notna()]
    if console.format not in ("csv", "json") and 0 < len(tested) < len(table):
        console.say(f"{len(table) - len(tested)} rows without a test: --format csv shows them")
        table = tested
    console.table(table, "comparison", title="A: {}   B: {}".format(*runs))
    for note in comparison.notes:
        console.say(note)
    _check_comparison(comparison.table, fail_if=fail_if, fail_below=fail_below)


def _check_comparison(table: pd.DataFrame, fail_if: str | None, fail_below: float | None) -> None:
    """Raise `CheckFailedError` for a verdict of `--fail-if`, or a speedup below `--fail-below`."""
    from lantern_bench.analysis.compare import BETTER, WORSE

    if fail_if is not None:
        failing = [WORSE] if fail_if == "worse" else [WORSE, BETTER]
        verdicts = table["verdict"].dropna()
        failed = verdicts.isin(failing).sum()
        if failed:
            raise CheckFailedError(
                f"--fail-if {fail_if}: true of {failed} of {len(verdicts)} verdicts"
            )
    if fail_below is not None:
        speedups = table.query("quantity == 'speedup'")
        if speedups.empty:
            raise RefusedError(
                f"--fail-below {fail_below:g}: the runs have no speedup in common",
                "Compare timed runs.",
            )
        slow = speedups[speedups["effect_high"].fillna(speedups["effect"]) < fail_below]
        if len(slow):
            raise CheckFailedError(
                f"--fail-below {fail_below:g}: true of {len(slow)} of {len(speedups)}, "
                f"{', '.join(slow['cell_id'])}"
            )


@with_format
def recommend(
    console: Console,
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
    max_emitted_tv: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="TV", help="Largest emitted TV, in place of a distance."),
    ] = None,
    within: Annotated[
        Any,
        typer.Option(
            parser=_limit, metavar="NAME=MARGIN", help="How much worse than ar a score may be."
        ),
    ] = None,
    across: Annotated[
        list[str] | None, typer.Option(help="What may differ between the runs: weights, protocol.")
    ] = None,
) -> None:
    """Name the fastest cell that keeps a limit on quality, and the fastest lossless cell."""
    from lantern_bench import api
    from lantern_bench.analysis.compare import ACROSS
    from lantern_bench.analysis.recommend import condition_of

    allowed = split_words(across or [])
    for kind in allowed:
        check_choice("--across", kind, ACROSS)
    limits: dict[str, Any] = {
        "max_distance": max_distance,
        "max_emitted_tv": max_emitted_tv,
        "within": within,
    }
    table = api.recommend(run, quality_run, across=allowed, **limits)
    console.table(table, "recommendation", title=run.name)
    console.say(
        f"The whole 95% interval has to keep {condition_of(**limits)}; cells that break it by the "
        "interval, or have no figure, are left out."
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
