"""The judge of the embedded world: a small network that reads the five attributes off a picture.

It has two uses. Its answers give prompt accuracy (does the picture show what the caption asked for), and its 64-wide
penultimate layer is the feature space in which the embedded family's FID, KID, precision and recall are measured
(`metrics.fidelity`). How it is trained is in `recipe_metrics`; nothing here paints or degrades a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.lanterns.captions import FIELDS, Attributes

FEATURES = 64
WEIGHTS = Path(__file__).parent / "weights" / "features.safetensors"
_BATCH = 256


class _Block(nn.Module):
    """Halve the picture and change the width, then one residual convolution at the new size."""

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
    """Three halving blocks, a coarse grid of what is where, 64 features, five heads (0.36 M parameters).

    The pooled grid keeps 2 rows and 4 columns: sky and ground are told apart by row, lanterns are counted by column.
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
    """The trained classifier in float32, in evaluation mode; `path` defaults to the shipped weights.

    Raises `RefusedError` when the file is not there and `UserError` when it is not a classifier's.
    """
    path = WEIGHTS if path is None else path
    if not path.is_file():
        raise RefusedError(
            f"the attribute classifier's weights are missing: {path.name}",
            "train them with `lantern-bench train lanterns --part features`",
        )
    model = AttributeClassifier()
    try:
        model.load_state_dict({name: _full(value) for name, value in load_file(path).items()})
    except (SafetensorError, RuntimeError) as problem:
        raise UserError(f"{path.name} does not hold an attribute classifier: {problem}") from problem
    return model.to(device).eval().requires_grad_(False)


def save_classifier(model: AttributeClassifier, path: Path) -> None:
    """Write the weights as safetensors, in float16 (they are read back as float32)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: _half(value) for name, value in model.state_dict().items()}, path)


def _half(value: Tensor) -> Tensor:
    return (value.half() if value.is_floating_point() else value).cpu().contiguous()


def _full(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


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
    """Whether all five attributes of each picture are as asked for: uint8 [n, 3, 64, 64] to bool [n]."""
    wanted = torch.tensor([item.indices() for item in attributes], dtype=torch.int64).reshape(-1, len(FIELDS))
    return (predict(model, images) == wanted).all(dim=1)
