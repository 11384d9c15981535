"""What the drafter learns from: the target's features of whole sequences, and batches of them.

Features are computed at each step (`LiveFeatures`) or read from disk (`FeatureShards`). Every sequence is shown once
before any is shown again, in an order that the seed decides. Worker r of n takes rows r, r + n, ... of the same batch;
each row has a seed of its own, so that its random draws are the same in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.clock import OnProgress
from lantern_bench.models.packed_linear import has_bfloat16
from lantern_bench.models.target import (
    Condition,
    TransformerTarget,
    positions_of,
    prefix_mask,
    prompt_rows,
    visible_rows,
)
from lantern_bench.models.transformer_config import TransformerConfig
from lantern_bench.training.drafter.dataset import Shards
from lantern_bench.training.loop import SINGLE, Distributed

SHARD_BYTES = 256 * 10**6


class TargetFeatures(NamedTuple):
    """Features of B sequences of N tokens behind a prefix of P, on the target's device.

    tokens int64 [B, N]. hidden [B, P + N - 1, dim]: final-norm hidden states, of which number P - 1 predicts the first
    token. valid bool [B, P], False for padding. words int64 [B, P]: prompts in the model's own vocabulary, else None.
    """

    tokens: Tensor
    hidden: Tensor
    valid: Tensor
    words: Tensor | None


def target_features(target: TransformerTarget, condition: Condition, tokens: Tensor, dropped: Tensor) -> TargetFeatures:
    """The features under teacher forcing of tokens int64 [B, N]; rows of `dropped` bool [B] have the null condition."""
    tokens, dropped = tokens.to(target.device), dropped.to(target.device)[:, None]
    given, null = target.prefix(condition, guided=True).chunk(2)
    visible, words = visible_rows(condition.valid.to(target.device), 2), None
    if target.config.text_vocab_size is not None:
        with_caption, without = prompt_rows(condition.values.to(target.device), 2).chunk(2)
        words = torch.where(dropped, without, with_caption)
    if len(visible) > len(tokens):
        with_caption, without = visible.chunk(2)
        visible = torch.where(dropped, without, with_caption)
    prefix = torch.where(dropped[:, :, None], null, given)
    x = torch.cat([prefix, target.transformer.tok_embeddings(tokens[:, :-1])], dim=1)
    length = x.shape[1]
    hidden = target.transformer(x, prefix_mask(visible, length), positions_of(visible, length, target.config))
    return TargetFeatures(tokens, hidden, visible, words)


class ConditionedTokens(NamedTuple):
    """Sequences and their conditions: tokens int [n, N]; `condition(rows)` is that of the rows with these numbers."""

    tokens: Tensor
    condition: Callable[[Sequence[int]], Condition]


class LiveFeatures:
    """Features by a forward of the target at each step: no disk, and conditions are dropped anew each time."""

    def __init__(self, target: TransformerTarget, sequences: ConditionedTokens) -> None:
        self.target, self._sequences = target, sequences

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._sequences.tokens)

    def of(self, rows: Sequence[int], dropped: Tensor) -> TargetFeatures:
        """Features of these rows; rows of `dropped` bool [B] have no condition."""
        tokens = self._sequences.tokens[torch.tensor(rows)].long()
        return target_features(self.target, self._sequences.condition(rows), tokens, dropped)

    def both(self, rows: Sequence[int]) -> TargetFeatures:
        """Features of these rows with their conditions, followed by the same rows without."""
        return self.of([*rows, *rows], torch.arange(2 * len(rows)) >= len(rows))

    @torch.no_grad()
    def pairs(self, rows: Sequence[int]) -> Iterator[tuple[TargetFeatures, TargetFeatures]]:
        """Yield rows in small batches, with and without their condition."""
        for part in (rows[start : start + 8] for start in range(0, len(rows), 8)):
            yield self.of(part, torch.zeros(len(part)).bool()), self.of(part, torch.ones(len(part)).bool())


class FeatureShards:
    """Features on disk, computed once: training needs none of the target's layers.

    Which sequences have no condition is decided when the shards are written, as in the published training; for `both`
    every sequence is stored twice, with and without it.
    """

    def __init__(self, root: Path, key: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.shards = Shards(root, "features", dict(key) | {"dtype": str(dtype)})
        self._dtype, self._device = dtype, device

    @torch.no_grad()
    def make(self, live: LiveFeatures, batch: int, dropped: Tensor, autocast: bool, on_progress: OnProgress) -> None:
        """Write the rows that are missing, `batch` sequences a forward; `dropped` bool [n], or [2 n] for `both`."""

        def part(start: int, stop: int) -> Mapping[str, Tensor]:
            parts = torch.arange(start, stop).split(batch)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=autocast and has_bfloat16(self._device)):
                whole = _joined([live.of((rows % len(live)).tolist(), dropped[rows]) for rows in parts])
            kept = {"tokens": whole.tokens.int(), "hidden": whole.hidden.to(self._dtype), "valid": whole.valid}
            return kept if whole.words is None else kept | {"words": whole.words}

        rows = max(1, SHARD_BYTES // bytes_per_row(live.target.config, self._dtype))
        self.shards.fill(len(dropped), rows, part, "making features", on_progress)

    def of(self, rows: Sequence[int], dropped: Tensor) -> TargetFeatures:  # noqa: ARG002
        """Features of these rows; which of them have no condition was decided when they were written."""
        read = [{name: t[None].to(self._device) for name, t in self.shards.row(row).items()} for row in rows]
        return _joined([TargetFeatures(row["tokens"], row["hidden"], row["valid"], row.get("words")) for row in read])

    def both(self, rows: Sequence[int]) -> TargetFeatures:
        """As `LiveFeatures.both`."""
        return self.of([*rows, *(len(self.shards) // 2 + row for row in rows)], torch.empty(0))


def bytes_per_row(config: TransformerConfig, dtype: torch.dtype) -> int:
    """Size of one sequence in `FeatureShards`."""
    positions = config.prefix + config.image_tokens - 1
    return positions * config.dim * dtype.itemsize + 4 * config.image_tokens + 9 * config.prefix


def _joined(parts: Sequence[TargetFeatures]) -> TargetFeatures:
    """Several batches as one; shorter prompts get padding in front."""
    longest = max(part.valid.shape[1] for part in parts)

    def padded(tensor: Tensor, prefix: int) -> Tensor:
        behind = (0, 0) * (tensor.dim() - 2)
        return functional.pad(tensor, (*behind, longest - prefix, 0))

    tokens = torch.cat([part.tokens.long() for part in parts])
    hidden = torch.cat([padded(part.hidden, part.valid.shape[1]) for part in parts])
    valid = torch.cat([padded(part.valid, part.valid.shape[1]) for part in parts])
    words = [padded(part.words, part.valid.shape[1]) for part in parts if part.words is not None]
    return TargetFeatures(tokens, hidden, valid, torch.cat(words) if words else None)


class Order:
    """The numbers 0 to n - 1 in seeded orders, one after the other without an end; `drawn` of them were taken."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed, self.drawn = count, seed, 0
        self._kept: tuple[int, Tensor] | None = None

    def take(self, count: int) -> list[int]:
        """The next numbers."""
        taken = []
        for number in range(self.drawn, self.drawn + count):
            epoch, place = divmod(number, self._count)
            if self._kept is None or self._kept[0] != epoch:
                generator = torch.Generator().manual_seed(((self._seed << 20) + epoch) % 2**63)
                self._kept = epoch, torch.randperm(self._count, generator=generator)
            taken.append(int(self._kept[1][place]))
        self.drawn += count
        return taken


class FeatureBatch(NamedTuple):
    """A batch of B sequences: `target` has B rows, or guided 2 B, those without condition after the others.

    seeds: one per sequence, for its random draws. dropped bool [B]: sequences without their condition, or guided
    without their guidance.
    """

    target: TargetFeatures
    seeds: list[int]
    dropped: Tensor


@dataclass
class FeatureBatches:
    """Batches of the sequences `rows`, in the order of a seed; `guided` as in `FeatureBatch`.

    `held_out` yields held-out sequences with and without their condition.
    """

    features: LiveFeatures | FeatureShards
    rows: Sequence[int]
    batch: int
    dropped: float
    seed: int
    held_out: Callable[[], Iterator[tuple[TargetFeatures, TargetFeatures]]]
    distributed: Distributed = SINGLE
    guided: bool = False

    def __post_init__(self) -> None:
        self.order = Order(len(self.rows), self.seed)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> FeatureBatch:
        """The next batch."""
        rows = [self.rows[number] for number in self.order.take(self.batch)]
        dropped = torch.rand(self.batch, generator=generator) < self.dropped
        seeds = torch.randint(2**62, (self.batch,), generator=generator).tolist()
        mine = slice(self.distributed.rank, None, self.distributed.count)
        target = self.features.both(rows[mine]) if self.guided else self.features.of(rows[mine], dropped[mine])
        return FeatureBatch(target, seeds[mine], dropped[mine])
