"""Decode every missing image of a plan, write its record and its picture, continue when one fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lantern_bench.config.experiment import Cell, ResolvedExperiment
from lantern_bench.config.plan import ImageKey, Plan
from lantern_bench.config.settings import Settings
from lantern_bench.decoding.loop import drafter_and_rule
from lantern_bench.devices import compute as compute_module
from lantern_bench.devices import machine
from lantern_bench.devices.compute import Compute
from lantern_bench.devices.machine import compute_block
from lantern_bench.methods.catalog import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models import load as load_module
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.storage.run_directory import done_images
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import SCHEMA_VERSION
from lantern_bench.sweeps.choose_threads import calibrate_threads
from lantern_bench.sweeps.decoder import Decoder
from lantern_bench.sweeps.events import ImageDone, Started
from lantern_bench.sweeps.request import Request
from lantern_bench.utils import signals
from lantern_bench.utils.clock import collect_garbage, now, stamp
from lantern_bench.utils.progress import Emit, Note, ProgressEvent

if TYPE_CHECKING:
    import torch
from lantern_bench.devices.machine import ENGINE_VERSION


def decode_missing(request: Request, emit: Emit) -> int:
    """Decode the missing images of a request in this process; return how many failed."""
    load = psutil.getloadavg()[0]
    settings = request.experiment.settings
    plan = request.plan
    compute, models = load_to_decode(request.experiment, emit)
    prepare_seconds = prepare_models(
        plan=plan, models=models, done=done_images(request.folder), emit=emit
    )
    threads = torch.get_num_threads()
    with RunStore.open(
        request.folder,
        request.experiment,
        key_fields(models=models, settings=settings, compute=compute, cells=plan.cells),
    ) as run:
        run.update_manifest(**request.manifest_entries(), load_before=round(load, 2))
        try:
            calibrate_threads(
                store=run, plan=plan, models=models, threads=settings.threads, emit=emit
            )
            timed = "speed" in settings.metrics
            return run_plan(
                store=run,
                plan=plan,
                models=models,
                compute=compute,
                emit=emit,
                prepare_seconds=prepare_seconds,
                repeat_disturbed=timed,
            )
        finally:
            torch.set_num_threads(threads)


def load_to_decode(
    experiment: ResolvedExperiment, emit: Emit
) -> tuple[Compute, dict[str, LoadedModel]]:
    """Load the models of an experiment, compiled if it asks for that."""
    settings = experiment.settings
    compute = compute_module.choose_compute(settings.device, settings.dtype, fast=True)
    models = load_module.load_models(experiment, compute)
    for model in models.values():
        model.pixel_decoder()
    if (
        settings.compile
        and (warning := load_module.compile_models(models.values(), compute)) is not None
    ):
        emit(warning)
    emit(Note(f"device {compute.device}, {compute.dtype_name}", level="detail"))
    return compute, models


def prepare_models(
    plan: Plan, models: Mapping[str, LoadedModel], done: Collection[ImageKey], emit: Emit
) -> float:
    """Compute neighbour tables and encode captions for what is not `done`; return the seconds it took."""
    began = now()
    batches = [batch for batch in plan.batches() if any(task.key not in done for task in batch)]
    for cell in dict.fromkeys(batch[0].cell for batch in batches):
        if cell.decoding.drafts:
            with torch.inference_mode():
                drafter_and_rule(models[cell.model], cell.decoding)
    for name, model in models.items():
        prompts = dict.fromkeys(
            task.prompt.text for batch in batches for task in batch if task.cell.model == name
        )
        for count, total in model.prepare(list(prompts)):
            emit(ProgressEvent(f"captions for {name}", count, total))
    return now() - began


def run_plan(
    store: RunStore,
    plan: Plan,
    models: Mapping[str, LoadedModel],
    compute: Compute,
    emit: Emit,
    *,
    prepare_seconds: float = 0.0,
    repeat_disturbed: bool = False,
) -> int:
    """Decode the images of `plan` that `store` lacks, and disturbed ones again if asked for; return how many failed."""
    batches = [batch for batch in plan.batches() if not all(map(store.is_done, batch))]
    to_do = Counter(task.cell.cell_id for task in plan.tasks if not store.is_done(task))
    session = open_session(store, prepare_seconds=prepare_seconds)
    started = store.manifest.get("started", session["started"])
    described = compute_block(compute, store.key["compile"]) | {"machine": machine.machine_block()}
    store.update_manifest(started=started, ended=None, **described)
    decoder = Decoder(
        models=models, compute=compute, session=session, repeat_disturbed=repeat_disturbed
    )
    try:
        emit(Started(len(plan.tasks) - to_do.total(), to_do))
        for note in decoder.warm_up(batches):
            store.update_manifest()
            emit(note)
        collect_garbage()
        for batch in batches:
            signals.check()
            for result in decoder.decode(
                batch, [task for task in batch if not store.is_done(task)]
            ):
                emit(ImageDone(result.task, store.append(*result)))
        session["complete"] = True
    finally:
        session |= {"ended": stamp(), "gpus_at_end": machine.gpu_blocks()}
        store.update_manifest(ended=session["ended"])
    failed: int = session["failed"]
    return failed


def open_session(store: RunStore, **entries: Any) -> dict[str, Any]:
    """Add the session of a process that begins to decode to the manifest; what is returned is part of it."""
    sessions = store.manifest.get("sessions", [])
    process = 1 + max((session.get("process", 0) for session in sessions), default=-1)
    session: dict[str, Any] = {
        "started": stamp(),
        "ended": None,
        "complete": False,
        "images": 0,
        "failed": 0,
    }
    session |= {
        "first_seconds": 0.0,
        "again_seconds": 0.0,
        "process": process,
        "prepare_seconds": 0.0,
        "warm_up": [],
    }
    session |= entries
    store.update_manifest(sessions=[*sessions, session])
    return session


def key_fields(
    models: Mapping[str, LoadedModel],
    settings: Settings,
    compute: Compute,
    cells: Iterable[Cell] = (),
) -> dict[str, Any]:
    """Return the fields of the record key that hold for the whole run, such as hashes of weights."""
    parts = {
        f"{name}/{part}": digest
        for name, model in models.items()
        for part, digest in model.weights.items()
    }
    if settings.neighbour_space is not None:
        parts |= {f"{name}/neighbours": settings.neighbour_space for name in models}
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine_version": ENGINE_VERSION,
        "torch_version": str(torch.__version__),
        "dtype": compute.dtype_name,
        "device_type": compute.device.type,
        "compile": any(model.engine.compile for model in models.values()),
        "weights": parts,
    }
    decodings = [cell.decoding for cell in cells]
    rules = {decoding.rule for decoding in decodings} & OUTSIDE_RULES.keys()
    draftings = {decoding.drafting for decoding in decodings} & OUTSIDE_DRAFTINGS.keys()
    outside = {
        "rules": {name: OUTSIDE_RULES[name].fingerprint() for name in sorted(rules)},
        "draftings": {name: OUTSIDE_DRAFTINGS[name].fingerprint() for name in sorted(draftings)},
    }
    return fields | {name: codes for name, codes in outside.items() if codes}
