"""Lumina-mGPT 2.0 (arXiv 2507.17801): Chameleon's architecture, another vocabulary, and MoVQGAN as its tokenizer.

Sizes, layout, prompt, guidance and forced tokens are those of Alpha-VLLM/Lumina-mGPT-2.0 at `f44a4d7f`. Its weights and
its tokenizer's files were not seen (docs/chameleon.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.chameleon import (
    LUMINA_2,
    LUMINA_2_SIZE,
    ChameleonVocabulary,
    Style,
    published_vocabulary_2,
)
from lantern_bench.models.chameleon.family import ChameleonFamily, folder_of
from lantern_bench.models.io.files import read_json
from lantern_bench.models.io.hub_files import APACHE
from lantern_bench.models.io.model_file import ModelFile

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.vq import VQConfig, VQModel


class Lumina2Family(ChameleonFamily):
    """Lumina-mGPT 2.0; no drafter was published."""

    name = "lumina-mgpt2"
    # What the authors' README samples with. Their guidance decreases within an image, but never below 4.
    defaults: Mapping[str, Any] = {"cfg_scale": 4.0, "top_k": 4096, "tree": "eagle1-25"}
    mode = "scd"
    builds_drafter = False
    token_pixels = 8
    styles: Mapping[str, Style] = {"lumina-mgpt2-7b": LUMINA_2}
    about: Mapping[str, str] = {"lumina-mgpt2-7b": "Lumina-mGPT 2.0"}
    also: Mapping[str, str] = {"lumina-mgpt2": "lumina-mgpt2-7b"}
    size = LUMINA_2_SIZE
    licence = APACHE.name
    invented_words = (0, 151642)

    def load_tokenizer(self, path: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> VQModel:  # noqa: ARG002
        """As `CheckpointFamily.load_tokenizer`; the shapes of a MoVQGAN tell its sizes."""
        from lantern_bench.models.chameleon.checkpoint import load_movqgan

        return load_movqgan(path, device)

    def published_tokenizer(self) -> VQConfig:
        """The sizes of MoVQGAN 270M."""
        from lantern_bench.models.chameleon.checkpoint import PUBLISHED_MOVQGAN

        return PUBLISHED_MOVQGAN

    def vocabulary_without_files(self) -> ChameleonVocabulary:
        """The vocabulary of models with random weights."""
        return published_vocabulary_2()

    def _style(self, file: ModelFile) -> Style:
        """The style with the start of text of the tokenizer's files, and the codes that a model file states."""
        style, stated = super()._style(file), file.target.config or {}
        for key in ("first_code", "codes"):
            if (value := stated.get(key)) is not None and (type(value) is not int or value < 0):
                raise file.wrong(f"target.config.{key}", f"{value}: must be a whole number, 0 or more")
        codes = {key: stated[key] for key in ("first_code", "codes") if stated.get(key) is not None}
        return replace(style, **codes, start=_start_of_text(folder_of(file), style.start))


def _start_of_text(folder: Path, usual: str) -> str:
    """The token before a prompt: the tokenizer's start, or its end where it has none; `usual` without its file."""
    path = folder / "tokenizer_config.json"
    stated = read_json(path) if path.is_file() else {}
    found = stated.get("bos_token") or stated.get("eos_token") or usual
    return str(found["content"] if isinstance(found, dict) else found)


FAMILY = Lumina2Family()
