"""Checkpoints on disk as mappings from names to tensors.

Files are memory-mapped if their format allows it. A pickle is read by torch's weights-only
unpickler.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.models.checkpoints.hub import shards_of
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import one_line

# The kinds of checkpoint, and the pattern of names that each has. The first match counts.
_KINDS: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# Keys under which training frameworks save a state dict: DDP scripts, DeepSpeed, Lightning. FSDP
# uses none.
_CONTAINERS = ("model", "module", "state_dict")
# Prefixes of DDP, of torch.compile and of FSDP.
_WRAPPERS = re.compile(r"^module\.|^_orig_mod\.module\.|(_orig_mod|_fsdp_wrapped_module)\.")
_IN_FOLDER = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
]
_ADVICE = "Download or copy it again."


def what_is(names: Iterable[str]) -> str | None:
    """Return what kind of checkpoint has these names. None for an unknown kind."""
    text = "\n".join(names)
    for kind, pattern in _KINDS.items():
        if re.search(rf"(^|\.){pattern}", text, re.MULTILINE):
            return kind
    return None


class Checkpoint(dict[str, Tensor]):
    """The tensors of one or several files, by name without the prefixes of wrappers.

    A memory-mapped tensor is read when it is used.

    Args:
        tensors: The tensors by name.
        path: The path as given.
        paths: The files, sorted.
        settings: The `args` that an official training script saved.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        path: Path,
        paths: Sequence[Path],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(tensors)
        self.path = path
        self.paths = tuple(paths)
        self.settings = settings

    def require(self, ending: str, wanted: str) -> None:
        """Raise `UserError` unless the name of a tensor has this ending.

        Args:
            ending: The ending, which only checkpoints of the wanted kind have.
            wanted: The kind, in words.
        """
        if not any(name.endswith(ending) for name in self):
            raise self.is_not(wanted, f"it has no {ending}")

    def is_not(self, wanted: str, reason: str) -> UserError:
        """Return the error for a checkpoint of another kind.

        Args:
            wanted: The kind that was wanted, in words.
            reason: What is wrong, if the kind of this checkpoint is unknown.
        """
        kind = what_is(self)
        if kind is not None and kind not in wanted:
            reason = f"it is {kind}"
        return UserError(
            f"{self.path}: is not {wanted}: {reason}", "Give the checkpoint of this model."
        )


def open_checkpoint(path: Path, rename: Callable[[str], str] = str) -> Checkpoint:
    """Open a checkpoint.

    Args:
        path: A `.safetensors` file, a torch file, or a folder with one of them, sharded or not.
        rename: Turns a name in the file, without the prefixes of wrappers, into the wanted one.

    Raises:
        UserError: A file is missing, truncated, no checkpoint, or a pickle with code.
    """
    tensors: dict[str, Tensor] = {}
    settings: Mapping[str, Any] = {}
    files = _files_of(path)
    for file in files:
        head = _head(file)
        if file.suffix == ".safetensors" or head[8:9] == b"{":
            tensors |= _read_safetensors(file)
        else:
            loaded = _unpickle(file, zipped=head.startswith(b"PK"))
            tensors |= _state_dict(file, loaded)
            if isinstance(loaded.get("args"), argparse.Namespace):
                settings = vars(loaded["args"])
    # `dict(model.named_parameters())` holds parameters, which need gradients.
    clean = {rename(_WRAPPERS.sub("", name)): tensor.detach() for name, tensor in tensors.items()}
    if len(clean) < len(tensors):
        raise UserError(f"{path}: holds the same weights under several prefixes")
    return Checkpoint(clean, path=path, paths=files, settings=settings)


def _files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: itself, the one in a folder, or the shards of an index."""
    if path.is_dir():
        names = [name for name in _IN_FOLDER if (path / name).is_file()]
        if not names:
            raise UserError(
                f"{path}: holds no weights", f"One of {', '.join(_IN_FOLDER)} is needed."
            )
        path /= names[0]
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix != ".json":
        return [path]
    shards = shards_of(path)
    for name in shards:
        # Only the name counts, because the files of a download cache are links to another folder.
        if os.path.isabs(name) or os.path.normpath(name).startswith(".."):
            raise UserError(f"{path}: names {name}, which is outside {path.parent}", _ADVICE)
    missing = [name for name in shards if not (path.parent / name).is_file()]
    if missing:
        raise UserError(
            f"{path.parent}: {len(missing)} of its {len(shards)} files are missing: "
            f"{', '.join(missing)}",
            _ADVICE,
        )
    return [path.parent / name for name in shards]


def _head(path: Path) -> bytes:
    """Return the first bytes of a file. Raises `UserError` if it is certainly no checkpoint."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise UserError(f"{path}: is empty", _ADVICE)
    if head.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path}: is a Git LFS pointer, not the weights themselves",
            "Fetch them with `git lfs pull`.",
        )
    return head


def _read_safetensors(path: Path) -> Mapping[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{path}: is truncated or no safetensors file ({one_line(error, 120)})", _ADVICE
        ) from error


# torch's message names the function that a pickle would call.
_CALLED = re.compile(r"GLOBAL `?([A-Za-z_][\w.]*)|(?:global:?|class) `?(\w+\.[\w.]+)")


def _unpickle(path: Path, *, zipped: bool) -> Any:
    """Return the content of a file of `torch.save`. The legacy format cannot be memory-mapped."""
    if zipped and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is truncated: its end is missing", _ADVICE)
    try:
        # Official training scripts save their arguments beside the weights, in a namespace.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            # The errors below say more than torch's warnings.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=zipped or None, weights_only=True)
    except pickle.UnpicklingError as error:
        called = _CALLED.search(str(error))
        if called is None:
            raise UserError(
                f"{path}: cannot be read as a checkpoint ({one_line(error, 120)})", _ADVICE
            ) from error
        raise UserError(
            f"{path}: is a pickle with code in it ({called[1] or called[2]}); such files are "
            "neither run nor loaded",
            "Save the state dict alone, or convert it to safetensors.",
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, OSError) as error:
        raise UserError(
            f"{path}: is truncated or no checkpoint ({one_line(error, 120)})", _ADVICE
        ) from error


def _state_dict(path: Path, loaded: Any) -> Mapping[str, Tensor]:
    """Return the state dict in the content of a file, whatever containers are around it."""
    if not isinstance(loaded, Mapping) or not loaded:
        content = "nothing" if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
        raise UserError(f"{path}: holds {content}, not tensors by name")
    for name in _CONTAINERS:
        if isinstance(loaded.get(name), Mapping):
            return _state_dict(path, loaded[name])
    wrong = [str(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if wrong:
        raise UserError(f"{path}: is no state dict: not a tensor: {', '.join(wrong[:5])}")
    return loaded


def read_own_table(path: Path, codes: int) -> Tensor:
    """Read a user's table of nearest codes.

    Args:
        path: A .npy file, or `nearest` in a .npz or .safetensors file.
        codes: Number of codes V.

    Returns:
        The table int32 [V, k].

    Raises:
        UserError: The file is malformed.
    """
    try:
        read: Any = (
            load_arrays(path)
            if path.suffix == ".safetensors"
            else np.load(path, allow_pickle=False)
        )
        table = read if isinstance(read, np.ndarray) else read["nearest"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot be read as .npy, or as nearest in .npz or .safetensors"
        ) from error
    if table.ndim != 2 or table.dtype.kind not in "iu" or len(table) != codes:
        raise UserError(
            f"{path}: must hold whole numbers [{codes}, k], not {table.dtype} {list(table.shape)}"
        )
    if not ((table >= 0) & (table < codes)).all() or (table == np.arange(codes)[:, None]).any():
        raise UserError(f"{path}: each row must name other codes, from 0 to {codes - 1}")
    return torch.from_numpy(table.astype(np.int32))
