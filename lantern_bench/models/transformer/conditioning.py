"""Conditions before the image: class label, caption features, caption words or prompt, as P prefix embeddings.

Each has a null condition for guidance. LlamaGen applies the prompt's padding mask to the unconditional rows as well
(docs/algorithms.md, section 9, C3); Chameleon's unconditional prompt has tokens and padding of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.transformer.layers import TokenEmbedding


class Condition(NamedTuple):
    """The prefix of B images before embedding.

    values: what the module takes (labels [B], features [B, P, width], word numbers [B, P], or prompts [B, 2, P], the
    unconditional one second). valid: bool [B, P], or [B, 2, P] for prompts, False for padding.
    """

    values: Tensor
    valid: Tensor


def prompt_words(values: Tensor, groups: int) -> Tensor:
    """The numbers int64 [groups * B, P] of prompts [B, 2, P], conditional rows first."""
    return values[:, :groups].transpose(0, 1).flatten(0, 1)


def visible_rows(valid: Tensor, groups: int) -> Tensor:
    """The visible prefix positions for `KVCache.hide`: bool [B, P], or [groups * B, P] of prompts."""
    return valid if valid.dim() == 2 else prompt_words(valid, groups)


class _Embedded(nn.Module, ABC):
    """A condition with one null condition for all images."""

    def rows(self, values: Tensor, guided: bool) -> Tensor:
        """Prefix embeddings [rows, P, dim] of `Condition.values`, conditional rows first."""
        given: Tensor = self(values)
        return torch.cat([given, self.null(len(given))]) if guided else given

    @abstractmethod
    def null(self, batch: int) -> Tensor:
        """The null condition [B, P, dim]."""


class ClassLabel(_Embedded):
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
        return self.forward(torch.full((batch,), self.classes, device=self.embedding_table.weight.device))


class CaptionFeatures(_Embedded):
    """Text-encoder features (T5) through a projection; the null condition is learned features."""

    def __init__(self, positions: int, width: int, dim: int) -> None:
        super().__init__()
        layers = {"fc1": nn.Linear(width, dim, bias=False), "fc2": nn.Linear(dim, dim, bias=False)}
        self.cap_proj = nn.ModuleDict(layers)
        self.uncond_embedding = nn.Parameter(torch.randn(positions, width) / width**0.5)

    def forward(self, values: Tensor) -> Tensor:
        """Features [B, P, width], left-padded -> [B, P, dim]."""
        first, second = self.cap_proj.values()
        out: Tensor = second(functional.gelu(first(values.to(self.uncond_embedding.dtype)), approximate="tanh"))
        return out

    def null(self, batch: int) -> Tensor:
        """The null condition [B, P, dim]."""
        return self.forward(self.uncond_embedding).expand(batch, -1, -1)


class WordCaption(_Embedded):
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


class PromptTokens(nn.Module):
    """Prompts in the model's own vocabulary (Chameleon), conditional and unconditional, embedded as image tokens are.

    The embedding is the transformer's and not a parameter of this module.
    """

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the module does not own it

    def rows(self, values: Tensor, guided: bool) -> Tensor:
        """Prefix embeddings [rows, P, dim] of prompts int64 [B, 2, P], conditional rows first."""
        return self._embedding[0].of_words(prompt_words(values, 1 + guided))
