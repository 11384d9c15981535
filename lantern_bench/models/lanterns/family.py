"""The bundled model before it is loaded: its prompts, and how it is loaded. No torch is imported before that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.lanterns import FILES, GUIDANCE, TARGET_CONFIG, TREE, WEIGHTS_FOLDER
from lantern_bench.models.lanterns.captions import HELD_OUT, TRAIN, words
from lantern_bench.models.model import Model

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel

_PARTS = ("target", "drafter", "tokenizer")


class Lanterns(Model):
    """Scenes of paper lanterns, 64x64 pixels, 256 tokens of 2,048 codes; its weights are in `folder`."""

    name = family = "lanterns"
    description = "bundled miniature: 64x64 px scenes of paper lanterns, 256 tokens"
    licence = "Apache-2.0"
    defaults: Mapping[str, Any] = {"cfg_scale": GUIDANCE, "tree": TREE}
    codes, tokens, parameters, sizes = 2048, 256, 7_485_440, TARGET_CONFIG
    prompt_sets: Mapping[str, Sequence[str]] = {
        "held-out": tuple(attributes.caption() for attributes in HELD_OUT),
        "train": tuple(attributes.caption() for attributes in TRAIN),
    }

    def __init__(self, folder: Path = WEIGHTS_FOLDER) -> None:
        self.folder = folder

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a word the model does not know."""
        words(text)

    def files(self) -> Mapping[str, Path]:
        """Return the file of each part."""
        return {part: self.folder / FILES[part] for part in _PARTS}

    def load(self, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load target, drafter and tokenizer; raises `RefusedError` when a file is missing."""
        from lantern_bench.models.eagle import untrained_drafter
        from lantern_bench.models.io.files import file_sha256
        from lantern_bench.models.lanterns.model import build_target, caption_condition, load_part, load_tokenizer
        from lantern_bench.models.loaded_model import Prompts, assemble

        files = self.files()
        # The drafter uses the target's head, so the target moves to its device first.
        target = load_part(build_target(), "target", files["target"], device, dtype)
        drafter = load_part(untrained_drafter(target), "drafter", files["drafter"], device, dtype)
        tokenizer = load_tokenizer(self.folder, device)
        hashes = {part: file_sha256(path) for part, path in files.items()}
        # Rows have unit length when they are looked up (docs/algorithms.md, section 9, C1).
        return assemble(self.name, target, drafter, tokenizer, Prompts(caption_condition), hashes, space="normalised")
