"""The files of published models: repositories and licences, where they are on this machine, and download.

huggingface_hub keeps, resumes and checks downloads, so nothing here hashes or records a file; the hashes in a run's
records are those of the files that were read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import cache_folder

WEIGHTS_VARIABLE = "LANTERN_BENCH_WEIGHTS"
"""Names the folder of the weights, with a folder for each repository."""

# Folders of a repository: as the hub names it, and as the authors' instructions do (LlamaGen:
# pretrained_models/t5-ckpt/flan-t5-xl; LANTERN: t5/, trained_drafters/, chameleon/tokenizer/). A single file may also
# lie in the folder of the weights itself.
_FOLDERS = ("{repo}", "{name}", "t5/{name}", "t5-ckpt/{name}", "trained_drafters/{name}", "chameleon", "")


class Licence(NamedTuple):
    """A licence by its name in the repository, and what to know before downloading."""

    name: str
    note: str = ""


MIT, APACHE = Licence("MIT"), Licence("Apache-2.0")
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
UNKNOWN = Licence(
    "not known here",
    "read the repository's page first; the code that made these files (jadohu/LANTERN) is under the Chameleon "
    "Research License",
)
NOT_STATED = Licence(
    "not stated", "the repository of these files names no licence: ask their authors before you use them"
)


class Source(NamedTuple):
    """A repository that has a part of a model."""

    repo: str
    path: str  # the file that is read; "." for a folder
    patterns: tuple[str, ...]  # of all files that are downloaded
    licence: Licence
    revision: str = "main"

    def found_in(self, folder: Path) -> Path | None:
        """Return the file or the folder of this part below the repository's folder; None where a file is missing."""
        path = folder / self.path
        complete = path.is_file() if self.path != "." else all(_complete(path, pattern) for pattern in self.patterns)
        return path if complete else None

    def local_path(self) -> Path | None:
        """Return the file or folder: below the folder of the weights, else in the cache of huggingface_hub."""
        # Files were downloaded to the second one before huggingface_hub's cache was used.
        for root in (weights_folder(), cache_folder() / "weights"):
            for folder in _FOLDERS if self.path != "." else _FOLDERS[:-1]:
                folder = folder.format(repo=self.repo, name=self.repo.split("/")[-1])
                if root is not None and (path := self.found_in(root / folder)) is not None:
                    return path
        # huggingface_hub is slow to import and rarely needed here.
        if not (_hub_cache() / f"models--{self.repo.replace('/', '--')}").is_dir():
            return None
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        where: dict[str, Any] = {"revision": self.revision, "allow_patterns": list(self.patterns)}
        where["cache_dir"] = _hub_cache()
        try:
            return self.found_in(Path(snapshot_download(self.repo, local_files_only=True, **where)))
        except (LocalEntryNotFoundError, OSError):
            return None

    def download(self, root: Path | None = None, bars: bool = True) -> Path:
        """Download the missing files into `root`, or the cache of huggingface_hub, and return the part's path.

        `bars` shows progress bars. The same call continues an interrupted download. Raises `RefusedError` for what the
        hub refuses.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not bars:
            disable_progress_bars()
        where: dict[str, Any] = {"local_dir": root / self.repo} if root is not None else {"cache_dir": _hub_cache()}
        where |= {"revision": self.revision, "allow_patterns": list(self.patterns)}
        with _explained(self.repo):
            folder = Path(snapshot_download(self.repo, **where))
        if self.found_in(folder) is None:
            raise RefusedError(f"{self.repo}: the repository no longer has {self.path} ({', '.join(self.patterns)})")
        return folder / self.path


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
    home = os.environ.get("HF_HOME") or cache_folder().parent / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


Part: TypeAlias = tuple[Source, ...]
"""The sources of a part: any that is here is used, the first is downloaded."""


def _file(repo: str, path: str, licence: Licence, revision: str = "main") -> Source:
    return Source(repo, path, (path,), licence, revision)


def _folder(repo: str, licence: Licence, revision: str = "main", ending: str = "safetensors") -> Source:
    return Source(repo, ".", ("*.json", f"*.{ending}"), licence, revision)


_T5 = ("google/flan-t5-xl", APACHE, "7d6315df2c2fb742f0f5b556879d730926ca9001")
_VQGAN = _file("GAIR/Anole-7b-v0.1", "tokenizer/vqgan.ckpt", CHAMELEON, "c5710623b72b402fd9ec0816e8d9b1a5c383f595")


def _t2i(checkpoint: str, converted: str, drafter: str) -> Mapping[str, Part]:
    """A text-conditional LlamaGen: the official checkpoint, or the LANTERN authors' conversion of it."""
    official = _file("peizesun/llamagen_t2i", checkpoint, MIT)
    return {
        "target": (official, _folder(f"jadohu/{converted}", UNKNOWN)),
        "tokenizer": (_file("peizesun/llamagen_t2i", "vq_ds16_t2i.pt", MIT),),
        "drafter": (_folder(f"jadohu/{drafter}", UNKNOWN, ending="bin"),),
        "text_encoder": (_folder(*_T5), _folder(*_T5, ending="bin")),
    }


def _c2i(size: str) -> Mapping[str, Part]:
    """A class-conditional LlamaGen; no drafter was published for any of them."""
    repo = "FoundationVision/LlamaGen"
    target = _file(repo, f"c2i_{size.replace('-', '_')}.pt", MIT)
    return {"target": (target,), "tokenizer": (_file(repo, "vq_ds16_c2i.pt", MIT),)}


def _one_folder(source: Source) -> Mapping[str, Part]:
    """A model whose image tokenizer is in the target's folder; no drafter was published for any."""
    return {"target": (source,), "tokenizer": (source,)}


PARTS: Mapping[str, Mapping[str, Part]] = {
    "llamagen-t2i-stage1": _t2i("t2i_XL_stage1_256.pt", "LlamaGen-T2I", "llamagen_drafter"),
    "llamagen-t2i-stage2": _t2i("t2i_XL_stage2_512.pt", "LlamaGen-T2I-2", "llamagen2_drafter"),
    **{f"llamagen-c2i-{s}": _c2i(s) for s in ("B-256", "B-384", "L-256", "L-384", "XL-384", "XXL-384", "3B-384")},
    "anole-7b": {
        "target": (_folder("leloy/Anole-7b-v0.1-hf", ANOLE_HF, "4f2c679ff6eb0291e7813502467b30e7835bd199"),),
        "tokenizer": (_VQGAN,),
        "drafter": (_folder("jadohu/anole_drafter", APACHE, ending="bin"),),
    },
    # The LANTERN authors have published no drafter for Lumina-mGPT.
    "lumina-mgpt-7b-768": {
        "target": (_folder("Alpha-VLLM/Lumina-mGPT-7B-768", CHAMELEON, "9624463a82ea5ce814af9b561dcd08a31082c3af"),),
        "tokenizer": (_VQGAN,),
    },
    "lumina-mgpt2-7b": {
        "target": (_folder("Alpha-VLLM/Lumina-mGPT-2.0", APACHE),),
        "tokenizer": (_file("ai-forever/MoVQGAN", "movqgan_270M.ckpt", NOT_STATED),),
    },
    "janus-pro-1b": _one_folder(_folder("deepseek-community/Janus-Pro-1B", JANUS)),
    "janus-pro-7b": _one_folder(_folder("deepseek-community/Janus-Pro-7B", JANUS)),
    "emu3-gen": _one_folder(_folder("BAAI/Emu3-Gen-hf", APACHE)),
}
"""The parts of each published model, by its name in this package."""


def local_path(part: Part) -> Path | None:
    """Return the file or folder of a part where it is on this machine."""
    return next((path for path in map(Source.local_path, part) if path is not None), None)


def expected_path(part: Part) -> Path:
    """Return the file or folder of a part: where it is, or below which folder a download puts it."""
    return local_path(part) or (weights_folder() or _hub_cache()) / part[0].repo / part[0].path


def local_paths(model: str) -> dict[str, Path]:
    """Return the path of each part of a published model that is on this machine.

    Raises `UserError` for a model without published files, `RefusedError` with the command that downloads them where
    the target or the tokenizer is missing.
    """
    parts = parts_of(model)
    paths = {name: local_path(part) for name, part in parts.items()}
    for name in ("target", "tokenizer"):
        if paths[name] is None:
            source = parts[name][0]
            raise RefusedError(
                f"the {name} of {model} is not on this machine: {source.repo} is neither in the folder that "
                f"{WEIGHTS_VARIABLE} names nor in the Hugging Face cache",
                f"Type `lantern-bench weights get {model}`, or set {WEIGHTS_VARIABLE} to the directory that has it.",
            )
    return {name: path for name, path in paths.items() if path is not None}


def parts_of(model: str) -> Mapping[str, Part]:
    """Return the parts of a published model; raises `UserError` for a model without published files."""
    if model not in PARTS:
        raise UserError(
            f"{model}: no published files of this model are known",
            f"The published models are {', '.join(PARTS)}; for your own files write a model.yaml.",
        )
    return PARTS[model]


def missing_sources(model: str, root: Path | None = None) -> Sequence[Source]:
    """Return the sources that complete a published model, on this machine or in the folder `root`."""

    def is_here(source: Source) -> bool:
        return (source.local_path() if root is None else source.found_in(root / source.repo)) is not None

    parts = parts_of(model).values()
    return list(dict.fromkeys(part[0] for part in parts if not any(map(is_here, part))))


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a `RefusedError` that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        if not constants.HF_HUB_OFFLINE:
            raise _not_downloaded(repo, error) from error
        problem = "not on this machine, and HF_HUB_OFFLINE forbids the download"
        advice = f"Unset it, or download it elsewhere and give its directory by --dir or {WEIGHTS_VARIABLE}."
        raise RefusedError(f"{repo}: {problem}", advice) from error
    except errors.GatedRepoError as error:
        advice = f"Accept it at https://huggingface.co/{repo}, then set HF_TOKEN or type `hf auth login`."
        raise RefusedError(f"{repo}: gated repository: accept its licence first", advice) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise RefusedError(f"{repo}: the hub no longer has this repository or revision") from error
    except (errors.HfHubHTTPError, OSError, RuntimeError) as error:
        raise _not_downloaded(repo, error) from error


def _not_downloaded(repo: str, error: Exception) -> RefusedError:
    problem = " ".join(str(error).split())[:200] or type(error).__name__
    return RefusedError(
        f"{repo}: cannot be downloaded: {problem}", "Files that arrived are kept; the same command continues."
    )
