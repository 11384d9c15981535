"""Pictures small enough for a page that holds hundreds of them: WebP, at most 128 pixels a side.

A picture is never enlarged; equal pictures are kept once, as greedy modes make the same one. All of a page have one
quality, the best with which they stay within what a page may weigh. The files themselves stay where they are.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["BUDGET", "SIDE", "Thumbnails"]

SIDE = 128
"""Longest side of a thumbnail in pixels."""

BUDGET = 5_000_000
"""What the thumbnails of a page may weigh together, as base64 text, in bytes."""

# A quality is tried on every so-many-th picture before it is used on all.
_SAMPLED = 8
_QUALITIES = (90, 82, 70, 55, 40, 25)


class Thumbnails:
    """The thumbnails of a page, each once, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._kept: list[Image] = []
        self._places: dict[tuple[tuple[int, int], bytes], int] = {}

    def place(self, picture: Path) -> int | None:
        """Return the place of a picture's thumbnail; None when the file is not there or no picture."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(picture) as opened:
                small = opened.convert("RGB")
                small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError):
            return None
        key = (small.size, small.tobytes())
        if key not in self._places:
            self._places[key] = len(self._kept)
            self._kept.append(small)
        return self._places[key]

    def encoded(self, budget: int = BUDGET) -> list[str]:
        """Return the thumbnails as base64 of WebP files, within `budget` where the lowest quality allows it."""
        texts: list[str] = []
        sample = self._kept[::_SAMPLED]
        for quality in _QUALITIES:
            share = len(sample) / max(1, len(self._kept))
            if quality != _QUALITIES[-1] and sum(len(_webp(one, quality)) for one in sample) > share * budget:
                continue
            texts = [_webp(picture, quality) for picture in self._kept]
            if sum(map(len, texts)) <= budget:
                break
        return texts


def _webp(picture: Image, quality: int) -> str:
    written = io.BytesIO()
    picture.save(written, "WEBP", quality=quality, method=4)
    return base64.b64encode(written.getvalue()).decode("ascii")
