"""What a sweep reports while it runs: every event goes to one callback, `emit(event)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.config.plan import ImageTask
from lantern_bench.utils.progress import Note, Share


class Started(NamedTuple):
    """Decoding starts."""

    finished: int  # images that the run directory already has
    to_do: Mapping[str, int]  # number of images to decode, by cell id


class ImageDone(NamedTuple):
    """An image has its record, with status `ok` or `failed`."""

    task: ImageTask
    record: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the image could not be decoded."""
        return bool(self.record["status"] != "ok")


Event: TypeAlias = Note | Share | Started | ImageDone
