"""The embedded family in a folder, loaded and measured against its bars, part by part.

Which bars there are is in `bars`. The CLIP model comes from above, since instruments are not for families to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from lantern_bench.errors import RefusedError
from lantern_bench.lanterns import bars
from lantern_bench.lanterns.bars import Bar, Embedder, Settings
from lantern_bench.lanterns.classifier import AttributeClassifier, load_classifier
from lantern_bench.lanterns.family import LanternsFamily
from lantern_bench.lanterns.files import FILES
from lantern_bench.lanterns.recipe_target import build_target, caption_condition
from lantern_bench.lanterns.recipe_weights import fill, load_tokenizer, part_hash
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.pixels import VQPixels
from lantern_bench.models.vq import VQModel
from lantern_bench.train.drafter_task import build_drafter

__all__ = ["Evaluation", "check_weights"]

# What the bars of a part are measured with.
_USES: dict[str, tuple[str, ...]] = {
    "tokenizer": ("tokenizer",),
    "features": ("features", "tokenizer"),
    "clip": ("clip",),
    "target": ("target", "drafter", "tokenizer", "features"),
    "drafter": ("drafter", "target", "tokenizer"),
}
_DRAFTER_PROMPTS = 100

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def check_weights(parts: Sequence[str], folder: Path) -> None:
    """Raise `RefusedError` naming what the bars of these parts need and the folder lacks."""
    needed = dict.fromkeys(part for named in parts for part in _USES[named])
    missing = [part for part in needed if not (folder / FILES[part]).is_file()]
    if missing:
        raise RefusedError(
            f"--evaluate: the folder of weights has no {', '.join(FILES[part] for part in missing)}",
            f"First: lantern-bench train lanterns --part {' --part '.join(missing)}",
        )


@dataclass
class Evaluation:
    """The models of `folder`, loaded when a bar needs them.

    `images` are the autoregressive samples; the drafter is measured over 100 prompts, or fewer where `images` are.
    """

    folder: Path
    clip: Embedder | None
    device: torch.device
    images: int = 500
    seed: int = 0
    batch: int = 32
    on_progress: bars.OnProgress = bars.unheard

    def measure(self, parts: Sequence[str]) -> Iterator[Bar]:
        """Yield the bars of these parts, one after the other."""
        for part in parts:
            yield from getattr(self, f"_{part}")()

    def _tokenizer(self) -> list[Bar]:
        return bars.tokenizer_bars(self.tokenizer)

    def _features(self) -> list[Bar]:
        return bars.classifier_bars(self.classifier, self.tokenizer)

    def _clip(self) -> list[Bar]:
        return bars.clip_bars(self.clip) if self.clip is not None else []

    def _target(self) -> list[Bar]:
        return bars.target_bars(self.model, self.tokenizer, self.classifier, self.images, self._settings)

    def _drafter(self) -> list[Bar]:
        return bars.drafter_bars(self.model, self.tokenizer, min(self.images, _DRAFTER_PROMPTS), self._settings)

    @cached_property
    def _settings(self) -> Settings:
        scale = float(LanternsFamily().cards()[0].defaults["cfg_scale"])
        return Settings(scale, self.seed, self.batch, self.on_progress)

    @cached_property
    def tokenizer(self) -> VQModel:
        """The tokenizer in the folder."""
        return load_tokenizer(self.folder, self.device)

    @cached_property
    def classifier(self) -> AttributeClassifier:
        """The attribute classifier in the folder."""
        return load_classifier(self.folder / FILES["features"], self.device)

    @cached_property
    def model(self) -> LoadedModel:
        """Target, drafter and tokenizer in the folder, in float32."""
        target = self._filled(build_target(), "target")
        drafter = self._filled(build_drafter(target), "drafter")
        return LoadedModel(
            name=LanternsFamily().cards()[0].name,
            target=target,
            drafter=drafter,
            pixels=VQPixels(self.tokenizer, target.config.grid),
            codebook=self.tokenizer.codebook(),
            neighbour_space="normalised",
            condition=caption_condition,
            weights={part: part_hash(self.folder / FILES[part]) for part in ("target", "drafter", "tokenizer")},
            grid=target.config.grid,
        )

    def _filled(self, module: AnyModule, part: str) -> AnyModule:
        fill(module, self.folder / FILES[part])
        return module.to(self.device).eval().requires_grad_(False)
