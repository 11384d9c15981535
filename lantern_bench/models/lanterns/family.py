"""The embedded family as `models.registry` wants it: one model, its prompts, its words, and how it is loaded.

It is found by entry point, as a stranger's family would be. Nothing here imports torch before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError
from lantern_bench.models.lanterns import FILES, GUIDANCE, TREE, WEIGHTS_FOLDER
from lantern_bench.models.lanterns.captions import HELD_OUT, TRAIN, words
from lantern_bench.plugins import ModelCard

if TYPE_CHECKING:
    import torch

    from lantern_bench.models.loaded_model import LoadedModel


_NAME = "lanterns"


class LanternsFamily:
    """Scenes of paper lanterns, 64x64 pixels, 256 tokens of 2,048 codes."""

    def cards(self) -> Sequence[ModelCard]:
        """The one model of the family."""
        parts = ("target", "drafter", "tokenizer")
        return [
            ModelCard(
                name=_NAME,
                family=_NAME,
                description="embedded miniature: 64x64 px scenes of paper lanterns, 256 tokens",
                defaults={"cfg_scale": GUIDANCE, "tree": TREE},
                prompt_set="held-out",
                licence="Apache-2.0",
                weights={part: WEIGHTS_FOLDER / FILES[part] for part in parts},
                vocab_size=2048,
                tokens=256,
                parameters=7_485_440,
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

    def load(self, name: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
        """Load target, drafter and tokenizer; raises `RefusedError` when a file is missing."""
        from lantern_bench.models.eagle import fresh_drafter
        from lantern_bench.models.lanterns.model import (
            TARGET_CONFIG,
            build_target,
            caption_condition,
            fill,
            load_tokenizer,
            part_hash,
        )
        from lantern_bench.models.loaded_model import LoadedModel, VQPixels

        card = self.cards()[0]
        for part, path in card.weights.items():
            if not path.is_file():
                raise RefusedError(
                    f"the embedded model's {part} is missing: {path.name}",
                    f"train it with `lantern-bench train lanterns --part {part}`",
                )
        target = build_target()
        fill(target, card.weights["target"])
        # The drafter uses the target's head, so the target goes where it will stay first.
        _settle(target, device, dtype)
        drafter: Any = fresh_drafter(target)
        fill(drafter, card.weights["drafter"])
        _settle(drafter, device, dtype)
        tokenizer = load_tokenizer(device=device)
        return LoadedModel(
            name=name,
            target=target,
            drafter=drafter,
            pixels=VQPixels(tokenizer, TARGET_CONFIG.grid),
            # Distances between the rows as they are looked up: of unit length (finding C1).
            codebook=tokenizer.codebook(),
            neighbour_space="normalised",
            condition=caption_condition,
            weights={part: part_hash(path) for part, path in card.weights.items()},
            grid=TARGET_CONFIG.grid,
        )


def _settle(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module to where it decodes; its rotary table stays float32."""
    rotary = [(part, part.rotary) for part in module.modules() if hasattr(part, "rotary")]
    module.to(device=device, dtype=dtype).eval().requires_grad_(False)
    for part, table in rotary:
        part.rotary = table.to(device)


FAMILY = LanternsFamily()
