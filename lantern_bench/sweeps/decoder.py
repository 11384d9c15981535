"""Decode batches of images, with retries, into results for the run directory."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from lantern_bench.config.experiment import Cell
from lantern_bench.config.plan import ImageTask, record_seed
from lantern_bench.decoding.engine import BeingCompiledError
from lantern_bench.decoding.loop import Decoded, check_decodable, decode
from lantern_bench.decoding.step import sampling_key
from lantern_bench.devices.compute import Compute
from lantern_bench.devices.machine import device_columns, peak_memory_bytes, reset_peak_memory
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.pictures import label, png_bytes
from lantern_bench.sweeps.decoded_image import DISTURBED, DecodedImage
from lantern_bench.utils import signals
from lantern_bench.utils.clock import now, synchronize
from lantern_bench.utils.errors import RecordsFailedError
from lantern_bench.utils.progress import Emit, Note, ProgressEvent
from lantern_bench.utils.text import one_line

Batch: TypeAlias = tuple[ImageTask, ...]

_ERROR_LENGTH = 2000  # characters of an error that a record or a manifest keeps
_MAX_ATTEMPTS = 3  # of a disturbed batch, the first one included
_MAX_REPEAT_SHARE = 0.25  # seconds of further attempts by seconds of first attempts in a session


def prepare_models(
    batches: Sequence[Batch], models: Mapping[str, LoadedModel], emit: Emit
) -> float:
    """Find the nearest codes and encode the captions that the images of `batches` need.

    Args:
        batches: The images.
        models: The loaded models by name.
        emit: Receives the progress.

    Returns:
        The seconds that this took.
    """
    began = now()
    for cell in dict.fromkeys(batch[0].cell for batch in batches):
        with torch.inference_mode():
            check_decodable(models[cell.model], cell.decoding)
    prompts: dict[str, dict[str, None]] = {name: {} for name in models}
    for batch in batches:
        prompts[batch[0].cell.model] |= dict.fromkeys(task.prompt.text for task in batch)
    for name, model in models.items():
        for count, total in model.prepare(list(prompts[name])):
            emit(ProgressEvent(f"captions for {name}", count, total))
    return now() - began


class Result(NamedTuple):
    """A decoded or failed image, ready to be stored."""

    task: ImageTask
    columns: Mapping[str, Any]  # of its record, beside the columns of its task
    png: bytes | None = None  # the PNG file; None for an image that failed

    @classmethod
    def failed(cls, task: ImageTask, error: str, process: int) -> Self:
        """Return the result of an image that could not be decoded.

        Args:
            task: The image.
            error: The reason.
            process: The process that tried, as in its session.
        """
        return cls(task, {"status": "failed", "error": error, "process": process})


@dataclass
class Decoder:
    """Decodes the batches of a run on one device. It writes no files."""

    models: Mapping[str, LoadedModel]  # by name
    compute: Compute
    session: dict[str, Any]  # of this process in the manifest; counts images and seconds
    repeat_disturbed: bool  # whether disturbed batches are decoded again

    def warm_up(self, batches: Iterable[Batch]) -> Iterator[Note]:
        """Decode a part of each kind of batch without making records. Yield a note for each."""
        # Cells that differ only in a value that is a tensor share programs.
        kinds: dict[Any, Batch] = {}
        for batch in batches:
            cell = batch[0].cell
            kinds.setdefault((cell.model, sampling_key(cell.decoding), len(batch)), batch)
        later = []
        for batch in kinds.values():
            try:
                with self.models[batch[0].cell.model].engine.without_waiting():
                    note = self._warm_up(batch)
            except BeingCompiledError:
                later.append(batch)
            else:
                yield note
        for batch in later:
            yield self._warm_up(batch)

    def _warm_up(self, batch: Batch) -> Note:
        signals.check()
        # A quarter of an image compiles all steps; without compiling, a few steps load code.
        cell = batch[0].cell
        model = self.models[cell.model]
        compiled = model.engine.compile
        tokens = max(1, model.target.image_tokens // (4 if compiled else 16))
        row: dict[str, Any] = {
            "cell_id": cell.cell_id,
            "batch": len(batch),
            "tokens": tokens,
            "seconds": None,
        }
        try:
            images = decode_batch(model, batch, self.compute, tokens=tokens)
            row["seconds"] = sum(image.seconds for image in images)
        except (RuntimeError, MemoryError) as error:
            # The images of the cell fail the same way and record it.
            row["error"] = one_line(error, most=_ERROR_LENGTH)
        self.session["warm_up"].append(row)
        took = f"{cell.cell_id}: {row['seconds'] or 0.0:.1f} s"
        if compiled:
            return Note(f"compiled {took}")
        return Note(f"warm-up of {took}", level="detail")

    def decode(self, batch: Batch, missing: Sequence[ImageTask]) -> Iterator[Result]:
        """Decode a batch and yield the results of its `missing` images.

        The whole batch is decoded even if some of its images are done, because the arithmetic
        depends on the batch.
        """
        model = self.models[batch[0].cell.model]
        try:
            with signals.delayed():
                attempts = self._attempts(model, batch)
        except (RuntimeError, MemoryError) as error:
            if self.compute.device.type == "cuda":
                torch.cuda.empty_cache()
            for task in missing:
                self.session["failed"] += 1
                yield Result.failed(
                    task, one_line(error, most=_ERROR_LENGTH), self.session["process"]
                )
            return
        least_disturbed = min(attempts, key=lambda images: images[0].lost_share(len(batch)))
        images = dict(zip(batch, least_disturbed, strict=True))
        for task in missing:
            image = images[task]
            png = image.png()
            self.session["images"] += 1
            columns = {
                **image.columns(len(batch)),
                **device_columns(self.compute.device),
                "image_sha256": hashlib.sha256(png).hexdigest(),
                "process": self.session["process"],
                "attempts": len(attempts),
            }
            yield Result(task, columns, png)

    def _attempts(self, model: LoadedModel, batch: Batch) -> list[list[DecodedImage]]:
        """Decode a batch until an attempt is undisturbed, within bounds on number and time."""
        session = self.session
        first = decode_batch(model, batch, self.compute)
        session["first_seconds"] += sum(image.seconds for image in first)
        attempts = [first]
        while (
            self.repeat_disturbed
            and len(attempts) < _MAX_ATTEMPTS
            and attempts[-1][0].lost_share(len(batch)) > DISTURBED
            and session["again_seconds"] <= _MAX_REPEAT_SHARE * session["first_seconds"]
        ):
            images = decode_batch(model, batch, self.compute)
            if not all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, images, strict=True)):
                if self.compute.device.type == "cpu":
                    raise RuntimeError("decoding a disturbed image again gave other tokens")
                break  # uncompiled steps of a GPU may round differently; the first attempt counts
            session["again_seconds"] += sum(image.seconds for image in images)
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
    """Decode images of one cell as one batch, then their pixels.

    Args:
        model: The model of the cell.
        batch: The images.
        compute: The device and dtype of the model.
        tokens: The number of tokens to decode, by default whole images. With it, images have no
            pixels.
        logits: Whether the images carry their guided logits.
    """
    prompts = [task.prompt.text for task in batch]
    generators = [torch.Generator(compute.device).manual_seed(task.seed) for task in batch]
    with torch.inference_mode():
        condition = model.condition(prompts)
        reset_peak_memory(compute.device)
        decoded: list[Decoded] = decode(
            model=model,
            condition=condition,
            decoding=batch[0].cell.decoding,
            generators=generators,
            tokens=tokens,
            keep_logits=logits,
            engine=model.engine,
        )
        peak = peak_memory_bytes(compute.device)
        seconds = 0.0  # per image, of the pixels
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


# ---- Images of a few prompts outside a run, for `lantern-bench generate` and `api.decode`


def tasks_of(
    cells: Sequence[Cell], seed: int, prompts: Sequence[str], images: int
) -> list[ImageTask]:
    """Return the tasks of some images of each prompt, cell by cell.

    Args:
        cells: The cells, which all decode the same prompts.
        seed: The seed of the run, from which each image gets its seed.
        prompts: The prompts.
        images: The number of images of each prompt.
    """
    slots = list(itertools.product(map(Prompt, prompts), range(images)))
    tasks = []
    for cell in cells:
        for index, (prompt, repeat) in enumerate(slots):
            image_seed = record_seed(seed, prompt.id, repeat, seed_set=cell.decoding.seed_set)
            tasks.append(
                ImageTask(
                    cell=cell,
                    prompt=prompt,
                    repeat=repeat,
                    seed=image_seed,
                    image_index=index,
                    order_index=index,
                )
            )
    return tasks


def decode_tasks(
    model: LoadedModel, compute: Compute, tasks: Sequence[ImageTask], *, logits: bool = False
) -> Iterator[DecodedImage]:
    """Decode images one by one. Compiled programs are warmed up first.

    Args:
        model: The model of all tasks. Without a tokenizer, images have no pixels.
        compute: The device and dtype of the model.
        tasks: The images.
        logits: Whether the images carry their guided logits.

    Raises:
        RecordsFailedError: An image cannot be decoded.
    """
    all_tokens = model.target.image_tokens

    def decode_task(task: ImageTask, tokens: int | None) -> DecodedImage:
        try:
            return decode_batch(model, [task], compute, tokens=tokens, logits=logits)[0]
        except (RuntimeError, MemoryError) as error:
            raise RecordsFailedError(
                f"{task.cell.cell_id}: {type(error).__name__}: {error}"
            ) from error

    if model.engine.compile:
        # A quarter of an image runs every program of a step more than once.
        for task in tasks:
            if task.image_index == 0:
                decode_task(task, max(16, all_tokens // 4))
    for task in tasks:
        yield decode_task(task, all_tokens if model.pixels is None else None)


def picture_png(decoded: Sequence[DecodedImage], cells: Sequence[Cell]) -> bytes:
    """Put all images into one PNG: a column per cell, a row per image.

    Where there are several cells, their names are written above the columns.
    """
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
