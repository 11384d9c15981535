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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.models.checkpoints.hub import weight_map
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import WEIGHT_FILES, kind_of, weights_in
from lantern_bench.utils.hashes import hash_of
from lantern_bench.utils.text import one_line

# The kinds of checkpoint, and the pattern of names that each has. The first match counts.
_KINDS: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# Entries under which training frameworks save a state dict: DDP scripts, DeepSpeed, Lightning. FSDP
# uses none.
_CONTAINERS = ("model", "module", "state_dict")
# Names of entries without weights of the model: the state of optimizers, and other networks.
_NO_WEIGHTS = re.compile(r"(?i)optim|sched|scaler|rng|loss|hyper|callback|config|discrim|critic")
# Names of weights that are averaged over a training.
# Pooling layers such as `avgpool` are not averages.
_AVERAGED = re.compile(
    r"(?i:(?<![a-z])ema|(averag|avg)(?!e?_?pool)|shadow|(?<![a-z])swa|polyak)|EMA"
)
_IS_AVERAGED = "the weights are averaged over a training"
_DEEPEST = 3  # entries inside entries
_BESIDE = (Mapping, int, float, str, bytes, argparse.Namespace, NoneType)  # types of other entries
# Prefixes of DDP, of torch.compile and of FSDP.
_WRAPPERS = re.compile(r"^module\.|^_orig_mod\.module\.|(_orig_mod|_fsdp_wrapped_module)\.")
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_ADVICE = "Download or copy it again."
_GIVE_OTHER = "Give the checkpoint of this model."


def is_mostly_zero(name: str, tensor: Tensor) -> bool:
    """Return whether a weight has no number but 0, or one in ten of its rows has none.

    Biases and means of trained models may be 0, and so may tables that are computed anew.

    Args:
        name: Its name.
        tensor: The weight.
    """
    may_be_zero = name.endswith(("bias", "running_mean", "freqs_cis", "_cache"))
    if may_be_zero or not tensor.is_floating_point() or not tensor.numel():
        return False
    if tensor.dim() < 2:
        return not tensor.any()
    empty = ~tensor.flatten(1).any(dim=1)
    return bool(empty.sum() * 10 > len(empty))


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
        remarks: What the user should know of the way in which the files were read.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        path: Path,
        paths: Sequence[Path],
        settings: Mapping[str, Any],
        remarks: Iterable[str] = (),
    ) -> None:
        super().__init__(tensors)
        self.path = path
        self.paths = tuple(paths)
        self.settings = settings
        self.remarks = list(remarks)

    def check_hash(self, stated: str | None) -> None:
        """Raise `UserError` if the model file states another SHA-256 than `models FILE` prints."""
        if stated is None:
            return
        found = hash_of(self.paths)
        if found != stated.lower():
            raise UserError(
                f"{self.path}: has the SHA-256 {found}, and the model file states {stated}",
                "Download the file again, or correct sha256.",
            )

    def note_zeros(self, tensors: Mapping[str, Tensor]) -> None:
        """Add a remark that names tensors of which nothing but zeros is left.

        A download that ends early leaves zeros where its file system made room for the whole file.

        Args:
            tensors: Tensors of this checkpoint, as read.
        """
        found = sorted(name for name, tensor in tensors.items() if is_mostly_zero(name, tensor))
        if found:
            more = ", ..." if len(found) > 8 else ""
            self.remarks.append(
                f"{self.path}: {len(found)} of its {len(self)} tensors are zeros, as in a file "
                f"that was not written to its end: {', '.join(found[:8])}{more}"
            )

    def leave_root(self, wanted: Collection[str]) -> None:
        """Remove a name that stands before all tensors, if it hides the wanted names.

        Lightning and other wrappers put `model.` or the name of an attribute there.

        Args:
            wanted: Names of the tensors that will be read.
        """
        root = next(iter(self), "").partition(".")[0] + "."
        inside = {name.removeprefix(root): tensor for name, tensor in self.items()}
        is_before_all = inside.keys().isdisjoint(self)
        hides = self.keys().isdisjoint(wanted) and not inside.keys().isdisjoint(wanted)
        if is_before_all and hides:
            self.clear()
            self.update(inside)

    def require(self, ending: str, wanted: str, advice: str = _GIVE_OTHER) -> None:
        """Raise `UserError` unless the name of a tensor has this ending.

        Args:
            ending: The ending, which only checkpoints of the wanted kind have.
            wanted: The kind, in words.
            advice: Which checkpoint to give.
        """
        if not any(name.endswith(ending) for name in self):
            raise self.is_not(wanted, f"it has no {ending}", advice)

    def is_not(self, wanted: str, reason: str, advice: str = _GIVE_OTHER) -> UserError:
        """Return the error for a checkpoint of another kind.

        Args:
            wanted: The kind that was wanted, in words.
            reason: What is wrong, if the kind of this checkpoint is unknown.
            advice: Which checkpoint to give.
        """
        kind = what_is(self)
        if kind is not None and wanted in kind:
            return UserError(f"{self.path}: is {kind}, but {reason}", advice)
        if kind is not None and kind not in wanted:
            reason = f"it is {kind}"
        return UserError(f"{self.path}: is not {wanted}: {reason}", advice)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: torch cannot compare float8."""
    return tensor.flatten().view(torch.uint8)


def _are_equal(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether two state dicts have the same tensors."""
    values = [*some.values(), *others.values()]
    if some.keys() != others.keys() or not all(isinstance(value, Tensor) for value in values):
        return False
    return all(
        tensor.dtype == others[name].dtype and torch.equal(_bytes(tensor), _bytes(others[name]))
        for name, tensor in some.items()
    )


def open_checkpoint(
    path: Path, rename: Callable[[str], str] = str, entry: str | None = None
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        path: A `.safetensors` file, a torch file, or a folder with one of them, sharded or not.
        rename: Turns a name in the file, without the prefixes of wrappers, into the wanted one.
        entry: The entry of a torch file that holds the weights, dotted inside another entry. The
            default is the only one, or the one that is not averaged.

    Raises:
        UserError: A file is missing, truncated, no checkpoint, ambiguous, or a pickle with code.
    """
    if path.is_dir():
        return _open_folder(path, rename, entry)
    if not path.is_file():
        raise no_such_file(path)
    places: Mapping[str, Path] = {}
    files = [path]
    if path.suffix == ".json":
        places = _shards(path)
        files = sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    settings: Mapping[str, Any] = {}
    remarks: list[str] = []
    for file in files:
        read, settings = _read(file, entry, remarks)
        for name in read:
            place = places.get(name, file)
            if name in tensors:
                raise _misplaced(file, name, "which another file of the folder also holds")
            if place != file:
                raise _misplaced(file, name, f"which the index places in {place.name}")
        tensors |= read
    # `dict(model.named_parameters())` holds parameters, which need gradients.
    clean = {rename(_WRAPPERS.sub("", name)): tensor.detach() for name, tensor in tensors.items()}
    if len(clean) < len(tensors):
        raise UserError(f"{path}: holds the same weights under several prefixes")
    return Checkpoint(clean, path=path, paths=files, settings=settings, remarks=remarks)


def _read(
    file: Path, entry: str | None, remarks: list[str]
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return the tensors of a file, and the arguments of the script that trained them."""
    head = _head(file)
    if file.suffix == ".safetensors" or head[8:9] == b"{":
        loaded: Any = _read_safetensors(file)
    else:
        loaded = _unpickle(file, zipped=head.startswith(b"PK"))
    found = _entries(file, loaded)
    if entry is None:
        entry = _entry_of(file, found, remarks)
        remarks += _unnamed_averages(file, loaded, found)
    elif entry not in found:
        raise UserError(
            f"{file}: weights: {entry}: the file has no such entry with weights",
            f"Give one of {', '.join(filter(None, found))}." if any(found) else "Leave it out.",
        )
    wrong = {name: kind for name, kind in found[entry].items() if not isinstance(kind, Tensor)}
    if wrong:
        raise UserError(f"{file}: is no state dict: not a tensor: {_with_types(wrong)}")
    arguments = loaded.get("args")
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    return found[entry], arguments if isinstance(arguments, Mapping) else {}


def _open_folder(folder: Path, rename: Callable[[str], str], entry: str | None) -> Checkpoint:
    """Open the checkpoint of a folder. Raises `UserError` for two that differ."""
    names = weights_in(folder)
    if not names:
        usual = f"One of {', '.join(WEIGHT_FILES)} is needed."
        found = sorted(path.name for path in folder.iterdir())
        others = [name for name in found if Path(name).suffix in _ENDINGS]
        if not others:
            listed = ", ".join(found[:5]) or "nothing"
            raise UserError(f"{folder}: holds no weights; it has {listed}", usual)
        raise UserError(
            f"{folder}: holds no weights of a usual name: it has {', '.join(others[:5])}",
            f"{usual} Rename the file, or give its own path where a model file says checkpoint.",
        )
    opened = open_checkpoint(folder / names[0], rename, entry)
    for name in names[1:]:
        if not _are_equal(opened, open_checkpoint(folder / name, rename, entry)):
            raise UserError(
                f"{folder}: {names[0]} and {name} hold different weights",
                "Remove the old one from the folder.",
            )
    opened.path = folder
    return opened


def count_numbers(path: Path, entry: str | None, ignored: str) -> int:
    """Return how many numbers a checkpoint has, without reading them.

    0 for a file that cannot be opened: the code that loads it raises the error.

    Args:
        path: As of `open_checkpoint`.
        entry: As of `open_checkpoint`.
        ignored: Regular expression of tensors that do not count.
    """
    try:
        opened = open_checkpoint(path, entry=entry)
    except UserError:
        return 0
    counts = [tensor.numel() for name, tensor in opened.items() if not re.match(ignored, name)]
    return sum(counts)


def no_such_file(path: Path) -> UserError:
    """Return the error for a missing file, which may be a link to another one that is gone."""
    if path.is_symlink():
        return UserError(
            f"{path}: is a link to {os.readlink(path)}, which does not exist",
            "The download cache no longer has this file: download it again.",
        )
    return UserError(f"{path}: no such file")


def _shards(index: Path) -> dict[str, Path]:
    """Return the file of each tensor of an index."""
    folder = index.parent
    places = weight_map(index)
    names = sorted(set(places.values()))
    if not names:
        raise UserError(f"{index}: names no tensors", _ADVICE)
    for name in names:
        # Only the name counts, because the files of a download cache are links to another folder.
        if os.path.isabs(name) or os.path.normpath(name).startswith(".."):
            raise UserError(f"{index}: names {name}, which is outside {folder}", _ADVICE)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        first = folder / missing[0]
        raise UserError(
            f"{folder}: {len(missing)} of its {len(names)} files are missing: {', '.join(missing)}",
            no_such_file(first).advice or _ADVICE,
        )
    return {name: folder / place for name, place in places.items()}


def _misplaced(file: Path, name: str, where: str) -> UserError:
    """Return the error for a tensor in two shards, or in another shard than the index says."""
    return UserError(
        f"{file}: holds {name}, {where}",
        "One of the files is of another version. Download the folder again.",
    )


def _head(path: Path) -> bytes:
    """Return the first bytes of a file. Raises `UserError` if it is certainly no checkpoint."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise UserError(f"{path}: is empty", _ADVICE)
    kind = kind_of(head)
    if kind and not head.startswith(b"PK"):  # torch's own files are ZIP archives
        raise UserError(f"{path}: is {kind}, not weights", _ADVICE)
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


def _entries(path: Path, loaded: Any) -> dict[str, dict[str, Any]]:
    """Return the state dicts in the content of a file. Raises `UserError` without any."""
    if not isinstance(loaded, Mapping):
        raise UserError(f"{path}: holds a {type(loaded).__name__}, not tensors by name")
    found = dict(_state_dicts(loaded))
    if not found:
        content = _with_types(loaded) or "nothing"
        raise UserError(f"{path}: holds {content}, not tensors by name")
    return found


def _unnamed_averages(path: Path, loaded: Mapping[Any, Any], found: Iterable[str]) -> Iterator[str]:
    """Yield a remark on each entry with averaged weights that are a list."""
    for name, value in loaded.items():
        is_read = any(entry.startswith(str(name)) for entry in found)
        if isinstance(value, Mapping | list) and _AVERAGED.search(str(name)) and not is_read:
            yield f"{path}: its averaged weights have no names and are not read: {name}"


def _state_dicts(
    loaded: Mapping[Any, Any], around: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the state dicts in the content of a file by their dotted entries.

    The file itself has the entry "". Numbers, texts and other entries beside tensors are left out;
    what may be a part of the weights stays.
    """
    named = {name: value for name, value in loaded.items() if isinstance(name, str)}
    own = {name: value for name, value in named.items() if not isinstance(value, _BESIDE)}
    for mark, part in _by_average(own).items():
        if any(_is_weight(name, value) for name, value in part.items()):
            yield ".".join((*around, mark)).strip("."), part
    for name, value in named.items():
        is_inside = isinstance(value, Mapping) and len(around) < _DEEPEST
        if is_inside and _NO_WEIGHTS.search(name) is None:
            yield from _state_dicts(value, (*around, name))


def _by_average(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return plain weights under "", and averaged ones under the beginning of their names."""
    counter = "n_averaged"  # of torch's AveragedModel, all of whose weights are averaged
    if counter in weights:
        return {counter: {name: value for name, value in weights.items() if name != counter}}
    parts: dict[str, dict[str, Any]] = {"": {}}
    for name, value in weights.items():
        mark, dot, rest = name.partition(".")
        if dot and _AVERAGED.search(mark):
            parts.setdefault(mark, {})[rest] = value
        else:
            parts[""][name] = value
    return parts


def _is_weight(name: str, value: object) -> bool:
    """Whether a value may be a weight: a step or the state of a generator is none."""
    is_weight = isinstance(value, Tensor) and value.dim() > 0 and value.dtype != torch.uint8
    return is_weight and _NO_WEIGHTS.search(name) is None


def _entry_of(path: Path, found: Mapping[str, Any], remarks: list[str]) -> str:
    """Return the entry that is taken where none is asked for."""
    plain = [entry for entry in found if _AVERAGED.search(entry) is None]
    usual = [entry for entry in plain if entry.rpartition(".")[2] in _CONTAINERS]
    names = " and ".join(entry or "the file itself" for entry in found)
    if plain and all(_are_equal(found[plain[0]], found[entry]) for entry in plain):
        plain = plain[:1]
    alone = [entries[0] for entries in (list(found), plain, usual) if len(entries) == 1]
    if not alone:
        raise UserError(
            f"{path}: holds weights in {names}",
            "Say which: `weights: ENTRY` beside `checkpoint` in a model file.",
        )
    if len(found) > 1:
        taken = alone[0] or "the file itself"
        remarks.append(
            f"{path}: holds weights in {names}; {taken} is taken. To choose others, write "
            "`weights: ENTRY` beside `checkpoint` in a model file"
        )
    elif not plain:
        remarks.append(f"{path}: {_IS_AVERAGED} ({names})")
    return alone[0]


def _with_types(loaded: Mapping[Any, Any]) -> str:
    """The first entries of a file with their types, for errors."""
    return ", ".join(f"{name} ({type(loaded[name]).__name__})" for name in list(loaded)[:8])
