"""Thumbnails of pictures, small enough for a page with thousands of them."""

from __future__ import annotations

import base64
import io
from pathlib import Path

SIDE = 128
"""Longest side of a thumbnail in pixels."""

BUDGET = 5_000_000
"""Limit for all thumbnails of a page together, as base64 text, in bytes."""


class Thumbnails:
    """The WebP thumbnails of a page, each once, in order of first use."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[int, int], bytes], int] = {}

    def place(self, picture: Path) -> int | None:
        """Return the place of a picture's thumbnail; None when the file is missing or no picture."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(picture) as opened:
                small = opened.convert("RGB")
                small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError):
            return None
        return self._places.setdefault((small.size, small.tobytes()), len(self._places))

    def encoded(self, budget: int = BUDGET) -> list[str]:
        """Return the thumbnails as base64 of WebP files, within `budget` where the lowest quality allows it."""
        from PIL import Image

        def encode(size: tuple[int, int], pixels: bytes, quality: int) -> str:
            written = io.BytesIO()
            Image.frombytes("RGB", size, pixels).save(written, "WEBP", quality=quality, method=4)
            return base64.b64encode(written.getvalue()).decode("ascii")

        texts: list[str] = []
        for quality in (90, 82, 70, 55, 40, 25):
            texts = [encode(*picture, quality) for picture in self._places]
            if sum(map(len, texts)) <= budget:
                break
        return texts
