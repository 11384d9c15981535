"""Choose the number of threads that decodes fastest."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.devices.threads import DISTURBED, calibrate
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.utils.files import write_atomically
from lantern_bench.utils.progress import Emit

_TOKENS = 12  # tokens of an image that are decoded at a time


def choose_threads(
    model: LoadedModel, prompt: str, decodings: Iterable[Decoding], emit: Emit
) -> None:
    """Time steps on several numbers of threads and set the fastest; does nothing on a GPU.

    The choice is stored with the compiled programs of the model, and read again by later runs.

    Args:
        model: The model that decodes.
        prompt: The prompt of the timed image.
        decodings: The first one that drafts and the first one that does not are timed.
        emit: Receives a note with the times, and a warning on a busy machine.
    """
    if model.target.device.type != "cpu":
        return
    # Drafts gain more from threads than autoregressive steps.
    kinds: dict[bool, Decoding] = {}
    for decoding in decodings:
        kinds.setdefault(decoding.drafts, decoding)
    # An image that fails to decode fails again in the run, which records the error.
    with contextlib.suppress(RuntimeError, MemoryError):
        _choose(model, prompt, kinds, emit=emit)


def _choose(model: LoadedModel, prompt: str, kinds: dict[bool, Decoding], *, emit: Emit) -> None:
    with torch.inference_mode():
        condition = model.condition([prompt])

    def steps() -> None:  # whole steps: between single products the threads would sleep
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

    most = torch.get_num_threads()
    file = model.engine.folder and model.engine.folder / "threads.json"
    timed = " and ".join("drafting" if drafts else "autoregressive" for drafts in sorted(kinds))
    name = f"{timed}, at most {most}"
    choices = _read_choices(file)
    recorded = choices.get(name)
    if not isinstance(recorded, int) or not 1 <= recorded <= most:
        recorded = None
    calibrated = calibrate(steps, recorded)
    # What was chosen on a busy machine does not count for the next run.
    is_quiet = calibrated.lost_share <= DISTURBED
    if file is not None and recorded is None and is_quiet:
        content = json.dumps(choices | {name: calibrated.threads}, indent=1)
        with contextlib.suppress(OSError):  # the next run times threads again
            write_atomically(file, content.encode() + b"\n")
    torch.set_num_threads(calibrated.threads)
    for note in calibrated.notes():
        emit(note)


def _read_choices(file: Path | None) -> dict[str, Any]:
    """Return the stored choices by what was timed; none for a missing or damaged file."""
    if file is None:
        return {}
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
