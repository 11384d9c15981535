"""Notes and progress events, and the callback that receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

# a description of the work, and the share that is done
OnProgress: TypeAlias = Callable[[str, float], None]


def no_progress(_description: str, _done: float) -> None:
    """Ignore progress: the default callback."""


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


Emit: TypeAlias = Callable[[Any], None]
"""Receives the events of a run: notes, shares, and what `sweeps/events.py` adds to them."""
