"""The painter: reproducible by seed, larger sets extend smaller ones, pictures show attributes."""

from __future__ import annotations

from colorsys import rgb_to_hsv
from pathlib import Path

import numpy as np
import pytest

from lantern_bench.models.families.lanterns.description import (
    ALL_ATTRIBUTES,
    FIELDS,
    TRAIN,
    Attributes,
)
from scripts.train_lanterns import scenes
from scripts.train_lanterns.scenes import SIZE, render, scene_set

# What the middle of a lantern looks like: hue in degrees, except white, which has none.
HUES = {"red": 0, "orange": 30, "yellow": 55, "green": 130, "blue": 225, "purple": 285}


def test_pictures_are_uint8_and_reproducible_by_seed() -> None:
    some = ALL_ATTRIBUTES[::101]
    first = render(some, 7)
    second = render(some, 7)
    other = render(some, 8)
    assert first.shape == (len(some), SIZE, SIZE, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    pictures = render([ALL_ATTRIBUTES[0]] * 2, 3).astype(int)
    assert np.abs(pictures[0] - pictures[1]).mean() > 2
    assert render([], 0).shape == (0, SIZE, SIZE, 3)


@pytest.mark.parametrize("colour", range(len(FIELDS["colour"])), ids=FIELDS["colour"])
def test_lanterns_have_their_colour(colour: int) -> None:
    """Under every sky and over every ground the body has its hue; a white one has little colour and
    much light.
    """
    asked = [
        Attributes(count=0, shape=0, colour=colour, ground=number // 4, sky=number % 4)
        for number in range(16)
    ]
    middle = render(asked, 5)[:, 20:27, 29:35].astype(float).mean((1, 2)) / 255
    for red, green, blue in middle:
        most = max(red, green, blue)
        least = min(red, green, blue)
        if FIELDS["colour"][colour] == "white":
            assert least > 0.6
            assert most - least < 0.2
        else:
            away = abs(360 * rgb_to_hsv(red, green, blue)[0] - HUES[FIELDS["colour"][colour]])
            assert most - least > 0.3
            assert min(away, 360 - away) < 20


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pictures_show_the_number_of_lanterns(count: int) -> None:
    """Red on a dark sky: the runs of red columns at lantern height are as many as asked for."""
    for picture in render(
        [Attributes(count=count - 1, shape=2, colour=0, ground=3, sky=1)] * 6, 9
    ).astype(float):
        band = picture[18:28].mean(0)
        red = band[:, 0] > 1.8 * band[:, 2] + 60
        assert int((np.diff(red.astype(int), prepend=0) == 1).sum()) == count


def test_larger_set_extends_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "_CHUNK", 8)
    progress: list[tuple[int, int]] = []
    small = scene_set(
        TRAIN, 13, seed=4, on_chunk=lambda done, total: progress.append((done, total))
    )
    large = scene_set(TRAIN, 20, seed=4)
    assert progress == [(8, 13), (13, 13)]
    assert {tuple(row) for row in small.attributes.tolist()} <= {item.indices() for item in TRAIN}
    assert np.array_equal(large.attributes[:13], small.attributes)
    assert np.array_equal(large.pixels[:13], small.pixels)


def test_scene_cache_is_used_only_when_it_matches(tmp_path: Path) -> None:
    cache = tmp_path / "folder" / "scenes.npz"
    first = scene_set(among=TRAIN, n=12, seed=4, cache=cache)
    written = cache.stat().st_mtime_ns
    again = scene_set(among=TRAIN, n=9, seed=4, cache=cache)
    assert np.array_equal(again.pixels, first.pixels[:9])
    assert cache.stat().st_mtime_ns == written
    other = scene_set(among=TRAIN, n=9, seed=5, cache=cache)
    assert not np.array_equal(other.pixels, again.pixels)
    assert np.array_equal(scene_set(among=TRAIN, n=9, seed=5, cache=cache).pixels, other.pixels)
