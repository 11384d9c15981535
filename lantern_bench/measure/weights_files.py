"""Finding the weights of a judge on this machine, and naming them in results.

A judge (feature extractor, CLIP model) is part of the figure it gives, so its label carries the first digits of its
weights' hash. Nothing here, and nothing that uses it, ever goes to the network: what is not on the disk is refused
with a message that says where it was looked for.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.files import remembered_sha256
from lantern_bench.models.weights import WEIGHTS_FOLDER_VARIABLE

__all__ = ["WEIGHTS_FOLDER_VARIABLE", "check_plain_weights", "find_weights", "fingerprint"]

_HASH_DIGITS = 8


def find_weights(judge: str, file_name: str, given: Path | None, advice: str) -> Path:
    """The weights file of `judge`, from the first place that has it.

    The places: the path that was given; the folder named by the environment variable `LANTERN_BENCH_WEIGHTS`; the
    cache of torch.hub. `file_name` is the name under which the weights are published. Raises `UserError` for a given
    path that is no file and `RefusedError` when no place has the file; `advice` is shown with both.
    """
    if given is not None:
        if not given.is_file():
            raise UserError(f"the weights given for {judge} are not a file: {given}", advice)
        return given
    for folder in _folders():
        if (folder / file_name).is_file():
            return folder / file_name
    raise RefusedError(
        f"the weights of {judge} are not on this machine: {file_name} is neither in the folder named by "
        f"{WEIGHTS_FOLDER_VARIABLE} nor in the cache of torch.hub (nothing is downloaded while measuring)",
        advice,
    )


def _folders() -> list[Path]:
    import torch

    named = os.environ.get(WEIGHTS_FOLDER_VARIABLE)
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    return [Path(named), cache] if named else [cache]


def check_plain_weights(path: Path, with_key: str | None = None) -> None:
    """Refuse a checkpoint that is anything but tensors in a dictionary (`UserError`): a pickle may carry code.

    `with_key`, when given, is a name the dictionary must have to be of the right model.
    """
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as problem:
        raise UserError(
            f"{path} cannot be read as plain weights",
            "a file of tensors saved with torch.save is needed; pickles with code and scripted models are not loaded",
        ) from problem
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors")
    if with_key is not None and with_key not in loaded:
        raise UserError(f"{path} holds the weights of another model: it has no {with_key}")


def fingerprint(path: Path) -> str:
    """The first eight hex digits of the file's SHA-256."""
    return remembered_sha256(path)[:_HASH_DIGITS]
