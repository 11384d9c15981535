"""How far something long is: what whoever does the work calls, and what hears nothing.

Here, at the bottom, because work is done in every layer; what is drawn of it is `console/progress.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["OnProgress", "unheard"]

OnProgress: TypeAlias = Callable[[str, float], None]
"""What is being done, and the share of it that is done."""


def unheard(_what: str, _done: float) -> None:
    """Progress that nobody listens to."""
