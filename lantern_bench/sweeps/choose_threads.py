"""Choose the number of threads that decodes fastest."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lantern_bench.utils.files import write_atomically
from lantern_bench.utils.progress import Note

if TYPE_CHECKING:
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.models.loaded_model import LoadedModel
from collections.abc import Mapping, Sequence

import torch

from lantern_bench.config.plan import ImageTask, Plan
from lantern_bench.decoding.loop import decode
from lantern_bench.devices.threads import DISTURBED, calibrate, set_threads
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.storage.run_store import RunStore
from lantern_bench.utils.progress import Emit

_TOKENS = 12  # tokens of an image that are decoded at a time


def set_fastest_threads(
    model: LoadedModel, prompt: str, decodings: Iterable[Decoding], emit: Callable[[Note], object]
) -> None:
    """Time numbers of threads, or the number that was chosen before, on steps of these decodings; not on a GPU."""
    if model.target.device.type != "cpu":
        return
    # The first that drafts and the first that does not: drafts gain more from threads.
    kinds: dict[bool, Decoding] = {}
    for decoding in decodings:
        kinds.setdefault(decoding.drafts, decoding)
    with torch.inference_mode():
        condition = model.condition([prompt])
    most = torch.get_num_threads()
    timed = " and ".join("drafting" if drafts else "autoregressive" for drafts in sorted(kinds))
    file = model.engine.folder and model.engine.folder / "threads.json"
    key = f"{timed}, at most {most}"
    choices: dict[str, Any] = {}
    if file is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or it is damaged
            choices = dict(json.loads(file.read_bytes()))
    recorded = choices.get(key)
    if not (isinstance(recorded, int) and 1 <= recorded <= most):
        recorded = None

    def steps() -> None:  # not single products: their threads would sleep between
        for decoding in kinds.values():
            generator = torch.Generator(model.target.device).manual_seed(0)
            decode(
                model=model,
                condition=condition,
                decoding=decoding,
                generators=[generator],
                tokens=_TOKENS,
                engine=model.engine,
            )

    calibrated = calibrate(steps, recorded)
    # What was chosen on a busy machine does not count for the next run.
    if file is not None and recorded is None and calibrated.lost_share <= DISTURBED:
        with contextlib.suppress(OSError):  # the next run times threads again
            write_atomically(
                file, json.dumps(choices | {key: calibrated.threads}, indent=1).encode() + b"\n"
            )
    set_threads(calibrated.threads)
    for note in calibrated.notes():
        emit(note)


def calibrate_threads(
    store: RunStore, plan: Plan, models: Mapping[str, LoadedModel], threads: int | None, emit: Emit
) -> None:
    """Set the threads to those of the run's finished images, else `threads`, else the fastest number."""
    set_threads(chosen := store.threads or threads)
    if chosen is None:
        try_threads([task for task in plan.tasks if not store.is_done(task)], models, emit)


def try_threads(tasks: Sequence[ImageTask], models: Mapping[str, LoadedModel], emit: Emit) -> None:
    """Try several numbers of threads on these images and set the fastest, where the CPU decodes."""
    if tasks:
        name = tasks[0].cell.model
        decodings = (task.cell.decoding for task in tasks if task.cell.model == name)
        # the images fail the same way and record it
        with contextlib.suppress(RuntimeError, MemoryError):
            set_fastest_threads(
                model=models[name], prompt=tasks[0].prompt.text, decodings=decodings, emit=emit
            )
