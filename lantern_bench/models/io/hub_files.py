"""The files of the published models: repositories, where they may be on this machine, download and hash check.

huggingface_hub downloads, resumes and retries. A file is accepted when its SHA-256 is the pinned one, else the recorded
one, else the one that the hub names; `weights.json` in the directory of the weights records every file once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import cache_folder, file_sha256, remembered_sha256, write_atomically


class Licence(NamedTuple):
    """A licence by its name in the repository, and what to know before downloading."""

    name: str
    note: str = ""


class HubFile(NamedTuple):
    """A file of a repository; `sha256` in hex where it is pinned. An optional file may be missing.

    `sharded`: weights that are this file, or the index beside it and the shards that the index names.
    """

    path: str
    sha256: str | None = None
    optional: bool = False
    sharded: bool = False

    @property
    def shard_index(self) -> str:
        """The name of the index of its shards."""
        return f"{self.path}.index.json"

    def found_in(self, folder: Path) -> dict[str, Path]:
        """The files in a directory, by their names in the repository; empty if one of them is missing."""
        if (folder / self.path).is_file() or not self.sharded:
            return {self.path: folder / self.path} if (folder / self.path).is_file() else {}
        try:
            shards = set(json.loads((folder / self.shard_index).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        found = {name: folder / name for name in (self.shard_index, *sorted(shards))}
        return found if all(path.is_file() for path in found.values()) else {}

    def offered_in(self, names: Collection[str]) -> list[str]:
        """Its names among those of a repository; empty if it is not there."""
        if self.path in names or not (self.sharded and self.shard_index in names):
            return [self.path] if self.path in names else []
        stem, _, ending = self.path.rpartition(".")
        shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{re.escape(ending)}")
        return [self.shard_index, *sorted(name for name in names if shard.fullmatch(name))]


class Source(NamedTuple):
    """One repository that has a part of a model. `revision` is a commit, or `main`; `layout` names the key map."""

    repo: str
    files: tuple[HubFile, ...]
    licence: Licence
    revision: str = "main"
    layout: str = ""

    @property
    def commit(self) -> str | None:
        """The pinned commit; None where the revision moves with its repository."""
        return None if self.revision == "main" else self.revision

    def pinned_sha256(self, file: str) -> str | None:
        """The SHA-256 that is pinned for a file."""
        return next((one.sha256 for one in self.files if one.path == file), None)


class Part(NamedTuple):
    """A part of a model and its sources: any complete one is used, the first is downloaded."""

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
JANUS = Licence(
    "MIT (as the repository says)",
    "its authors put the weights under the DeepSeek Model License, which restricts some uses: "
    "https://github.com/deepseek-ai/Janus/blob/main/LICENSE-MODEL",
)
UNSTATED = Licence(
    "not known here",
    "read the repository's page first; the code that made these files (jadohu/LANTERN) is under the Chameleon "
    "Research License",
)

NOT_STATED = Licence(
    "not stated", "the repository of these files names no licence: ask their authors before you use them"
)


def _files(*paths: str, optional: bool = False) -> tuple[HubFile, ...]:
    return tuple(HubFile(path, optional=optional) for path in paths)


def _shards(name: str, ending: str, count: int) -> tuple[HubFile, ...]:
    """Sharded weights and their index, as transformers names them."""
    shards = (f"{name}-{shard + 1:05}-of-{count:05}.{ending}" for shard in range(count))
    return _files(*shards, f"{name}.{ending}.index.json")


def _t5(weights: tuple[HubFile, ...]) -> Source:
    words = _files("config.json", "tokenizer.json", "tokenizer_config.json")
    files = (*weights, *words, *_files("special_tokens_map.json", "spiece.model", optional=True))
    return Source("google/flan-t5-xl", files, APACHE, "7d6315df2c2fb742f0f5b556879d730926ca9001")


T5 = Part("text_encoder", (_t5(_shards("model", "safetensors", 2)), _t5(_shards("pytorch_model", "bin", 2))))


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


_VQGAN = Source(
    "GAIR/Anole-7b-v0.1",
    _files("tokenizer/vqgan.ckpt", "tokenizer/vqgan.yaml", "tokenizer/text_tokenizer.json"),
    CHAMELEON,
    revision="c5710623b72b402fd9ec0816e8d9b1a5c383f595",
)


def _chameleon(repo: str, shards: int, licence: Licence, revision: str) -> Source:
    """A Chameleon in the layout of transformers."""
    words = _files("config.json", "tokenizer.json")
    more = _files("tokenizer_config.json", "special_tokens_map.json", optional=True)
    return Source(repo, (*_shards("model", "safetensors", shards), *words, *more), licence, revision, layout="hf")


_ANOLE = _chameleon("leloy/Anole-7b-v0.1-hf", 3, ANOLE_HF, "4f2c679ff6eb0291e7813502467b30e7835bd199")
_LUMINA = _chameleon("Alpha-VLLM/Lumina-mGPT-7B-768", 2, CHAMELEON, "9624463a82ea5ce814af9b561dcd08a31082c3af")
_LUMINA_2 = Source(
    "Alpha-VLLM/Lumina-mGPT-2.0",
    (*_shards("model", "safetensors", 4), *_files("config.json", "tokenizer.json", "tokenizer_config.json")),
    APACHE,
    layout="hf",
)
_MOVQGAN = Source("ai-forever/MoVQGAN", _files("movqgan_270M.ckpt"), NOT_STATED)
_ANOLE_DRAFTER = Source("jadohu/anole_drafter", _files("config.json", "pytorch_model.bin"), APACHE)


def _hosted(repo: str, licence: Licence) -> tuple[Part, ...]:
    """A model whose target and tokenizers transformers reads from one folder; no drafter was published for any."""
    files = (HubFile("model.safetensors", sharded=True), *_files("config.json", "tokenizer.json"))
    more = _files("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", optional=True)
    source = Source(repo, (*files, *more), licence, layout="hf")
    return (Part("target", (source,)), Part("tokenizer", (source,)))


_C2I_SIZES = ("B-256", "B-384", "L-256", "L-384", "XL-384", "XXL-384", "3B-384")

SOURCES: dict[str, tuple[Part, ...]] = {
    "llamagen-t2i-stage1": _t2i("t2i_XL_stage1_256.pt", "LlamaGen-T2I", "llamagen_drafter"),
    "llamagen-t2i-stage2": _t2i("t2i_XL_stage2_512.pt", "LlamaGen-T2I-2", "llamagen2_drafter"),
    **{f"llamagen-c2i-{size}": _c2i(f"c2i_{size.replace('-', '_')}.pt") for size in _C2I_SIZES},
    "anole-7b": (Part("target", (_ANOLE,)), Part("tokenizer", (_VQGAN,)), Part("drafter", (_ANOLE_DRAFTER,))),
    # The LANTERN authors have published no drafter for Lumina-mGPT.
    "lumina-mgpt-7b-768": (Part("target", (_LUMINA,)), Part("tokenizer", (_VQGAN,))),
    "janus-pro-1b": _hosted("deepseek-community/Janus-Pro-1B", JANUS),
    "janus-pro-7b": _hosted("deepseek-community/Janus-Pro-7B", JANUS),
    "emu3-gen": _hosted("BAAI/Emu3-Gen-hf", APACHE),
    "lumina-mgpt2-7b": (Part("target", (_LUMINA_2,)), Part("tokenizer", (_MOVQGAN,))),
}
"""The parts of each published model, by its name in this package."""


# ---- Files on this machine

WEIGHTS_FOLDER_VARIABLE = "LANTERN_BENCH_WEIGHTS"
# Directories of a repository under the root: as the hub names it, and as the authors' instructions do
# (LlamaGen: pretrained_models/t5-ckpt/flan-t5-xl; LANTERN: t5/, trained_drafters/, chameleon/tokenizer/).
_FOLDERS = ("{repo}", "{name}", "t5/{name}", "t5-ckpt/{name}", "trained_drafters/{name}", "chameleon")


class Found(NamedTuple):
    """A part that is on this machine: its source, its directory, and each file's path by its name in the source."""

    part: str
    source: Source
    folder: Path
    paths: Mapping[str, Path]

    @property
    def path(self) -> Path:
        """The first file: the whole checkpoint, where it is one file."""
        return next(iter(self.paths.values()))


def weights_root() -> Path:
    """The directory of the weights: `LANTERN_BENCH_WEIGHTS`, else `weights` in the user's cache directory."""
    return Path(os.environ.get(WEIGHTS_FOLDER_VARIABLE) or cache_folder() / "weights")


def parts_of(model: str) -> tuple[Part, ...]:
    """The parts of a published model; raises `UserError` for a model without published files."""
    if model not in SOURCES:
        raise UserError(
            f"{model}: no published files of this model are known",
            f"The published models are {', '.join(SOURCES)}; for your own files write a model.yaml.",
        )
    return SOURCES[model]


def find_part(model: str, part: str, root: Path | None = None) -> Found | None:
    """Find a part of a model: the first complete source on this machine, else None."""
    base = root or weights_root()
    for source in _sources(model, part):
        name = source.repo.split("/")[-1]
        folders = [base / place.format(repo=source.repo, name=name) for place in _FOLDERS]
        # A checkpoint of one file may also lie in the root itself.
        for folder in [*folders, *([base] if len(source.files) == 1 else []), *_hub_cache(source)]:
            here = [file.found_in(folder) for file in source.files]
            if all(file.optional or paths for file, paths in zip(source.files, here, strict=True)):
                return Found(part, source, folder, {name: path for paths in here for name, path in paths.items()})
    return None


def require_part(model: str, part: str, root: Path | None = None) -> Found:
    """Find a part of a model; raises `RefusedError` with the command that downloads it."""
    if (found := find_part(model, part, root)) is not None:
        return found
    source = _sources(model, part)[0]
    first, *more = [file.path for file in source.files if not file.optional]
    files = f"({first} and {len(more)} more)" if more else first
    raise RefusedError(
        f"the {part.replace('_', ' ')} of {model} is not on this machine: {source.repo} {files} is neither under "
        f"{root or weights_root()} nor in the Hugging Face cache",
        f"Type `lantern-bench weights get {model}`, or set {WEIGHTS_FOLDER_VARIABLE} to the directory that has it.",
    )


class ExpectedPaths(Mapping[str, Path]):
    """Each part's first file where it is found, else where a download puts it; looked up only when asked."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getitem__(self, part: str) -> Path:
        found, first = find_part(self._model, part), _sources(self._model, part)[0]
        return found.path if found is not None else weights_root() / first.repo / first.files[0].path

    def __iter__(self) -> Iterator[str]:
        return (part.name for part in parts_of(self._model))

    def __len__(self) -> int:
        return len(parts_of(self._model))


def _sources(model: str, part: str) -> tuple[Source, ...]:
    return {one.name: one.choices for one in parts_of(model)}[part]


def _hub_cache(source: Source) -> list[Path]:
    """The snapshot in the Hugging Face cache, where there is one; uses no network."""
    home = os.environ.get("HF_HOME") or cache_folder().parent / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    # huggingface_hub is slow to import and rarely needed here.
    if not (cache / f"models--{source.repo.replace('/', '--')}").is_dir():
        return []
    from huggingface_hub import try_to_load_from_cache

    first = next(file.path for file in source.files if not (file.optional or file.sharded))
    cached = try_to_load_from_cache(source.repo, first, cache_dir=cache, revision=source.revision)
    return [Path(cached).parents[first.count("/")]] if isinstance(cached, str) else []


# ---- Recorded hashes


class Ledger:
    """The SHA-256 of every file seen under a root, in `weights.json` there.

    An entry never changes; a file that differs from its entry is refused.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / "weights.json"
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self._entries = {str(key): dict(value) for key, value in found["files"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path}: damaged, it should hold the SHA-256 of the files here",
                "Remove it; the files are recorded again when they are next used.",
            ) from error

    def entry(self, repo: str, file: str) -> Mapping[str, Any]:
        """What is recorded of a file (sha256, bytes, revision), or an empty mapping."""
        return self._entries.get(f"{repo}/{file}", {})

    def record(self, repo: str, file: str, sha256: str, size: int, revision: str | None) -> bool:
        """Record a file that is not recorded yet; False where the directory cannot be written."""
        self._entries.setdefault(f"{repo}/{file}", {"sha256": sha256, "bytes": size, "revision": revision})
        try:
            write_atomically(self.path, json.dumps({"files": self._entries}, indent=1, sort_keys=True).encode() + b"\n")
        except OSError:
            return False
        return True


def hashes_of(found: Found, root: Path | None = None) -> dict[str, str]:
    """The SHA-256 of each file of a part, by its name in the source; a file seen for the first time is recorded.

    Raises `RefusedError` for a file whose hash is not the pinned or recorded one.
    """
    ledger, source = Ledger(root or weights_root()), found.source
    hashes = {file: remembered_sha256(path) for file, path in found.paths.items()}
    for file, path in found.paths.items():
        expected = source.pinned_sha256(file) or ledger.entry(source.repo, file).get("sha256")
        if expected is None:
            ledger.record(source.repo, file, hashes[file], path.stat().st_size, source.commit)
        elif hashes[file] != expected:
            raise RefusedError(
                f"{path}: the file changed: its SHA-256 is {hashes[file][:12]}..., expected {expected[:12]}...",
                "Remove it and download it again with `lantern-bench weights get`; if you replaced it on purpose, "
                f"remove its entry in {ledger.path}.",
            )
    return hashes


# ---- Download


Missing: TypeAlias = tuple[Source, tuple[HubFile, ...]]
"""A source, and its files that are not on this machine."""


class Fetched(NamedTuple):
    """A file that was downloaded: its SHA-256, its commit, and whether the hash was known before."""

    source: Source
    file: str
    sha256: str
    commit: str
    known: bool


def missing_files(model: str, root: Path) -> list[Missing]:
    """The files that complete a model: of each incomplete part, those of its first source that are not here."""
    missing = [part.choices[0] for part in parts_of(model) if find_part(model, part.name, root) is None]
    return [
        (source, tuple(file for file in source.files if not file.found_in(root / source.repo)))
        for source in dict.fromkeys(missing)
    ]


def licences(missing: Sequence[Missing]) -> dict[Licence, list[str]]:
    """The licences of files, each with its repositories, in the order of the files."""
    pairs = dict.fromkeys((source.licence, source.repo) for source, _files in missing)
    return {licence: [repo for kind, repo in pairs if kind == licence] for licence, _repo in pairs}


def fetch(missing: Sequence[Missing], root: Path, bars: bool = True) -> Iterator[Fetched]:
    """Download files and check each against its SHA-256; yields a file once it is recorded.

    Every repository is asked for its files before anything is downloaded; `bars` shows huggingface_hub's progress bars.
    Raises `UserError` when the directory cannot be written, `RefusedError` for what the hub refuses and for a file with
    an unexpected hash, which is removed.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not bars:
        disable_progress_bars()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dir {root}: cannot be written: {error.strerror}") from error
    ledger = Ledger(root)
    for source, commit, named in [_described(*one) for one in missing]:
        folder = root / source.repo
        with _explained(source.repo):
            snapshot_download(source.repo, revision=commit, allow_patterns=list(named), local_dir=folder)
            found = {file: file_sha256(folder / file) for file in named}
        for file, sha256 in found.items():
            known = source.pinned_sha256(file) or ledger.entry(source.repo, file).get("sha256")
            expected = known or named[file] or sha256
            if sha256 != expected:
                (folder / file).unlink()
                raise RefusedError(
                    f"{source.repo} {file}: SHA-256 {sha256[:12]}..., expected {expected[:12]}...; removed",
                    "The file changed at its source or was damaged in transit; try again, and do not use it if this "
                    "repeats.",
                )
            ledger.record(source.repo, file, sha256, (folder / file).stat().st_size, commit)
            yield Fetched(source, file, sha256, commit, known is not None)


def _described(source: Source, files: Sequence[HubFile]) -> tuple[Source, str, dict[str, str | None]]:
    """A source, its commit, and its files to download with the SHA-256 that the hub names for large ones."""
    from huggingface_hub import HfApi

    with _explained(source.repo):
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
    named = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or ()}
    offered = {file: file.offered_in(named) for file in files}
    absent = [file.path for file, names in offered.items() if not file.optional and not names]
    if absent:
        raise RefusedError(f"{source.repo}: the repository no longer has {', '.join(absent)}")
    return source, str(info.sha), {name: named[name] for names in offered.values() for name in names}


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a `RefusedError` that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:
        if isinstance(error, errors.OfflineModeIsEnabled):
            problem, other = "not on this machine, and HF_HUB_OFFLINE forbids the download", WEIGHTS_FOLDER_VARIABLE
            advice = f"Unset HF_HUB_OFFLINE, or download it elsewhere and give its directory by --dir or {other}."
        elif isinstance(error, errors.GatedRepoError):
            problem = "gated repository: accept its licence first"
            advice = f"Accept it at https://huggingface.co/{repo}, then set HF_TOKEN or type `hf auth login`."
        elif isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
            problem, advice = "the hub no longer has this repository or revision", None
        else:
            problem = f"cannot be downloaded: {' '.join(str(error).split())[:200] or type(error).__name__}"
            advice = "Files that arrived are kept; the same command continues."
        raise RefusedError(f"{repo}: {problem}", advice) from error
