"""Words of sentences that users read."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them.

    >>> listed(["fid", "kid", "recall"])
    'fid, kid and recall'
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
