"""The errors shown to users, each with its exit code; any other that escapes is our own fault."""

from __future__ import annotations


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
