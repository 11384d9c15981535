"""Fetching the files of a published model, once: what is there is kept, what was cut is continued, all is checked.

The network is a `HubClient` that is handed in; the real one is huggingface_hub, which resumes by itself. A file counts
when its SHA-256 is the pinned one, or the recorded one, or, the first time, the one the hub itself names for it; one
that differs is removed. Where files lie is `weights`; what they are, `sources`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.files import file_sha256
from lantern_bench.models.sources import HubFile, Licence, Source
from lantern_bench.models.weights import Ledger, find_part, parts_of, pinned

__all__ = ["Fetched", "HubClient", "HuggingFaceHub", "RemoteFile", "Wanted", "fetch", "licences", "wanted"]

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file: the commit it is from, its bytes, its SHA-256 where the hub has one."""

    commit: str
    bytes: int | None
    sha256: str | None = None


class HubClient(Protocol):
    """What is needed of a hub. Both methods raise `RefusedError` for what cannot be had now."""

    def describe(self, repo: str, file: str, revision: str | None) -> RemoteFile:
        """What a file of a revision is; nothing is downloaded."""
        ...

    def download(self, repo: str, file: str, revision: str, folder: Path, on_bytes: OnBytes) -> Path:
        """Bring a file of a commit to `folder / file`, going on where an earlier attempt stopped."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A file that is not here yet, and where it belongs."""

    part: str
    source: Source
    file: HubFile
    folder: Path


@dataclass(frozen=True)
class Fetched:
    """A file that was brought: its place, SHA-256, commit, and whether the hash had been known before (`pinned`)."""

    wanted: Wanted
    path: Path
    sha256: str
    commit: str
    pinned: bool


def wanted(model: str, root: Path) -> list[Wanted]:
    """The files of a model that are not on this machine, of the first choice of each part that is not complete."""
    missing: list[Wanted] = []
    for part in parts_of(model):
        if find_part(model, part.name, root) is not None:
            continue
        source = part.choices[0]
        folder = root / source.repo
        absent = [file for file in source.files if not (folder / file.path).exists()]
        missing += [Wanted(part.name, source, file, folder) for file in absent]
    return missing


def licences(files: Sequence[Wanted]) -> dict[Licence, list[str]]:
    """The licences of files, each with the repositories under it, in the order of the files."""
    found: dict[Licence, list[str]] = {}
    for one in files:
        repos = found.setdefault(one.source.licence, [])
        if one.source.repo not in repos:
            repos.append(one.source.repo)
    return found


def describe(files: Sequence[Wanted], hub: HubClient) -> list[RemoteFile]:
    """What the hub says of each file, so that all is known to be there before anything is fetched."""
    return [hub.describe(one.source.repo, one.file.path, one.source.revision) for one in files]


def fetch(
    files: Sequence[Wanted], remote: Sequence[RemoteFile], hub: HubClient, root: Path, on_bytes: OnBytes
) -> Iterator[Fetched]:
    """Fetch files one by one and check each; yields a file when it is recorded.

    Raises `UserError` when the folder cannot be written, and `RefusedError` for what the hub refuses and for a file
    with another SHA-256 than the one known; that file is removed.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dir {root}: cannot be written: {error.strerror}") from error
    ledger = Ledger(root)
    for one, facts in zip(files, remote, strict=True):
        try:
            path = hub.download(one.source.repo, one.file.path, facts.commit, one.folder, on_bytes)
            sha256 = file_sha256(path)
        except OSError as error:
            raise RefusedError(
                f"{one.source.repo} {one.file.path}: cannot be fetched: {error}",
                "What has arrived is kept; the same command continues.",
            ) from error
        before = pinned(one.source, one.file.path) or ledger.entry(one.source.repo, one.file.path).get("sha256")
        _check(one, path, sha256, before or facts.sha256)
        ledger.record(one.source.repo, one.file.path, sha256, path.stat().st_size, facts.commit)
        yield Fetched(one, path, sha256, facts.commit, before is not None)


def _check(one: Wanted, path: Path, sha256: str, expected: str | None) -> None:
    if expected is None or sha256 == expected:
        return
    path.unlink()
    raise RefusedError(
        f"{one.source.repo} {one.file.path}: SHA-256 {sha256[:12]}... where {expected[:12]}... was expected; removed",
        "The file changed at its source or was damaged on the way; try again, and do not use it if this repeats.",
    )


class HuggingFaceHub:
    """The real hub. `HF_HUB_OFFLINE`, `HF_TOKEN` and `HF_ENDPOINT` work as everywhere."""

    def describe(self, repo: str, file: str, revision: str | None) -> RemoteFile:
        """What a file is, by one request without a body."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        if constants.is_offline_mode():
            raise _offline(repo, file)
        with _Explained(repo, file):
            facts = get_hf_file_metadata(hf_hub_url(repo, file, revision=revision))
        # The hub's tag of a large file is its SHA-256, of a small one the hash of a git object.
        sha256 = facts.etag if re.fullmatch(r"[0-9a-f]{64}", facts.etag or "") else None
        if facts.commit_hash is None:
            raise RefusedError(f"{repo} {file}: the hub does not say which commit this is", "Try again later.")
        return RemoteFile(facts.commit_hash, facts.size, sha256)

    def download(self, repo: str, file: str, revision: str, folder: Path, on_bytes: OnBytes) -> Path:
        """Bring a file; huggingface_hub keeps what has arrived below `.cache` in the folder and goes on from there."""
        from huggingface_hub import hf_hub_download

        with _Explained(repo, file):
            return Path(
                hf_hub_download(repo, file, revision=revision, local_dir=folder, tqdm_class=_counting(on_bytes))
            )


class _Explained:
    """Turns what huggingface_hub raises into one line of ours."""

    def __init__(self, repo: str, file: str) -> None:
        self.repo, self.file = repo, file

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _at: object) -> None:
        from huggingface_hub import errors

        what = f"{self.repo} {self.file}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            raise _offline(self.repo, self.file) from error
        if isinstance(error, errors.GatedRepoError):
            raise RefusedError(
                f"{what}: its owners let in only who has agreed to their terms",
                f"Agree at https://huggingface.co/{self.repo}, then set HF_TOKEN or type `hf auth login`.",
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
            raise RefusedError(f"{what}: there is no such repository or revision any more") from error
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise RefusedError(f"{what}: the repository has no such file any more") from error
        if isinstance(error, Exception):
            raise RefusedError(
                f"{what}: the hub cannot be reached: {' '.join(str(error).split())[:200] or type(error).__name__}",
                "What has arrived is kept; the same command continues when there is a connection.",
            ) from error


def _offline(repo: str, file: str) -> RefusedError:
    return RefusedError(
        f"{repo} {file}: not on this machine, and HF_HUB_OFFLINE forbids to fetch it",
        "Unset HF_HUB_OFFLINE, or fetch it elsewhere and name its folder with --dir or LANTERN_BENCH_WEIGHTS.",
    )


def _counting(on_bytes: OnBytes) -> type[Any]:
    """A progress bar for huggingface_hub that draws nothing and tells the bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False, "mininterval": 60.0})
            on_bytes(int(kwargs.get("initial") or 0))

        def update(self, n: float | None = 1) -> bool | None:
            on_bytes(int(n or 0))
            return super().update(n)

    return Counting
