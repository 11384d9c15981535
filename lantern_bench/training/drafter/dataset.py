"""The sequences a drafter learns from: pictures as tokens of the target's tokenizer, or the target's own samples.

Tokens are made once and kept in shards, so that an interrupted preparation continues. A caption belongs to each
sequence; which of them are held out is decided here, from the seed alone.
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

from lantern_bench.clock import OnProgress, unheard
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.loaded_model import LoadedModel, NoPixels, ReadsPictures

# ---- Rows of tensors on disk in shards of bounded size, begun anew or continued, read row by row without loading t

_MANIFEST = "manifest.json"


class Shards:
    """The rows under `root` that are made from `key` (plain data)."""

    def __init__(self, root: Path, name: str, key: Mapping[str, Any]) -> None:
        self.key = json.loads(json.dumps(dict(key), sort_keys=True))
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.folder = root / f"{name}-{digest[:12]}"
        self._sizes: list[int] = self._read_manifest()
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        """Rows that are there."""
        return sum(self._sizes)

    def fill(
        self,
        total: int,
        at_once: int,
        make: Callable[[int, int], Mapping[str, Tensor]],
        what: str,
        on_progress: OnProgress,
    ) -> None:
        """Make the rows that are missing, `at_once` a shard: `make(start, stop)` gives tensors [stop - start, ...]."""
        while (start := len(self)) < total:
            on_progress(what, start / total)
            stop = min(total, start + at_once)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in make(start, stop).items()}
            write_atomically(self._path(len(self._sizes)), save(tensors))
            self._sizes.append(stop - start)
            content = {"key": self.key, "rows": self._sizes}
            write_atomically(self.folder / _MANIFEST, json.dumps(content, indent=1).encode() + b"\n")
        on_progress(what, 1.0)

    def whole(self, name: str) -> Tensor:
        """All rows of a tensor, in memory."""
        return torch.cat([self._shard(number).get_tensor(name) for number in range(len(self._sizes))])

    def row(self, index: int) -> dict[str, Tensor]:
        """One row of every tensor; only its own bytes are read."""
        ends = list(accumulate(self._sizes))
        number = bisect_right(ends, index)
        at = index - (ends[number] - self._sizes[number])
        shard = self._shard(number)
        return {name: shard.get_slice(name)[at] for name in shard.keys()}  # noqa: SIM118  # no mapping

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            path = self._path(number)
            try:
                self._open[number] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise RefusedError(f"{path}: damaged: {error}", f"Remove {self.folder}; it is made again.") from error
        return self._open[number]

    def _read_manifest(self) -> list[int]:
        path = self.folder / _MANIFEST
        if not path.is_file():
            return []
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            sizes = [int(size) for size in content["rows"]]
            same = content["key"] == self.key
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{path}: damaged: {error}", f"Remove {self.folder}; it is made again.") from error
        if not same:
            raise RefusedError(f"{path}: is of other data", f"Remove {self.folder}; it is made again.")
        return sizes


# ----

_AT_ONCE = 256
_SAMPLED_AT_ONCE = 32


@dataclass(frozen=True)
class Data:
    """What was given: a caption for each sequence, and the picture it belongs to; None: the target samples it.

    `mirrored`: every picture's mirror image follows, with the same caption.
    """

    captions: Sequence[str]
    pictures: Sequence[Path] | None = None
    mirrored: bool = False

    def __len__(self) -> int:
        """How many sequences this makes."""
        return len(self.captions) * (1 + (self.mirrored and self.pictures is not None))

    def caption(self, index: int) -> str:
        """The caption of a sequence."""
        return self.captions[index % len(self.captions)]

    def sha256(self) -> str:
        """A hash of captions, and of the pictures' names and sizes: reading them all for it would take too long."""
        pictures = [[path.name, path.stat().st_size] for path in self.pictures or ()]
        return hashlib.sha256(json.dumps([list(self.captions), pictures]).encode()).hexdigest()


@dataclass(frozen=True)
class Examples:
    """Sequences in memory: tokens int32 [n, N] and their captions; `sha256` says what they were made from."""

    tokens: Tensor
    caption: Callable[[int], str]
    sha256: str


def make_examples(
    data: Data, model: LoadedModel, decoding: Decoding, seed: int, work: Path, on_progress: OnProgress = unheard
) -> Examples:
    """Encode the pictures, or let the target sample with `decoding` (a mode `ar`); what is in `work` is not made again.

    Raises `UserError` for a picture that cannot be read, and for a model without a tokenizer.
    """
    if data.pictures is not None:
        parts = [_encoded(data, model, mirrored, work, on_progress) for mirrored in (False, True)[: 1 + data.mirrored]]
    else:
        parts = [_sampled(data, model, decoding, seed, work, on_progress)]
    names = "+".join(shards.folder.name for shards in parts)
    return Examples(torch.cat([shards.whole("tokens") for shards in parts]), data.caption, names)


def _encoded(data: Data, model: LoadedModel, mirrored: bool, work: Path, on_progress: OnProgress) -> Shards:
    """Tokens of the pictures, or of their mirror images, which are kept apart."""
    reader, pictures = _reader(model), data.pictures or ()
    key = {"data": data.sha256(), "grid": list(model.grid), "size": list(reader.size), "mirrored": mirrored}
    shards = Shards(work, "tokens", key | {"tokenizer": model.weights.get("tokenizer")})
    what = "encoding mirror images" if mirrored else "encoding pictures"
    shards.fill(len(pictures), _AT_ONCE, _encoder(pictures, reader, mirrored), what, on_progress)
    return shards


def _sampled(
    data: Data, model: LoadedModel, decoding: Decoding, seed: int, work: Path, on_progress: OnProgress
) -> Shards:
    """The target's own pictures of the captions."""
    key = {"data": data.sha256(), "grid": list(model.grid), "weights": dict(model.weights), "seed": seed}
    key |= {"decoding": decoding.model_dump(mode="json"), "dtype": str(getattr(model.target, "dtype", ""))}
    shards = Shards(work, "samples", key)
    make = _sampler(data, model, decoding, seed)
    shards.fill(len(data), _SAMPLED_AT_ONCE, make, "sampling from the target", on_progress)
    return shards


def split(count: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the sequences to learn from, and of those held out (at least one), int64, in a seeded order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    kept = min(count - 1, max(1, round(held_out * count)))
    return order[kept:], order[:kept]


def picture_array(path: Path, size: tuple[int, int]) -> np.ndarray:
    """A picture as uint8 RGB [H, W, 3]: its short side brought to size, its middle cut out.

    Raises `UserError` for a file that is no picture.
    """
    height, width = size
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise UserError(
            f"--data: {path}: cannot be read as a picture: {error}", "Remove it, or save it anew."
        ) from error
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        larger = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
        picture = picture.resize(larger, Image.Resampling.BICUBIC)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    return np.asarray(picture, dtype=np.uint8)


def _reader(model: LoadedModel) -> ReadsPictures:
    if isinstance(model.pixels, NoPixels) or not isinstance(model.pixels, ReadsPictures):
        raise UserError(
            f"--data: pictures need the tokenizer of {model.name}, and it has none",
            "Name the tokenizer in the model's file; or give captions alone, and the target samples from them.",
        )
    return model.pixels


def _encoder(
    pictures: Sequence[Path], reader: ReadsPictures, mirrored: bool
) -> Callable[[int, int], Mapping[str, Tensor]]:
    def make(start: int, stop: int) -> Mapping[str, Tensor]:
        arrays = np.stack([picture_array(path, reader.size) for path in pictures[start:stop]])
        whole = torch.from_numpy(arrays)
        parts = (whole.flip(2) if mirrored else whole).split(_SAMPLED_AT_ONCE)
        return {"tokens": torch.cat([reader.tokens(part) for part in parts]).int()}

    return make


def _sampler(
    data: Data, model: LoadedModel, decoding: Decoding, seed: int
) -> Callable[[int, int], Mapping[str, Tensor]]:
    """Sampled as a sweep would: by the prompt and its how manieth picture this is."""
    repeats, seen = [], dict[str, int]()
    for caption in data.captions:
        repeats.append(seen.get(caption, 0))
        seen[caption] = repeats[-1] + 1

    def make(start: int, stop: int) -> Mapping[str, Tensor]:
        captions = data.captions[start:stop]
        seeds = [record_seed(seed, Prompt(text).id, repeats[start + i]) for i, text in enumerate(captions)]
        generators = [torch.Generator(model.target.device).manual_seed(one) for one in seeds]
        made = decode(model, model.condition(captions), decoding, generators, engine=model.engine)
        return {"tokens": torch.stack([image.tokens for image in made])}

    return make
