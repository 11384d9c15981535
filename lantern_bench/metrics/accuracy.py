"""Prompt accuracy: whether a picture of the bundled family shows all attributes that its caption asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lantern_bench.config.protocols import Protocol
from lantern_bench.models.lanterns import attributes_of
from lantern_bench.models.lanterns.modules import AttributeClassifier, load_classifier
from lantern_bench.models.lanterns.modules import prompt_accuracy as shows_all


class PromptAccuracy:
    """Scores by the attribute classifier. It has no label: the protocol says which network it is."""

    label = None

    def __init__(self, classifier: AttributeClassifier) -> None:
        self.classifier = classifier

    def __call__(self, pictures: Sequence[Tensor], prompts: Sequence[str]) -> list[float | None]:
        """Return 1.0 or 0.0 for each picture; None where the prompt is no caption of the bundled family."""
        wanted = [(row, caption) for row, caption in enumerate(attributes_of(prompts)) if caption is not None]
        scores: list[float | None] = [None] * len(prompts)
        if wanted:
            captioned = torch.stack([pictures[row] for row, _ in wanted])
            correct = shows_all(self.classifier, captioned, [attributes for _, attributes in wanted])
            for (row, _), is_correct in zip(wanted, correct.tolist(), strict=True):
                scores[row] = float(is_correct)
        return scores


def prompt_accuracy(_protocol: Protocol, _weights: Path | None, device: torch.device | str) -> PromptAccuracy:
    """Load the scorer of the metric `prompt_accuracy`."""
    return PromptAccuracy(load_classifier(device=device))
