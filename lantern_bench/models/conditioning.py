"""What comes before the image: class label, caption features, caption words, each as P prefix embeddings.

All three know a null condition for guidance. The prompt's padding mask is applied to the unconditional rows as well,
as the published models do (finding C3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CaptionFeatures", "ClassLabel", "Condition", "WordCaption"]


class Condition(NamedTuple):
    """The prefix of B images before embedding.

    values: what the module takes (labels [B], features [B, P, width] or word numbers [B, P]). valid: bool [B, P],
    False for padding.
    """

    values: Tensor
    valid: Tensor


class ClassLabel(nn.Module):
    """A class label as one position; the null class is number `classes`."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, dim)
        self.classes = classes

    def forward(self, values: Tensor) -> Tensor:
        """Labels int64 [B] -> [B, 1, dim]."""
        out: Tensor = self.embedding_table(values)[:, None]
        return out

    def null(self, batch: int) -> Tensor:
        """The null condition [B, 1, dim]."""
        label = torch.full((batch,), self.classes, device=self.embedding_table.weight.device)
        return self.forward(label)


class _Projection(nn.Module):
    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class CaptionFeatures(nn.Module):
    """Text-encoder features (T5) through a projection; the null condition is learned features."""

    def __init__(self, positions: int, width: int, dim: int) -> None:
        super().__init__()
        self.cap_proj = _Projection(width, dim)
        self.uncond_embedding = nn.Parameter(torch.randn(positions, width) / width**0.5)

    def forward(self, values: Tensor) -> Tensor:
        """Features [B, P, width], left-padded -> [B, P, dim]."""
        out: Tensor = self.cap_proj(values.to(self.cap_proj.fc1.weight.dtype))
        return out

    def null(self, batch: int) -> Tensor:
        """The null condition [B, P, dim]."""
        return self.forward(self.uncond_embedding).expand(batch, -1, -1)


class WordCaption(nn.Module):
    """Words of a small vocabulary, left-padded to P positions; the null condition is learned."""

    def __init__(self, words: int, positions: int, dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.uncond_embedding = nn.Parameter(torch.randn(positions, dim) * 0.02)

    def forward(self, values: Tensor) -> Tensor:
        """Word numbers int64 [B, P] -> [B, P, dim]."""
        out: Tensor = self.words(values)
        return out

    def null(self, batch: int) -> Tensor:
        """The null condition [B, P, dim]."""
        return self.uncond_embedding.expand(batch, -1, -1)
