"""Decode batches of images, with retries, to results that can be stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import ImageTask, record_seed
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.decoding.step import sampling_key
from lantern_bench.devices import machine
from lantern_bench.devices.compute import Compute
from lantern_bench.devices.machine import peak_memory_bytes, reset_peak_memory
from lantern_bench.devices.threads import DISTURBED
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.pictures import label, png_bytes
from lantern_bench.sweeps.events import DecodedImage
from lantern_bench.utils import signals
from lantern_bench.utils.clock import now, synchronize
from lantern_bench.utils.errors import RecordsFailedError
from lantern_bench.utils.progress import Note
from lantern_bench.utils.text import one_line

Batch: TypeAlias = tuple[ImageTask, ...]

_MAX_ATTEMPTS = 3  # how often a disturbed batch is decoded at most
_MAX_REPEAT_SHARE = 0.25  # what repetitions may add to the decoding time of a session


class Result(NamedTuple):
    """What a worker hands to the store: an image that was decoded, or failed."""

    task: ImageTask
    columns: Mapping[str, Any]  # what its record adds to the columns of its task
    png: bytes | None  # the PNG file; None for an image that failed


class Decoder:
    """Decodes the batches of a run on one device and writes nothing; counts what it does in `session`."""

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        compute: Compute,
        session: dict[str, Any],
        repeat_disturbed: bool,
    ) -> None:
        self.session = session
        self._models = models
        self._compute = compute
        self._repeat_disturbed = repeat_disturbed

    def warm_up(self, batches: Iterable[Batch]) -> Iterator[Note]:
        """Decode a part of each kind of batch, outside all records; yield a note about it."""
        kinds: dict[Any, Batch] = {}  # cells that differ only in a tensor bound share programs
        for batch in batches:
            kinds.setdefault(
                (batch[0].cell.model, sampling_key(batch[0].cell.decoding), len(batch)), batch
            )
        for batch in kinds.values():
            signals.check()
            # A quarter of an image compiles all steps; without compiling, a few steps load the code.
            cell = batch[0].cell
            model = self._models[batch[0].cell.model]
            compiled = model.engine.compile
            tokens = max(1, model.target.image_tokens // (4 if compiled else 16))
            row: dict[str, Any] = {
                "cell_id": cell.cell_id,
                "batch": len(batch),
                "tokens": tokens,
                "seconds": None,
            }
            try:
                images = decode_batch(model, batch, self._compute, tokens=tokens)
                row["seconds"] = sum(image.seconds for image in images)
            except (RuntimeError, MemoryError) as error:
                # the images of the cell fail the same way and record it
                row["error"] = one_line(error, most=2000)
            self.session["warm_up"].append(row)
            text = f"{'compiled' if compiled else 'warm-up of'} {cell.cell_id}: {row['seconds'] or 0.0:.1f} s"
            yield Note(text, level="info" if compiled else "detail")

    def decode(self, batch: Batch, missing: Sequence[ImageTask]) -> Iterator[Result]:
        """Decode a whole batch, so that the arithmetic is the same, and yield the results of `missing`."""
        session = self.session
        compute = self._compute
        model = self._models[batch[0].cell.model]
        try:
            with signals.delayed():
                attempts = self._attempts(model, batch)
        except (RuntimeError, MemoryError) as error:
            if compute.device.type == "cuda":
                torch.cuda.empty_cache()
            for task in missing:
                session["failed"] += 1
                columns = {
                    "status": "failed",
                    "error": one_line(error, most=2000),
                    "process": session["process"],
                }
                yield Result(task, columns, None)
            return
        least_disturbed = min(attempts, key=lambda images: images[0].lost_share(len(batch)))
        images = dict(zip(batch, least_disturbed, strict=True))
        common = {
            "process": session["process"],
            "attempts": len(attempts),
            **machine.device_columns(compute.device),
        }
        for task in missing:
            png = images[task].png()
            session["images"] += 1
            digest = {"image_sha256": hashlib.sha256(png).hexdigest()}
            yield Result(task, images[task].columns(len(batch)) | digest | common, png)

    def _attempts(self, model: LoadedModel, batch: Batch) -> list[list[DecodedImage]]:
        """Decode a batch until an attempt is undisturbed, within bounds on their number and time."""
        attempts: list[list[DecodedImage]] = []
        session = self.session
        while not attempts or (
            self._repeat_disturbed
            and len(attempts) < _MAX_ATTEMPTS
            and attempts[-1][0].lost_share(len(batch)) > DISTURBED
            and session["again_seconds"] <= _MAX_REPEAT_SHARE * session["first_seconds"]
        ):
            images = decode_batch(model, batch, self._compute)
            if attempts and any(
                not torch.equal(a.tokens, b.tokens)
                for a, b in zip(attempts[0], images, strict=True)
            ):
                if self._compute.device.type == "cpu":
                    raise RuntimeError("decoding a disturbed image again gave other tokens")
                break  # uncompiled steps of a GPU may round differently; the first attempt counts
            session["again_seconds" if attempts else "first_seconds"] += sum(
                image.seconds for image in images
            )
            attempts.append(images)
        return attempts


def decode_batch(
    model: LoadedModel,
    batch: Sequence[ImageTask],
    compute: Compute,
    *,
    tokens: int | None = None,
    logits: bool = False,
) -> list[DecodedImage]:
    """Decode images of one cell as one batch, then their pixels unless `tokens` ends them early."""
    decoding = batch[0].cell.decoding
    prompts = [task.prompt.text for task in batch]
    generators = [torch.Generator(compute.device).manual_seed(task.seed) for task in batch]
    with torch.inference_mode():
        condition = model.condition(prompts)
        reset_peak_memory(compute.device)
        decoded: list[Decoded] = decode(
            model=model,
            condition=condition,
            decoding=decoding,
            generators=generators,
            tokens=tokens,
            keep_logits=logits,
            engine=model.engine,
        )
        peak = peak_memory_bytes(compute.device)
        seconds = 0.0
        pixels: Sequence[torch.Tensor | None] = [None] * len(decoded)
        if tokens is None:
            stacked = torch.stack([image.tokens for image in decoded]).to(compute.device)
            synchronize(compute.device)
            began = now()
            pixels = list(model.draw(stacked))
            synchronize(compute.device)
            seconds = (now() - began) / len(batch)
    return [
        DecodedImage(
            prompt=prompt,
            tokens=image.tokens,
            trace=image.trace,
            pixels=picture,
            pixel_seconds=seconds,
            peak_memory=peak,
            logits=image.logits,
        )
        for prompt, image, picture in zip(prompts, decoded, pixels, strict=True)
    ]


# ---- Images of a few prompts outside a run, for lantern-bench generate


def tasks_of(
    cells: Sequence[Cell], seed: int, prompts: Sequence[str], images: int
) -> list[ImageTask]:
    """Return the tasks of `images` images of each prompt, cell by cell."""
    slots = [(prompt, repeat) for prompt in map(Prompt, prompts) for repeat in range(images)]
    return [
        ImageTask(
            cell=cell,
            prompt=prompt,
            repeat=repeat,
            seed=record_seed(
                run_seed=seed, prompt_id=prompt.id, repeat=repeat, seed_set=cell.decoding.seed_set
            ),
            image_index=index,
            order_index=index,
        )
        for cell in cells
        for index, (prompt, repeat) in enumerate(slots)
    ]


def decode_tasks(
    model: LoadedModel, compute: Compute, tasks: Sequence[ImageTask], *, logits: bool = False
) -> Iterator[DecodedImage]:
    """Yield the images one by one, without pixels if the model has no tokenizer."""
    tokens = model.target.image_tokens if model.pixels is None else None
    # A quarter of an image runs every program of a step more than once.
    warm_up_tokens = max(16, model.target.image_tokens // 4)
    warm_ups = [
        (task, warm_up_tokens) for task in tasks if task.image_index == 0 and model.engine.compile
    ]
    for number, (task, count) in enumerate([*warm_ups, *((task, tokens) for task in tasks)]):
        try:
            images = decode_batch(model, [task], compute, tokens=count, logits=logits)
        except (RuntimeError, MemoryError) as error:
            raise RecordsFailedError(
                f"{task.cell.cell_id}: {type(error).__name__}: {error}"
            ) from error
        if number >= len(warm_ups):
            yield from images


def picture_png(decoded: Sequence[DecodedImage], cells: Sequence[Cell]) -> bytes:
    """Put all images into one PNG: a column per cell, a row per image, and the names of several cells above."""
    rows = len(decoded) // len(cells)
    pixels = [image.pixels for image in decoded if image.pixels is not None]
    columns = [pixels[start : start + rows] for start in range(0, len(pixels), rows)]
    if len(cells) > 1:
        modes = [cell.decoding.mode for cell in cells]
        names = modes if len(set(modes)) == len(cells) else [cell.cell_id for cell in cells]
        columns = [
            [label(name, column[0]), *column] for name, column in zip(names, columns, strict=True)
        ]
    return png_bytes(torch.cat([torch.cat(column) for column in columns], dim=1))
