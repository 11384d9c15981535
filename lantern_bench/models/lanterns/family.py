"""The bundled family as `models.registry` wants it: one model, its prompts, and how it is loaded.

Nothing here imports torch before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_bench.models.card import ModelCard
from lantern_bench.models.lanterns import FILES, GUIDANCE, TARGET_CONFIG, TREE, WEIGHTS_FOLDER
from lantern_bench.models.lanterns.captions import HELD_OUT, TRAIN, words

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel


_NAME = "lanterns"
_PARTS = ("target", "drafter", "tokenizer")


class LanternsFamily:
    """Scenes of paper lanterns, 64x64 pixels, 256 tokens of 2,048 codes."""

    def cards(self) -> Sequence[ModelCard]:
        """The one model of the family."""
        return [
            ModelCard(
                name=_NAME,
                family=_NAME,
                description="bundled miniature: 64x64 px scenes of paper lanterns, 256 tokens",
                defaults={"cfg_scale": GUIDANCE, "tree": TREE},
                prompt_set="held-out",
                licence="Apache-2.0",
                weights={part: WEIGHTS_FOLDER / FILES[part] for part in _PARTS},
                vocab_size=2048,
                tokens=256,
                parameters=7_485_440,
                sizes=TARGET_CONFIG,
            )
        ]

    def check_prompt(self, text: str) -> None:
        """Raise `UserError` for a word the model does not know."""
        words(text)

    def prompt_sets(self) -> Mapping[str, tuple[str, ...]]:
        """The captions held out of training (the default), and those of training."""
        return {
            "held-out": tuple(item.caption() for item in HELD_OUT),
            "train": tuple(item.caption() for item in TRAIN),
        }

    def load(self, name: str, device: torch.device, dtype: torch.dtype, folder: Path = WEIGHTS_FOLDER) -> LoadedModel:
        """Load target, drafter and tokenizer from `folder`; raises `RefusedError` when a file is missing."""
        from lantern_bench.models.eagle import fresh_drafter
        from lantern_bench.models.io.files import file_sha256
        from lantern_bench.models.lanterns.model import build_target, caption_condition, load_part, load_tokenizer
        from lantern_bench.models.loaded_model import Parts, Prompts, assemble

        weights = {part: folder / FILES[part] for part in _PARTS}
        # The drafter uses the target's head, so the target moves to its device first.
        target = load_part(build_target(), "target", weights["target"], device, dtype)
        drafter = load_part(fresh_drafter(target), "drafter", weights["drafter"], device, dtype)
        parts = Parts(target, drafter, load_tokenizer(folder, device))
        hashes = {part: file_sha256(path) for part, path in weights.items()}
        # Rows have unit length when they are looked up (docs/algorithms.md, section 9, C1).
        return assemble(name, parts, Prompts(caption_condition), hashes, space="normalised")


FAMILY = LanternsFamily()
