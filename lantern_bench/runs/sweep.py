"""A sweep from an experiment to scored images: `prepare` checks everything without torch, `run` does the work.

Shared by the command line and the Python API. Progress goes to a callback as events (`runs/runner.py`). The checks
write nothing, so that a refused sweep leaves no trace; `RunStore` checks again under the lock.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lantern_bench import stopping
from lantern_bench.config.experiment import ResolvedExperiment, load_experiment, resolve
from lantern_bench.config.parse_experiment import Experiment, read_experiment
from lantern_bench.config.plan import Plan, Shard, make_plan, parse_shard
from lantern_bench.config.protocols import EMBEDDED, LANTERN_COCO, Protocol, protocol_of
from lantern_bench.config.values import Overrides
from lantern_bench.config.yaml_source import Source
from lantern_bench.errors import RecordsFailedError, RefusedError, UserError
from lantern_bench.models.registry import defaults_of, model_of
from lantern_bench.prompts.sets import load_prompts, prompt_facts
from lantern_bench.runs.engines import ENGINES, LOCAL, Workers, check_workers
from lantern_bench.runs.keys import check_same_experiment, check_same_threads
from lantern_bench.runs.store import (
    LOCK,
    MANIFEST,
    ScoreStore,
    cannot_write,
    check_is_run,
    done_images,
    lock_run,
    read_manifest,
    results_root,
    run_folder,
    scan_records,
)
from lantern_bench.runs.threads import prepare_environment
from lantern_bench.runs.tuned import Added, add_lossless

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.config.plan import Estimate
    from lantern_bench.metrics.reference_sets import Reference
    from lantern_bench.runs.runner import Event
    from lantern_bench.runs.scoring import Scorers

    Tell = Callable[[Event], None]


WORKER_TIMEOUT = 1800.0
"""Seconds: loading, compiling and encoding captions give no sign of life, decoding does at every step."""


class Request(NamedTuple):
    """A sweep that passed every check that needs no models.

    `prompts` describes them for the manifest. `lossless` are cells that the experiment got beside its own. `shard` is
    the part of a larger run, `workers` where it runs. `worker_timeout`: seconds without a sign of life after which a
    worker process is ended.
    """

    experiment: ResolvedExperiment
    plan: Plan
    folder: Path
    protocol: Protocol
    prompts: dict[str, Any]
    lossless: Added
    worker_timeout: float = WORKER_TIMEOUT
    shard: Shard | None = None
    workers: Workers = LOCAL


def prepare(
    source: str | Path | Mapping[str, Any],
    overrides: Overrides,
    *,
    out: Path | None = None,
    resume: bool = True,
    shard: str | None = None,
    workers: Workers = LOCAL,
    both_residuals: bool = False,
    worker_timeout: float = WORKER_TIMEOUT,
) -> Request:
    """Check a sweep and return it; writes nothing, and needs torch only to find a tuned lossless cell (`tuned.py`).

    `source` is the name of a shipped experiment, a YAML file, or the content of one as a mapping. With
    `both_residuals`, a relaxed experiment runs with both residuals unless the overrides name one. Raises `UserError`
    for everything wrong with the experiment, flags or prompts, `RefusedError` for a run directory in use or of other
    settings.
    """
    if not worker_timeout > 0:
        raise UserError(f"--worker-timeout {worker_timeout:g}: must be more than 0 seconds")
    part = parse_shard(shard) if shard is not None else None
    loaded = load(source, overrides)
    if both_residuals and "residual" not in overrides.values and loaded.is_relaxed:
        both = {**overrides.values, "residual": ["official", "exact"]}
        loaded = load(source, replace(overrides, values=both))
    if "prompts" not in loaded.settings.model_fields_set:
        own = {"prompts": next(iter(model_of(loaded.settings.model[0]).prompt_sets))}
        loaded = replace(loaded, settings=loaded.settings.model_copy(update=own))
    resolved = resolve(loaded, defaults_of(loaded.settings.model))
    check_neighbours(resolved)
    settings = resolved.settings
    check_workers(workers, settings)
    protocol = protocol_of(settings.protocol or default_protocol(settings.model))
    models = [model_of(name) for name in settings.model]
    # Checks every prompt for every model; the prompts themselves are the same for all.
    prompts, *_ = [load_prompts(settings.prompts, model) for model in models]
    # The name does not depend on the tuned lossless cell: after another search the run goes on in the same directory.
    folder = run_folder(resolved, results_root(), out, resume=resume)
    if part is not None and out is None:
        # Shards run at the same time, and a run directory has one writer.
        folder = folder.with_name(f"{folder.name}-shard{part.index}of{part.count}")
    resolved, lossless = add_lossless(resolved, folder)
    plan, facts = make_plan(resolved, prompts), prompt_facts(settings.prompts, models[0], prompts)
    plan = plan if part is None else plan.shard(part)
    check_folder(folder, resolved)
    return Request(resolved, plan, folder, protocol, facts, lossless, worker_timeout, part, workers)


def load(source: str | Path | Mapping[str, Any], overrides: Overrides) -> Experiment:
    """Read an experiment by name, file or content; raises `UserError` as `load_experiment`."""
    if isinstance(source, str | Path):
        return load_experiment(source, overrides)
    experiment, problems = read_experiment(Source("experiment", Path(), dict(source)), overrides)
    problems.raise_all()
    return experiment


def check_folder(folder: Path, experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a folder that cannot be a run directory, `RefusedError` if in use or of other settings."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"--out {folder}: {there} is a file, not a folder", "Give a folder that you may write to.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise cannot_write(folder)
    if not folder.is_dir():
        return
    if (folder / LOCK).exists():
        lock_run(folder).release()
    check_is_run(folder)
    if (folder / MANIFEST).exists() and (finished := len(done_images(folder))):
        recorded = read_manifest(folder).get("experiment", {})
        check_same_experiment(folder.name, recorded, experiment.to_dict(), finished)
        check_same_threads(folder.name, read_manifest(folder).get("threads"), experiment.settings.threads, finished)


def check_neighbours(experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a cell that asks for more neighbours than its model has other codes."""
    for cell in experiment.cells:
        codes, asked = model_of(cell.model).codes, cell.decoding.neighbours
        if codes is not None and asked is not None and asked >= codes:
            raise UserError(f"--neighbours {asked}: the model {cell.model} has {codes} codes", f"At most {codes - 1}.")


def default_protocol(models: Sequence[str]) -> str:
    """Return the quality protocol of a run of these models: the bundled scorers only for the bundled family."""
    bundled = all(model_of(model).family == "lanterns" for model in models)
    return EMBEDDED if bundled else LANTERN_COCO


def seconds_per_image(folder: Path) -> dict[str, float]:
    """Return mean seconds per image by cell id, pixels included, of the finished images; empty without any."""
    spent: dict[str, list[float]] = defaultdict(list)
    for row in scan_records(folder).rows("cell_id", "status", "seconds", "pixel_seconds"):
        if row["status"] == "ok" and row["seconds"] is not None:
            spent[row["cell_id"]].append(row["seconds"] + (row["pixel_seconds"] or 0.0))
    return {cell_id: sum(values) / len(values) for cell_id, values in spent.items()}


def plan_table(request: Request) -> tuple[pd.DataFrame, Estimate]:
    """Return the plan by cell (images, done, to_do, s_per_image), and the estimate of the time left."""
    import pandas as pd

    pace, done = seconds_per_image(request.folder), done_images(request.folder)
    rows = []
    planned = Counter(unit.cell.cell_id for unit in request.plan.units)
    finished = Counter(
        unit.cell.cell_id for unit in request.plan.units if (unit.cell.cell_id, unit.prompt.id, unit.repeat) in done
    )
    for cell in request.plan.cells:
        images, made = planned[cell.cell_id], finished[cell.cell_id]
        row = {"cell": cell.cell_id, "images": images, "done": made, "to_do": images - made}
        rows.append(row | {"s_per_image": pace.get(cell.cell_id)})
    return pd.DataFrame(rows), request.plan.estimate(pace, done)


def run(request: Request, tell: Tell) -> int:
    """Make the missing images and score them; return how many images failed. Events go to `tell`.

    Raises `RefusedError` for missing weights, drafters or scorers and for a run directory whose images were made in
    another way, `UserError` for malformed files; all before the first image. Raises `RecordsFailedError` when a worker
    process dies or hangs.
    """
    prepare_environment()

    from lantern_bench.runs.runner import Interrupted

    def on_event(event: Event) -> None:
        tell(event)
        stopping.check()

    units = request.plan.units
    try:
        return ENGINES[request.workers.engine].run(request, on_event)
    except KeyboardInterrupt:
        done = done_images(request.folder)
        made = sum((unit.cell.cell_id, unit.prompt.id, unit.repeat) in done for unit in units)
        tell(Interrupted(made, len(units)))
        raise


def run_here(request: Request, tell: Tell) -> int:
    """Run a request on this machine: the engine `local`. Returns and raises as `run`."""
    from lantern_bench.runs.processes import decode_in_processes

    settings = request.experiment.settings
    # The bundled scorers are in the package: none can be missing, and loading them first would delay the first image.
    bundled = request.protocol.name == EMBEDDED and settings.reference is None
    loaded = None if bundled else load_scorers_of(request, settings.device)
    failed = (decode_missing if settings.processes == 1 else decode_in_processes)(request, tell)
    scorers, reference = loaded or load_scorers_of(request, settings.device)
    if scorers is not None and done_images(request.folder):
        score_store(request.folder, scorers, reference, tell)
    return failed


def decode_missing(request: Request, tell: Tell) -> int:
    """Make the missing images in this process; return how many failed. Raises as `run`."""
    import torch

    from lantern_bench.models.loaded_model import NoPixels
    from lantern_bench.runs.devices import choose_place, compile_models, key_fields, load_models
    from lantern_bench.runs.runner import ImageDone, Loaded, calibrate_threads, prepare_models, run_plan
    from lantern_bench.runs.store import RunStore

    load, settings = psutil.getloadavg()[0], request.experiment.settings
    place = choose_place(settings.device, settings.dtype, fast=True)
    models = load_models(request.experiment, place)
    for model in models.values():
        if isinstance(model.pixels, NoPixels):
            raise model.pixels.problem
    tell(Loaded(place, compile_models(models.values(), place) if settings.compile else None))
    prepare_seconds, threads, failed = (
        prepare_models(request.plan, models, done_images(request.folder), tell),
        torch.get_num_threads(),
        0,
    )
    key = key_fields(models, settings, place, request.plan.cells)
    with RunStore(request.folder, request.experiment, key) as store:
        store.update_manifest(**manifest_facts(request), load_before=round(load, 2))
        try:
            calibrate_threads(store, request.plan, models, settings.threads, tell)
            again = "speed" in settings.metrics
            for event in run_plan(store, request.plan, models, place, prepare_seconds, again=again):
                failed += isinstance(event, ImageDone) and event.failed
                tell(event)
        finally:
            torch.set_num_threads(threads)
    return failed


def manifest_facts(request: Request) -> dict[str, Any]:
    """Return what the manifest of a run says of its request, beside the experiment."""
    shard = None
    if request.shard is not None:
        # The number of its images tells later whether the shard is whole.
        shard = asdict(request.shard) | {"images": len(request.plan.units)}
    lossless = list(request.lossless.cells)
    return {"prompts": request.prompts, "lossless": lossless, "shard": shard, "engine": request.workers.engine}


def disturbed(folder: Path) -> str | None:
    """Say in one line how many images of a run were disturbed; None without any."""
    records = scan_records(folder)
    marks = records.floats("disturbed")[records.is_value("status", "ok")]
    timed, count = int((marks == marks).sum()), int((marks == 1.0).sum())
    if count == 0:
        return None
    said = f"{count} of {timed} images disturbed: their threads lacked a core for more than 5 % of the time"
    return f"speed cannot be measured now: {said}" if 2 * count > timed else said


def check_failed(request: Request, failed: int) -> None:
    """Raise `RecordsFailedError` when images failed."""
    if failed:
        what = f"{failed} of {len(request.plan.units)} images failed; see {request.folder / 'records.jsonl'}"
        raise RecordsFailedError(what, "The same command tries them again.")


def score(
    folder: Path,
    tell: Tell,
    *,
    protocol: str | None = None,
    reference: str | None = None,
    device: str = "auto",
    clip_weights: Path | None = None,
    features_weights: Path | None = None,
    infinity: bool = False,
    again: bool = False,
) -> tuple[Protocol, int]:
    """Score the pictures of a run by a quality protocol, by default the run's; nothing is decoded.

    Returns the protocol and the number of rows written. Raises as `load_scorers`, `find_reference` and `ScoreStore`.
    """
    recorded = read_manifest(folder).get("experiment", {})
    named = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    rules = protocol_of(named)

    from lantern_bench.metrics.reference_sets import find_reference
    from lantern_bench.runs.devices import choose_place
    from lantern_bench.runs.scoring import load_scorers

    place = choose_place(device)
    scorers = load_scorers(rules, clip_weights=clip_weights, features_weights=features_weights, device=place.device)
    given = reference or (recorded.get("reference") if named == recorded.get("protocol") else None)
    against = find_reference(given, rules)
    return rules, score_store(folder, scorers, against, tell, infinity=infinity, again=again)


def load_scorers_of(request: Request, device: str) -> tuple[Scorers | None, Reference | None]:
    """Load the scorers and the reference of the run's protocol, if quality is measured.

    Raises `RefusedError` for missing weights, `UserError` for a malformed reference.
    """
    from lantern_bench.runs.devices import choose_place

    place = choose_place(device)
    if "quality" not in request.experiment.settings.metrics:
        return None, None

    # Importing them takes seconds.
    from lantern_bench.metrics.reference_sets import find_reference
    from lantern_bench.runs.scoring import load_scorers

    try:
        # The reference first: it is found quickly, and scorers are large.
        reference = find_reference(request.experiment.settings.reference, request.protocol)
        return load_scorers(request.protocol, device=place.device), reference
    except RefusedError as error:
        advice = f"{error.advice.rstrip('.')}. " if error.advice else ""
        raise RefusedError(error.message, f"{advice}Or leave quality out: --metrics speed.") from error


def score_store(folder: Path, scorers: Scorers, reference: Reference | None, tell: Tell, **more: Any) -> int:
    """Score what these scorers have not scored in a run; `more` as in `score_run`. Returns the number of rows."""
    from lantern_bench.metrics.reference_sets import cache_folder
    from lantern_bench.runs.runner import Scored
    from lantern_bench.runs.scoring import score_run

    with ScoreStore(folder) as store:
        return score_run(
            store,
            scorers,
            reference,
            lambda _cell, done, total: tell(Scored(done, total)),
            cache=cache_folder(),
            **more,
        )
