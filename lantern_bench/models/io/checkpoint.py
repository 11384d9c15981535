"""Checkpoints on disk as mappings of names to tensors: opened, not read; whatever is wrong with a file is one line.

Files are memory-mapped where their format allows, and what has been touched is given back as one goes on, so that
filling a model needs little more memory than the model. A pickle is read by torch's weights-only unpickler, which runs
no code. Which names a model wants is not known here: that is `filling`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern_bench.errors import UserError

# ---- What kind of checkpoint a file is, told from the names in it, for errors that say what was found


_TELLS: tuple[tuple[str, str], ...] = (
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


def what_is(names: Iterable[str]) -> str | None:
    """Say what a checkpoint with these names is; None for one of no known kind."""
    known = list(names)
    for pattern, kind in _TELLS:
        if any(re.match(pattern, name) or re.search(rf"(^|\.){pattern}", name) for name in known):
            return kind
    return None


# ----

# The names that training frameworks put around a state dict: DDP scripts, DeepSpeed, Lightning; FSDP puts none.
_CONTAINERS = ("model", "module", "state_dict")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module)\.")
_IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# A mapping is closed and opened again when this much of it has been touched: touched pages count as memory.
_WINDOW = 16 << 20
_ADVICE = "Download or copy it again."


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of one or several files, by name without the prefixes of wrappers.

    A tensor is read when it is asked for. `settings` is what the file says of its training, `{}` where it says nothing.
    """

    def __init__(self, path: Path, files: Mapping[str, _File], names: Mapping[str, str]) -> None:
        self.path = path
        self._files, self._names = files, names

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files it consists of, in order."""
        return tuple(dict.fromkeys(sorted(file.path for file in self._files.values())))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The `args` of an official training run, where the file has them."""
        return next((file.settings for file in self._files.values() if file.settings), {})

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return self._files[name].shape(self._names[name])

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].tensor(self._names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the inherited one would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _File(Protocol):
    path: Path
    settings: Mapping[str, Any]

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: a `.safetensors` file, a torch file, or a folder with one of them, in one piece or sharded.

    Raises `UserError` for a file that is missing, cut off, no checkpoint, or a pickle with code.
    """
    parts = [_open(file) for file in _files_of(path)]
    files: dict[str, _File] = {}
    for part in parts:
        for name in part.names():
            if name in files:
                raise UserError(f"{path}: {name} stands in two of its files", _ADVICE)
            files[name] = part
    clean = {name: _WRAPPERS.sub("", name) for name in files}
    if clean and all(name.startswith("module.") for name in clean.values()):
        clean = {name: short.removeprefix("module.") for name, short in clean.items()}
    if len(set(clean.values())) < len(clean):
        raise UserError(f"{path}: has the same weights under several prefixes")
    return Checkpoint(path, {clean[name]: file for name, file in files.items()}, {v: k for k, v in clean.items()})


def _files_of(path: Path) -> list[Path]:
    """The files a checkpoint consists of: itself, the one in a folder, or the shards that an index names."""
    if path.is_dir():
        found = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: holds no weights", f"One of {', '.join(_IN_FOLDER)} is needed.")
        path = found
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix != ".json":
        return [path]
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as an index of weights", _ADVICE) from error
    missing = [name for name in shards if not (path.parent / name).is_file()]
    if missing:
        raise UserError(f"{path.parent}: of its {len(shards)} files are missing {', '.join(missing)}", _ADVICE)
    return [path.parent / name for name in shards]


def _open(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise UserError(f"{path}: is empty", _ADVICE)
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path}: is a Git LFS pointer, not the weights themselves", "Fetch them with `git lfs pull`.")
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return _Safetensors(path)
    return _Pickled(path, zipped=head.startswith(b"PK"))


class _Safetensors:
    """A safetensors file; each read maps it anew, so that nothing stays in memory but what was asked for."""

    def __init__(self, path: Path) -> None:
        self.settings: Mapping[str, Any] = {}
        self.path = path
        try:
            with safe_open(path, "pt") as file:
                self._shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: is cut off or no safetensors file ({_short(error)})", _ADVICE) from error

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.path, "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found


class _Pickled:
    """A file of `torch.save`: mapped where it is a zip file; the older kind has to be read whole."""

    def __init__(self, path: Path, zipped: bool) -> None:
        self.path, self._zipped = path, zipped
        self._touched = 0
        loaded = self._load()
        self.settings: Mapping[str, Any] = _training_settings(loaded)
        self._state: Mapping[str, Tensor] | None = _state_dict(path, loaded)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        if self._zipped and self._touched > _WINDOW:
            self._state, self._touched = None, 0
        if self._state is None:
            self._state = _state_dict(self.path, self._load())
        found = self._state[name]
        self._touched += found.nbytes
        return found

    def _load(self) -> Any:
        if self._zipped and not zipfile.is_zipfile(self.path):
            raise UserError(f"{self.path}: is cut off: its end is missing", _ADVICE)
        try:
            # Official training scripts save their arguments beside the weights: a plain namespace of plain values.
            with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
                # Torch remarks on how a pickle was written; what is wrong with it is said below.
                warnings.simplefilter("ignore")
                return torch.load(self.path, map_location="cpu", mmap=self._zipped or None, weights_only=True)
        except pickle.UnpicklingError as error:
            code = _code_in(self.path, str(error))
            if code is None:
                raise UserError(f"{self.path}: cannot be read as a checkpoint ({_short(error)})", _ADVICE) from error
            raise UserError(
                f"{self.path}: is a pickle with code in it ({code}), which is not run and not loaded",
                "Only files of tensors are: save the state dict alone, or convert it to safetensors.",
            ) from error
        except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, OSError) as error:
            raise UserError(f"{self.path}: is cut off or no checkpoint ({_short(error)})", _ADVICE) from error


def _state_dict(path: Path, loaded: Any) -> Mapping[str, Tensor]:
    """The state dict inside what a file holds; raises `UserError` where there is none."""
    # One in another, where a script has saved what another one had.
    while (inner := _inside(loaded)) is not None:
        loaded = inner
    if not isinstance(loaded, Mapping) or not loaded:
        what = "nothing" if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
        raise UserError(f"{path}: holds {what}, not tensors by name")
    wrong = [str(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if wrong:
        raise UserError(
            f"{path}: is no state dict: {', '.join(wrong[:5])} {'are' if len(wrong) > 1 else 'is'} no tensor"
        )
    return loaded


def _inside(loaded: Any) -> Mapping[str, Any] | None:
    """What stands under the first known name of a container; None where there is none."""
    if not isinstance(loaded, Mapping):
        return None
    return next((loaded[name] for name in _CONTAINERS if isinstance(loaded.get(name), Mapping)), None)


def _training_settings(loaded: Any) -> Mapping[str, Any]:
    args = loaded.get("args") if isinstance(loaded, Mapping) else None
    return vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {}


def _short(error: BaseException) -> str:
    """The first sentence of an error, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.:]) ", text, maxsplit=1)[0][:120].rstrip(".:")


def _code_in(path: Path, said: str) -> str | None:
    """What a pickle would have called: as torch names it, or else the first name in it; nothing is run for that."""
    # Functions that are built in are named without their module.
    named = re.search(r"GLOBAL `?([A-Za-z_][\w.]*)", said) or re.search(r"(?:global:?|class) `?(\w+\.[\w.]+)", said)
    if named is not None:
        return named[1]
    words: list[str] = []
    try:
        with path.open("rb") as file:
            for code, argument, _at in pickletools.genops(file):
                if code.name == "GLOBAL":
                    return str(argument).replace(" ", ".")
                if code.name == "STACK_GLOBAL":
                    return ".".join(words[-2:])
                if isinstance(argument, str):
                    words.append(argument)
    except (ValueError, OSError):
        # No pickle at all.
        return None
    return None
