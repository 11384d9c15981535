"""Chameleon as `models.registry` wants it: Anole and Lumina-mGPT, by name or by a user's file.

Nothing here imports torch before a model is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.chameleon import (
    FIRST_WORD,
    PUBLISHED,
    STYLES,
    ChameleonSize,
    ChameleonVocabulary,
    Style,
    chameleon_vocabulary,
    published_vocabulary,
    read_config,
)
from lantern_bench.models.family import CheckpointFamily, ModelCard, config_beside
from lantern_bench.models.io.hub_files import CHAMELEON
from lantern_bench.models.io.model_file import ModelFile
from lantern_bench.models.prompt_tokens import PromptBuilder, TextTokenizer, invented_prompts

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import Prompts
    from lantern_bench.models.target import TransformerTarget
    from lantern_bench.models.vq import VQConfig, VQModel


class ChameleonFamily(CheckpointFamily):
    """The published models that descend from Chameleon 7B.

    `about`: what a model is called. `also`: other names of models. `size`: of all of them. `licence`: theirs.
    """

    name = "chameleon"
    # What the LANTERN authors sample both with: the defaults of their generate_images.
    defaults: Mapping[str, Any] = {"cfg_scale": 3.0, "top_k": 2000, "tree": "eagle1-25"}
    styles: Mapping[str, Style] = STYLES
    about: Mapping[str, str] = {"anole-7b": "Anole", "lumina-mgpt-7b-768": "Lumina-mGPT"}
    also: Mapping[str, str] = {"anole": "anole-7b", "chameleon": "anole-7b", "lumina-mgpt": "lumina-mgpt-7b-768"}
    size: ChameleonSize = PUBLISHED
    licence = CHAMELEON.name
    invented_words = (FIRST_WORD, PUBLISHED.words - 1)

    def cards(self) -> Sequence[ModelCard]:
        """The published models."""
        return [
            self.card(
                name,
                self.about[name],
                style.grid,
                self.size.parameters,
                licence=self.licence,
                vocab_size=style.codes,
                tokens=style.tokens,
                # Only the number of tokens matters to sizes: their ids are not looked up.
                sizes=replace(self.size.transformer(style, range(style.codes + style.line_ends)), token_ids=None),
                also_called=tuple(
                    other for other, meant in self.also.items() if meant == name and other != "chameleon"
                ),
            )
            for name, style in self.styles.items()
        ]

    def takes(self, file: ModelFile) -> bool:
        """Whether `family:` is one of these models, or another name of one."""
        return file.family in self.styles or file.family in self.also

    def facts_of_file(self, file: ModelFile) -> dict[str, Any]:
        """The card's fields; raises `UserError` for sizes that cannot be."""
        self._size(file)
        style = self._style(file)
        codes, tokens = len(self._vocabulary(file).token_ids(style)) - style.line_ends, style.tokens
        return {"description": self.about[self._named(file)], "vocab_size": codes, "tokens": tokens}

    def check_prompt_of_file(self, file: ModelFile, text: str) -> None:
        """Raise `UserError` for a caption that is empty or too long, and for a missing tokenizer.json."""
        self._tokenizer(file).words(text)

    def load_target(
        self, file: ModelFile, published: bool, device: torch.device, dtype: torch.dtype
    ) -> tuple[TransformerTarget, tuple[Path, ...], str]:
        """As `CheckpointFamily.load_target`; the tokenizer decides which code a token is, so it is one of the files."""
        from lantern_bench.models.chameleon.checkpoint import load_target
        from lantern_bench.models.io.checkpoint import open_checkpoint

        if file.target.layout == "official":
            raise file.wrong("target.layout", "official: Chameleon is read in the layout hf", "Convert it, or say hf.")
        style = self._style(file)
        config = self._size(file).transformer(style, self._vocabulary(file).token_ids(style))
        checkpoint = open_checkpoint(folder_of(file) if published else file.target.path)
        target = load_target(checkpoint, config, dtype=dtype, device=device)
        words = tuple(path for path in (folder_of(file) / "tokenizer.json",) if path.is_file())
        return target, (*checkpoint.paths, *words), repr((style, config, config.token_ids))

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:
        """As `CheckpointFamily.load_tokenizer`."""
        from lantern_bench.models.chameleon.checkpoint import load_vqgan

        return load_vqgan(path, device, config)

    def prompts(self, name: str, file: ModelFile, target: TransformerTarget) -> Prompts:  # noqa: ARG002
        """Captions through the model's own tokenizer, or prompts as numbers."""
        from lantern_bench.models.loaded_model import Prompts

        words = target.config.embedded_tokens
        builder = self._tokenizer(file)
        return Prompts(builder, condition_of_arrays=functools.partial(builder.of_arrays, words=words))

    def random_prompts(self, name: str) -> Prompts:
        """Prompts of invented numbers, the same for the same words."""
        from lantern_bench.models.loaded_model import Prompts

        builder = invented_prompts(self.styles[name], self.vocabulary_without_files(), *self.invented_words)
        return Prompts(builder, condition_of_arrays=functools.partial(builder.of_arrays, words=self.size.words))

    def fresh_parts(self, name: str) -> tuple[TransformerTarget, VQModel]:
        """As `CheckpointFamily.fresh_parts`."""
        from lantern_bench.models.target import TransformerTarget
        from lantern_bench.models.vq import VQModel

        style = self.styles[name]
        target = TransformerTarget(self.size.transformer(style, self.vocabulary_without_files().token_ids(style)))
        return target, VQModel(self.published_tokenizer())

    def published_tokenizer(self) -> VQConfig:
        """The sizes of the published image tokenizer."""
        from lantern_bench.models.chameleon.checkpoint import PUBLISHED_VQGAN

        return PUBLISHED_VQGAN

    def vocabulary_without_files(self) -> ChameleonVocabulary:
        """The vocabulary of models with random weights."""
        return published_vocabulary()

    def _named(self, file: ModelFile) -> str:
        return self.also.get(file.family, file.family)

    def _style(self, file: ModelFile) -> Style:
        style = self.styles[self._named(file)]
        return style if file.grid is None else replace(style, grid=file.grid)

    def _stated(self, file: ModelFile) -> Mapping[str, Any]:
        """The config.json beside the weights, overridden by the model file."""
        return {**config_beside(file.target.path, "hf"), **(file.target.config or {})}

    def _size(self, file: ModelFile) -> ChameleonSize:
        return read_config(self._stated(file), lambda key, text: file.wrong(f"target.config.{key}", text), self.size)

    def _vocabulary(self, file: ModelFile) -> ChameleonVocabulary:
        tokenizer, stated = folder_of(file) / "tokenizer.json", self._stated(file)
        if not tokenizer.is_file() and not stated.get("vocabulary_map"):
            # Without either it may well be another model: that error comes first.
            from lantern_bench.models.chameleon.checkpoint import check_target
            from lantern_bench.models.io.checkpoint import open_checkpoint

            check_target(open_checkpoint(file.target.path))
        return chameleon_vocabulary(stated, tokenizer, str(file.path))

    def _tokenizer(self, file: ModelFile) -> PromptBuilder:
        encode = TextTokenizer(folder_of(file) / "tokenizer.json")
        return PromptBuilder(self._style(file), self._vocabulary(file), encode)


def folder_of(file: ModelFile) -> Path:
    """The folder of the target's files."""
    return file.target.path if file.target.path.is_dir() else file.target.path.parent


FAMILY = ChameleonFamily()
