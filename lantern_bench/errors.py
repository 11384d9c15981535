"""The errors shown to users, each with its exit code; any other that escapes is our own fault."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LanternError(Exception):
    """Base of all errors that say what is wrong, and what to do about it."""

    exit_code = 1

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        if advice is not None:
            self.add_note(advice)  # a traceback shows it


class UserError(LanternError):
    """Usage error: a wrong flag, experiment file, caption or other input file."""

    exit_code = 2


class RefusedError(LanternError):
    """The request is valid, but cannot be served now (locked run, resume mismatch, missing weights)."""

    exit_code = 3


class RecordsFailedError(LanternError):
    """Some images failed, or the process that decoded them ended."""

    exit_code = 4


class LogitsError(RecordsFailedError, RuntimeError):
    """A model gave NaN or infinite logits; the image that they belong to is not made."""


class CheckFailedError(LanternError):
    """A requested check failed."""

    exit_code = 5


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
