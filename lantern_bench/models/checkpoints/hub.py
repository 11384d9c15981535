"""The files of published models: repositories and licences (`hub.toml`), where they are on this machine, and download.

huggingface_hub keeps, resumes and checks downloads, so nothing here hashes or records a file.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import user_cache
from lantern_bench.utils.text import one_line

# names the folder of the weights, with a folder for each repository
WEIGHTS_VARIABLE = "LANTERN_BENCH_WEIGHTS"

# Folders of a repository: as the hub names it, and as the authors' instructions do. A single file may also lie in the
# folder of the weights itself.
_FOLDERS = (
    "{repo}",
    "{name}",
    "t5/{name}",
    "t5-ckpt/{name}",
    "trained_drafters/{name}",
    "chameleon",
    "",
)


class Licence(NamedTuple):
    """A licence by its name in the repository, and what to know before downloading."""

    name: str
    note: str = ""


class Source(NamedTuple):
    """A repository that has a part of a model."""

    repo: str
    licence: Licence
    file: str | None = None  # None: the folder with its JSON files and weights
    revision: str = "main"
    ending: str = "safetensors"  # of a folder's weights

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of all files that are downloaded."""
        return ("*.json", f"*.{self.ending}") if self.file is None else (self.file,)

    def found_in(self, folder: Path) -> Path | None:
        """Return the file or the folder of this part below the repository's folder; None where a file is missing."""
        if self.file is not None:
            return folder / self.file if (folder / self.file).is_file() else None
        return folder if all(_complete(folder, pattern) for pattern in self.patterns) else None

    def local_path(self) -> Path | None:
        """Return the file or folder: below the folder of the weights, else in the cache of huggingface_hub."""
        if (root := weights_folder()) is not None:
            for folder in _FOLDERS if self.file is not None else _FOLDERS[:-1]:
                folder = folder.format(repo=self.repo, name=self.repo.split("/")[-1])
                if (path := self.found_in(root / folder)) is not None:
                    return path
        # As huggingface_hub lays it out, which is slow to import.
        cached = _hub_cache() / f"models--{self.repo.replace('/', '--')}"
        newest = cached / "refs" / self.revision
        commit = newest.read_text(encoding="utf-8").strip() if newest.is_file() else self.revision
        return self.found_in(cached / "snapshots" / commit)

    def download(self, root: Path | None = None, bars: bool = True) -> Path:
        """Download the missing files into `root`, or the hub's cache; raises `RefusedError` where the hub refuses."""
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not bars:
            disable_progress_bars()
        where: dict[str, Any] = (
            {"local_dir": root / self.repo} if root is not None else {"cache_dir": _hub_cache()}
        )
        where |= {"revision": self.revision, "allow_patterns": list(self.patterns)}
        try:
            folder = Path(snapshot_download(self.repo, **where))
        except errors.GatedRepoError as error:
            advice = f"Accept it at https://huggingface.co/{self.repo}, then set HF_TOKEN or type `hf auth login`."
            raise RefusedError(
                f"{self.repo}: gated repository: accept its licence first", advice
            ) from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise RefusedError(
                f"{self.repo}: the hub no longer has this repository or revision"
            ) from error
        except (errors.HfHubHTTPError, OSError, RuntimeError) as error:
            problem = f"cannot be downloaded: {one_line(error, 200)}"
            advice = "Files that arrived are kept; the same command continues."
            if constants.HF_HUB_OFFLINE:
                problem = "not on this machine, and HF_HUB_OFFLINE forbids the download"
                advice = f"Unset it, or download it elsewhere and give its directory by --dir or {WEIGHTS_VARIABLE}."
            raise RefusedError(f"{self.repo}: {problem}", advice) from error
        if (path := self.found_in(folder)) is None:
            raise RefusedError(
                f"{self.repo}: the repository no longer has {', '.join(self.patterns)}"
            )
        return path


def _complete(folder: Path, pattern: str) -> bool:
    """Whether a folder has the files of a pattern: of sharded weights every shard that their index names."""
    try:
        for index in folder.glob(f"{pattern}.index.json"):
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / shard).is_file() for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return any(folder.glob(pattern))


def weights_folder() -> Path | None:
    """Return the folder that `LANTERN_BENCH_WEIGHTS` names."""
    folder = os.environ.get(WEIGHTS_VARIABLE)
    return Path(folder) if folder else None


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or user_cache() / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


Part: TypeAlias = tuple[Source, ...]
"""The sources of a part: any that is here is used, the first is downloaded."""

_DECLARED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LICENCES = {key: Licence(**fields) for key, fields in _DECLARED["licences"].items()}

PARTS: Mapping[str, Mapping[str, Part]] = {
    model: {
        part: tuple(
            Source(**source | {"licence": LICENCES[source["licence"]]}) for source in sources
        )
        for part, sources in parts.items()
    }
    for model, parts in _DECLARED["models"].items()
}
"""The parts of each published model, by its name in this package."""


def local_path(part: Part) -> Path | None:
    """Return the file or folder of a part where it is on this machine."""
    return next((path for path in map(Source.local_path, part) if path is not None), None)


def expected_path(part: Part) -> Path:
    """Return the file or folder of a part: where it is, or where a download puts it."""
    return local_path(part) or (weights_folder() or _hub_cache()) / part[0].repo / (
        part[0].file or ""
    )


def local_paths(model: str) -> dict[str, Path]:
    """Return the paths of a published model; raises `RefusedError` without target or tokenizer."""
    if model not in PARTS:
        raise UserError(
            f"{model}: no published files of this model are known",
            f"The published models are {', '.join(PARTS)}; for your own files write a model.yaml.",
        )
    paths = {name: local_path(part) for name, part in PARTS[model].items()}
    for name in ("target", "tokenizer"):
        if paths[name] is None:
            raise RefusedError(
                f"the {name} of {model} is not on this machine: {PARTS[model][name][0].repo} is neither in the folder "
                f"that {WEIGHTS_VARIABLE} names nor in the Hugging Face cache",
                f"Type `lantern-bench weights get {model}`, or set {WEIGHTS_VARIABLE} to the directory that has it.",
            )
    return {name: path for name, path in paths.items() if path is not None}


def missing_sources(model: str, root: Path | None = None) -> Sequence[Source]:
    """Return the sources that complete a published model, on this machine or in the folder `root`."""

    def is_here(source: Source) -> bool:
        return (
            source.local_path() if root is None else source.found_in(root / source.repo)
        ) is not None

    return list(
        dict.fromkeys(part[0] for part in PARTS[model].values() if not any(map(is_here, part)))
    )
