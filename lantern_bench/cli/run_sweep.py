"""The course of a run, shared by the commands that decode an experiment: check, plan, make, score.

All that can be wrong is checked first, before torch is imported: the experiment, the prompts, the protocol, the folder.
What follows only puts together what `spec`, `runs` and `measure` do, and tells people about it. Flags are the
commands' own, and so is what is shown at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.cli.options import compile_steps, results_root
from lantern_bench.console import Console, duration
from lantern_bench.errors import RecordsFailedError, RefusedError

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.config.experiment import ResolvedExperiment
    from lantern_bench.config.parse_experiment import Experiment
    from lantern_bench.config.plan import Plan
    from lantern_bench.config.protocols import Protocol
    from lantern_bench.metrics.reference_sets import Reference
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Place
    from lantern_bench.runs.scoring import Judges
    from lantern_bench.runs.store import RunStore


class Request(NamedTuple):
    """A run with everything checked that can be checked without models."""

    experiment: ResolvedExperiment
    plan: Plan
    folder: Path
    protocol: Protocol
    prompts: dict[str, Any]


def make_request(
    source: str,
    typed: dict[str, Any],
    *,
    modes: list[str] | None = None,
    settings: list[str] | None = None,
    out: Path | None = None,
    resume: bool = True,
    shard: str | None = None,
) -> Request:
    """Check everything, with what was typed (by key, None: not typed) laid over the experiment; no torch."""
    from lantern_bench.config.experiment import load_experiment, resolve
    from lantern_bench.config.plan import parse_shard
    from lantern_bench.config.values import Overrides
    from lantern_bench.models.registry import defaults_of
    from lantern_bench.runs.preflight import check_folder, check_neighbours
    from lantern_bench.runs.store import run_folder

    part = parse_shard(shard) if shard is not None else None
    loaded = _with_prompts(load_experiment(source, Overrides.from_flags(typed, modes=modes, settings=settings or [])))
    resolved = resolve(loaded, defaults_of(loaded.settings.model))
    check_neighbours(resolved)
    protocol = _protocol(resolved)
    plan, prompts = _planned(loaded, resolved)
    folder = run_folder(resolved, results_root(), out, resume=resume)
    if part is not None:
        plan = plan.shard(part)
        # Shards run at the same time, and a folder has one writer.
        folder = folder if out is not None else folder.with_name(f"{folder.name}-shard{part.index}of{part.count}")
    check_folder(folder, resolved)
    return Request(resolved, plan, folder, protocol, prompts)


def _with_prompts(loaded: Experiment) -> Experiment:
    """The experiment with the prompts of its first model, where nobody said any."""
    from dataclasses import replace

    from lantern_bench.models.registry import card_of

    if "prompts" in loaded.settings.model_fields_set:
        return loaded
    own = card_of(loaded.settings.model[0]).prompt_set
    return replace(loaded, settings=loaded.settings.model_copy(update={"prompts": own}))


def _protocol(resolved: ResolvedExperiment) -> Protocol:
    """The protocol that was asked for, else that of the models."""
    from lantern_bench.config.protocols import protocol_of
    from lantern_bench.runs.preflight import default_protocol

    return protocol_of(resolved.settings.protocol or default_protocol(resolved.settings.model))


def _planned(loaded: Experiment, resolved: ResolvedExperiment) -> tuple[Plan, dict[str, Any]]:
    """Make the plan, and what the manifest says of its prompts; every prompt is one that every model can take."""
    from lantern_bench.config.plan import make_plan
    from lantern_bench.models.registry import family_of
    from lantern_bench.prompts.sets import load_prompts, prompt_facts

    source, families = loaded.settings.prompts, [family_of(model) for model in loaded.settings.model]
    lists = [load_prompts(source, family) for family in families]
    return make_plan(resolved, lists[0]), prompt_facts(source, families[0], lists[0])


def plan_table(request: Request, console: Console) -> pd.DataFrame:
    """The plan by cell, with what is done and what the rest will take."""
    import pandas as pd

    from lantern_bench.runs.preflight import seconds_per_image
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


def carry_out(request: Request, console: Console) -> int:
    """Make what is to be made and score it; return how many images failed."""
    from lantern_bench.models.loaded_model import NoPixels
    from lantern_bench.runs.devices import choose_place, key_fields, load_models
    from lantern_bench.runs.store import RunStore

    settings = request.experiment.settings
    place = choose_place(settings.device, settings.dtype, fast=True)
    judges, reference = _judges(request, place)
    models = load_models(request.experiment, place)
    for model in models.values():
        if isinstance(model.pixels, NoPixels):
            raise model.pixels.problem
    if settings.compile:
        compile_steps(models.values(), place, console)
    console.detail(f"device {place.device}, {place.dtype_name}")
    prepared = _ready(request, models, console)
    with RunStore(request.folder, request.experiment, key_fields(models, settings, place, request.plan.cells)) as store:
        store.update_manifest(prompts=request.prompts)
        try:
            failed = _make(request.plan, store, models, place, prepared, console)
            if judges is not None:
                _score(store, judges, reference, console)
        except KeyboardInterrupt:
            units = request.plan.units
            done = sum(store.is_done(unit) for unit in units)
            console.say(f"interrupted: {done} of {len(units)} images are done and kept in {request.folder}")
            console.say("The same command continues.")
            raise
    return failed


def _judges(request: Request, place: Place) -> tuple[Judges | None, Reference | None]:
    """What quality is judged by, where it is asked for."""
    from lantern_bench.metrics.reference_sets import find_reference
    from lantern_bench.runs.scoring import judges_of

    if "quality" not in request.experiment.settings.metrics:
        return None, None
    try:
        # The reference first: to find it is quick, and judges are large.
        reference = find_reference(request.experiment.settings.reference, request.protocol)
        return judges_of(request.protocol, device=place.device), reference
    except RefusedError as error:
        advice = f"{error.advice.rstrip('.')}. " if error.advice else ""
        raise RefusedError(error.message, f"{advice}Or leave quality out: --metrics speed.") from error


def check_failed(request: Request, failed: int) -> None:
    """Raise `RecordsFailedError` where images failed."""
    if failed:
        raise RecordsFailedError(
            f"{failed} of {len(request.plan.units)} images failed; they are in {request.folder / 'records.jsonl'}",
            "The same command tries them again.",
        )


def _ready(request: Request, models: Mapping[str, LoadedModel], console: Console) -> float:
    """Have everything at hand that the images need, before there is a folder; return the seconds it took."""
    from lantern_bench.runs.runner import Ready, get_ready

    seconds = 0.0
    try:
        with console.progress() as progress:
            for event in get_ready(request.plan, models, request.folder):
                if isinstance(event, Ready):
                    seconds = event.seconds
                    continue
                if event.done == 0:
                    progress.start(event.total, f"captions for {event.model}")
                progress.reach(event.done)
    except KeyboardInterrupt:
        console.say("interrupted before the first image; captions that were encoded are kept")
        console.say("The same command continues.")
        raise
    return seconds


def _make(
    plan: Plan,
    store: RunStore,
    models: Mapping[str, LoadedModel],
    place: Place,
    prepared: float,
    console: Console,
) -> int:
    from lantern_bench.runs.runner import ImageDone, Started, WarmedUp, run_plan

    failed, lengths, seconds = 0, [], []
    with console.progress() as progress:
        for event in run_plan(store, plan, models, place, prepared):
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


def _score(store: RunStore, judges: Judges, reference: Reference | None, console: Console) -> None:
    from lantern_bench.metrics.reference_sets import cache_folder
    from lantern_bench.runs.scoring import score_run

    with console.progress() as progress:
        progress.start(1, "scoring")
        score_run(
            store,
            judges,
            reference,
            on_cell=lambda _cell, done, total: progress.reach(done / total),
            cache=cache_folder(),
        )
        progress.reach(1)
