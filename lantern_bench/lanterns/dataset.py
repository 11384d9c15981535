"""Rendered scenes as arrays, made once and kept in a folder of the training.

Painting is done in chunks with their own seeds, so that a set of n pictures begins with the pictures of a smaller set
of the same seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lantern_bench.lanterns.captions import Attributes
from lantern_bench.lanterns.scenes import SIZE, render

__all__ = ["SceneSet", "scene_set"]

_CHUNK = 250


class SceneSet(NamedTuple):
    """Pictures uint8 [n, 64, 64, 3] and the indices of their attributes int64 [n, 5]."""

    pixels: NDArray[np.uint8]
    attributes: NDArray[np.int64]


def scene_set(
    among: Sequence[Attributes],
    n: int,
    seed: int,
    cache: Path | None = None,
    on_chunk: Callable[[int, int], None] = lambda _done, _total: None,
) -> SceneSet:
    """Paint `n` scenes with attributes drawn uniformly from `among`; read them from `cache` when it holds them.

    `on_chunk(done, n)` is called as the work goes on.
    """
    if cache is not None and cache.exists():
        with np.load(cache) as kept:
            if len(kept["pixels"]) >= n and int(kept["seed"]) == seed and int(kept["among"]) == len(among):
                return SceneSet(kept["pixels"][:n], kept["attributes"][:n])
    pixels = np.empty((n, SIZE, SIZE, 3), dtype=np.uint8)
    attributes = np.empty((n, 5), dtype=np.int64)
    for start in range(0, n, _CHUNK):
        stop = min(n, start + _CHUNK)
        sequence = np.random.SeedSequence([seed, start // _CHUNK])
        chosen = [among[i] for i in np.random.default_rng(sequence).integers(len(among), size=_CHUNK)]
        # The whole chunk is painted even when less is wanted, so that sets of one seed share their beginning.
        pixels[start:stop] = render(chosen, int(sequence.generate_state(1)[0]))[: stop - start]
        attributes[start:stop] = [item.indices() for item in chosen[: stop - start]]
        on_chunk(stop, n)
    if cache is not None:
        _keep(cache, pixels, attributes, seed, len(among))
    return SceneSet(pixels, attributes)


def _keep(cache: Path, pixels: NDArray[np.uint8], attributes: NDArray[np.int64], seed: int, among: int) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_suffix(".part.npz")
    np.savez(part, pixels=pixels, attributes=attributes, seed=np.int64(seed), among=np.int64(among))
    os.replace(part, cache)
