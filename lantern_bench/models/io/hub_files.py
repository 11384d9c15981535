"""Fetching the files of a published model, once: what is there is kept, what was cut is continued, all is checked.

The network is a `HubClient` that is handed in; the real one is huggingface_hub, which resumes by itself. A file counts
when its SHA-256 is the pinned one, or the recorded one, or, the first time, the one the hub itself names for it; one
that differs is removed. Where files lie is `weights`; what they are, `sources`.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import cache_folder, file_sha256, remembered_sha256, write_atomically

# ---- Where the files of the published models are: repository, file, revision, licence, size and SHA-256 where know


@dataclass(frozen=True)
class Licence:
    """A licence as it is named where the files are, and what to know before downloading (empty: nothing)."""

    name: str
    note: str = ""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `bytes` is about how large it is, `sha256` its hash in hex, each None where unknown.

    `optional` files are fetched with the others, and not missed where they are not.
    """

    path: str
    bytes: int | None = None
    sha256: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Source:
    """One place to get a part from. `layout` says how its files are to be read; `revision` None is unpinned."""

    repo: str
    files: tuple[HubFile, ...]
    licence: Licence
    revision: str | None = None
    layout: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a model and where it may come from: any one complete choice will do, the first is downloaded."""

    name: str
    choices: tuple[Source, ...]


MIT = Licence("MIT")
APACHE = Licence("Apache-2.0")
CHAMELEON = Licence(
    "Chameleon Research License",
    "for research only, not for commercial use: https://ai.meta.com/resources/models-and-libraries/chameleon-license",
)
ANOLE_HF = Licence(
    "Apache-2.0 (as the repository says)",
    "the weights descend from Chameleon, and Anole's authors put theirs under the Chameleon Research License: "
    "research only, https://ai.meta.com/resources/models-and-libraries/chameleon-license",
)
UNSTATED = Licence(
    "not known here",
    "read the repository's page first; the code that made these files (jadohu/LANTERN) is under the Chameleon "
    "Research License",
)

_MB = 10**6


def _files(*paths: str, optional: bool = False) -> tuple[HubFile, ...]:
    return tuple(HubFile(path, optional=optional) for path in paths)


def _t5(*weights: HubFile) -> Source:
    words = _files("config.json", "tokenizer.json", "tokenizer_config.json")
    more = _files("special_tokens_map.json", "spiece.model", optional=True)
    files = (*weights, *words, *more)
    return Source("google/flan-t5-xl", files, APACHE, revision="7d6315df2c2fb742f0f5b556879d730926ca9001")


T5 = Part(
    "text_encoder",
    (
        _t5(
            HubFile("model-00001-of-00002.safetensors", 9450 * _MB),
            HubFile("model-00002-of-00002.safetensors", 1950 * _MB),
            HubFile("model.safetensors.index.json"),
        ),
        _t5(
            HubFile("pytorch_model-00001-of-00002.bin", 9450 * _MB),
            HubFile("pytorch_model-00002-of-00002.bin", 1950 * _MB),
            HubFile("pytorch_model.bin.index.json"),
        ),
    ),
)


def _t2i(checkpoint: str, converted: str, drafter: str) -> tuple[Part, ...]:
    """A text-conditional LlamaGen: the official checkpoint, or the LANTERN authors' conversion of it."""
    official = Source("peizesun/llamagen_t2i", _files(checkpoint), MIT, layout="official")
    hf = Source(f"jadohu/{converted}", _files("model.safetensors", "config.json"), UNSTATED, layout="hf")
    return (
        Part("target", (official, hf)),
        Part("tokenizer", (Source("peizesun/llamagen_t2i", _files("vq_ds16_t2i.pt"), MIT),)),
        Part("drafter", (Source(f"jadohu/{drafter}", _files("config.json", "pytorch_model.bin"), UNSTATED),)),
        T5,
    )


def _c2i(checkpoint: str) -> tuple[Part, ...]:
    """A class-conditional LlamaGen; no drafter was published for any of them."""
    repo = "FoundationVision/LlamaGen"
    return (
        Part("target", (Source(repo, _files(checkpoint), MIT, layout="official"),)),
        Part("tokenizer", (Source(repo, _files("vq_ds16_c2i.pt"), MIT),)),
    )


_CHAMELEON_TOKENIZER = Part(
    "tokenizer",
    (
        Source(
            "GAIR/Anole-7b-v0.1",
            _files("tokenizer/vqgan.ckpt", "tokenizer/vqgan.yaml", "tokenizer/text_tokenizer.json"),
            CHAMELEON,
            revision="c5710623b72b402fd9ec0816e8d9b1a5c383f595",
        ),
    ),
)
_ANOLE = Source(
    "leloy/Anole-7b-v0.1-hf",
    (
        HubFile("model-00001-of-00003.safetensors", 4990 * _MB),
        HubFile("model-00002-of-00003.safetensors", 4990 * _MB),
        HubFile("model-00003-of-00003.safetensors", 4320 * _MB),
        *_files("model.safetensors.index.json", "config.json", "tokenizer.json"),
        *_files("tokenizer_config.json", "special_tokens_map.json", optional=True),
    ),
    ANOLE_HF,
    revision="4f2c679ff6eb0291e7813502467b30e7835bd199",
    layout="hf",
)
_LUMINA = Source(
    "Alpha-VLLM/Lumina-mGPT-7B-768",
    (
        HubFile("model-00001-of-00002.safetensors", 9980 * _MB),
        HubFile("model-00002-of-00002.safetensors", 4050 * _MB),
        *_files("model.safetensors.index.json", "config.json", "tokenizer.json"),
        *_files("tokenizer_config.json", "special_tokens_map.json", optional=True),
    ),
    CHAMELEON,
    revision="9624463a82ea5ce814af9b561dcd08a31082c3af",
    layout="hf",
)
_ANOLE_DRAFTER = Source("jadohu/anole_drafter", _files("config.json", "pytorch_model.bin"), APACHE)

SOURCES: dict[str, tuple[Part, ...]] = {
    "llamagen-t2i-stage1": _t2i("t2i_XL_stage1_256.pt", "LlamaGen-T2I", "llamagen_drafter"),
    "llamagen-t2i-stage2": _t2i("t2i_XL_stage2_512.pt", "LlamaGen-T2I-2", "llamagen2_drafter"),
    "llamagen-c2i-B-256": _c2i("c2i_B_256.pt"),
    "llamagen-c2i-B-384": _c2i("c2i_B_384.pt"),
    "llamagen-c2i-L-256": _c2i("c2i_L_256.pt"),
    "llamagen-c2i-L-384": _c2i("c2i_L_384.pt"),
    "llamagen-c2i-XL-384": _c2i("c2i_XL_384.pt"),
    "llamagen-c2i-XXL-384": _c2i("c2i_XXL_384.pt"),
    "llamagen-c2i-3B-384": _c2i("c2i_3B_384.pt"),
    "anole-7b": (Part("target", (_ANOLE,)), _CHAMELEON_TOKENIZER, Part("drafter", (_ANOLE_DRAFTER,))),
    # The LANTERN authors have published no drafter for Lumina-mGPT.
    "lumina-mgpt-7b-768": (Part("target", (_LUMINA,)), _CHAMELEON_TOKENIZER),
}
"""The parts of each published model, by the name it has here."""


# ---- Which files of a published model are on this machine, and whether they are what they were


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


# ----

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
