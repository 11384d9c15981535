"""What a message adds when a word is nearly a known one.

By itself, since commands that have nothing to do with experiments want it as well and must start fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for a known word that is close, else an empty text."""
    close = difflib.get_close_matches(str(word).lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
