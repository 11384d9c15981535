"""The files of published models: where they are on this machine, and download.

`hub.toml` names repositories and licences. huggingface_hub keeps, resumes and checks downloads, so
nothing here hashes or records a file.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import (
    cache_problems,
    is_temporary,
    path_of_variable,
    read_json,
    user_cache,
)
from lantern_bench.utils.text import listed, one_line

WEIGHTS_VARIABLE = "LANTERN_BENCH_WEIGHTS"
"""The environment variable that names the folder of the weights."""
_PLACES = f"Choose a folder: give --dir FOLDER, or set {WEIGHTS_VARIABLE} or HF_HOME."

# Folders of a repository below the folder of the weights, as the hub and as the authors'
# instructions name them. A single file may also lie in the folder of the weights itself ("").
_FOLDERS = (
    "{repo}",
    "{name}",
    "t5/{name}",
    "t5-ckpt/{name}",
    "trained_drafters/{name}",
    "chameleon",
    "",
)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A repository that has a part of a model."""

    repo: str
    licence: str  # its name in the repository
    file: str | None = None  # None: the folder with its JSON files and weights
    revision: str = "main"
    ending: str = "safetensors"  # of a folder's weights
    folder: str = ""  # of the files; empty: the repository's own
    beside: str = ""  # a further folder of JSON files

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of all files that are downloaded."""
        if self.file is not None:
            return (self.file,)
        names = [f"{self.folder}/*.json", f"{self.folder}/*.{self.ending}"]
        if self.beside:
            names.append(f"{self.beside}/*.json")
        return tuple(name.removeprefix("/") for name in names)

    def found_in(self, folder: Path) -> Path | None:
        """Return the file or folder of this part below the repository's folder.

        None if a file is missing.
        """
        if all(_complete(folder, pattern) for pattern in self.patterns):
            return folder / (self.file or self.folder)
        return None

    def local_path(self, into: Path | None = None) -> Path | None:
        """Return the file or folder of this part on this machine.

        The folder of the weights comes first, then the cache of huggingface_hub.

        Args:
            into: The only folder of weights to search, as `download` fills it.

        Raises:
            RefusedError: A file or folder there cannot be read.
        """
        try:
            return self._found(into)
        except (OSError, ValueError) as error:  # ValueError: a name of a commit that is no text
            place = getattr(error, "filename", None) or f"the cached copy of {self.repo}"
            reason = getattr(error, "strerror", None) or one_line(error, 100)
            raise RefusedError(
                f"{place}: cannot be read: {reason}",
                f"Make it readable, or remove it and fetch {self.repo} again.",
            ) from error

    def _found(self, into: Path | None) -> Path | None:
        if into is not None:
            return self.found_in(into / self.repo)
        root = weights_folder()
        if root is not None:
            for pattern in _FOLDERS if self.file is not None else _FOLDERS[:-1]:
                folder = pattern.format(repo=self.repo, name=Path(self.repo).name)
                path = self.found_in(root / folder)
                if path is not None:
                    return path
        # The layout of huggingface_hub, which is slow to import.
        cached = _hub_cache() / f"models--{self.repo.replace('/', '--')}"
        newest = cached / "refs" / self.revision
        commit = newest.read_text(encoding="utf-8").strip() if newest.is_file() else self.revision
        return self.found_in(cached / "snapshots" / commit)

    def download(self, root: Path | None = None, *, bars: bool = True) -> Path:
        """Download the files that are missing.

        Args:
            root: Folder of the weights. The default is the cache of huggingface_hub.
            bars: Whether to show progress bars.

        Returns:
            The file or folder of this part.

        Raises:
            RefusedError: The hub refuses, or cannot be reached.
        """
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        cache = _hub_cache()
        if root is None and is_temporary(cache):
            problem = f"{self.repo}: {cache_problems[0]}, so nothing would be kept"
            raise RefusedError(problem, _PLACES)
        if not bars:
            disable_progress_bars()
        try:
            found = snapshot_download(
                self.repo,
                revision=self.revision,
                allow_patterns=list(self.patterns),
                local_dir=None if root is None else root / self.repo,
                cache_dir=cache,
            )
        except errors.GatedRepoError as error:
            raise RefusedError(
                f"{self.repo}: gated repository: accept its licence first",
                f"Accept it at https://huggingface.co/{self.repo}, then set HF_TOKEN or type "
                "`hf auth login`.",
            ) from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise RefusedError(
                f"{self.repo}: the hub no longer has this repository or revision"
            ) from error
        except (errors.HfHubHTTPError, OSError, RuntimeError) as error:
            if constants.HF_HUB_OFFLINE:
                raise RefusedError(
                    f"{self.repo}: not on this machine, and HF_HUB_OFFLINE forbids the download",
                    "Unset it, or download it elsewhere and give its directory by --dir or "
                    f"{WEIGHTS_VARIABLE}.",
                ) from error
            if getattr(error, "filename", None):  # of a file here, not of the network
                raise RefusedError(f"{self.repo}: cannot be written: {error}", _PLACES) from error
            raise RefusedError(
                f"{self.repo}: cannot be downloaded: {one_line(error, 200)}",
                "Files that arrived are kept; the same command continues.",
            ) from error
        path = self.found_in(Path(found))
        if path is None:
            raise RefusedError(
                f"{self.repo}: the repository no longer has {', '.join(self.patterns)}"
            )
        return path


def _complete(folder: Path, pattern: str) -> bool:
    """Whether a folder has the files of a pattern, and of sharded weights every shard."""
    if folder.exists():
        os.listdir(folder)  # `glob` takes a folder that cannot be read for an empty one
    try:
        for index in folder.glob(f"{pattern}.index.json"):
            shards = weight_map(index).values()
            return all((index.parent / shard).is_file() for shard in shards)
    except (OSError, UserError):
        return False
    # A link of the cache may point to a file that is gone.
    return any(path.is_file() for path in folder.glob(pattern))


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor of sharded weights. Raises `UserError` for a broken index."""
    stated = read_json(index)
    try:
        return {str(name): str(file) for name, file in stated["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: cannot be read as an index of weights", "Download or copy it again."
        ) from error


def weights_folder() -> Path | None:
    """Return the folder that `LANTERN_BENCH_WEIGHTS` names, if it is set."""
    return path_of_variable(WEIGHTS_VARIABLE)


def _hub_cache() -> Path:
    home = path_of_variable("HF_HOME") or user_cache() / "huggingface"
    return path_of_variable("HF_HUB_CACHE") or home / "hub"


def find_weights(scorer: str, *file_names: str) -> list[Path]:
    """Return the paths of published files of weights of scorers on this machine.

    Args:
        scorer: What needs them, for the error.
        file_names: Their names.

    Raises:
        RefusedError: Files are in no folder. The error names all of them.
    """
    torch_home = path_of_variable("TORCH_HOME") or user_cache() / "torch"
    cache = torch_home / "hub" / "checkpoints"
    found = {}
    for name, folder in itertools.product(file_names, (cache, weights_folder() or cache)):
        if (folder / name).is_file():
            found[name] = folder / name
    missing = [name for name in file_names if name not in found]
    if missing:
        raise RefusedError(
            f"the weights of {scorer} are not on this machine: neither the folder that "
            f"{WEIGHTS_VARIABLE} names nor the cache of torch.hub has {listed(missing)} (scoring "
            "downloads nothing)",
            f"Put {listed(missing)} there; docs/troubleshooting.md has the addresses.",
        )
    return list(found.values())


Part: TypeAlias = tuple[Source, ...]
"""The sources of a part. Any source on this machine is used, and the first is downloaded."""


class _Published(msgspec.Struct, forbid_unknown_fields=True):
    """The content of `hub.toml`."""

    licence_notes: dict[str, str]
    models: dict[str, dict[str, Part]]


_PUBLISHED = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Published)
LICENCE_NOTES = _PUBLISHED.licence_notes
"""Remarks to read before a download, by the name of the licence."""
PARTS = _PUBLISHED.models
"""The parts of each published model, by its name in this package."""


def local_path(part: Part, into: Path | None = None) -> Path | None:
    """Return the file or folder of a part on this machine. `into` is as in `Source.local_path`."""
    return next(filter(None, (source.local_path(into) for source in part)), None)


def expected_path(part: Part) -> Path:
    """Return the file or folder of a part: where it is, or where a download puts it."""
    first = part[0]
    inside = first.file or first.folder
    download = (weights_folder() or _hub_cache()) / first.repo / inside
    return local_path(part) or download


@functools.cache
def published_files() -> dict[str, str]:
    """Return the published files that are known, as repository and file, by their hashes.

    Known are the files that the hub has delivered to this machine: its cache names them by their
    hashes, and a folder of weights keeps the hash beside each file.
    """
    known: dict[str, str] = {}
    # The cache: links to files that are named by their hashes.
    for link in _hub_cache().glob("models--*/snapshots/*/**/*"):
        if link.is_symlink():
            folder, _, _, *file = link.relative_to(_hub_cache()).parts
            repo = folder.removeprefix("models--").replace("--", "/")
            known[Path(os.readlink(link)).name] = "/".join([repo, *file])
    # A folder of weights: the second line of a note on each file.
    root = weights_folder() or _hub_cache()  # which has no such notes
    for note in root.glob("*/*/.cache/huggingface/download/**/*.metadata"):
        lines = note.read_text(encoding="utf-8", errors="replace").splitlines()
        owner, name, _, _, _, *file = note.relative_to(root).with_suffix("").parts
        known |= dict.fromkeys(lines[1:2], "/".join([owner, name, *file]))
    return known


def local_paths(model: str, required: Iterable[str] = ("target", "tokenizer")) -> dict[str, Path]:
    """Return the paths of a published model on this machine.

    Args:
        model: The model.
        required: Parts that must be here.

    Raises:
        UserError: The files of this model are not published.
        RefusedError: Required parts are missing. The error names all of them.
    """
    if model not in PARTS:
        raise UserError(
            f"{model}: no published files of this model are known",
            f"The published models are {', '.join(PARTS)}; for your own files write a model.yaml.",
        )
    found = {name: local_path(part) for name, part in PARTS[model].items()}
    paths = {name: path for name, path in found.items() if path is not None}
    lacking = [name for name in required if name in PARTS[model] and name not in paths]
    missing = {name: PARTS[model][name][0].repo for name in lacking}
    if missing:
        parts = listed([name.replace("_", " ") for name in missing])
        repos = listed(list(dict.fromkeys(missing.values())))
        raise RefusedError(
            f"the {parts} of {model}: not on this machine: neither the folder that "
            f"{WEIGHTS_VARIABLE} names nor the Hugging Face cache has the files of {repos}",
            f"Type `lantern-bench weights get {model}`, or set {WEIGHTS_VARIABLE} to the "
            "directory that has them.",
        )
    return paths


def missing_sources(model: str, root: Path | None = None) -> Sequence[Source]:
    """Return the sources that complete a published model.

    Args:
        model: Name of the model.
        root: Where its files are searched. The default is this machine.
    """
    missing = [part[0] for part in PARTS[model].values() if local_path(part, root) is None]
    return list(dict.fromkeys(missing))
