"""`lantern-bench sweep`: the main job. Plan, run, score, write the tables, show the summary.

The flags and what is shown at the end; what happens in between is `cli/course.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lantern_bench.cli.course import Request, carry_out, check_failed, make_request, plan_table
from lantern_bench.cli.flags import DECODING, PLACE, PROMPTS_HELP, with_flags
from lantern_bench.console import FORMATS, Console

__all__ = ["sweep"]


@with_flags(*DECODING, *PLACE)
def sweep(
    ctx: typer.Context,
    experiment: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped experiment.")] = "lanterns",
    model: Annotated[list[str] | None, typer.Option(help="Model, or several.")] = None,
    modes: Annotated[list[str] | None, typer.Option(help="Keep the cells of these modes.")] = None,
    prompts: Annotated[str | None, typer.Option(help=PROMPTS_HELP)] = None,
    images: Annotated[str | None, typer.Option(help="Images per cell.")] = None,
    repeats: Annotated[str | None, typer.Option(help="Make the images so many times, with fresh seeds.")] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="speed, quality, or both.")] = None,
    protocol: Annotated[str | None, typer.Option(help="How quality is judged; see `lantern-bench score`.")] = None,
    reference: Annotated[str | None, typer.Option(help="What fidelity is measured against; see `score`.")] = None,
    batch: Annotated[str | None, typer.Option(help="Images decoded at once, or a list; published: 1.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default results/<name>-<hash>.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue what is there, or start afresh beside it.")] = True,
    baseline: Annotated[bool | None, typer.Option("--baseline/--no-baseline", help="Add ar to a run without.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, any key of an experiment.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: make only this part of the prompts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and make nothing.")] = False,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Run an experiment: speed and quality of every cell, and the tables. The same command continues it."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    typed: dict[str, Any] = {"model": model or None, "prompts": prompts, "images": images, "repeats": repeats}
    typed |= {"batch": batch, "metrics": metrics or None, "baseline": baseline}
    typed |= {key: None if value == [] else value for key, value in flags.items()}
    typed |= {"protocol": protocol, "reference": reference}
    request = make_request(
        experiment, typed, modes=modes or None, settings=settings, out=out, resume=resume, shard=shard
    )
    if dry_run:
        console.table(plan_table(request, console), title=str(request.folder), format=chosen)
        return
    console.say(f"run: {request.folder}")
    failed = carry_out(request, console)
    _finish(request, console, chosen)
    check_failed(request, failed)


def _finish(request: Request, console: Console, format: str | None) -> None:
    """Write the tables, show the summary, say where everything is."""
    from lantern_bench.report.tables import NAMES, write_tables

    tables = write_tables(request.folder)
    console.table(tables["summary"], "summary", title=request.folder.name, format=format)
    console.say(f"tables: {', '.join(f'{name}.csv' for name in NAMES)}; pictures: images/; all in")
    console.say(f"run: {request.folder}")
