"""The errors a person may meet, each with the exit code the shell gets.

Everything that goes wrong for a reason outside this program is raised as one of these, with a message that says
what was wrong, what is allowed, and what to type. Anything else that escapes is our own fault and exits with 1.
The codes are listed in the README; they are part of the interface.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LanternError(Exception):
    """Base of all errors that are shown without a traceback.

    `message` says what is wrong; `advice`, when given, says what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


class UserError(LanternError):
    """What was typed or written is wrong: a flag, an experiment file, a caption, a user's file."""

    exit_code = 2


class RefusedError(LanternError):
    """The request is right but cannot be met now: locked run, resume mismatch, weights not found."""

    exit_code = 3


class RecordsFailedError(LanternError):
    """The run finished, but some images failed."""

    exit_code = 4


class CheckFailedError(LanternError):
    """A check that was asked for did not hold."""

    exit_code = 5


# ---- What a message adds when a word is nearly a known one


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for a known word that is close, else an empty text."""
    close = difflib.get_close_matches(str(word).lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
