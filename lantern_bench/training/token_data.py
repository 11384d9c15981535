"""The token sequences that a drafter learns from: encoded pictures, or samples of the target.

Tokens are made once and kept in files, so that an interrupted training continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.loop import Decoded, decode, image_generators
from lantern_bench.models.loaded_model import LoadedModel, VQPixels
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.pictures import read_rgb
from lantern_bench.training.drafter_job import DrafterJob
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file, write_json
from lantern_bench.utils.progress import Emit, ProgressEvent

_BATCH = 32


def make_tokens(job: DrafterJob, model: LoadedModel, emit: Emit) -> Tensor:
    """Encode the pictures of the data, or sample from the target: tokens int32 [n, N].

    They are kept in the work folder, a file for each batch. Files that exist are not made again.

    Args:
        job: The data, the work folder, and the settings and the seed of the samples.
        model: The target and its tokenizer.
        emit: Receives progress.

    Raises:
        UserError: The model has no tokenizer, or a picture cannot be read.
        RefusedError: A file of tokens is damaged.
    """
    captions = job.data.captions
    for done, wanted in model.prepare(list(dict.fromkeys([*captions, *job.prompts]))):
        emit(ProgressEvent("encoding captions", done / wanted))
    key: dict[str, Any] = {"data": job.data.sha256(), "grid": list(model.grid)}
    reader: Any = model.pixels
    pictures = job.data.pictures
    if pictures is None:
        name = "samples"
        label = "sampling from the target"
        decoding = job.decoding.autoregressive()
        texts = pd.Series(captions)
        slots = list(zip(texts, texts.groupby(texts).cumcount(), strict=True))
        key |= {
            "weights": dict(model.weights),
            "seed": job.flags.seed,
            "decoding": decoding.settings(),
            "dtype": str(getattr(model.target, "dtype", "")),
        }
    elif isinstance(reader, VQPixels):
        name = "tokens"
        label = "encoding pictures"
        key |= {"size": list(reader.size), "tokenizer": model.weights.get("tokenizer")}
    else:
        raise UserError(
            f"--data: pictures need the tokenizer of {model.name}, and it has none",
            "Name the tokenizer in the model's file; or give captions alone, and the target "
            "samples from them.",
        )

    def make(rows: slice) -> Tensor:
        if pictures is None:
            images = decode_slots(model, decoding, seed=job.flags.seed, slots=slots[rows])
            return torch.stack([image.tokens for image in images])
        pixels = [_read(path, reader.size, mirrored=mirrored) for path, mirrored in pictures[rows]]
        return reader.tokens(torch.from_numpy(np.stack(pixels))).int()

    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = job.work / f"{name}-{digest[:12]}"
    write_json(folder / "manifest.json", {"key": key})
    batches = []
    for start in range(0, len(captions), _BATCH):
        path = folder / f"{start // _BATCH:05d}.safetensors"
        if not path.is_file():
            emit(ProgressEvent(label, start / len(captions)))
            made = make(slice(start, start + _BATCH))
            write_file(path, save({"tokens": made.cpu().contiguous()}))
        try:
            batches.append(load_file(path)["tokens"])
        except (OSError, KeyError, SafetensorError) as error:
            raise RefusedError(
                f"{path}: damaged: {error}",
                f"Remove {folder}; the next training writes it again.",
            ) from error
    emit(ProgressEvent(label, 1.0))
    return torch.cat(batches)


def decode_slots(
    model: LoadedModel, decoding: Decoding, *, seed: int, slots: Sequence[tuple[str, int]]
) -> list[Decoded]:
    """Decode images in one batch, with the seeds that a sweep gives them.

    Args:
        model: The model.
        decoding: Its settings.
        seed: Seed of the sweep.
        slots: A prompt and the number of its repeat for each image.
    """
    seeds = [record_seed(seed, Prompt(text).id, repeat) for text, repeat in slots]
    return decode(
        model=model,
        condition=model.condition([text for text, _ in slots]),
        decoding=decoding,
        generators=image_generators(model, seeds),
    )


def _read(path: Path, size: tuple[int, int], *, mirrored: bool) -> np.ndarray:
    """Read a picture as uint8 RGB [H, W, 3]: short side scaled to `size`, centre cropped."""
    try:
        picture = read_rgb(path)
    except UserError as error:
        raise UserError(f"--data: {error.message}", error.advice) from error
    picture = ImageOps.fit(picture, size[::-1], Image.Resampling.BICUBIC)
    return np.asarray(ImageOps.mirror(picture) if mirrored else picture)
