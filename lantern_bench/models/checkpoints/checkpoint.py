"""Checkpoints on disk as mappings from names to tensors.

Files are memory-mapped where their format allows. A pickle is read by torch's weights-only unpickler.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import one_line

# What kind of checkpoint a file is, by the names in it: the first pattern that matches counts.
_KINDS: tuple[tuple[str, str], ...] = (
    (r"(model\.)?generation_head\.", "a Janus model in the layout of transformers"),
    (
        r"(gen_head|gen_embed)\.",
        "a Janus model in the layout of its authors, which transformers does not read",
    ),
    (r"(model\.)?text_model\.", "an Emu3 model in the layout of transformers"),
    (r"model\.vqmodel\.|\.self_attn\.q_norm\.", "a Chameleon model (Anole, Lumina-mGPT)"),
    (r"model\.cls_embedding\.", "LlamaGen, text-conditional, in the layout of the HF conversion"),
    (r"cls_embedding\.uncond_embedding$", "LlamaGen, text-conditional, in the official layout"),
    (r"cls_embedding\.embedding_table\.", "LlamaGen, class-conditional, in the official layout"),
    (r"(encoder\.down|decoder\.up)\.\d+\.block\.", "a VQGAN, such as Chameleon's vqgan.ckpt"),
    (r"quantize\.embedding\.", "a VQ tokenizer"),
    (r"(encoder|shared)\.(block|weight)\b", "a T5 text encoder"),
    (r"fc\.weight$", "an EAGLE drafter"),
    (r"model\.layers\.\d+\.self_attn\.", "a Llama language model"),
)
# Keys under which training frameworks save a state dict: DDP scripts, DeepSpeed, Lightning; FSDP uses none.
_CONTAINERS = ("model", "module", "state_dict")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module)\.")
_IN_FOLDER = [
    f"{name}{index}"
    for name in ("model.safetensors", "pytorch_model.bin")
    for index in ("", ".index.json")
]
_ADVICE = "Download or copy it again."


def what_is(names: Iterable[str]) -> str | None:
    """Say what kind of checkpoint has these names; None for an unknown kind."""
    text = "\n".join(names)
    return next(
        (kind for pattern, kind in _KINDS if re.search(rf"(^|\.){pattern}", text, re.MULTILINE)),
        None,
    )


class Checkpoint(dict[str, Tensor]):
    """The tensors of one or several files, by name without the prefixes of wrappers; a mapped one is read when used."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        paths: Iterable[Path],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(tensors)
        self.path = path
        self.paths = tuple(paths)  # its files, sorted
        self.settings = settings  # the `args` that an official training script saved

    def renamed(self, rename: Callable[[str], str | None]) -> Checkpoint:
        """The same tensors by other names; those whose new name is None are left out."""
        tensors = {
            new: tensor for name, tensor in self.items() if (new := rename(name)) is not None
        }
        return Checkpoint(path=self.path, tensors=tensors, paths=self.paths, settings=self.settings)

    def inside(self, prefix: str) -> Checkpoint:
        """The tensors whose names begin with a prefix, by their names without it."""
        return self.renamed(
            lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self[name].shape)

    def require(self, ending: str, wanted: str) -> None:
        """Raise `UserError`, in one line, unless the name of a tensor ends like this; `wanted` says what it shows."""
        if not any(name.endswith(ending) for name in self):
            raise self.is_not(wanted, f"it has no {ending}")

    def is_not(self, wanted: str, reason: str) -> UserError:
        """Return the error for a checkpoint of another kind; `reason` where its kind is not known."""
        kind = what_is(self)
        text = f"it is {kind}" if kind is not None and kind not in wanted else reason
        return UserError(
            f"{self.path}: is not {wanted}: {text}", "Give the checkpoint of this model."
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: a `.safetensors` file, a torch file, or a directory with one of them, sharded or not.

    Raises `UserError` for a file that is missing, truncated, no checkpoint, or a pickle with code.
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
            args = loaded.get("args")
            args = vars(args) if isinstance(args, argparse.Namespace) else args
            settings = args if isinstance(args, Mapping) else settings
    # Parameters are saved as such by `dict(model.named_parameters())`.
    clean = {_WRAPPERS.sub("", name): tensor.detach() for name, tensor in tensors.items()}
    if clean and all(name.startswith("module.") for name in clean):
        clean = {name.removeprefix("module."): tensor for name, tensor in clean.items()}
    if len(clean) < len(tensors):
        raise UserError(f"{path}: holds the same weights under several prefixes")
    return Checkpoint(path=path, tensors=clean, paths=files, settings=settings)


def _files_of(path: Path) -> list[Path]:
    """The files of a checkpoint: itself, the one in a directory, or the shards that an index names."""
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
    try:
        shards = sorted(
            map(str, set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as an index of weights", _ADVICE) from error
    # By name alone: the files of a download cache are links to another folder.
    if outside := [
        name for name in shards if os.path.isabs(name) or os.path.normpath(name).startswith("..")
    ]:
        raise UserError(f"{path}: names {outside[0]}, which is outside {path.parent}", _ADVICE)
    missing = [name for name in shards if not (path.parent / name).is_file()]
    if missing:
        counts = f"{len(missing)} of its {len(shards)} files are missing"
        raise UserError(f"{path.parent}: {counts}: {', '.join(missing)}", _ADVICE)
    return [path.parent / name for name in shards]


def _head(path: Path) -> bytes:
    """The first bytes of a file; raises `UserError` for one that is certainly no checkpoint."""
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


def _unpickle(path: Path, zipped: bool) -> Any:
    """The content of a file of `torch.save`; the legacy format cannot be memory-mapped."""
    if zipped and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is truncated: its end is missing", _ADVICE)
    try:
        # Official training scripts save their arguments beside the weights, in a namespace.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            # The errors below say more than torch's warnings.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=zipped or None, weights_only=True)
    except pickle.UnpicklingError as error:
        problem = f"cannot be read as a checkpoint ({one_line(error, 120)})"
        advice = _ADVICE
        # Torch's message names the function that the pickle would call.
        if code := re.search(
            r"GLOBAL `?([A-Za-z_][\w.]*)|(?:global:?|class) `?(\w+\.[\w.]+)", str(error)
        ):
            problem = f"is a pickle with code in it ({code[1] or code[2]}); such files are neither run nor loaded"
            advice = "Save the state dict alone, or convert it to safetensors."
        raise UserError(f"{path}: {problem}", advice) from error
    except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, OSError) as error:
        raise UserError(
            f"{path}: is truncated or no checkpoint ({one_line(error, 120)})", _ADVICE
        ) from error


def _state_dict(path: Path, loaded: Any) -> Mapping[str, Tensor]:
    """The state dict in the content of a file, in as many containers as there are; else raises `UserError`."""
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
    """Read a user's table of nearest codes, int32 [V, k]; raises ValueError for one that is malformed."""
    try:
        read: Any = (
            load_arrays(path)
            if path.suffix == ".safetensors"
            else np.load(path, allow_pickle=False)
        )
        table = read if isinstance(read, np.ndarray) else read["nearest"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, SafetensorError) as error:
        raise ValueError(
            f"{path.name}: cannot be read as .npy, or as nearest in .npz or .safetensors"
        ) from error
    if table.ndim != 2 or table.dtype.kind not in "iu" or len(table) != codes:
        raise ValueError(
            f"{path.name}: must hold whole numbers [{codes}, k], not {table.dtype} {list(table.shape)}"
        )
    if not ((table >= 0) & (table < codes)).all() or (table == np.arange(codes)[:, None]).any():
        raise ValueError(f"{path.name}: each row must name other codes, from 0 to {codes - 1}")
    return torch.from_numpy(table.astype(np.int32))
