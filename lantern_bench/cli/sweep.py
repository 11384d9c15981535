"""`lantern-bench sweep`: the main job. Plan, run, score, write the tables, show the summary.

The flags and what is shown at the end; what happens in between is `cli/run_sweep.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import DECODING, PLACE, PROMPTS_HELP, RUN_HELP, locate, with_flags
from lantern_bench.cli.run_sweep import Request, carry_out, check_failed, make_request, plan_table
from lantern_bench.config.protocols import PROTOCOLS
from lantern_bench.console import FORMATS, Console

if TYPE_CHECKING:
    import pandas as pd


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


# ---- `lantern-bench reproduce`: run the experiment of a published table, with both residuals, and set it beside th

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
    from lantern_bench.config.experiment import load_experiment
    from lantern_bench.config.values import Overrides

    if typed.get("residual") is None:
        overrides = Overrides.from_flags(typed, modes=more["modes"], settings=more["settings"] or [])
        if load_experiment(experiment, overrides).is_relaxed:
            typed = typed | {"residual": _RESIDUALS}
    return make_request(experiment, typed, **more)


def _show(folder: Path, console: Console, format: str | None) -> None:
    """Write the tables, show the comparison and what stands in its way."""
    from lantern_bench.config.paper import read_paper
    from lantern_bench.report.reproduction import comparability, reproduction_rows, side_by_side, trends
    from lantern_bench.report.tables import frame, write_csv, write_tables
    from lantern_bench.runs.store import read_manifest

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


# ---- `lantern-bench score`: judge the pictures of a run again, by any protocol; nothing is decoded


def score(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    protocol: Annotated[str | None, typer.Option(help=f"One of {', '.join(PROTOCOLS)}; by default the run's.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="embedded, a folder of pictures, a COCO .json (or FILE.json=FOLDER), or a .npz (mu, sigma)."),
    ] = None,
    fid_infinity: Annotated[
        bool, typer.Option("--fid-infinity", help="Also extrapolate FID to infinitely many pictures.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Score also what these judges have scored already.")] = False,
    clip_weights: Annotated[Path | None, typer.Option(help="Checkpoint of the protocol's CLIP model.")] = None,
    features_weights: Annotated[Path | None, typer.Option(help="Weights of the protocol's extractor.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "auto",
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Score the pictures of a run by a quality protocol, without decoding again."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    folder = locate(run)

    from lantern_bench.config.protocols import protocol_of
    from lantern_bench.runs.preflight import default_protocol
    from lantern_bench.runs.store import read_manifest

    recorded = read_manifest(folder).get("experiment", {})
    named = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    rules = protocol_of(named)

    from lantern_bench.metrics.reference_sets import cache_folder, find_reference
    from lantern_bench.report.tables import write_tables
    from lantern_bench.runs.devices import choose_place
    from lantern_bench.runs.scoring import judges_of, score_run
    from lantern_bench.runs.store import ScoreBook

    place = choose_place(device)
    judges = judges_of(rules, clip_weights=clip_weights, features_weights=features_weights, device=place.device)
    given = reference or (recorded.get("reference") if named == recorded.get("protocol") else None)
    against = find_reference(given, rules)
    with ScoreBook(folder) as book, console.progress() as progress:
        progress.start(1, "scoring")
        written = score_run(
            book,
            judges,
            against,
            on_cell=lambda _cell, done, total: progress.reach(done / total),
            cache=cache_folder(),
            infinity=fid_infinity,
            again=again,
        )
        progress.reach(1)
    quality = write_tables(folder)["quality"]
    mine = quality[quality["protocol"] == rules.name].reset_index(drop=True)
    console.table(mine, "quality", title=f"{folder.name}: {rules.name}, version {rules.version}", format=chosen)
    said = f"{written} scores added" if written else "nothing to add: these judges have scored all of it (--again)"
    console.say(f"{said}; {folder / 'scores.jsonl'}")
