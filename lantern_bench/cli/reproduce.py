"""`lantern-bench reproduce`: run the experiment of a published table, with both residuals, and set it beside the paper.

The run is a sweep like any other and continues like one. What is shown is `report/reproduction.py`: published, ours,
difference, and in plain words what cannot be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.course import Request, carry_out, check_failed, make_request, plan_table
from lantern_bench.cli.flags import DECODING, PLACE, PROMPTS_HELP, with_flags
from lantern_bench.console import FORMATS, Console

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["reproduce"]

_RESIDUALS = ["official", "exact"]


@with_flags(*DECODING, *PLACE)
def reproduce(
    ctx: typer.Context,
    experiment: Annotated[str, typer.Argument(help="A shipped experiment with published figures, or a YAML file.")],
    model: Annotated[str | None, typer.Option(help="The model; by default the experiment's.")] = None,
    modes: Annotated[list[str] | None, typer.Option(help="Keep the cells of these modes.")] = None,
    prompts: Annotated[str | None, typer.Option(help=PROMPTS_HELP)] = None,
    images: Annotated[str | None, typer.Option(help="Images per cell; published tables use 1,000 to 5,000.")] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="speed, quality, or both.")] = None,
    protocol: Annotated[str | None, typer.Option(help="How quality is judged; see `lantern-bench score`.")] = None,
    reference: Annotated[str | None, typer.Option(help="What fidelity is measured against; see `score`.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default results/<name>-<hash>.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue what is there, or start afresh beside it.")] = True,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, any key of an experiment.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and make nothing.")] = False,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Reproduce a published table: every relaxed cell with both residuals, published figures beside ours."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    typed: dict[str, Any] = {"model": [model] if model else None, "prompts": prompts, "images": images}
    typed |= {"metrics": metrics or None, "protocol": protocol, "reference": reference}
    typed |= {key: None if value == [] else value for key, value in flags.items()}
    request = _request(experiment, typed, modes=modes or None, settings=settings, out=out, resume=resume)
    if dry_run:
        console.table(plan_table(request, console), title=str(request.folder), format=chosen)
        return
    console.say(f"run: {request.folder}")
    failed = carry_out(request, console)
    _show(request.folder, console, chosen)
    check_failed(request, failed)


def _request(experiment: str, typed: dict[str, Any], **more: Any) -> Request:
    """The run with both residuals, unless the residual was typed or no cell has one."""
    from lantern_bench.spec.experiment import load_experiment
    from lantern_bench.spec.overrides import Overrides

    if typed.get("residual") is None:
        overrides = Overrides.from_flags(typed, modes=more["modes"], settings=more["settings"] or [])
        if load_experiment(experiment, overrides).is_relaxed:
            typed = typed | {"residual": _RESIDUALS}
    return make_request(experiment, typed, **more)


def _show(folder: Path, console: Console, format: str | None) -> None:
    """Write the tables, show the comparison and what stands in its way."""
    from lantern_bench.report.reproduction import comparability, reproduction_rows, trends
    from lantern_bench.report.reproduction_view import side_by_side
    from lantern_bench.report.tables import frame, write_csv, write_tables
    from lantern_bench.runs.store import read_manifest
    from lantern_bench.spec.paper import read_paper

    manifest = read_manifest(folder)
    paper = read_paper(manifest["experiment"].get("paper"))
    tables = write_tables(folder)
    table: pd.DataFrame = frame("reproduction", reproduction_rows(tables, paper))
    write_csv(table, folder / "reproduction.csv")
    notes = [*trends(tables), *comparability(tables, paper, manifest)]
    if (format or console.format) in ("csv", "json"):
        console.table(table, "reproduction", format=format)
        for note in notes:
            console.say(note)
    else:
        console.table(side_by_side(table), title=paper.title if paper else folder.name, format=format)
        console.data("\n".join(["", *notes]))
    console.say(f"tables: reproduction.csv, speed.csv, quality.csv, acceptance.csv, summary.csv; all in {folder}")
