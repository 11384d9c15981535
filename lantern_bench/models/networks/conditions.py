"""Conditions: how prompts become prefix embeddings.

A condition is a class label, caption features, caption words or a prompt, as P prefix embeddings.
LlamaGen applies the padding mask of the prompt to the unconditional rows as well
(docs/algorithms.md, section 9, C3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.networks.transformer import TokenEmbedding


class Prompts(NamedTuple):
    """How a model takes prompts: fields of `LoadedModel`, and the hash of its text encoder."""

    condition: Callable[[Sequence[str]], Any]
    prepare: Callable[[Sequence[str]], Iterator[tuple[int, int]]] = lambda _prompts: iter(())
    sha256: str | None = None  # None without a text encoder


class Condition(NamedTuple):
    """The prefix of B images before embedding."""

    # Labels [B], features [B, P, width], word numbers [B, P], or prompts [B, 2, P], whose second
    # entry is the unconditional prompt.
    values: Tensor
    valid: Tensor  # bool [B, P], or [B, 2, P] for prompts; False for padding


def prompt_condition(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Condition:
    """Return the condition of prompts with and without caption: int64 [B, 2, P], padded left."""
    length = max(max(len(prompt) for prompt in pair) for pair in pairs)
    values = torch.ones(len(pairs), 2, length, dtype=torch.int64)
    valid = torch.zeros(values.shape, dtype=torch.bool)
    for row, pair in enumerate(pairs):
        for kind, prompt in enumerate(pair):
            start = length - len(prompt)
            values[row, kind, start:] = torch.tensor(prompt, dtype=torch.int64)
            valid[row, kind, start:] = True
    return Condition(values, valid)


def prompt_rows(values: Tensor, groups: int) -> Tensor:
    """Return prompts [B, 2, P] as rows [groups * B, P], conditional ones first."""
    return values[:, :groups].transpose(0, 1).flatten(0, 1)


def visible_rows(valid: Tensor, groups: int) -> Tensor:
    """Return the visible prefix positions for `KVCache.set_visible`.

    Args:
        valid: The mask of a `Condition`.
        groups: Rows of each image: 2 with guidance, otherwise 1.

    Returns:
        bool [B, P], or [groups * B, P] for prompts.
    """
    return valid if valid.dim() == 2 else prompt_rows(valid, groups)


class ClassLabel(nn.Module):
    """A class label as one position. The null class has the number `classes`."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, dim)
        self.classes = classes

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed labels int64 [B] to [rows, 1, dim], conditional rows first."""
        if guided:
            values = torch.cat([values, torch.full_like(values, self.classes)])
        return self.embedding_table(values)[:, None]


class CaptionFeatures(nn.Module):
    """Text-encoder features (T5) through a projection. The null condition is learned features."""

    def __init__(self, positions: int, width: int, dim: int) -> None:
        super().__init__()
        layers = {"fc1": nn.Linear(width, dim, bias=False), "fc2": nn.Linear(dim, dim, bias=False)}
        self.cap_proj = nn.ModuleDict(layers)
        self.uncond_embedding = nn.Parameter(torch.randn(positions, width) / width**0.5)

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed left-padded features [B, P, width] to [rows, P, dim], conditional rows first."""
        conditional = self._project(values)
        if not guided:
            return conditional
        null = self._project(self.uncond_embedding).expand(len(values), -1, -1)
        return torch.cat([conditional, null])

    def _project(self, values: Tensor) -> Tensor:
        first, second = self.cap_proj.values()
        hidden = first(values.to(self.uncond_embedding.dtype))
        return second(functional.gelu(hidden, approximate="tanh"))


class WordCaption(nn.Module):
    """Words of a small vocabulary, left-padded to P positions. The null condition is learned."""

    def __init__(self, words: int, positions: int, dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.uncond_embedding = nn.Parameter(torch.randn(positions, dim) * 0.02)

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed word numbers int64 [B, P] to [rows, P, dim], conditional rows first."""
        conditional: Tensor = self.words(values)
        if not guided:
            return conditional
        null = self.uncond_embedding.expand(len(values), -1, -1)
        return torch.cat([conditional, null])


class PromptTokens(nn.Module):
    """Prompts in the model's own vocabulary (Chameleon), with and without caption."""

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the module does not own it

    def rows(self, values: Tensor, *, guided: bool) -> Tensor:
        """Embed prompts int64 [B, 2, P] to [rows, P, dim], conditional rows first."""
        return self._embedding[0].of_text(prompt_rows(values, 2 if guided else 1))
