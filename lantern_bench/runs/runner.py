"""The runner: decode every missing image of a plan, write its record and its picture, continue when one fails.

`run_plan` yields events and prints nothing. Images are made in the order of the plan. The decode loop
is timed; text encoding, pixels, PNG files and records are not. Warm-up images are decoded first, one batch for every
kind of cell, and only the manifest records them. Scores and tables come afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from lantern_bench import stopping
from lantern_bench.clock import now, peak_memory_bytes, reset_peak_memory, settle_garbage, stamp, synchronize
from lantern_bench.config.plan import Plan, Unit
from lantern_bench.decoding.loop import Decoded, decode, drafter_and_table
from lantern_bench.decoding.step import sampling_key
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.runs.devices import Place
from lantern_bench.runs.keys import check_same_threads
from lantern_bench.runs.machine import device_columns, gpu_blocks, machine_block
from lantern_bench.runs.store import RunStore
from lantern_bench.runs.threads import DISTURBED, Calibrated, fastest_threads, set_threads

# ---- Events: what a sweep reports while it runs, in this order


class Loaded(NamedTuple):
    """The models are loaded; `compile_problem` says why steps are not compiled although this was asked for."""

    place: Place
    compile_problem: str | None = None


class EncodedCaptions(NamedTuple):
    """A model's text encoder has encoded `done` of `total` captions."""

    model: str
    done: int
    total: int


class Started(NamedTuple):
    """Decoding starts: images kept from before, and those to make, by cell id."""

    kept: int
    to_do: Mapping[str, int]


class WarmedUp(NamedTuple):
    """A kind of cell has been decoded once, untimed, and compiled if asked for; seconds are None when it failed."""

    cell_id: str
    seconds: float | None
    compiled: bool = False


class ImageDone(NamedTuple):
    """An image has its record, with status `ok` or `failed`."""

    unit: Unit
    record: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the image could not be made."""
        return bool(self.record["status"] != "ok")


class Scored(NamedTuple):
    """The scorers have scored `done` of `total` cells."""

    done: int
    total: int


class Interrupted(NamedTuple):
    """The run was interrupted with `done` of `total` images finished; the same command resumes it."""

    done: int
    total: int


class WorkerJoined(NamedTuple):
    """A worker of a cluster begins to make images: its process, its device, and how many kinds of device there are."""

    process: int
    device: str
    kinds: int


class WorkerLost(NamedTuple):
    """A worker of a cluster is gone; its `prompts` are decoded again by another. `process` is None before its start."""

    process: int | None
    device: str
    reason: str
    prompts: int


Event: TypeAlias = (
    Loaded
    | EncodedCaptions
    | Calibrated
    | Started
    | WarmedUp
    | ImageDone
    | Scored
    | Interrupted
    | WorkerJoined
    | WorkerLost
)

# ---- Running a plan

# A disturbed image is decoded up to so often, and all repetitions may add this share to the time of a session.
_ATTEMPTS, _AGAIN = 3, 0.25


class Made(NamedTuple):
    """One image: tokens int32 [N], trace, pixels uint8 [H, W, 3], guided logits [N, V] if they were asked for."""

    tokens: Tensor
    trace: ImageTrace
    pixels: Tensor
    pixel_seconds: float
    peak_memory: int | None
    logits: Tensor | None = None


def prepare_models(
    plan: Plan, models: Mapping[str, LoadedModel], done: Collection[tuple[str, str, int]], tell: Callable[[Event], None]
) -> float:
    """Make what the images of `plan` that are not `done` need: neighbour tables, encoded captions.

    Return the seconds it took. `done` holds (cell id, prompt id, repeat).

    Raises `RefusedError` for a missing drafter, text encoder or codebook and for a damaged table or feature, and
    `UserError` for files that are malformed or ask for what their model lacks.
    """
    began = now()
    missing = [unit for group in plan.batches() if any(_place(one) not in done for one in group) for unit in group]
    for cell in dict.fromkeys(unit.cell for unit in missing):
        if cell.decoding.drafts:
            with torch.inference_mode():
                drafter_and_table(models[cell.model], cell.decoding)
    for name, model in models.items():
        prompts = dict.fromkeys(unit.prompt.text for unit in missing if unit.cell.model == name)
        for count, total in model.prepare(list(prompts)):
            tell(EncodedCaptions(name, count, total))
    return now() - began


def _place(unit: Unit) -> tuple[str, str, int]:
    return unit.cell.cell_id, unit.prompt.id, unit.repeat


def calibrate_threads(
    store: RunStore, plan: Plan, models: Mapping[str, LoadedModel], asked: int | None, tell: Callable[[Event], None]
) -> None:
    """Set the number of threads: that of the run's finished images, else the one asked for, else the fastest.

    Raises `RefusedError` when another number is asked for than finished images were made with.
    """
    set_threads(known := known_threads(store, asked))
    waiting = [unit for unit in plan.units if not store.is_done(unit)]
    if known is None and (found := fastest_for(waiting, models)) is not None:
        set_threads(found.threads)
        tell(found)


def known_threads(store: RunStore, asked: int | None) -> int | None:
    """Return the threads of the run's finished images, else those asked for; raises as `calibrate_threads`."""
    finished = store.finished
    recorded = store.manifest.get("threads") if finished else None
    check_same_threads(store.folder.name, recorded, asked, finished)
    return recorded or asked


def fastest_for(waiting: Sequence[Unit], models: Mapping[str, LoadedModel]) -> Calibrated | None:
    """Try several numbers of threads on these images; None where the CPU does not decode, or where decoding fails."""
    if not waiting:
        return None
    name = waiting[0].cell.model
    decodings = (unit.cell.decoding for unit in waiting if unit.cell.model == name)
    try:
        return fastest_threads(models[name], waiting[0].prompt.text, decodings)
    except (RuntimeError, MemoryError):
        return None  # the images fail the same way and record it


def run_plan(
    store: RunStore,
    plan: Plan,
    models: Mapping[str, LoadedModel],
    place: Place,
    prepare_seconds: float = 0.0,
    again: bool = False,
) -> Iterator[Event]:
    """Make the images of `plan` that `store` lacks; yield `Started`, then `WarmedUp`, then `ImageDone` events.

    `prepare_seconds`, the time of `prepare_models`, goes into the manifest. With `again`, disturbed batches are decoded
    again, within bounds (`_ATTEMPTS`, `_AGAIN`). An image that raises gets a record with status `failed` and the run
    continues. An interrupted run keeps everything up to the last image.
    """
    groups = [group for group in plan.batches() if not all(map(store.is_done, group))]
    waiting = Counter(unit.cell.cell_id for unit in plan.units if not store.is_done(unit))
    session = _start_session(store, models, place, prepare_seconds)
    decoder = Decoder(models, place, session, again)
    try:
        yield Started(len(plan.units) - waiting.total(), waiting)
        for warmed in decoder.warm_up(groups):
            store.update_manifest()
            yield warmed
        settle_garbage()
        for group in groups:
            stopping.check()
            for image in decoder.decode(group, [unit for unit in group if not store.is_done(unit)]):
                yield store_image(store, image)
        session["complete"] = True
    finally:
        session |= {"ended": stamp(), "gpus_at_end": gpu_blocks()}
        store.update_manifest(ended=session["ended"])


class DecodedUnit(NamedTuple):
    """An image that no store has yet: its unit, what its record adds to the unit, its PNG file (None: it failed)."""

    unit: Unit
    record: Mapping[str, Any]
    png: bytes | None


def store_image(store: RunStore, image: DecodedUnit) -> ImageDone:
    """Write the picture and the record of an image."""
    with stopping.held():
        # The picture is written first, so that every record has its picture.
        picture = {} if image.png is None else {"image": store.write_image(image.unit, image.png)}
        return ImageDone(image.unit, store.append(image.unit, {**image.record, **picture}))


def new_session(process: int, prepare_seconds: float = 0.0) -> dict[str, Any]:
    """Return the manifest's entry of a process that begins to make images."""
    session: dict[str, Any] = {"started": stamp(), "ended": None, "complete": False, "images": 0, "failed": 0}
    session |= {"first_seconds": 0.0, "again_seconds": 0.0}
    return session | {"process": process, "prepare_seconds": prepare_seconds, "warm_up": []}


class Decoder:
    """Decodes the batches of a run on one device and writes nothing; counts what it does in `session`."""

    def __init__(
        self, models: Mapping[str, LoadedModel], place: Place, session: dict[str, Any], again: bool = False
    ) -> None:
        self.session = session
        self._models, self._place, self._again = models, place, again

    def warm_up(self, groups: Iterable[tuple[Unit, ...]]) -> Iterator[WarmedUp]:
        """Compile and decode once, untimed, what these batches run."""
        kinds = kinds_of(groups)
        for group in kinds:
            stopping.check()
            _make_programs(self._models[group[0].cell.model], group, self._place)
        for group in kinds:
            yield _warm_up(self.session, self._models[group[0].cell.model], group, self._place)

    def decode(self, group: tuple[Unit, ...], waiting: Sequence[Unit]) -> Iterator[DecodedUnit]:
        """Decode a batch and yield its images `waiting`; the whole batch is decoded: the arithmetic stays the same."""
        session, place, model = self.session, self._place, self._models[group[0].cell.model]
        try:
            with stopping.held():
                attempts = _attempts(session, model, group, place, self._again)
        except (RuntimeError, MemoryError) as error:
            if place.device.type == "cuda":
                torch.cuda.empty_cache()
            for unit in waiting:
                session["failed"] += 1
                failed = {"status": "failed", "error": _one_line(error), "process": session["process"]}
                yield DecodedUnit(unit, failed, None)
            return
        kept = min(attempts, key=lambda images: _lost_share(images[0].trace, len(group)))
        made = dict(zip(group, kept, strict=True))
        how = {"process": session["process"], "attempts": len(attempts), **device_columns(place.device)}
        for unit in waiting:
            png = png_bytes(made[unit].pixels)
            session["images"] += 1
            digest = {"image_sha256": hashlib.sha256(png).hexdigest()}
            yield DecodedUnit(unit, _record(made[unit], len(group)) | digest | how, png)


def kinds_of(groups: Iterable[tuple[Unit, ...]]) -> list[tuple[Unit, ...]]:
    """Return one batch for every kind of cell: cells that differ only in a bound run the same programs."""
    kinds: dict[Any, tuple[Unit, ...]] = {}
    for group in groups:
        cell = group[0].cell
        kinds.setdefault((cell.model, sampling_key(cell.decoding), len(group)), group)
    return list(kinds.values())


def make_images(
    model: LoadedModel, units: Sequence[Unit], place: Place, *, tokens: int | None = None, keep_logits: bool = False
) -> list[Made]:
    """Decode units of one cell as one batch, then their pixels; writes nothing.

    `tokens` ends the images early; they then have no pixels.
    """
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
        pixels = zip(decoded, model.pixels.pixels(stacked), strict=True)
        synchronize(place.device)
        seconds = (now() - began) / len(units)
    return [Made(one.tokens, one.trace, picture, seconds, peak, one.logits) for one, picture in pixels]


def png_bytes(pixels: Tensor) -> bytes:
    """Pixels uint8 [H, W, 3] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def _start_session(
    store: RunStore, models: Mapping[str, LoadedModel], place: Place, prepare_seconds: float
) -> dict[str, Any]:
    """Add a session to the manifest; the returned dictionary is part of it."""
    session = new_session(store.next_process(), prepare_seconds)
    sessions = [*store.manifest.get("sessions", []), session]
    facts = {"started": store.manifest.get("started", session["started"]), "ended": None}
    where = place_facts(place, any(model.engine.compile for model in models.values()))
    store.update_manifest(**facts, **where, machine=machine_block(), sessions=sessions)
    return session


def place_facts(place: Place, compiled: bool) -> dict[str, Any]:
    """Return what the manifest says of how this process decodes."""
    device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else place.device.type
    return {"device": device, "dtype": place.dtype_name, "threads": torch.get_num_threads(), "compile": compiled}


def _make_programs(model: LoadedModel, group: tuple[Unit, ...], place: Place) -> None:
    """Compile what a batch runs; the C++ compiler goes on beside the next batch, and the warm-up waits for it."""
    # The warm-up meets the same error and reports it.
    with model.engine.compiling() as possible, contextlib.suppress(RuntimeError, MemoryError):
        if possible:
            make_images(model, group, place, tokens=2)


def _warm_up(session: dict[str, Any], model: LoadedModel, group: tuple[Unit, ...], place: Place) -> WarmedUp:
    # Steps are compiled here, never in a timed window: the warm-up is a quarter of an image, of the same shapes.
    # Without compiling, a few steps load the code and touch the caches.
    part = 4 if model.engine.compile else 16
    cell_id, count = group[0].cell.cell_id, max(1, model.target.image_tokens // part)
    row: dict[str, Any] = {"cell_id": cell_id, "batch": len(group), "tokens": count, "seconds": None}
    try:
        row["seconds"] = sum(made.trace.seconds for made in make_images(model, group, place, tokens=count))
    except (RuntimeError, MemoryError) as error:
        # The images of the cell fail the same way and record it.
        row["error"] = _one_line(error)
    session["warm_up"].append(row)
    return WarmedUp(cell_id, row["seconds"], model.engine.compile)


def _attempts(
    session: dict[str, Any], model: LoadedModel, group: tuple[Unit, ...], place: Place, again: bool
) -> list[list[Made]]:
    """Decode a batch until an attempt is undisturbed, within the bounds on attempts and on their time."""
    attempts: list[list[Made]] = []
    while not attempts or (
        again
        and len(attempts) < _ATTEMPTS
        and _lost_share(attempts[-1][0].trace, len(group)) > DISTURBED
        and session["again_seconds"] <= _AGAIN * session["first_seconds"]
    ):
        images = make_images(model, group, place)
        if attempts and any(not torch.equal(a.tokens, b.tokens) for a, b in zip(attempts[0], images, strict=True)):
            if place.device.type == "cpu":
                raise RuntimeError("decoding a disturbed image again gave other tokens")
            break  # uncompiled steps of a GPU may round differently; the first attempt counts
        session["again_seconds" if attempts else "first_seconds"] += sum(made.trace.seconds for made in images)
        attempts.append(images)
    return attempts


def _record(made: Made, images: int) -> dict[str, Any]:
    trace, phases = made.trace, made.trace.phases
    known = {"draft", "target", "verify", "prefill"}
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
        **_usage(trace, images),
        "peak_memory_bytes": made.peak_memory,
        "moved_mass": trace.neighbour_mass,
        "moved_mass_tried": trace.neighbour_mass_tried,
        "tokens_sha256": hashlib.sha256(made.tokens.cpu().numpy().astype("<i4").tobytes()).hexdigest(),
    }


def _usage(trace: ImageTrace, images: int) -> dict[str, Any]:
    """The columns of an image of a batch that tell whether its threads got the processor."""
    if trace.usage is None:
        return {}
    shared = {name: value and value / images for name, value in trace.usage._asdict().items()}
    row = {name: shared[name] for name in ("cpu_seconds", "waited_seconds", "steal_seconds")}
    row |= {"involuntary_switches": trace.usage.involuntary_switches}
    return row | {"disturbed": _lost_share(trace, images) > DISTURBED}


def _lost_share(trace: ImageTrace, images: int) -> float:
    """By what share of its seconds a batch may have been held up."""
    seconds = trace.seconds * images
    return trace.usage.lost_seconds(seconds, torch.get_num_threads()) / seconds if trace.usage and seconds else 0.0


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
