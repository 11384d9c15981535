"""Paint 64x64 pictures of paper lanterns from attributes and a seed.

Skies, water, sand and snow are fractal noise. A mottle of the size of a token's cell covers the
picture, so that many codes of a tokenizer are interchangeable: this is the token selection
ambiguity under study. Lanterns, horizon and colour are exact, so that quality can be measured.

All draws of a batch come from one numpy generator. The second half of this module degrades pictures
without changing their content, and keeps rendered scenes in files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lantern_bench.models.families.lanterns.description import Attributes

SIZE = 64
_SUPERSAMPLE = 2
_SIDE = SIZE * _SUPERSAMPLE

Array = NDArray[np.float32]


def _array(rows: object) -> Array:
    return np.array(rows, dtype=np.float32)


# Linear-ish RGB in [0, 1]: (top of the sky, horizon glow), one row per sky.
_SKY = _array(
    [
        ((0.13, 0.10, 0.30), (0.85, 0.42, 0.30)),  # dusk
        ((0.01, 0.02, 0.07), (0.07, 0.10, 0.24)),  # night
        ((0.38, 0.52, 0.74), (0.97, 0.80, 0.66)),  # dawn
        ((0.15, 0.17, 0.19), (0.36, 0.39, 0.40)),  # storm
    ]
)
_CLOUDS = _array([0.24, 0.09, 0.22, 0.42])  # strength of clouds for each sky
# (far colour, near colour), one row per ground; the lake takes most of its colour from the sky.
_GROUND = _array(
    [
        ((0.10, 0.16, 0.26), (0.03, 0.06, 0.13)),  # lake
        ((0.20, 0.40, 0.16), (0.07, 0.22, 0.07)),  # meadow
        ((0.80, 0.60, 0.34), (0.58, 0.38, 0.19)),  # desert
        ((0.86, 0.89, 0.95), (0.68, 0.74, 0.86)),  # snow
    ]
)
_LIGHT = _array([0.78, 0.50, 1.00, 0.66])  # brightness of the ground under each sky
_COLOUR = _array(
    [
        (0.92, 0.10, 0.08),  # red
        (1.00, 0.50, 0.05),  # orange
        (1.00, 0.90, 0.15),  # yellow
        (0.10, 0.78, 0.25),  # green
        (0.12, 0.35, 1.00),  # blue
        (0.66, 0.14, 0.86),  # purple
        (1.00, 1.00, 0.97),  # white
    ]
)
# Half width and half height of a single lantern, as a fraction of the picture, for each shape.
_SHAPE = _array([(0.150, 0.150), (0.092, 0.190), (0.136, 0.136)])
_SHRINK = _array([1.0, 0.84, 0.70])  # factor on both for one, two and three lanterns
_MOTTLE = 0.16  # amplitude of the mottle where the picture is white
_BLOCK = 8  # side of the blocks of `drop_detail`
_CHUNK = 250  # scenes painted at once
# Scenes whose noise or lanterns are computed at once: few enough for the processor's cache.
_IN_CACHE = 4
_PLACES = ((0.5,), (0.29, 0.71), (0.19, 0.5, 0.81))


_AXIS = ((np.arange(_SIDE, dtype=np.float32) + 0.5) / _SIDE).astype(np.float32)
_X = _AXIS[None, None, :]
_Y = _AXIS[None, :, None]


def render(attributes: Sequence[Attributes], seed: int) -> NDArray[np.uint8]:
    """Paint one picture for each entry of `attributes`.

    Returns uint8 RGB [n, 64, 64, 3]. The same attributes and seed give the same pictures. Noise,
    stars and the jitter of place and size come from the seed.
    """
    rng = np.random.default_rng(seed)
    index = np.array([item.indices() for item in attributes], dtype=np.int64).reshape(-1, 5)
    horizon = 0.64 + rng.normal(0, 0.012, (len(index), 1, 1)).astype(np.float32)
    sky = _paint_sky(index, horizon, rng)
    ground = _paint_ground(index=index, sky=sky, horizon=horizon, rng=rng)
    lanterns = _paint_lanterns(index=index, canvas=ground, horizon=horizon, rng=rng)
    canvas = _mottle(lanterns, rng)
    small = canvas.reshape(len(index), SIZE, _SUPERSAMPLE, SIZE, _SUPERSAMPLE, 3).mean((2, 4))
    grain = rng.normal(0, 0.010, small.shape).astype(np.float32)
    return (np.clip(small + grain, 0, 1) * 255 + 0.5).astype(np.uint8)


def _noise(
    rng: np.random.Generator, n: int, cells: Sequence[tuple[int, int]], weights: Sequence[float]
) -> Array:
    """Return a sum of smooth value noises [n, side, side], mean about 0, range about [-1, 1].

    `cells` are the (vertical, horizontal) numbers of noise cells of each octave.
    """
    total = np.zeros((n, _SIDE, _SIDE), dtype=np.float32)
    for (rows, columns), weight in zip(cells, weights, strict=True):
        grid = rng.uniform(-1, 1, (n, rows + 1, columns + 1)).astype(np.float32)
        for first in range(0, n, _IN_CACHE):
            some = slice(first, first + _IN_CACHE)
            total[some] += weight * _stretch(_stretch(grid[some], axis=1), axis=2)
    return total / float(sum(weights))


def _stretch(grid: Array, axis: int) -> Array:
    """Interpolate `axis` of a noise grid to the canvas's side, with a smooth step between knots."""
    at = np.linspace(0, grid.shape[axis] - 1, _SIDE, endpoint=False, dtype=np.float32)
    low = at.astype(np.int64)
    part = at - low
    part = part * part * (3 - 2 * part)
    part = part.reshape([_SIDE if number == axis else 1 for number in range(3)])
    below = np.take(grid, low, axis)
    above = np.take(grid, low + 1, axis)
    return np.asarray(below * (1 - part) + above * part, dtype=np.float32)


def _mottle(canvas: Array, rng: np.random.Generator) -> Array:
    """Add noise of the size of a token's cell: brightness, and a shift between warm and cool.

    Coarser noise is predictable from earlier cells, and the tokenizer loses finer noise: neither
    makes a code hard to guess. The noise is weaker where the picture is dark.
    """
    n = len(canvas)
    bright = _noise(rng=rng, n=n, cells=((13, 15), (21, 19)), weights=(1.0, 0.9))
    warm = _noise(rng=rng, n=n, cells=((15, 13), (19, 21)), weights=(1.0, 0.6))
    strength = _MOTTLE * (0.35 + 0.65 * np.clip(canvas.mean(-1), 0, 1))
    change = bright[..., None] + _array([0.55, 0.0, -0.55]) * warm[..., None]
    return np.asarray(canvas + strength[..., None] * change, dtype=np.float32)


def _paint_sky(index: NDArray[np.int64], horizon: Array, rng: np.random.Generator) -> Array:
    """Paint gradient, fractal clouds and, at night, stars: [n, side, side, 3]."""
    n = len(index)
    kind = index[:, 4]
    depth = np.clip(_Y / horizon, 0, 1)[..., None] ** 1.6
    colours = _SKY[kind][:, None, None]
    sky = colours[..., 0, :] * (1 - depth) + colours[..., 1, :] * depth
    clouds = _noise(
        rng=rng, n=n, cells=((3, 2), (7, 5), (14, 10), (28, 20)), weights=(1.0, 0.8, 0.55, 0.35)
    )
    lit = (0.35 + 0.65 * depth) * (_CLOUDS[kind] * 1.5)[:, None, None, None]
    sky = sky + lit * clouds[..., None] * (0.55 + colours[..., 1, :])
    stars = rng.random((n, _SIDE // 2, _SIDE // 2)).astype(np.float32)
    bright = np.clip((stars - 0.985) / 0.015, 0, 1) * (kind == 1)[:, None, None]
    bright = np.repeat(np.repeat(bright, 2, 1), 2, 2) * np.clip(1.2 - _Y / horizon, 0, 1)
    return np.asarray(sky + 0.5 * bright[..., None], dtype=np.float32)


def _paint_ground(
    index: NDArray[np.int64], sky: Array, horizon: Array, rng: np.random.Generator
) -> Array:
    """Lay the ground under the horizon: ripples, grass, dunes or drifts: [n, side, side, 3]."""
    n = len(index)
    kind = index[:, 3]
    down = np.clip((_Y - horizon) / (1 - horizon), 0, 1)
    colours = _GROUND[kind][:, None, None] * _LIGHT[index[:, 4]][:, None, None, None, None]
    ground = colours[..., 0, :] * (1 - down[..., None]) + colours[..., 1, :] * down[..., None]
    ground = np.where((kind == 0)[:, None, None, None], 0.55 * ground + 0.5 * sky[:, ::-1], ground)
    ripples = _noise(rng=rng, n=n, cells=((40, 5), (22, 9)), weights=(1.0, 0.8))
    grass = _noise(rng=rng, n=n, cells=((26, 44), (12, 18)), weights=(1.0, 0.6))
    swell = _noise(rng=rng, n=n, cells=((4, 3), (9, 5)), weights=(1.0, 0.5))
    bands = np.sin(34 * down + 5 * swell + 5 * _X).astype(np.float32)
    drifts = _noise(rng=rng, n=n, cells=((8, 5), (20, 14)), weights=(1.0, 0.5))
    texture = np.stack([0.30 * ripples, 0.52 * grass, 0.13 * bands + 0.14 * grass, 0.17 * drifts])
    strength = (0.10 + 0.9 * ground.mean(-1)) * texture[kind, np.arange(n)]
    ground = ground + strength[..., None]
    edge = np.clip((_Y - horizon) * SIZE + 0.5, 0, 1)[..., None]
    return np.asarray(sky * (1 - edge) + ground * edge, dtype=np.float32)


def _paint_lanterns(
    index: NDArray[np.int64], canvas: Array, horizon: Array, rng: np.random.Generator
) -> NDArray[np.floating]:
    """Paint glow, body with ribs and shading, caps, and the light that falls on the ground."""
    # Centre and half size of up to three lanterns: [n, 3, 4] as (x, y, half width, half height).
    # Absent ones are 0.
    lanterns = np.zeros((len(index), 3, 4), dtype=np.float32)
    jitter = rng.uniform(-1, 1, (len(index), 3, 3)).astype(np.float32)
    for row, (count, kind, *_rest) in enumerate(index):
        half = _SHAPE[kind] * _SHRINK[count]
        for slot, place in enumerate(_PLACES[count]):
            across, up, scale = jitter[row, slot]
            size = half * (1 + 0.07 * scale)
            lanterns[row, slot] = (place + 0.025 * across, 0.36 + 0.055 * up, size[0], size[1])
    painted = np.empty(canvas.shape)
    for count in range(3):
        alike = np.flatnonzero(index[:, 0] == count)
        for first in range(0, len(alike), _IN_CACHE):
            rows = alike[first : first + _IN_CACHE]
            painting = _with_lanterns(
                index=index[rows],
                canvas=canvas[rows],
                horizon=horizon[rows],
                lanterns=lanterns[rows, : count + 1],
            )
            # float32 keeps the pictures of the bundled weights to the bit. They were made when the
            # absent lanterns of a scene were painted too.
            painted[rows] = painting if count == 2 else painting.astype(np.float32)
    return painted


def _with_lanterns(
    index: NDArray[np.int64], canvas: Array, horizon: Array, lanterns: Array
) -> NDArray[np.floating]:
    """Paint `lanterns` [n, count, 4] over `canvas` [n, side, side, 3], one after the other."""
    colour = _COLOUR[index[:, 2]][:, None, None]
    shape = index[:, 1][:, None, None]
    # Ellipse, capsule-like barrel or rounded square.
    power = np.where(shape == 2, 8.0, np.where(shape == 1, 3.2, 2.0)).astype(np.float32)
    lake = (index[:, 3] == 0)[:, None, None]
    down = np.clip((_Y - horizon) / (1 - horizon), 0, 1)
    for slot in range(lanterns.shape[1]):
        cx, cy, half_w, half_h = (lanterns[:, slot, part][:, None, None] for part in range(4))
        dx = (_X - cx) / half_w
        dy = (_Y - cy) / half_h
        glow = np.exp(-1.1 * np.maximum(np.sqrt(dx * dx + dy * dy) - 0.9, 0)) * 0.34
        canvas = canvas + glow[..., None] * colour * (1 - 0.6 * np.clip(canvas, 0, 1))
        # A broken streak on water, a soft pool of light on land.
        wobble = 0.18 * np.sin(95 * _Y + 9 * cx)
        broken = (0.62 + 0.3 * np.sin(120 * _Y + 7 * cx)) * (1 - 0.55 * down)
        streak = np.exp(-(((_X - cx) / half_w + wobble) ** 2) * 1.7) * broken
        pool = np.exp(-(((_X - cx) / (2.2 * half_w)) ** 2) - ((down - 0.35) / 0.33) ** 2) * 0.42
        light = (np.where(lake, np.clip(streak, 0, 1) * 0.72, pool) * (horizon < _Y))[..., None]
        canvas = np.asarray(canvas * (1 - 0.55 * light) + colour * light * 0.75, dtype=np.float32)
        radius = (np.abs(dx) ** power + np.abs(dy) ** power) ** (1 / power)
        body = np.clip((1 - radius) * half_w * SIZE * 1.4 + 0.5, 0, 1).astype(np.float32)
        ribs = 1 - 0.16 * (np.cos(dy * 4.5 * np.pi) > 0.55)
        shade = (1.02 - 0.42 * dx * dx - 0.10 * dy * dy) * ribs
        lit = np.clip(
            colour * shade[..., None] + 0.20 * np.exp(-2.5 * (dx * dx + dy * dy))[..., None], 0, 1
        )
        canvas = canvas * (1 - body[..., None]) + lit * body[..., None]
        cap = ((np.abs(dx) < 0.42) * (np.abs(np.abs(dy) - 1.03) < 0.09)).astype(np.float32)
        canvas = canvas * (1 - cap[..., None]) + _array([0.16, 0.09, 0.05]) * cap[..., None]
    return canvas


def degrade(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Degrade each picture at random: float [n, 3, h, w] in [0, 1] to the same shape and range.

    Mirror, blur, lost detail, shifted light and noise apply to a picture independently of each
    other. About one picture in ten is unchanged. Sides must be multiples of 8.
    """
    n = len(pixels)

    def draw(low: float = 0.0, high: float = 1.0) -> Tensor:
        return (torch.rand((n, 1, 1, 1), generator=generator) * (high - low) + low).to(pixels)

    pixels = torch.where(draw() < 0.5, pixels.flip(3), pixels)
    pixels = torch.where(draw() < 0.35, pixels + draw(0.3, 1.0) * (blur(pixels) - pixels), pixels)
    pixels = torch.where(draw() < 0.35, drop_detail(pixels, draw(0.02, 0.15)), pixels)
    pixels = torch.where(draw() < 0.35, pixels * draw(0.92, 1.08) + draw(-0.03, 0.03), pixels)
    noise = torch.randn(pixels.shape, generator=generator).to(pixels)
    pixels = torch.where(draw() < 0.35, pixels + draw(0.005, 0.04) * noise, pixels)
    return pixels.clamp(0, 1)


def blur(pixels: Tensor) -> Tensor:
    """Blur float [n, c, h, w] by the binomial 5x5 kernel, edges repeated."""
    taps = pixels.new_tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    kernel = (taps[:, None] * taps[None, :]).expand(pixels.shape[1], 1, 5, 5)
    padded = functional.pad(pixels, (2, 2, 2, 2), mode="replicate")
    return functional.conv2d(padded, kernel, groups=pixels.shape[1])


def drop_detail(pixels: Tensor, step: Tensor) -> Tensor:
    """Round the cosine coefficients of 8x8 blocks, coarser for finer detail, as JPEG does.

    `pixels` are [n, c, h, w] in [0, 1], with sides that are multiples of 8. `step` [n, 1, 1, 1] is
    the rounding step of the coarsest coefficient.
    """
    n, c, h, w = pixels.shape
    order = torch.arange(_BLOCK, dtype=pixels.dtype, device=pixels.device)
    # The orthonormal DCT-II basis [8, 8], frequency by sample.
    basis = torch.cos(math.pi * (order + 0.5) * order[:, None] / _BLOCK) * math.sqrt(2 / _BLOCK)
    basis[0] /= math.sqrt(2)
    blocks = pixels.reshape(n, c, h // _BLOCK, _BLOCK, w // _BLOCK, _BLOCK)
    coefficients = torch.einsum("ui,ncyixj,vj->ncyxuv", basis, blocks, basis)
    steps = step[..., None, None] * (1 + 0.5 * (order[:, None] + order[None, :]))
    rounded = (coefficients / steps).round() * steps
    return torch.einsum("ui,ncyxuv,vj->ncyixj", basis, rounded, basis).reshape(n, c, h, w)


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
    """Paint scenes, or read them from a file that holds them.

    Args:
        among: Attributes are drawn uniformly from these.
        n: Number of scenes.
        seed: Seed of attributes and pictures.
        cache: The file, which is written if it does not exist.
        on_chunk: Called as `on_chunk(done, n)` after each chunk.
    """
    if cache is not None and cache.exists():
        with np.load(cache) as scenes:
            enough = len(scenes["pixels"]) >= n
            same = int(scenes["seed"]) == seed and int(scenes["among"]) == len(among)
            if enough and same:
                return SceneSet(scenes["pixels"][:n], scenes["attributes"][:n])
    pixels = np.empty((n, SIZE, SIZE, 3), dtype=np.uint8)
    attributes = np.empty((n, 5), dtype=np.int64)
    for start in range(0, n, _CHUNK):
        stop = min(n, start + _CHUNK)
        sequence = np.random.SeedSequence([seed, start // _CHUNK])
        numbers = np.random.default_rng(sequence).integers(len(among), size=_CHUNK)
        chosen = [among[number] for number in numbers]
        # The whole chunk is painted even if less is wanted, so that sets of one seed share their
        # beginning.
        painted = render(chosen, int(sequence.generate_state(1)[0]))
        pixels[start:stop] = painted[: stop - start]
        attributes[start:stop] = [item.indices() for item in chosen[: stop - start]]
        on_chunk(stop, n)
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(".part.npz")
        np.savez(
            part,
            pixels=pixels,
            attributes=attributes,
            seed=np.int64(seed),
            among=np.int64(len(among)),
        )
        os.replace(part, cache)
    return SceneSet(pixels, attributes)
