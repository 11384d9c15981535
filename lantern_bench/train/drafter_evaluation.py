"""How far a drafter carries while it is being trained: accepted lengths through the project's own decode loop.

Lossless speculative decoding with a stated tree, on prompts the drafter was not trained on, from the seeds that a sweep
gives them. Every drafter measured here sees the same prompts and seeds, so two of them can be compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lantern_bench.decode.engine import Engine
from lantern_bench.decode.loop import decode
from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.plan import Prompt
from lantern_bench.spec.progress import OnProgress, unheard
from lantern_bench.spec.seeds import record_seed

__all__ = ["Accepted", "Examination"]

_AT_ONCE = 16


class Accepted(NamedTuple):
    """Of each image: tokens committed by steps, steps, and its prompt."""

    committed: list[float]
    steps: list[float]
    prompts: list[str]

    @property
    def mal(self) -> float:
        """Mean accepted length: sum over sum."""
        return sum(self.committed) / sum(self.steps)


@dataclass(frozen=True)
class Examination:
    """`prompts` in order and then again, decoded as `decoding` says (a mode `speculative`)."""

    model: LoadedModel
    prompts: Sequence[str]
    decoding: Decoding
    seed: int

    def accepted(
        self, drafter: EagleDrafter, images: int, what: str = "", on_progress: OnProgress = unheard
    ) -> Accepted:
        """Measure a drafter, which has the target's type, over so many images; `what` is said of the progress."""
        # An engine of its own: programs of another drafter must not be met.
        model = replace(self.model, drafter=drafter, engine=Engine())
        slots = [(self.prompts[n % len(self.prompts)], n // len(self.prompts)) for n in range(images)]
        found = Accepted([], [], [])
        for start in range(0, images, _AT_ONCE):
            part = slots[start : start + _AT_ONCE]
            seeds = [record_seed(self.seed, Prompt(text).id, repeat) for text, repeat in part]
            draws = [torch.Generator(model.target.device).manual_seed(seed) for seed in seeds]
            texts = [text for text, _ in part]
            for text, image in zip(texts, decode(model, model.condition(texts), self.decoding, draws), strict=True):
                found.committed.append(float(sum(image.trace.committed)))
                found.steps.append(float(len(image.trace.committed)))
                found.prompts.append(text)
            on_progress(what, (start + len(part)) / images)
        return found
