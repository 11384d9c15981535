"""Walks in parts of a few images. The sums of a part are kept in a file.

A walk that was interrupted continues at the first part without a file. Where the machine has room,
a second process walks half of the parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import ImageTask
from lantern_bench.devices.compute import choose_compute
from lantern_bench.models.load import load_models
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.shadow_walk import WalkSums, walk_images
from lantern_bench.sweeps.request import Request
from lantern_bench.sweeps.worker_process import has_room_for_second, unheard_process
from lantern_bench.utils import signals
from lantern_bench.utils.files import write_file
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

_TOGETHER = 8  # most images of a part
_PROBABILITIES = 2**22  # most probabilities of a step, images times nodes times vocabulary
_POLL = 0.1  # seconds between two looks at the second process


class Part(NamedTuple):
    """Images that are walked together."""

    walk: Decoding  # the setting that is followed
    settings: Sequence[Decoding]  # the settings that are evaluated
    images: Sequence[ImageTask]
    path: Path  # the file of the sums


def parts_of(
    walk: Decoding,
    settings: Sequence[Decoding],
    images: Sequence[ImageTask],
    *,
    vocab_size: int,
    folder: Path,
    fields: Mapping[str, Any],
) -> list[Part]:
    """Return the parts of a walk.

    Args:
        walk: The setting that is followed.
        settings: The settings to evaluate, all of one group.
        images: The images.
        vocab_size: Of the target. It limits the images of a part.
        folder: Folder of the exploration.
        fields: The facts of `key_fields`, on which the sums depend.
    """
    of_image = (1 + walk.draft_nodes) * vocab_size
    together = min(_TOGETHER, max(1, _PROBABILITIES // of_image))
    parts = []
    for start in range(0, len(images), together):
        chosen = images[start : start + together]
        covered = [
            dict(fields),
            [decoding.settings() for decoding in (walk, *settings)],
            [(task.prompt.text, task.seed) for task in chosen],
        ]
        key = hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()[:16]
        parts.append(Part(walk, settings, chosen, path=folder / "walks" / f"{key}.npz"))
    return parts


def walk_parts(model: LoadedModel, parts: Sequence[Part], emit: Emit) -> None:
    """Walk the parts that have no file yet, and write their files.

    Args:
        model: The model.
        parts: The parts.
        emit: Receives progress.
    """
    total = sum(len(part.images) for part in parts)
    done = 0
    for part in parts:
        name = f"walk of {len(part.settings)} settings along {part.walk.cell_id}"
        report = partial(_report, emit, name, before=done / total, share=len(part.images) / total)
        if not part.path.is_file():
            sums = walk_images(
                model=model,
                walk=part.walk,
                settings=part.settings,
                prompts=[task.prompt.text for task in part.images],
                seeds=[task.seed for task in part.images],
                progress=report,
            )
            content = io.BytesIO()
            np.savez_compressed(content, **sums._asdict())
            part.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(part.path, content.getvalue(), flag="--out")
        report(1.0)
        done += len(part.images)


def _report(emit: Emit, name: str, fraction: float, *, before: float, share: float) -> None:
    """Emit the progress of walks when a fraction of a part, itself a share of them, is done."""
    emit(ProgressEvent(name, before + fraction * share))


def walked(model: LoadedModel, parts: Sequence[Part], emit: Emit) -> WalkSums:
    """Return the sums of a walk.

    Args:
        model: The model.
        parts: The parts. Those that have no file yet are walked, as in `walk_parts`.
        emit: Receives progress.
    """
    walk_parts(model, parts, emit)
    sums = []
    for part in parts:
        with np.load(part.path) as stored:
            sums.append(WalkSums(**stored))
    return WalkSums.joined(sums)


def walk_in_two_processes(
    request: Request, model: LoadedModel, *, parts: Sequence[Part], emit: Emit
) -> None:
    """Walk half of the parts here and half in a second process, if the machine has room for it.

    Without room nothing is walked. A part that the second process fails to walk has no file.

    Args:
        request: Of `explore_request`; the second process loads its models.
        model: The model of the parts.
        parts: The parts.
        emit: Receives the progress of this process.
    """
    missing = [part for part in parts if not part.path.is_file()]
    threads = torch.get_num_threads()
    on_cpu = model.target.device.type == "cpu"
    if len(missing) < 2 or threads < 2 or not on_cpu or not has_room_for_second():
        return
    half = -(-len(missing) // 2)
    work = partial(_walk_second_half, name=model.name, parts=missing[half:], threads=threads // 2)
    torch.set_num_threads(threads - threads // 2)
    try:
        # An error of the second process is met again where its parts are walked here.
        with unheard_process(work, request) as second:
            walk_parts(model, missing[:half], emit)
            while second.poll() is None:
                signals.check()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    second.wait(_POLL)
    finally:
        torch.set_num_threads(threads)


def _walk_second_half(
    request: Request, _emit: Emit, *, name: str, parts: Sequence[Part], threads: int
) -> None:
    """Walk parts, in the second process."""
    settings = request.experiment.settings
    compute = choose_compute(settings.device, settings.dtype, fast=True)
    models = load_models(request.experiment, compute, ignore_events)
    model = next(each for each in models.values() if each.name == name)
    torch.set_num_threads(threads)
    tasks = itertools.chain.from_iterable(part.images for part in parts)
    for _ in model.prepare([task.prompt.text for task in tasks]):
        pass
    walk_parts(model, parts, ignore_events)
