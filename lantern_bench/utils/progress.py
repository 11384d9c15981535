"""Notes and progress events, and the callback that receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias


class Note(NamedTuple):
    """A text for the user."""

    text: str
    advice: str | None = None  # what the user can do
    level: Literal["detail", "info", "warning"] = "info"  # details are shown with `--verbose` only


class ProgressEvent(NamedTuple):
    """How much of a long task is done; decoding reports `ImageDone` instead."""

    label: str
    done: float
    total: float = 1  # 1 where `done` is a fraction


Emit: TypeAlias = Callable[[Any], None]
"""Receives every event of a run: `Note`, `ProgressEvent`, and the events of `sweeps/events.py`."""


def ignore_events(_event: object) -> None:
    """Ignore an event: the default of functions that take an `Emit`."""
