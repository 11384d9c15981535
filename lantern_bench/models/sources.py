"""Where the files of the published models are: repository, file, revision, licence, size and SHA-256 where known.

Pure data and nothing else: how files are found is `weights`, how they are fetched `download`. What is not known is
left out and never guessed: a revision that is None moves with its repository and is called unpinned, a SHA-256 that is
None is recorded at the first download. Sizes are those that the repositories' listings show, rounded there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHAMELEON", "SOURCES", "HubFile", "Licence", "Part", "Source"]


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
