"""What decoding needs of a model: a target, perhaps a drafter, and the values that pass between them and the loop.

Everything is batched over B images. A session owns preallocated caches for one shape and is used for one batch at a
time; with guidance it holds two rows per image. Features of the target are passed to the drafter unread.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lantern_bench.decoding.sampling import guide
from lantern_bench.methods.parameters import NeighbourMetric


class Logits(NamedTuple):
    """The target's answer at N nodes of B images."""

    cond: Tensor  # [B, N, V]
    uncond: Tensor | None  # [B, N, V]; None without guidance
    # final-norm hidden states [rows, N, width]; rows = 2B with guidance, conditional rows first
    features: Tensor


class DrafterLogits(NamedTuple):
    """The drafter's answer at n nodes of B images."""

    cond: Tensor  # [B, n, V]
    uncond: Tensor | None  # [B, n, V]; None without guidance


class TargetSession:
    """The target for one batch of images; `score` and `commit` may be compiled, and have fixed shapes."""

    def prefill(self, condition: Any) -> Logits:
        """Start B images: logits of the last prefix position (N = 1), features of the whole prefix."""
        raise NotImplementedError

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        """Run one forward over the N nodes of a draft tree, root first, behind the committed tokens.

        tokens, depths: int64 [B, N]. attention: bool [B, N, N], node (row) sees node (column).
        """
        raise NotImplementedError

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `score`: guided logits float32 [B, N, V] and features; a linear head may be applied to guided features."""
        logits = self.score(tokens, depths, attention)
        return guide(logits.cond, logits.uncond, cfg_scale), logits.features

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep the first `counts` [B] nodes of `path` [B, D + 1] of the last `score`; the others are filler."""
        raise NotImplementedError

    def clear(self) -> None:
        """Fill a cache with zeros, after NaN: attention gives hidden positions the weight 0, and 0 * NaN is NaN."""


class DrafterSession:
    """The drafter for one batch of images (EAGLE: features of the target in, logits of its head out)."""

    def prefill(self, condition: Any, features: Tensor) -> None:
        """Start from the prefix features [rows, P, width]; `observe` gets the last again, with the first token."""
        raise NotImplementedError

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        """Feed committed tokens [B, n] with the true features [rows, n, width] that predicted them.

        The first `counts` [B] count, the others are filler. Returns the logits of the new root's children, n = 1.
        """
        raise NotImplementedError

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        """Expand n nodes one level deeper, tokens [B, n].

        origin [B, n]: the slot of each node's parent among the nodes of the call before (0, the root, in the first).
        seen: bool [B, n, total], which of all nodes extended since `observe` each one attends to, itself included.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """As `TargetSession.clear`."""


class Target:
    """A model whose distribution is to be sampled."""

    vocab_size: int
    image_tokens: int
    # tokens of one row of the picture, forced ones included; 0: tokens are no rows of a grid
    line_length: int = 0
    device: torch.device

    def session(self, batch: int, *, guided: bool, nodes: int) -> TargetSession:
        """A session for B images and trees of at most `nodes` nodes, root included; caches are reused."""
        raise NotImplementedError

    @cached_property
    def n_codes(self) -> int:
        """How many tokens can be chosen; tokens from this number on are forced.

        Logits, the drafter's too, make a forced token certain at its positions and impossible elsewhere.
        """
        return self.vocab_size

    def forced(self, positions: Tensor) -> Tensor:
        """The tokens that are forced at `positions` int64 [...] of an image, -1 where none is."""
        return torch.full_like(positions, -1)

    def logits_without_cache(self, condition: Any, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Conditional and unconditional logits of one forward without a cache, for `check-model`."""


class Drafter:
    """A model that proposes tokens."""

    def session(self, batch: int, *, guided: bool, nodes: int) -> DrafterSession:
        """A session for B images that extends at most `nodes` nodes a step; caches are reused."""
        raise NotImplementedError


class PixelDecoder(Protocol):
    """Tokens to pictures."""

    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens int [B, N] -> uint8 RGB [B, H, W, 3] on the CPU."""


class DecodableModel(Protocol):
    """What `decode` needs of a loaded model; only some drafts need the drafter, only some rules the codes."""

    target: Target
    drafter: Drafter | None

    @property
    def codes(self) -> Tensor:
        """Embeddings of the tokens [V, d] on the target's device, in the space that neighbours are measured in."""

    def table(self, columns: int, metric: NeighbourMetric) -> Tensor:
        """The nearest codes int [V, columns] by a metric."""
