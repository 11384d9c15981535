"""Commands that make runs: `sweep`, `reproduce` and `merge`; and `experiments`."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import (
    EXPERIMENT_FLAGS,
    RunsArgument,
    SettingsOption,
    with_flags,
    with_format,
)
from lantern_bench.config.settings import Overrides
from lantern_bench.storage import run_directory
from lantern_bench.sweeps.decoded_image import quiet_advice
from lantern_bench.sweeps.request import WORKER_TIMEOUT, plan_table, prepare
from lantern_bench.sweeps.run import check_failed, run
from lantern_bench.utils.errors import UserError, joined
from lantern_bench.utils.text import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd


_RAY_HELP = (
    "Decode on a Ray cluster: auto, HOST:6379 or ray://HOST:10001. "
    "Default: the cluster of RAY_ADDRESS, or a new one."
)
REPRODUCE_HELP = (
    "Reproduce a published table: every relaxed cell with both residuals, "
    "and published figures beside ours."
)


@with_flags(EXPERIMENT_FLAGS)
def sweep(
    ctx: typer.Context,
    console: Console,
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file, or the name of a shipped experiment.", show_default="lanterns"
        ),
    ] = None,
    modes: Annotated[
        list[str] | None,
        typer.Option(help="Run only these modes; modes that the experiment lacks are added."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. Default: results/<name>-<hash>.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Resume the run, or start a new one beside it.")
    ] = True,
    settings: SettingsOption = None,
    shard: Annotated[
        str | None, typer.Option(metavar="i/n", help="Run only part i of n of the prompts.")
    ] = None,
    worker_timeout: Annotated[
        float,
        typer.Option(
            help="End a worker process after this many seconds without a sign of life.",
            hidden=True,
        ),
    ] = WORKER_TIMEOUT,
    ray: Annotated[str | None, typer.Option(metavar="[ADDRESS]", help=_RAY_HELP)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and decode nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Run a grid of any number of cells.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Run an experiment and write its tables. The same command resumes an interrupted run."""
    overrides = Overrides.from_flags(flags, modes=modes, settings=settings, many=yes)
    published = ctx.info_name == "reproduce"  # the same command with other cells and another table
    if published and experiment is None:
        raise UserError(
            "EXPERIMENT: no published table is named",
            "Name one, such as lantern-table2: `lantern-bench experiments` lists them.",
        )
    request = prepare(
        experiment or "lanterns",
        overrides,
        out=out,
        resume=resume,
        shard=shard,
        ray=ray,
        both_residuals=published,
        worker_timeout=worker_timeout,
        command=ctx.meta["command"],
    )
    console.say(f"run: {request.folder}")
    for remark in request.remarks():
        console.say(remark)
    if dry_run:
        if request.lacking:
            problem = joined(request.lacking)
            console.warn(problem.message, problem.advice)
        table, seconds = plan_table(request)
        time = "unknown, nothing is measured yet" if isnan(seconds) else duration(seconds)
        images, done, to_do = table[["images", "done", "to_do"]].sum()
        console.say(
            f"{len(table)} cells, {images} images, {done} done, {to_do} to do; time left: {time}"
        )
        return console.table(table, title=str(request.folder))
    with console.events() as emit:
        tables = run(request, emit)
    if "speed" in request.experiment.settings.metrics:
        disturbance = run_directory.disturbance(run_directory.finished_records(request.folder))
        if disturbance:
            console.warn(f"{disturbance}. {quiet_advice()}")
    show = _show_reproduction if published else _show_summary
    show(request.folder, tables, console)
    check_failed(request)
    return None


@with_format
def merge(
    console: Console,
    runs: RunsArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the merged run. Default: the shards' name without -shardIofN."
        ),
    ] = None,
) -> None:
    """Merge the shards of a run (`sweep --shard i/n`) into one run."""
    from lantern_bench.analysis.tables import write_tables
    from lantern_bench.storage.merge import merge_runs

    folder = merge_runs(runs, out)
    images = len(run_directory.read_records(folder))
    done = len(run_directory.done_images(folder))
    console.say(f"{images} images of {len(runs)} shards, {images - done} failed: {folder}")
    if run_directory.read_scores(folder):
        console.say(f"quality of whole cells: lantern-bench score {folder}")
    _show_summary(folder, write_tables(folder), console)


def _show_summary(folder: Path, tables: Mapping[str, pd.DataFrame], console: Console) -> None:
    console.table(tables["summary"], "summary", title=folder.name)
    console.say(f"tables: {', '.join(f'{name}.csv' for name in tables)}; pictures: images/")
    console.say(f"run: {folder}")


def _show_reproduction(folder: Path, tables: Mapping[str, pd.DataFrame], console: Console) -> None:
    """Write and show the published figures beside ours, and say what is not comparable."""
    from lantern_bench.analysis.published import comparability, reproduction_rows, sources
    from lantern_bench.config.paper import read_paper
    from lantern_bench.report.format_tables import side_by_side
    from lantern_bench.storage.schema import frame, write_csv

    manifest = run_directory.read_manifest(folder)
    paper = read_paper(manifest["experiment"].get("paper"))
    table = frame("reproduction", reproduction_rows(tables, paper))
    write_csv(table, folder / "reproduction.csv")
    notes = comparability(tables, paper, manifest)
    if console.format in ("csv", "json"):
        console.table(table)
        for note in notes:
            console.say(note)
    else:
        console.table(
            side_by_side(table),
            title=paper.title if paper else folder.name,
            notes=[*notes, *sources(table)],
        )
    files = ", ".join(f"{name}.csv" for name in ("reproduction", *tables))
    console.say(f"tables: {files}; all in {folder}")


@with_format
def experiments(console: Console) -> None:
    """List the experiments that come with the package."""
    from lantern_bench.config.experiment import shipped_experiments
    from lantern_bench.config.experiment_file import ExperimentReader
    from lantern_bench.utils.yaml_file import read_source

    rows = []
    for name, path in shipped_experiments().items():
        settings = ExperimentReader(read_source(path), Overrides()).settings()
        rows.append(
            {
                "experiment": name,
                "model": ", ".join(settings.model),
                "images": settings.images,
                "about": " ".join((settings.description or "").split()),
            }
        )
    console.table(rows)
