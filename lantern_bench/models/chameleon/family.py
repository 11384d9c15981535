"""Chameleon as `models.registry` wants it: Anole and Lumina-mGPT, by name or by a user's file.

Nothing here imports torch before a model is loaded. What the sizes are, and how each model asks for a picture, is
`chameleon_sizes`; what is in the files `chameleon` and `vqgan_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.models.chameleon import (
    _CODES,
    PUBLISHED,
    STYLES,
    ChameleonSize,
    PromptTokenizer,
    Style,
    Vocabulary,
    invented_words,
    published_vocabulary,
    read_config,
    read_vocabulary,
)
from lantern_bench.models.default_prompts import CAPTIONS
from lantern_bench.models.io.hub_files import CHAMELEON, SOURCES, ExpectedPaths, find_part, hashes_of, require_part
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.llamagen.family import one_hash
from lantern_bench.plugins import ModelCard

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel, Parts
    from lantern_bench.models.vq import VQModel


# What the LANTERN authors sample both with: the defaults of their generate_images.
_DEFAULTS: dict[str, Any] = {"cfg_scale": 3.0, "top_k": 2000, "tree": "eagle1-25"}
_ABOUT = {"anole-7b": "Anole", "lumina-mgpt-7b-768": "Lumina-mGPT"}
_ALSO = {"anole": "anole-7b", "chameleon": "anole-7b", "lumina-mgpt": "lumina-mgpt-7b-768"}


class ChameleonFamily:
    """The published models that descend from Chameleon 7B."""

    # ---- what can be known without loading

    def cards(self) -> Sequence[ModelCard]:
        """Anole and Lumina-mGPT."""
        return [self._card(name, style) for name, style in STYLES.items()]

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for an empty caption."""
        if not text.strip():
            raise UserError("the caption is empty", "Type what the picture shows.")

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """A few prompts to begin with."""
        return {"examples": CAPTIONS}

    # ---- models of a user's file

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` is one of these models, or chameleon."""
        return file.family in STYLES or file.family in _ALSO

    def card_of_file(self, file: ModelFile) -> ModelCard:
        """The card of a model in a file."""
        style, vocabulary = self._style(file), self._vocabulary(file)
        self._size(file)
        parts = {"target": file.target, "tokenizer": file.tokenizer, "drafter": file.drafter}
        return ModelCard(
            name=str(file.path),
            family="chameleon",
            description=file.description or f"{file.name}: {_ABOUT[self._named(file)]}",
            defaults=_DEFAULTS | dict(file.defaults),
            prompt_set="examples",
            weights={name: part.path for name, part in parts.items() if part is not None},
            vocab_size=len(vocabulary.codes),
            tokens=style.grid[0] * (style.grid[1] + style.line_ends),
        )

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """Raise `UserError` for a caption that is empty or too long, and where the tokenizer.json is missing."""
        self._prompts(file).words(text)

    def load_file(self, file: ModelFile, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load the model of a file; raises `UserError` for every way in which its checkpoints do not fit."""
        from lantern_bench.models.chameleon.checkpoint import load_drafter, load_target
        from lantern_bench.models.chameleon.model import loaded_model
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.io.files import hash_of
        from lantern_bench.models.llamagen.model import hash_of_text, table_of_file
        from lantern_bench.models.loaded_model import Parts

        if file.target.layout == "official":
            raise file.wrong("target.layout", "official: Chameleon is read in the layout hf", "Convert it, or say hf.")
        style, vocabulary = self._style(file), self._vocabulary(file)
        config = self._size(file).transformer(style, vocabulary.token_ids(style))
        checkpoint = open_checkpoint(file.target.path)
        target = load_target(checkpoint, config, dtype=dtype, device=device)
        # Sizes, prompts and the order of codes stand in the files beside the weights, and change what is computed.
        words = tuple(path for path in (_folder(file) / "tokenizer.json",) if path.is_file())
        sizes = hash_of_text(repr((style, config, config.token_ids)))
        hashes = {"target": hash_of((*checkpoint.paths, *words)), "sizes": sizes}
        drafter = tokenizer = None
        if file.drafter is not None:
            drafter = load_drafter(file.drafter.path, target, dtype=dtype, device=device)
            weights = open_checkpoint(file.drafter.path).paths
            hashes["drafter"] = hash_of((*weights, file.drafter.path / "config.json"))
        if file.tokenizer is not None:
            tokenizer = self.load_tokenizer(file.tokenizer.path, device, file.tokenizer.config)
            hashes["tokenizer"] = hash_of(open_checkpoint(file.tokenizer.path).paths)
        if file.neighbours is not None:
            hashes["neighbour_table"] = hash_of((file.neighbours.path,))
        return loaded_model(
            str(file.path),
            style,
            Parts(target, drafter, tokenizer),
            hashes,
            self._prompts(file),
            table=table_of_file(file, len(vocabulary.codes)),
            table_folder=file.tokenizer.path.parent if file.tokenizer is not None else None,
        )

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
        """Load a tokenizer alone; raises `UserError` for a file that is none, or not of the sizes in `config`."""
        from lantern_bench.models.chameleon.checkpoint import load_vqgan

        return load_vqgan(path, device, config)

    # ---- published models

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load a published model; `RefusedError` when a file is missing, `UserError` when it is not what it should be.

        The drafter may be missing: then only `ar` can be asked of it.
        """
        from lantern_bench.models.chameleon.checkpoint import load_drafter, load_target
        from lantern_bench.models.chameleon.model import loaded_model
        from lantern_bench.models.io.checkpoint import open_checkpoint
        from lantern_bench.models.llamagen.checkpoint import config_beside
        from lantern_bench.models.loaded_model import Parts

        style = STYLES[name]
        found = {part: require_part(name, part) for part in ("target", "tokenizer")}
        drafted = any(part.name == "drafter" for part in SOURCES[name]) and find_part(name, "drafter")
        folder = found["target"].folder
        stated = config_beside(folder, "hf")
        vocabulary = read_vocabulary(stated, folder / "tokenizer.json", str(folder / "config.json"))
        size = read_config(stated, lambda key, text: UserError(f"{folder / 'config.json'}: {key}: {text}"))
        config = size.transformer(style, vocabulary.token_ids(style))
        target = load_target(open_checkpoint(folder), config, dtype=dtype, device=device)
        drafter = None
        if drafted:
            found["drafter"] = drafted
            drafter = load_drafter(drafted.folder, target, dtype=dtype, device=device)
        return loaded_model(
            name,
            style,
            Parts(target, drafter, self.load_tokenizer(found["tokenizer"].path, device)),
            {part: one_hash(hashes_of(files)) for part, files in found.items()},
            PromptTokenizer(folder / "tokenizer.json", vocabulary, style),
            table_folder=found["tokenizer"].folder,
        )

    def build(self, name: str) -> Parts:
        """Fresh modules of the full shape, a drafter of the published shape among them."""
        from lantern_bench.models.chameleon.model import build

        return build(STYLES[name])

    def assemble(self, name: str, parts: Parts, weights: Mapping[str, str]) -> LoadedModel:
        """Put parts that have their weights together."""
        from lantern_bench.models.chameleon.model import loaded_model

        return loaded_model(name, STYLES[name], parts, weights, self.random_condition(name, parts))

    def random_condition(self, name: str, parts: Parts) -> Callable[[Sequence[str]], Any]:  # noqa: ARG002
        """Prompts of invented numbers, the same for the same words."""
        return invented_words(STYLES[name], published_vocabulary(), PUBLISHED.words)

    # ----

    def _card(self, name: str, style: Style) -> ModelCard:
        height, width = (16 * side for side in style.grid)
        return ModelCard(
            name=name,
            family="chameleon",
            description=f"{_ABOUT[name]}, {height}x{width} px, {PUBLISHED.parameters / 1e6:,.0f}M parameters",
            defaults=_DEFAULTS,
            prompt_set="examples",
            licence=CHAMELEON.name,
            weights=ExpectedPaths(name),
            vocab_size=_CODES,
            tokens=style.grid[0] * (style.grid[1] + style.line_ends),
            parameters=PUBLISHED.parameters,
            also_called=tuple(other for other, meant in _ALSO.items() if meant == name and other != "chameleon"),
        )

    def _named(self, file: ModelFile) -> str:
        return _ALSO.get(file.family, file.family)

    def _style(self, file: ModelFile) -> Style:
        style = STYLES[self._named(file)]
        return style if file.grid is None else replace(style, grid=file.grid)

    def _stated(self, file: ModelFile) -> Mapping[str, Any]:
        """What config.json beside the weights says, and over it what the model file does."""
        from lantern_bench.models.llamagen.checkpoint import config_beside

        return {**config_beside(file.target.path, "hf"), **(file.target.config or {})}

    def _size(self, file: ModelFile) -> ChameleonSize:
        return read_config(self._stated(file), lambda key, text: file.wrong(f"target.config.{key}", text))

    def _vocabulary(self, file: ModelFile) -> Vocabulary:
        tokenizer, stated = _folder(file) / "tokenizer.json", self._stated(file)
        if not tokenizer.is_file() and not stated.get("vocabulary_map"):
            # Without either it may well be another model, which is the better thing to say.
            from lantern_bench.models.chameleon.checkpoint import check_target
            from lantern_bench.models.io.checkpoint import open_checkpoint

            check_target(open_checkpoint(file.target.path))
        return read_vocabulary(stated, tokenizer, str(file.path))

    def _prompts(self, file: ModelFile) -> PromptTokenizer:
        return PromptTokenizer(_folder(file) / "tokenizer.json", self._vocabulary(file), self._style(file))


def _folder(file: ModelFile) -> Path:
    """Where the target's files are."""
    return file.target.path if file.target.path.is_dir() else file.target.path.parent


FAMILY = ChameleonFamily()
