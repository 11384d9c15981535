"""Text for messages: lists, suggested spellings, errors in one line; and lists that users type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def listed(names: Sequence[str]) -> str:
    """Join names for a sentence.

    >>> listed(["fid", "kid", "recall"])
    'fid, kid and recall'
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def split_words(values: Iterable[str]) -> list[str]:
    """Return the words of a flag that may be repeated and may list several words with commas.

    >>> split_words(["ar,scd", "lantern"])
    ['ar', 'scd', 'lantern']
    """
    words = ",".join(values).split(",")
    return list(filter(None, map(str.strip, words)))


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar of the words, or an empty string."""
    by_spelling = {allowed.replace("-", "_"): allowed for allowed in words}
    typed = str(word).lower().replace("-", "_")
    close = difflib.get_close_matches(typed, list(by_spelling), n=1, cutoff=0.6)
    return f"; did you mean {by_spelling[close[0]]}?" if close else ""


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's type and the first `most` characters of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}"


def duration(seconds: float) -> str:
    """Return a time as text: `42 s`, `4 min 12 s`, `1 h 03 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
