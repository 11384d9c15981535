"""Pictures small enough for a page that holds hundreds of them: WebP, at most 128 pixels a side.

A picture is never enlarged; equal pictures of a run are kept once, as greedy modes make the same one. The files
themselves stay where they are and are linked.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

__all__ = ["SIDE", "Thumbnails"]

SIDE = 128
"""Longest side of a thumbnail in pixels."""

_QUALITY = 82
_SMALL_QUALITY = 90
_SMALL = 64


class Thumbnails:
    """The thumbnails of a page, each once, in the order in which they were asked for; base64 of WebP files."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, picture: Path) -> int | None:
        """Return the place of a picture's thumbnail in `kept`; None when the file is not there or no picture."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(picture) as opened:
                small = opened.convert("RGB")
                small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError):
            return None
        written = io.BytesIO()
        # Where every pixel is one of few, losses show.
        quality = _SMALL_QUALITY if max(small.size) <= _SMALL else _QUALITY
        small.save(written, "WEBP", quality=quality, method=6)
        text = base64.b64encode(written.getvalue()).decode("ascii")
        if text not in self._places:
            self._places[text] = len(self.kept)
            self.kept.append(text)
        return self._places[text]
