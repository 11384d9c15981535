"""The errors that users see, each with its exit code."""

from __future__ import annotations

from collections.abc import Sequence


class LanternError(Exception):
    """Base class of errors that say what is wrong and what to do about it.

    Any other exception that reaches the command line is a bug of this package.
    """

    exit_code = 1

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        if advice is not None:
            self.add_note(advice)  # a traceback shows it


class UserError(LanternError):
    """A usage error, such as a wrong flag, experiment file, caption or other input file."""

    exit_code = 2


class RefusedError(LanternError):
    """A valid request that cannot be served now.

    Examples are a locked run, a run with other settings, and missing weights.
    """

    exit_code = 3


class RecordsFailedError(LanternError):
    """Some images failed, or the process that decoded them ended."""

    exit_code = 4


def joined(errors: Sequence[LanternError]) -> LanternError:
    """Return one error that lists several. It is a usage error if one of them is."""
    if len(errors) == 1:
        return errors[0]
    kind = UserError if any(isinstance(error, UserError) for error in errors) else RefusedError
    messages = "".join(f"\n  {error.message}" for error in errors)
    advice = dict.fromkeys(error.advice for error in errors if error.advice)
    return kind(f"{len(errors)} problems:{messages}", "\n".join(advice))


class LogitsError(RecordsFailedError, RuntimeError):
    """A model returned NaN or infinite logits, so the image cannot be decoded."""


class CheckFailedError(LanternError):
    """A requested check failed."""

    exit_code = 5
