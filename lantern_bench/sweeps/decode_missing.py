"""Decode the missing images of a run in this process. Workers on Ray use parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import psutil
import torch

from lantern_bench.config.experiment import Cell
from lantern_bench.config.settings import Settings
from lantern_bench.decoding.engine import ENGINE_VERSION
from lantern_bench.devices import machine
from lantern_bench.devices.compute import Compute
from lantern_bench.methods.catalog import OUTSIDE_DRAFTINGS, OUTSIDE_RULES
from lantern_bench.models.checkpoints.hub import published_files
from lantern_bench.models.load import compile_models, load_uncompiled
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from lantern_bench.storage.run_directory import MAPS_OF_CODES, done_images
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import SCHEMA_VERSION
from lantern_bench.sweeps.choose_threads import choose_threads_for, timed_tasks
from lantern_bench.sweeps.decoder import Batch, Decoder, prepare_models
from lantern_bench.sweeps.events import ImageDone, Started
from lantern_bench.sweeps.request import Request
from lantern_bench.sweeps.second_compiler import SecondCompiler
from lantern_bench.utils import signals
from lantern_bench.utils.clock import collect_garbage, stamp
from lantern_bench.utils.progress import Emit


def decode_missing(request: Request, emit: Emit) -> None:
    """Decode every missing image and write its record and picture. Continue after a failed image.

    Args:
        request: The sweep.
        emit: Receives the events of `sweeps/events.py`.

    Raises:
        RefusedError: Weights are missing, the run is in use, or its images were decoded with
            other settings.
    """
    load_before = round(psutil.getloadavg()[0], 2)
    settings = request.experiment.settings
    plan = request.plan
    compute, models = load_uncompiled(request.experiment, emit)
    done = done_images(request.folder)
    batches = [batch for batch in plan.batches() if not all(task.key in done for task in batch)]
    # Captions that cannot be encoded are refused before the run directory is made.
    prepare_seconds = prepare_models(batches, models, emit)
    threads_before = torch.get_num_threads()
    with SecondCompiler(request, models, compute) as second:
        # A run that is resumed keeps its number of threads.
        if settings.threads is None and not done:
            second.compile_timed(timed_tasks(list(chain.from_iterable(batches))))
        if settings.compile:
            warning = compile_models(models.values(), compute)
            if warning is not None:
                second.give_up()
                emit(warning)
        key = key_fields(models, settings, compute, cells=plan.cells)

        with RunStore.open(request.folder, request.experiment, key) as store:
            missing = store.missing(plan.tasks)
            try:
                threads = store.threads or settings.threads
                if threads is not None:
                    torch.set_num_threads(threads)
                else:
                    choose_threads_for(missing, models, emit)
                begin_run(
                    store,
                    request,
                    machine=machine.machine_block(),
                    load_before=load_before,
                    published_files=_published(key["weights"]),
                    **machine.compute_block(compute, compiled=key["compile"]),
                )
                emit(Started.of(plan, missing))
                session = store.begin_session(prepare_seconds=prepare_seconds)
                decoder = Decoder(models, compute, session, settings.redecodes)
                _decode_batches(store, batches, decoder=decoder, second=second, emit=emit)
            finally:
                torch.set_num_threads(threads_before)


def maps_entry(models: Sequence[str]) -> dict[str, list[str]]:
    """Return the entry of a manifest for models whose pictures are maps of codes, if any."""
    maps = [name for name in models if model_of(name).draws_maps]
    return {MAPS_OF_CODES: maps} if maps else {}


def begin_run(store: RunStore, request: Request, **entries: Any) -> None:
    """Write the entries of the request, and further `entries`, into the manifest."""
    commands = [*store.manifest.get("commands", []), request.command or "Python"]
    store.update_manifest(
        started=store.manifest.get("started", stamp()),
        ended=None,
        commands=list(dict.fromkeys(commands)),
        prompts=request.prompts,
        shard=request.shard,
        engine="local" if request.ray is None else "ray",
        **maps_entry(request.experiment.settings.model),
        **entries,
    )


def _decode_batches(
    store: RunStore,
    batches: Sequence[Batch],
    *,
    decoder: Decoder,
    second: SecondCompiler,
    emit: Emit,
) -> None:
    """Warm up, then decode the missing images. The session in the manifest records the end."""
    session = decoder.session
    try:
        second.compile_steps(batches, torch.get_num_threads())
        for note in decoder.warm_up(batches):
            store.update_manifest()
            emit(note)
        second.end()
        collect_garbage()
        for batch in batches:
            signals.check()
            for result in decoder.decode(batch, store.missing(batch)):
                emit(ImageDone(result.task, record=store.append(*result)))
        session["complete"] = True
    finally:
        session |= {"ended": stamp(), "gpus_at_end": machine.gpu_blocks()}
        store.update_manifest(ended=session["ended"])


def _published(weights: Mapping[str, str]) -> dict[str, str]:
    """Return the published files among weights by hash, by `model/part`."""
    known = published_files()
    return {part: known[digest] for part, digest in weights.items() if digest in known}


def key_fields(
    models: Mapping[str, LoadedModel],
    settings: Settings,
    compute: Compute,
    cells: Iterable[Cell] = (),
) -> dict[str, Any]:
    """Return the fields of the record key that hold for the whole run.

    Args:
        models: The loaded models by name, whose weights are hashed.
        settings: The settings of the experiment.
        compute: The device and dtype.
        cells: The cells; rules and draftings of other packages are covered by hashes of their code.
    """
    weights = {}
    for name, model in models.items():
        for part, digest in model.weights.items():
            weights[f"{name}/{part}"] = digest
        if settings.neighbour_space is not None:
            weights[f"{name}/neighbours"] = settings.neighbour_space
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine_version": ENGINE_VERSION,
        "torch_version": str(torch.__version__),
        "dtype": compute.dtype_name,
        "device_type": compute.device.type,
        "compile": any(model.engine.compile for model in models.values()),
        "weights": weights,
    }
    for cell in cells:
        outside = {
            "rules": OUTSIDE_RULES.get(cell.decoding.rule),
            "draftings": OUTSIDE_DRAFTINGS.get(cell.decoding.drafting),
        }
        for field, row in outside.items():
            if row is not None:
                fields.setdefault(field, {})[row.name] = row.fingerprint()
    return fields
