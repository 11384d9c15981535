"""What the drafter is shown at each step: features made as they are needed, or read from shards made before.

Every sequence is shown once before any is shown again, in an order that the seed decides. Of several workers each takes
every so manieth row of the same batch; what is random about a row comes from a seed of its own, so that it does not
matter who takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.clock import OnProgress
from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.conditioning import Condition, prompt_words, visible_rows
from lantern_bench.models.transformer.target import TransformerTarget, padding_of
from lantern_bench.training.drafter.dataset import Shards
from lantern_bench.training.loop import ALONE, Workers

# ---- What a target teaches its drafter: features of whole sequences under teacher forcing, for every kind of condi


class Taught(NamedTuple):
    """B sequences of N tokens behind a prefix of P, on the target's device.

    tokens int64 [B, N]. hidden [B, P + N - 1, dim]: final-norm hidden states, of which number P - 1 predicts the first
    token. valid bool [B, P], False for padding. words int64 [B, P]: prompts in the model's own vocabulary, else None.
    """

    tokens: Tensor
    hidden: Tensor
    valid: Tensor
    words: Tensor | None


def prefix_mask(valid: Tensor, length: int) -> Tensor:
    """The additive mask [B, 1, n, n] of training: causal, padding (`valid` bool [B, P]) seen by itself alone."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril().repeat(len(valid), 1, 1)
    allowed[:, :, : valid.shape[1]] &= valid[:, None, :]
    allowed |= torch.eye(length, dtype=torch.bool, device=valid.device)
    return torch.zeros(allowed.shape, device=valid.device).masked_fill_(~allowed, -torch.inf)[:, None]


def positions_of(valid: Tensor, length: int, config: TransformerConfig) -> Tensor | None:
    """Positions int64 [B, length] behind the padding, for models that count them; None for those on a grid."""
    if config.positions == "grid":
        return None
    padding = padding_of(valid, len(valid), config)
    return (torch.arange(length, device=valid.device) - padding).clamp_min(0)


def teach(target: TransformerTarget, condition: Condition, tokens: Tensor, dropped: Tensor) -> Taught:
    """The features along tokens int64 [B, N]; rows of `dropped` bool [B] have the null condition."""
    tokens, dropped = tokens.to(target.device), dropped.to(target.device)[:, None]
    given, null = target.prefix(condition, guided=True).chunk(2)
    visible, words = visible_rows(condition.valid.to(target.device), 2), None
    if target.config.words is not None:
        with_caption, without = prompt_words(condition.values.to(target.device), 2).chunk(2)
        words = torch.where(dropped, without, with_caption)
    if len(visible) > len(tokens):
        with_caption, without = visible.chunk(2)
        visible = torch.where(dropped, without, with_caption)
    prefix = torch.where(dropped[:, :, None], null, given)
    x = torch.cat([prefix, target.transformer.tok_embeddings(tokens[:, :-1])], dim=1)
    length = x.shape[1]
    hidden = target.transformer(x, prefix_mask(visible, length), positions_of(visible, length, target.config))
    return Taught(tokens, hidden, visible, words)


# ----

SHARD_BYTES = 256 * 10**6
_HELD_OUT_AT_ONCE = 8


class Sequenced(NamedTuple):
    """Sequences and their conditions: tokens int [n, N]; `condition(rows)` is that of the rows with these numbers."""

    tokens: Tensor
    condition: Callable[[Sequence[int]], Condition]


class Features(Protocol):
    """Where the features of sequences come from."""

    def of(self, rows: Sequence[int], dropped: Tensor) -> Taught:
        """Of the rows with these numbers; `dropped` bool [B] says which have no condition, where that is still open."""
        ...

    def both(self, rows: Sequence[int]) -> Taught:
        """Of the rows with their conditions, and after these of the same rows without."""
        ...


class Lesson(NamedTuple):
    """A batch of B sequences: `taught` has B rows, or guided 2 B, those without condition behind the others.

    seeds: one for each sequence, for what is random about it. dropped bool [B]: sequences without their condition, or
    guided without their guidance.
    """

    taught: Taught
    seeds: list[int]
    dropped: Tensor


class Order:
    """The numbers 0 to n - 1 in seeded orders, one after the other without an end; `drawn` of them were taken."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed, self.drawn = count, seed, 0
        self._kept: tuple[int, Tensor] | None = None

    def take(self, count: int) -> list[int]:
        """The next numbers."""
        places = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [int(self._epoch(place // self._count)[place % self._count]) for place in places]

    def _epoch(self, number: int) -> Tensor:
        if self._kept is None or self._kept[0] != number:
            generator = torch.Generator().manual_seed(((self._seed << 20) + number) % 2**63)
            self._kept = number, torch.randperm(self._count, generator=generator)
        return self._kept[1]


class Lessons:
    """Batches of the sequences `learnt`, and those `held_out` as they are needed to examine the drafter."""

    def __init__(
        self,
        features: Features,
        learnt: Sequence[int],
        batch: int,
        dropped: float,
        seed: int,
        examined: Callable[[], Iterator[tuple[Taught, Taught]]],
        workers: Workers = ALONE,
        guided: bool = False,
    ) -> None:
        """`examined` yields held-out sequences with and without their condition; `guided`: as in `Lesson`."""
        self._features, self._learnt, self._batch, self._dropped = features, list(learnt), batch, dropped
        self._guided = guided
        self.order, self.held_out, self._workers = Order(len(self._learnt), seed), examined, workers

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> Lesson:
        """The next batch."""
        rows = [self._learnt[number] for number in self.order.take(self._batch)]
        dropped = torch.rand(self._batch, generator=generator) < self._dropped
        seeds = torch.randint(2**62, (self._batch,), generator=generator).tolist()
        mine = slice(self._workers.rank, None, self._workers.count)
        taught = self._features.both(rows[mine]) if self._guided else self._features.of(rows[mine], dropped[mine])
        return Lesson(taught, seeds[mine], dropped[mine])


class LiveFeatures:
    """Features by a forward of the target at each step: no disk, and a condition dropped anew each time."""

    def __init__(self, target: TransformerTarget, sequences: Sequenced) -> None:
        self._target, self._sequences = target, sequences

    def __len__(self) -> int:
        """Sequences there are."""
        return len(self._sequences.tokens)

    def of(self, rows: Sequence[int], dropped: Tensor) -> Taught:
        """See `Features`."""
        tokens = self._sequences.tokens[torch.tensor(rows)].long()
        return teach(self._target, self._sequences.condition(rows), tokens, dropped)

    def both(self, rows: Sequence[int]) -> Taught:
        """See `Features`."""
        return self.of([*rows, *rows], torch.arange(2 * len(rows)) >= len(rows))

    @torch.no_grad()
    def examined(self, rows: Sequence[int]) -> Iterator[tuple[Taught, Taught]]:
        """Yield rows in small batches, with and without their condition."""
        for start in range(0, len(rows), _HELD_OUT_AT_ONCE):
            part = rows[start : start + _HELD_OUT_AT_ONCE]
            with_condition, without = (self.of(part, torch.full((len(part),), gone)) for gone in (False, True))
            yield with_condition, without


class FeatureShards:
    """Features from disk, made once: nothing of the target's layers is needed while training.

    Which sequences have no condition is decided when they are made, as in the published training; or all of them are
    there twice, with and without it.
    """

    def __init__(self, root: Path, key: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.shards = Shards(root, "features", dict(key) | {"dtype": str(dtype)})
        self._dtype, self._device = dtype, device

    @torch.no_grad()
    def make(
        self, live: LiveFeatures, row_bytes: int, batch: int, dropped: Tensor, autocast: bool, on_progress: OnProgress
    ) -> None:
        """Make those that are missing, `batch` sequences a forward; `dropped` bool [n], or [2 n] for `both`."""

        def part(start: int, stop: int) -> Mapping[str, Tensor]:
            made = []
            for first in range(start, stop, batch):
                rows = range(first, min(stop, first + batch))
                with torch.autocast(self._device.type, torch.bfloat16, enabled=autocast):
                    made.append(live.of([row % len(live) for row in rows], dropped[first : rows.stop]))
            return _stored(_joined(made), self._dtype)

        at_once = max(1, SHARD_BYTES // row_bytes)
        self.shards.fill(len(dropped), at_once, part, "making features", on_progress)

    def of(self, rows: Sequence[int], dropped: Tensor) -> Taught:  # noqa: ARG002  # decided when they were made
        """See `Features`."""
        read = [self.shards.row(row) for row in rows]
        taught = []
        for row in read:
            one = {name: tensor[None].to(self._device) for name, tensor in row.items()}
            taught.append(Taught(one["tokens"], one["hidden"], one["valid"], one.get("words")))
        return _joined(taught)

    def both(self, rows: Sequence[int]) -> Taught:
        """See `Features`."""
        half = len(self.shards) // 2
        return self.of([*rows, *(half + row for row in rows)], torch.empty(0))


def bytes_a_row(prefix: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
    """What a sequence takes in `FeatureShards`."""
    return (prefix + tokens - 1) * dim * dtype.itemsize + 4 * tokens + 9 * prefix


def _stored(taught: Taught, dtype: torch.dtype) -> dict[str, Tensor]:
    kept = {"tokens": taught.tokens.int(), "hidden": taught.hidden.to(dtype), "valid": taught.valid}
    return kept if taught.words is None else kept | {"words": taught.words}


def _joined(parts: Sequence[Taught]) -> Taught:
    """Several batches as one: prompts of different lengths get padding in front."""
    longest = max(part.valid.shape[1] for part in parts)

    def padded(tensor: Tensor, axis: int, prefix: int) -> Tensor:
        behind = (0, 0) * (tensor.dim() - 1 - axis)
        return functional.pad(tensor, (*behind, longest - prefix, 0))

    tokens = torch.cat([part.tokens.long() for part in parts])
    hidden = torch.cat([padded(part.hidden, 1, part.valid.shape[1]) for part in parts])
    valid = torch.cat([padded(part.valid, 1, part.valid.shape[1]) for part in parts])
    words = [padded(part.words, 1, part.valid.shape[1]) for part in parts if part.words is not None]
    return Taught(tokens, hidden, valid, torch.cat(words) if words else None)
