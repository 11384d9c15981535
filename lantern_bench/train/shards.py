"""Rows of tensors on disk in shards of bounded size, begun anew or continued, read row by row without loading them.

A folder holds safetensors files and `manifest.json`, which says what the rows are made from (`key`: hashes of weights
and data, settings) and which shards are whole. Rows of another key are never mixed in: the folder's name has its hash.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.models.files import write_atomically
from lantern_bench.spec.progress import OnProgress

__all__ = ["Shards"]

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
