"""The networks of the bundled family: target, tokenizer and attribute classifier.

The classifier measures prompt accuracy. Its penultimate layer has the features of FID, KID,
precision and recall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
from lantern_bench.models.checkpoints.key_map import load_into, same_names
from lantern_bench.models.families.lanterns.description import (
    FIELDS,
    FILES,
    MAX_WORDS,
    TARGET_CONFIG,
    VOCABULARY,
    WEIGHTS_FOLDER,
    Attributes,
    words,
)
from lantern_bench.models.networks.target import Condition, TransformerTarget, WordCaption
from lantern_bench.models.networks.transformer import in_dtype
from lantern_bench.models.networks.vq import VQConfig, VQModel
from lantern_bench.utils.errors import RefusedError

M = TypeVar("M", bound=nn.Module)

TOKENIZER_CONFIG = VQConfig(
    codes=2048, code_dim=8, z_channels=64, channels=32, channel_mult=(1, 2, 3), res_blocks=1
)


def new_target() -> TransformerTarget:
    """Return the bundled target with fresh weights."""
    return TransformerTarget(
        TARGET_CONFIG, WordCaption(len(VOCABULARY), MAX_WORDS, TARGET_CONFIG.dim)
    )


def caption_condition(captions: Sequence[str]) -> Condition:
    """Return word numbers int64 [B, 10], padded on the left. Raises `UserError` as `words`."""
    values = torch.zeros(len(captions), MAX_WORDS, dtype=torch.int64)
    for row, caption in enumerate(captions):
        numbers = words(caption)
        values[row, MAX_WORDS - len(numbers) :] = torch.tensor(numbers)
    return Condition(values, values > 0)


def load_part(
    make: Callable[[], M],
    part: str,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> M:
    """Load a part for decoding.

    Args:
        make: Makes the module.
        part: Name of the part, a key of `FILES`.
        path: File of the weights.
        device: Device of the weights.
        dtype: Type of the weights. The output head stays float32.

    Raises:
        RefusedError: The file is missing.
    """
    if not path.is_file():
        raise RefusedError(
            f"the bundled model's {part} is missing: {path.name}",
            "Install lantern-bench again; or, in its repository: "
            f"python -m scripts.train_lanterns --part {part}",
        )
    # Its fresh weights are drawn and dropped. On the meta device torch would import its compiler,
    # which takes longer.
    with torch.random.fork_rng(devices=[]):
        module = make()
    load_into(
        module,
        open_checkpoint(path),
        same_names(module),
        dtype=torch.float32,
        device=torch.device(device),
        ignored=r".*\.num_batches_tracked$",
        wanted=f"the {part} of lanterns",
    )
    return in_dtype(module, dtype)


def load_tokenizer(folder: Path = WEIGHTS_FOLDER, device: torch.device | str = "cpu") -> VQModel:
    """Load the tokenizer in float32. Raises as `load_part`."""
    path = folder / FILES["tokenizer"]
    return load_part(lambda: VQModel(TOKENIZER_CONFIG), "tokenizer", path, device=device)


# ---- The attribute classifier

FEATURES = 64  # numbers of a feature
WEIGHTS = WEIGHTS_FOLDER / FILES["features"]
_BATCH = 256  # pictures that are classified at once


class _Block(nn.Module):
    """Halve the size and change the width, then apply one residual convolution."""

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

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(3, 32), _Block(32, 64), _Block(64, 128))
        self.project = nn.Linear(128 * 2 * 4, FEATURES)
        self.heads = nn.ModuleDict(
            {name: nn.Linear(FEATURES, len(values)) for name, values in FIELDS.items()}
        )

    def features(self, pixels: Tensor) -> Tensor:
        """Map pixels in [0, 1], float [n, 3, 64, 64], to features [n, 64]."""
        grid = functional.adaptive_avg_pool2d(self.blocks(pixels * 2 - 1), (2, 4))
        return functional.silu(self.project(grid.flatten(1)))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Map pixels in [0, 1], float [n, 3, 64, 64], to logits [n, values] of each field."""
        features = self.features(pixels)
        return [head(features) for head in self.heads.values()]


def load_classifier(
    path: Path = WEIGHTS, device: torch.device | str = "cpu"
) -> AttributeClassifier:
    """Load the classifier in float32. Raises as `load_part`."""
    return load_part(AttributeClassifier, "features", path, device=device)


@torch.inference_mode()
def prompt_accuracy(
    model: AttributeClassifier, images: Tensor, attributes: Sequence[Attributes]
) -> Tensor:
    """Return whether each picture shows all five attributes of its caption.

    Args:
        model: The classifier.
        images: Pictures uint8 [n, 3, 64, 64].
        attributes: The attributes of the captions.

    Returns:
        bool [n].
    """
    indices = [item.indices() for item in attributes]
    wanted = torch.tensor(indices, dtype=torch.int64).reshape(-1, len(FIELDS))
    device = next(model.parameters()).device
    right = []
    for batch, asked in zip(images.split(_BATCH), wanted.split(_BATCH), strict=True):
        logits = model(batch.to(device).float() / 255)
        shown = torch.stack([scores.argmax(1) for scores in logits], dim=1)
        right.append((shown.cpu() == asked).all(dim=1))
    return torch.cat(right)
