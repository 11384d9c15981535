"""Words of sentences that users read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them.

    >>> listed(["fid", "kid", "recall"])
    'fid, kid and recall'
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Return `; did you mean X?` if one of the words is similar, else an empty string."""
    by_spelling = {allowed.replace("-", "_"): allowed for allowed in words}
    close = difflib.get_close_matches(
        str(word).lower().replace("-", "_"), list(by_spelling), n=1, cutoff=0.6
    )
    return f"; did you mean {by_spelling[close[0]]}?" if close else ""


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's type and the first `most` characters of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"
