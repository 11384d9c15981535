"""The sequences a drafter learns from: images as tokens of the target's tokenizer, or the target's own samples.

Tokens are made once and kept in shards, so that an interrupted preparation continues. Each sequence has a caption; the
seed alone decides which sequences are held out.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lantern_bench.clock import OnProgress
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel, NoPixels, ReadsPictures

_BATCH = 32

MakeRows = Callable[[int, int], Mapping[str, Tensor]]
"""`make(start, stop)` returns tensors [stop - start, ...]."""


class Shards:
    """Rows of tensors in a folder under `root`, named after `key` (plain data), in files of bounded size."""

    def __init__(self, root: Path, name: str, key: Mapping[str, Any]) -> None:
        self.key = json.loads(json.dumps(dict(key), sort_keys=True))
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.folder = root / f"{name}-{digest[:12]}"
        self._manifest = self.folder / "manifest.json"
        self._sizes, self._open = list[int](), dict[int, Any]()
        if self._manifest.is_file():
            try:
                content = json.loads(self._manifest.read_text(encoding="utf-8"))
                written_for, self._sizes = content["key"], [int(size) for size in content["rows"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise self._refused(self._manifest, f"damaged: {error}") from error
            if written_for != self.key:
                raise self._refused(self._manifest, "belongs to other data")

    def __len__(self) -> int:
        """Number of rows written so far."""
        return sum(self._sizes)

    def fill(self, total: int, shard_rows: int, make: MakeRows, what: str, on_progress: OnProgress) -> None:
        """Write the rows that are missing."""
        while (start := len(self)) < total:
            on_progress(what, start / total)
            stop = min(total, start + shard_rows)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in make(start, stop).items()}
            write_atomically(self._path(len(self._sizes)), save(tensors))
            self._sizes.append(stop - start)
            content = {"key": self.key, "rows": self._sizes}
            write_atomically(self._manifest, json.dumps(content, indent=1).encode() + b"\n")
        on_progress(what, 1.0)

    def whole(self, name: str) -> Tensor:
        """All rows of a tensor, in memory."""
        return torch.cat([self._shard(number).get_tensor(name) for number in range(len(self._sizes))])

    def row(self, index: int) -> dict[str, Tensor]:
        """One row of every tensor; reads only the bytes of that row."""
        ends = list(accumulate(self._sizes))
        number = bisect_right(ends, index)
        at, shard = index - (ends[number] - self._sizes[number]), self._shard(number)
        return {name: shard.get_slice(name)[at] for name in shard.keys()}  # noqa: SIM118  # no mapping

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            path = self._path(number)
            try:
                self._open[number] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self._refused(path, f"damaged: {error}") from error
        return self._open[number]

    def _refused(self, path: Path, problem: str) -> RefusedError:
        return RefusedError(f"{path}: {problem}", f"Remove {self.folder}; the next training writes it again.")


@dataclass(frozen=True)
class Data:
    """A caption per sequence, and the picture it belongs to; without pictures the target samples them.

    `mirrored`: every picture's mirror image follows, with the same caption.
    """

    captions: Sequence[str]
    pictures: Sequence[Path] | None = None
    mirrored: bool = False

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.captions) * (1 + (self.mirrored and self.pictures is not None))

    def caption(self, index: int) -> str:
        """The caption of a sequence."""
        return self.captions[index % len(self.captions)]

    def sha256(self) -> str:
        """A hash of captions and of the pictures' names and sizes; reading all pictures would take too long."""
        pictures = [[path.name, path.stat().st_size] for path in self.pictures or ()]
        return hashlib.sha256(json.dumps([list(self.captions), pictures]).encode()).hexdigest()


def make_dataset(
    data: Data, model: LoadedModel, decoding: Decoding, seed: int, work: Path, on_progress: OnProgress
) -> tuple[Tensor, str]:
    """Encode the pictures, or sample from the target with `decoding` (a mode `ar`); rows in `work` are not made again.

    Returns tokens int32 [n, N] and a text that identifies their sources. Raises `UserError` for a picture that cannot
    be read, and for a model without a tokenizer.
    """
    key: dict[str, Any] = {"data": data.sha256(), "grid": list(model.grid)}
    parts = []
    if data.pictures is not None:
        reader, pictures = model.pixels, data.pictures
        if isinstance(reader, NoPixels) or not isinstance(reader, ReadsPictures):
            raise UserError(
                f"--data: pictures need the tokenizer of {model.name}, and it has none",
                "Name the tokenizer in the model's file; or give captions alone, and the target samples from them.",
            )
        for mirrored in (False, True)[: 1 + data.mirrored]:
            encoder_key = key | {"size": list(reader.size), "mirrored": mirrored}
            parts.append(Shards(work, "tokens", encoder_key | {"tokenizer": model.weights.get("tokenizer")}))
            what = "encoding mirror images" if mirrored else "encoding pictures"
            parts[-1].fill(len(pictures), 256, _encoder(pictures, reader, mirrored), what, on_progress)
    else:
        key |= {"weights": dict(model.weights), "seed": seed}
        key |= {"decoding": decoding.model_dump(mode="json"), "dtype": str(getattr(model.target, "dtype", ""))}
        parts.append(Shards(work, "samples", key))
        parts[0].fill(len(data), _BATCH, _sampler(data, model, decoding, seed), "sampling from the target", on_progress)
    return torch.cat([shards.whole("tokens") for shards in parts]), "+".join(shards.folder.name for shards in parts)


def held_out_count(count: int, held_out: float) -> int:
    """How many of `count` sequences are held out for the share `held_out`: at least one, never all."""
    return min(count - 1, max(1, round(held_out * count)))


def split(count: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the training sequences and of those held out, int64, in a seeded order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    kept = held_out_count(count, held_out)
    return order[kept:], order[:kept]


def _picture(path: Path, size: tuple[int, int]) -> np.ndarray:
    """A picture as uint8 RGB [H, W, 3]: the short side scaled to `size`, the centre cropped."""
    height, width = size
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        advice = "Remove it, or save it again."
        raise UserError(f"--data: {path}: cannot be read as a picture: {error}", advice) from error
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        larger = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
        picture = picture.resize(larger, Image.Resampling.BICUBIC)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    return np.asarray(picture, dtype=np.uint8)


def _encoder(pictures: Sequence[Path], reader: ReadsPictures, mirrored: bool) -> MakeRows:
    def make(start: int, stop: int) -> Mapping[str, Tensor]:
        whole = torch.from_numpy(np.stack([_picture(path, reader.size) for path in pictures[start:stop]]))
        parts = (whole.flip(2) if mirrored else whole).split(_BATCH)
        return {"tokens": torch.cat([reader.tokens(part) for part in parts]).int()}

    return make


def _sampler(data: Data, model: LoadedModel, decoding: Decoding, seed: int) -> MakeRows:
    """Sample as a sweep does: the seed depends on the prompt and on its number of earlier occurrences."""
    repeats, seen = [], dict[str, int]()
    for caption in data.captions:
        repeats.append(seen.get(caption, 0))
        seen[caption] = repeats[-1] + 1

    def make(start: int, stop: int) -> Mapping[str, Tensor]:
        captions = data.captions[start:stop]
        seeds = [record_seed(seed, Prompt(text).id, n) for text, n in zip(captions, repeats[start:stop], strict=True)]
        generators = [torch.Generator(model.target.device).manual_seed(one) for one in seeds]
        made = decode(model, model.condition(captions), decoding, generators, engine=model.engine)
        return {"tokens": torch.stack([image.tokens for image in made])}

    return make
