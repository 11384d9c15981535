"""What a sweep reports while it runs: every event goes to one callback, `emit(event)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from lantern_bench.config.plan import ImageTask


class Note(NamedTuple):
    """A text for the user."""

    text: str
    advice: str | None = None  # what the user can do
    level: Literal["detail", "info", "warning"] = "info"  # a detail is shown on request only (`-v`)


class Share(NamedTuple):
    """How much is done of a long task other than decoding."""

    label: str
    done: int
    total: int


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
Emit: TypeAlias = Callable[[Event], None]
