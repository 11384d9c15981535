"""`lantern-bench sweep`: the main job. Plan, run, score, write the tables, show the summary.

All that can be wrong is checked first, before torch is imported: the experiment, the prompts, the folder. What follows
only puts together what `spec`, `runs` and `report` do, and tells people about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lantern_bench.cli.flags import DECODING, PLACE, with_flags
from lantern_bench.cli.places import results_root
from lantern_bench.console import FORMATS, Console, duration
from lantern_bench.errors import RecordsFailedError

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.runs.local import Place
    from lantern_bench.runs.score import Judges
    from lantern_bench.runs.store import RunStore
    from lantern_bench.spec.experiment import Experiment, ResolvedExperiment
    from lantern_bench.spec.plan import Plan

__all__ = ["sweep"]


class _Request(NamedTuple):
    """A sweep with everything checked that can be checked without models."""

    experiment: ResolvedExperiment
    plan: Plan
    folder: Path


@with_flags(*DECODING, *PLACE)
def sweep(
    ctx: typer.Context,
    experiment: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped experiment.")] = "lanterns",
    model: Annotated[list[str] | None, typer.Option(help="Model, or several.")] = None,
    modes: Annotated[list[str] | None, typer.Option(help="Keep the cells of these modes.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A prompt set, or a .txt, .csv or .jsonl file.")] = None,
    images: Annotated[str | None, typer.Option(help="Images per cell.")] = None,
    repeats: Annotated[str | None, typer.Option(help="Make the images so many times, with fresh seeds.")] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="speed, quality, or both.")] = None,
    batch: Annotated[str | None, typer.Option(help="Images decoded at once; published timings use 1.")] = None,
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
    request = _request(experiment, typed, modes or None, settings or [], out, resume, shard)
    if dry_run:
        console.table(_plan_table(request, console), title=str(request.folder), format=chosen)
        return
    console.say(f"run: {request.folder}")
    failed = _run(request, console)
    _finish(request, console, chosen)
    if failed:
        raise RecordsFailedError(
            f"{failed} of {len(request.plan.units)} images failed; they are in {request.folder / 'records.jsonl'}",
            "The same command tries them again.",
        )


def _request(
    source: str,
    typed: dict[str, Any],
    modes: list[str] | None,
    settings: list[str],
    out: Path | None,
    resume: bool,
    shard: str | None,
) -> _Request:
    """Check everything; no torch."""
    from lantern_bench.models.registry import cards
    from lantern_bench.runs.admission import check_folder, check_neighbours
    from lantern_bench.runs.store import run_folder
    from lantern_bench.spec.experiment import load_experiment, resolve
    from lantern_bench.spec.overrides import Overrides
    from lantern_bench.spec.plan import parse_shard

    part = parse_shard(shard) if shard is not None else None
    loaded = load_experiment(source, Overrides.from_flags(typed, modes=modes, settings=settings))
    resolved = resolve(loaded, {name: card.defaults for name, card in cards().items()})
    check_neighbours(resolved)
    plan = _planned(loaded, resolved)
    folder = run_folder(resolved, results_root(), out, resume=resume)
    if part is not None:
        plan = plan.shard(part)
        # Shards run at the same time, and a folder has one writer.
        folder = folder if out is not None else folder.with_name(f"{folder.name}-shard{part.index}of{part.count}")
    check_folder(folder, resolved)
    return _Request(resolved, plan, folder)


def _planned(loaded: Experiment, resolved: ResolvedExperiment) -> Plan:
    """Make the plan; every prompt is one that every model can take."""
    from lantern_bench.measure.prompts import load_prompts
    from lantern_bench.models.registry import family_of
    from lantern_bench.spec.plan import make_plan

    lists = [load_prompts(loaded.settings.prompts, family_of(model)) for model in loaded.settings.model]
    return make_plan(resolved, lists[0])


def _plan_table(request: _Request, console: Console) -> pd.DataFrame:
    """The plan by cell, with what is done and what the rest will take."""
    import pandas as pd

    from lantern_bench.runs.admission import seconds_per_image
    from lantern_bench.runs.store import done_images

    pace, done = seconds_per_image(request.folder), done_images(request.folder)
    whole = request.plan.estimate(pace, done)
    rows = []
    for cell in request.plan.cells:
        units = [unit for unit in request.plan.units if unit.cell == cell]
        made = sum((cell.cell_id, unit.prompt.id, unit.repeat) in done for unit in units)
        row = {"cell": cell.cell_id, "images": len(units), "done": made, "to_do": len(units) - made}
        rows.append(row | {"s_per_image": pace.get(cell.cell_id)})
    time = "unknown, nothing is measured yet" if whole.seconds is None else duration(whole.seconds)
    console.say(f"run: {request.folder}")
    console.say(f"{len(rows)} cells, {whole.images} images, {whole.done} done, {whole.to_do} to do; time left: {time}")
    return pd.DataFrame(rows)


def _run(request: _Request, console: Console) -> int:
    """Make what is to be made and score it; return how many images failed."""
    from lantern_bench.runs.local import choose_place, key_fields, load_models
    from lantern_bench.runs.store import RunStore

    settings = request.experiment.settings
    place = choose_place(settings.device, settings.dtype)
    judges = _judges() if "quality" in settings.metrics else None
    models = load_models(request.experiment, place)
    _compile(models, settings.compile, place, console)
    console.detail(f"device {place.device}, {place.dtype_name}")
    with RunStore(request.folder, request.experiment, key_fields(models, settings, place)) as store:
        try:
            failed = _make(request.plan, store, models, place, console)
            if judges is not None:
                _score(store, judges, console)
        except KeyboardInterrupt:
            units = request.plan.units
            done = sum(store.is_done(unit) for unit in units)
            console.say(f"interrupted: {done} of {len(units)} images are done and kept in {request.folder}")
            console.say("The same command continues.")
            raise
    return failed


def _compile(models: Any, asked: bool, place: Place, console: Console) -> None:
    """Compile where that is asked for; where it cannot be, say why and go on as it is."""
    from lantern_bench.runs.local import compile_models

    if not asked:
        return
    problem = compile_models(models.values(), place)
    if problem is not None:
        console.warn(
            f"decoding is not compiled: {problem}", "It is slower so. Install a C++ compiler, or --no-compile."
        )


def _make(plan: Plan, store: RunStore, models: Any, place: Any, console: Console) -> int:
    from lantern_bench.runs.runner import ImageDone, Started, WarmedUp, run_plan

    failed, lengths, seconds = 0, [], []
    with console.progress() as progress:
        for event in run_plan(store, plan, models, place):
            if isinstance(event, Started):
                to_do = sum(event.to_do.values())
                if event.kept:
                    console.say(f"{event.kept} images kept, {to_do} to do")
                if to_do:
                    progress.start(to_do, "images", event.to_do)
            elif isinstance(event, WarmedUp):
                compiled = any(model.engine.compile for model in models.values())
                tell = console.say if compiled else console.detail
                tell(f"{'compiled' if compiled else 'warm-up of'} {event.cell_id}: {event.seconds or 0.0:.1f} s")
            elif isinstance(event, ImageDone):
                failed += event.failed
                if event.failed:
                    console.warn(f"{event.unit.image} failed: {event.record['error']}")
                else:
                    seconds.append(event.record["seconds"])
                    if event.unit.cell.decoding.mode != "ar" and event.record["mean_accepted_length"]:
                        lengths.append(event.record["mean_accepted_length"])
                live = {"mal": sum(lengths) / len(lengths)} if lengths else {}
                live |= {"s_per_image": sum(seconds) / len(seconds)} if seconds else {}
                progress.advance(part=event.unit.cell.cell_id, **live)
    return failed


def _judges() -> Judges:
    from lantern_bench.runs.score import embedded_judges

    return embedded_judges()


def _score(store: RunStore, judges: Judges, console: Console) -> None:
    from lantern_bench.runs.score import score_run

    with console.progress() as progress:
        progress.start(1, "scoring")
        score_run(store, judges, on_cell=lambda _cell, done, total: progress.reach(done / total))
        progress.reach(1)


def _finish(request: _Request, console: Console, format: str | None) -> None:
    """Write the tables, show the summary, say where everything is."""
    from lantern_bench.report.tables import NAMES, write_tables

    tables = write_tables(request.folder)
    console.table(tables["summary"], "summary", title=request.folder.name, format=format)
    console.say(f"tables: {', '.join(f'{name}.csv' for name in NAMES)}; pictures: images/; all in")
    console.say(f"run: {request.folder}")
