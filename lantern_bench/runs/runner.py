"""Doing a plan: decode every image that is not done, keep its record and its picture, go on when one fails.

`run_plan` yields events and draws nothing. The order is the plan's; the timed window is the decode loop's own, so that
text, pixels, PNG files and records are outside it. Warm-up images are decoded first, once for every kind of cell, and
are recorded in the manifest and nowhere else. Scoring and tables come afterwards and elsewhere.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lantern_bench.clock import now, peak_memory_bytes, reset_peak_memory, settle_garbage, stamp, synchronize
from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import Plan, Unit
from lantern_bench.decoding.loop import Decoded, decode, drafter_and_table
from lantern_bench.decoding.step import sampling_key
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.runs.devices import Place
from lantern_bench.runs.machine import gpu_blocks, machine_block
from lantern_bench.runs.store import RunStore, done_images

# ---- Whether loaded models can do a plan: drafter, tables of nearest codes, features of captions, all at hand befo


@dataclass(frozen=True)
class Preparing:
    """A model's text encoder is at work: captions encoded, and how many there are to encode."""

    model: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """Nothing is missing; all of it took so many seconds."""

    seconds: float


Readying: TypeAlias = Preparing | Ready


def get_ready(plan: Plan, models: Mapping[str, LoadedModel], folder: Path) -> Iterator[Readying]:
    """Make what the images of `plan` that `folder` lacks will need, and free what only making it needed.

    Raises `RefusedError` for a missing drafter, text encoder or codebook and for a damaged table or feature, and
    `UserError` for files that are malformed or ask for what their model has not.
    """
    began = now()
    done = done_images(folder)
    groups = [
        group for group in plan.batches() if any((u.cell.cell_id, u.prompt.id, u.repeat) not in done for u in group)
    ]
    for cell in dict.fromkeys(group[0].cell for group in groups):
        if cell.decoding.drafting != "none":
            with torch.inference_mode():
                drafter_and_table(models[cell.model], cell.decoding)
    for name, model in models.items():
        prompts = [unit.prompt.text for group in groups for unit in group if unit.cell.model == name]
        for count, total in model.prepare(list(dict.fromkeys(prompts))):
            yield Preparing(name, count, total)
    yield Ready(now() - began)


# ----

# The course of a warm-up is that of an image, only shorter.
_WARM_UP_SHARE = 4


@dataclass(frozen=True)
class Started:
    """The work is known: images kept from before, and those to make, by cell id."""

    kept: int
    to_do: Mapping[str, int]


@dataclass(frozen=True)
class WarmedUp:
    """A kind of cell has been decoded once, and compiled where that was asked for, in so many seconds."""

    cell_id: str
    seconds: float | None


@dataclass(frozen=True)
class ImageDone:
    """An image has its record, good or failed."""

    unit: Unit
    record: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the image could not be made."""
        return bool(self.record["status"] != "ok")


Event: TypeAlias = Started | WarmedUp | ImageDone


@dataclass(frozen=True)
class Made:
    """One image: tokens int32 [N], its course, pixels uint8 [H, W, 3], guided logits [N, V] where they were kept."""

    tokens: Tensor
    trace: ImageTrace
    pixels: Tensor
    pixel_seconds: float
    peak_memory: int | None
    logits: Tensor | None = None


def run_plan(
    store: RunStore, plan: Plan, models: Mapping[str, LoadedModel], place: Place, prepare_seconds: float = 0.0
) -> Iterator[Event]:
    """Make the images of `plan` that `store` lacks; yields what happens, in the order of the events' definitions.

    `prepare_seconds`, what `readiness` took, stands in the manifest by itself.
    An image that raises gets a failed record and the run goes on. What is interrupted is kept up to the last image.
    """
    groups = [group for group in plan.batches() if not all(store.is_done(unit) for unit in group)]
    waiting = Counter(unit.cell.cell_id for group in groups for unit in group if not store.is_done(unit))
    session = _begin(store, models, place, prepare_seconds)
    try:
        yield Started(len(plan.units) - waiting.total(), waiting)
        for cell, group in _kinds(groups).values():
            yield _warm_up(store, session, models[cell.model], group, place)
        settle_garbage()
        for group in groups:
            yield from _do(store, session, models[group[0].cell.model], group, place)
        session["complete"] = True
    finally:
        session |= {"ended": stamp(), "gpus_at_end": gpu_blocks()}
        store.update_manifest(ended=session["ended"])


def make_images(
    model: LoadedModel, units: Sequence[Unit], place: Place, *, tokens: int | None = None, keep_logits: bool = False
) -> list[Made]:
    """Decode units of one cell together, then their pixels; nothing is written. `tokens` ends the images early."""
    decoding = units[0].cell.decoding
    generators = [torch.Generator(place.device).manual_seed(unit.seed) for unit in units]
    with torch.inference_mode():
        condition = model.condition([unit.prompt.text for unit in units])
        reset_peak_memory(place.device)
        decoded: list[Decoded] = decode(
            model, condition, decoding, generators, tokens=tokens, keep_logits=keep_logits, engine=model.engine
        )
        peak = peak_memory_bytes(place.device)
        if tokens is not None:
            return [Made(one.tokens, one.trace, torch.empty(0), 0.0, peak, one.logits) for one in decoded]
        stacked = torch.stack([one.tokens for one in decoded]).to(place.device)
        synchronize(place.device)
        began = now()
        pixels = model.pixels.pixels(stacked)
        synchronize(place.device)
        seconds = (now() - began) / len(units)
    pairs = zip(decoded, pixels, strict=True)
    return [Made(one.tokens, one.trace, picture, seconds, peak, one.logits) for one, picture in pairs]


def png_bytes(pixels: Tensor) -> bytes:
    """A picture uint8 [H, W, 3] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def _begin(store: RunStore, models: Mapping[str, LoadedModel], place: Place, prepare_seconds: float) -> dict[str, Any]:
    """Note this sitting in the manifest; the dictionary that is returned is part of it."""
    session: dict[str, Any] = {"started": stamp(), "ended": None, "complete": False, "images": 0, "failed": 0}
    session |= {"prepare_seconds": prepare_seconds, "warm_up": []}
    sessions = [*store.manifest.get("sessions", []), session]
    device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else place.device.type
    facts = {"started": store.manifest.get("started", session["started"]), "ended": None}
    where = {"device": device, "dtype": place.dtype_name, "threads": torch.get_num_threads()}
    where["compile"] = any(model.engine.compile for model in models.values())
    store.update_manifest(**facts, **where, machine=machine_block(), sessions=sessions)
    return session


def _kinds(groups: Sequence[tuple[Unit, ...]]) -> dict[tuple[Any, ...], tuple[Cell, tuple[Unit, ...]]]:
    """One batch for every kind of cell there is to do: what differs only in a bound runs the same programs."""
    found: dict[tuple[Any, ...], tuple[Cell, tuple[Unit, ...]]] = {}
    for group in groups:
        cell = group[0].cell
        found.setdefault((cell.model, sampling_key(cell.decoding), len(group)), (cell, group))
    return found


def _warm_up(
    store: RunStore, session: dict[str, Any], model: LoadedModel, group: tuple[Unit, ...], place: Place
) -> WarmedUp:
    # Compiling happens here and never in a timed window: these are the shapes of the images, and the programs.
    cell_id, count = group[0].cell.cell_id, max(1, model.target.image_tokens // _WARM_UP_SHARE)
    row: dict[str, Any] = {"cell_id": cell_id, "batch": len(group), "tokens": count, "seconds": None}
    try:
        row["seconds"] = sum(made.trace.seconds for made in make_images(model, group, place, tokens=count))
    except (RuntimeError, MemoryError) as error:
        # What fails here fails again in the images of the cell, and is recorded there.
        row["error"] = _text(error)
    session["warm_up"].append(row)
    store.update_manifest()
    return WarmedUp(cell_id, row["seconds"])


def _do(
    store: RunStore, session: dict[str, Any], model: LoadedModel, group: tuple[Unit, ...], place: Place
) -> Iterator[ImageDone]:
    """Decode a batch and record those of its images that are not done; the batch stays whole for equal arithmetic."""
    waiting = [unit for unit in group if not store.is_done(unit)]
    try:
        made = dict(zip(group, make_images(model, group, place), strict=True))
    except (RuntimeError, MemoryError) as error:
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
        for unit in waiting:
            session["failed"] += 1
            yield ImageDone(unit, store.append(unit, {"status": "failed", "error": _text(error)}))
        return
    for unit in waiting:
        png = png_bytes(made[unit].pixels)
        # The picture first: a record that is there has its picture.
        image = store.write_image(unit, png)
        record = _record(made[unit]) | {"image": image, "image_sha256": hashlib.sha256(png).hexdigest()}
        row = store.append(unit, record)
        session["images"] += 1
        yield ImageDone(unit, row)


def _record(made: Made) -> dict[str, Any]:
    trace, phases = made.trace, made.trace.phases
    known = {"draft", "target", "verify", "prefill"}
    numbers = made.tokens.cpu().numpy().astype(np.dtype("<i4"))
    return {
        "tokens": trace.tokens,
        "target_forwards": trace.target_forwards,
        "drafter_forwards": trace.drafter_forwards,
        "start_per_step": trace.start,
        "committed_per_step": trace.committed,
        "accepted_per_step": trace.accepted,
        "offered_depth_per_step": trace.offered_depth,
        "child_rank_per_step": trace.child_rank,
        "mean_accepted_length": trace.mean_accepted_length,
        "mal_uncut": trace.mal_uncut,
        "step_compression": trace.step_compression,
        "seconds": trace.seconds,
        "draft_seconds": phases.get("draft", 0.0),
        "target_seconds": phases.get("target", 0.0) + phases.get("prefill", 0.0),
        "verify_seconds": phases.get("verify", 0.0),
        "other_seconds": max(0.0, trace.seconds - sum(phases[name] for name in known & phases.keys())),
        "pixel_seconds": made.pixel_seconds,
        "peak_memory_bytes": made.peak_memory,
        "moved_mass": trace.moved_mass,
        "moved_mass_tried": trace.moved_mass_tried,
        "tokens_sha256": hashlib.sha256(numbers.tobytes()).hexdigest(),
    }


def _text(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
