"""The attribute classifier: a small network that recognises the five attributes of a scene of lanterns.

Its answers give prompt accuracy (does the picture show what the caption asked for), and its 64-wide penultimate layer
is the feature space of the bundled model's FID, KID, precision and recall (`metrics.features`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.lanterns import FILES, WEIGHTS_FOLDER
from lantern_bench.models.lanterns.captions import FIELDS, Attributes
from lantern_bench.models.lanterns.model import load_part

FEATURES = 64
WEIGHTS = WEIGHTS_FOLDER / FILES["features"]
_BATCH = 256


class _Block(nn.Module):
    """Halve the size and change the width, then one residual convolution."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(wide_in, wide_out, 3, stride=2, padding=1, bias=False)
        self.down_norm = nn.BatchNorm2d(wide_out)
        self.keep = nn.Conv2d(wide_out, wide_out, 3, padding=1, bias=False)
        self.keep_norm = nn.BatchNorm2d(wide_out)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.down_norm(self.down(x)))
        return functional.silu(x + self.keep_norm(self.keep(x)))


class AttributeClassifier(nn.Module):
    """Three halving blocks, a pooled grid, 64 features, five heads (0.36 M parameters).

    The grid keeps 2 rows, which separate sky and ground, and 4 columns, which count lanterns.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(3, width), _Block(width, 2 * width), _Block(2 * width, 4 * width))
        self.project = nn.Linear(4 * width * 8, FEATURES)
        self.heads = nn.ModuleDict({name: nn.Linear(FEATURES, len(values)) for name, values in FIELDS.items()})

    def features(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1], float [n, 3, 64, 64], to features [n, 64]."""
        grid = functional.adaptive_avg_pool2d(self.blocks(pixels * 2 - 1), (2, 4))
        return functional.silu(self.project(grid.flatten(1)))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Pixels in [0, 1], float [n, 3, 64, 64], to one logit tensor [n, size of the set] for each of `FIELDS`."""
        features = self.features(pixels)
        return [head(features) for head in self.heads.values()]


def load_classifier(path: Path | None = None, device: torch.device | str = "cpu") -> AttributeClassifier:
    """The trained classifier in float32, in evaluation mode; raises as `load_part`."""
    return load_part(AttributeClassifier(), "features", path or WEIGHTS, device)


@torch.inference_mode()
def predict(model: AttributeClassifier, images: Tensor) -> Tensor:
    """The attributes each picture shows: uint8 [n, 3, 64, 64] to int64 [n, 5], columns in the order of `FIELDS`."""
    device = next(model.parameters()).device
    answers = [
        torch.stack([logits.argmax(1) for logits in model(batch.to(device).float() / 255)], dim=1).cpu()
        for batch in images.split(_BATCH)
    ]
    return torch.cat(answers) if answers else torch.zeros((0, len(FIELDS)), dtype=torch.int64)


def prompt_accuracy(model: AttributeClassifier, images: Tensor, attributes: Sequence[Attributes]) -> Tensor:
    """Whether each picture shows all five attributes asked for: uint8 [n, 3, 64, 64] to bool [n]."""
    wanted = torch.tensor([item.indices() for item in attributes], dtype=torch.int64).reshape(-1, len(FIELDS))
    return (predict(model, images) == wanted).all(dim=1)
