"""Which files of a published model are on this machine, and whether they are what they were.

Files are looked for under one folder, in the shape of the hub (`owner/name/file`) or in the folders that the authors'
own instructions make, and then in the Hugging Face cache; nothing here goes to the network. A file's SHA-256 is the one
that `sources` pins, else the one recorded when it was first seen, in `weights.json` beside the files. Fetching is
`download`, reading a checkpoint `checkpoint`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.files import cache_folder, remembered_sha256, write_atomically
from lantern_bench.models.sources import SOURCES, HubFile, Part, Source

__all__ = [
    "WEIGHTS_FOLDER_VARIABLE",
    "ExpectedPaths",
    "Found",
    "Ledger",
    "expected_paths",
    "find_part",
    "hashes_of",
    "parts_of",
    "require_part",
    "weights_root",
]

WEIGHTS_FOLDER_VARIABLE = "LANTERN_BENCH_WEIGHTS"
# Where the files of a repository may be, under the root: as the hub names it, and as the authors' instructions do
# (LlamaGen: pretrained_models/t5-ckpt/flan-t5-xl; LANTERN: t5/, trained_drafters/, chameleon/tokenizer/).
_FOLDERS = ("{repo}", "{name}", "t5/{name}", "t5-ckpt/{name}", "trained_drafters/{name}", "chameleon")
_LEDGER = "weights.json"


@dataclass(frozen=True)
class Found:
    """A part that is here: where it is from, the folder, and each of its files by the name it has in the source."""

    part: str
    source: Source
    folder: Path
    paths: Mapping[str, Path]

    @property
    def path(self) -> Path:
        """The first file: the whole checkpoint, where it is one file."""
        return next(iter(self.paths.values()))


class Ledger:
    """The SHA-256 of every file seen under a root, in `weights.json` there.

    An entry is never changed: a file that differs from it is refused. A root that cannot be written keeps nothing,
    and the methods say so by returning False.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / _LEDGER
        self._entries = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): dict(value) for key, value in found["files"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path}: damaged, it should hold the SHA-256 of the files here",
                "Remove it; `lantern-bench weights check MODEL` then records the files anew.",
            ) from error

    def entry(self, repo: str, file: str) -> Mapping[str, Any]:
        """What is recorded of a file (sha256, bytes, revision), or nothing."""
        return self._entries.get(f"{repo}/{file}", {})

    def record(self, repo: str, file: str, sha256: str, size: int, revision: str | None) -> bool:
        """Record a file that is not recorded yet; False where nothing can be written."""
        entry = {"sha256": sha256, "bytes": size, "revision": revision}
        self._entries.setdefault(f"{repo}/{file}", entry)
        try:
            write_atomically(self.path, json.dumps({"files": self._entries}, indent=1, sort_keys=True).encode() + b"\n")
        except OSError:
            return False
        return True


def weights_root() -> Path:
    """The folder of weights: the one `LANTERN_BENCH_WEIGHTS` names, else `weights` in the user's cache folder."""
    named = os.environ.get(WEIGHTS_FOLDER_VARIABLE)
    return Path(named) if named else cache_folder() / "weights"


def parts_of(model: str) -> tuple[Part, ...]:
    """The parts of a published model; raises `UserError` for a model of which no files are published."""
    if model not in SOURCES:
        raise UserError(
            f"{model}: no files of this model are published, as far as is known here",
            f"The published ones are {', '.join(SOURCES)}; for files of your own write a model.yaml.",
        )
    return SOURCES[model]


def find_part(model: str, part: str, root: Path | None = None) -> Found | None:
    """Where a part of a model is, the first complete choice; None when it is not on this machine."""
    base = root if root is not None else weights_root()
    for choice in _part(model, part).choices:
        for folder in _folders(choice, base):
            paths = _complete(choice, folder)
            if paths is not None:
                return Found(part, choice, folder, paths)
    return None


def require_part(model: str, part: str, root: Path | None = None) -> Found:
    """Where a part of a model is; raises `RefusedError` with the command that fetches it."""
    found = find_part(model, part, root)
    if found is None:
        base = root if root is not None else weights_root()
        source = _part(model, part).choices[0]
        raise RefusedError(
            f"the {part.replace('_', ' ')} of {model} is not on this machine: {source.repo} {_named(source)} is "
            f"neither under {base} nor in the Hugging Face cache",
            f"Type `lantern-bench weights get {model}`, or name the folder that has it by {WEIGHTS_FOLDER_VARIABLE}.",
        )
    return found


def expected_paths(model: str, root: Path | None = None) -> dict[str, Path]:
    """For each part the first file that was found, or the place where it would be: for listings."""
    base = root if root is not None else weights_root()
    places: dict[str, Path] = {}
    for part in parts_of(model):
        found, first = find_part(model, part.name, base), part.choices[0]
        places[part.name] = found.path if found is not None else base / first.repo / first.files[0].path
    return places


class ExpectedPaths(Mapping[str, Path]):
    """`expected_paths`, looked up when somebody asks: a card is made far more often than its files are wanted."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getitem__(self, part: str) -> Path:
        return expected_paths(self._model)[part]

    def __iter__(self) -> Iterator[str]:
        return (part.name for part in parts_of(self._model))

    def __len__(self) -> int:
        return len(parts_of(self._model))


def hashes_of(found: Found, root: Path | None = None, on_bytes: Callable[[int], None] | None = None) -> dict[str, str]:
    """The SHA-256 of each file of a part, by its name in the source; a file seen for the first time is recorded.

    Raises `RefusedError` for a file that is not the pinned or the recorded one.
    """
    ledger = Ledger(root if root is not None else weights_root())
    hashes: dict[str, str] = {}
    for file, path in found.paths.items():
        entry = ledger.entry(found.source.repo, file)
        expected = pinned(found.source, file) or entry.get("sha256")
        hashes[file] = remembered_sha256(path, on_bytes)
        if expected is None:
            ledger.record(found.source.repo, file, hashes[file], path.stat().st_size, found.source.revision)
        elif hashes[file] != expected:
            raise RefusedError(
                f"{path}: not the file it was: SHA-256 {hashes[file][:12]}..., expected {expected[:12]}...",
                "Remove it and fetch it again with `lantern-bench weights get`; or, where you replaced it on purpose, "
                f"remove its entry in {ledger.path}.",
            )
    return hashes


def pinned(source: Source, file: str) -> str | None:
    """The SHA-256 that `sources` pins for a file."""
    return next((one.sha256 for one in source.files if one.path == file), None)


def _part(model: str, part: str) -> Part:
    return next(one for one in parts_of(model) if one.name == part)


def _named(source: Source) -> str:
    needed = [file.path for file in source.files if not file.optional]
    return needed[0] if len(needed) == 1 else f"({needed[0]} and {len(needed) - 1} more)"


def _folders(source: Source, base: Path) -> Sequence[Path]:
    name = source.repo.split("/")[-1]
    under = [base / place.format(repo=source.repo, name=name) for place in _FOLDERS]
    # A checkpoint that is one file with a name of its own may lie flat in the root.
    flat = [base] if len(source.files) == 1 else []
    return [*under, *flat, *_hub_cache(source)]


def _hub_cache(source: Source) -> list[Path]:
    """The snapshot in the Hugging Face cache, where there is one; no network."""
    home = os.environ.get("HF_HOME") or cache_folder().parent / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    # Most often there is none: then the hub's package, which is slow to import, is not needed.
    if not (cache / f"models--{source.repo.replace('/', '--')}").is_dir():
        return []
    from huggingface_hub import try_to_load_from_cache

    first = next(file.path for file in source.files if not file.optional)
    cached = try_to_load_from_cache(source.repo, first, cache_dir=cache, revision=source.revision)
    return [Path(cached).parents[first.count("/")]] if isinstance(cached, str) else []


def _complete(source: Source, folder: Path) -> dict[str, Path] | None:
    """The files of a source in a folder, or None when one that is needed is missing."""
    there: dict[str, Path] = {}
    for file in source.files:
        path = folder / file.path
        if path.is_file():
            there[file.path] = path
        elif not file.optional:
            return None
    return there


def size_of(file: HubFile, ledger: Ledger, repo: str) -> int | None:
    """About how many bytes a file has: from the ledger, else from the table of sources; None where unknown."""
    return ledger.entry(repo, file.path).get("bytes") or file.bytes
