"""What decoding needs of a model: a target, an optional drafter, and their sessions.

Everything is batched over B images. A session owns preallocated caches for one shape and is used
for one batch at a time. With guidance it holds two rows per image, so `rows` is 2B, the conditional
rows first; otherwise `rows` is B. Features of the target are passed to the drafter unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lantern_bench.decoding.sampling import guide
from lantern_bench.methods.parameters import NeighbourMetric
from lantern_bench.utils.errors import RefusedError


class Logits(NamedTuple):
    """The target's answer at N nodes of B images."""

    # the conditional logits, [B, N, V]
    cond: Tensor
    # the unconditional logits, [B, N, V]; None without guidance
    uncond: Tensor | None
    # hidden states after the final norm, [rows, N, width]
    features: Tensor


class DrafterLogits(NamedTuple):
    """The drafter's answer at n nodes of B images."""

    # the conditional logits, [B, n, V]
    cond: Tensor
    # the unconditional logits, [B, n, V]; None without guidance
    uncond: Tensor | None


class TargetSession:
    """The target for one batch of images.

    `score` and `commit` may be compiled, and have fixed shapes.
    """

    def prefill(self, condition: Any) -> Logits:
        """Start B images.

        Returns:
            The logits of the last prefix position (N = 1), and the features of the whole prefix.
        """
        raise NotImplementedError

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        """Run one forward over the N nodes of a draft tree, behind the committed tokens.

        Args:
            tokens: The nodes, root first, int64 [B, N].
            depths: Their depths, int64 [B, N].
            attention: Node (row) sees node (column), bool [B, N, N].
        """
        raise NotImplementedError

    def score_guided(
        self, tokens: Tensor, depths: Tensor, attention: Tensor, cfg_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Score the nodes of a draft tree, and guide their logits.

        A subclass may apply a linear head to guided features instead.

        Args:
            tokens: The nodes, root first, int64 [B, N].
            depths: Their depths, int64 [B, N].
            attention: Node (row) sees node (column), bool [B, N, N].
            cfg_scale: The guidance scale; 1 in a session without guidance.

        Returns:
            The guided logits float32 [B, N, V], and the features.
        """
        logits = self.score(tokens, depths, attention)
        return guide(logits.cond, logits.uncond, cfg_scale), logits.features

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep nodes of the last `score`: the first `counts` [B] of `path` [B, D + 1]."""
        raise NotImplementedError

    def clear(self) -> None:
        """Fill a cache that holds NaN with zeros.

        Attention gives hidden positions the weight 0, and 0 * NaN is NaN.
        """


class DrafterSession:
    """The drafter for one batch of images (EAGLE: features of the target in, logits out)."""

    def prefill(self, condition: Any, features: Tensor) -> None:
        """Start B images from the prefix features [rows, P, width].

        `observe` then gets the last of these features again, together with the first token.
        """
        raise NotImplementedError

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        """Read committed tokens and the target's features that predicted them.

        Args:
            tokens: [B, n].
            features: [rows, n, width].
            counts: How many of the tokens are committed, [B]; the others are filler.

        Returns:
            The logits of the new root's children, n = 1.
        """
        raise NotImplementedError

    def observe_all(self, tokens: Tensor, features: Tensor) -> DrafterLogits:
        """Read committed tokens as `observe`, and return the logits behind each of them [B, n, V].

        A subclass may read all of them in one forward.
        """
        ones = torch.ones_like(tokens[:, 0])
        cond = []
        uncond = []
        for position in range(tokens.shape[1]):
            now = slice(position, position + 1)
            logits = self.observe(tokens[:, now], features[:, now], ones)
            cond.append(logits.cond)
            if logits.uncond is not None:
                uncond.append(logits.uncond)
        return DrafterLogits(
            cond=torch.cat(cond, dim=1), uncond=torch.cat(uncond, dim=1) if uncond else None
        )

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        """Expand n nodes one level deeper.

        Args:
            tokens: The nodes, [B, n].
            origin: The index of each node's parent among the nodes of the previous call, [B, n]; 0
                (the root) in the first call after `observe`.
            seen: The nodes that each node attends to, itself included, among all nodes extended
                since `observe`, bool [B, n, total].
        """
        raise NotImplementedError

    def clear(self) -> None:
        """As `TargetSession.clear`."""


class Target:
    """The model whose distribution is sampled."""

    vocab_size: int
    image_tokens: int
    # tokens of one row of the picture, forced ones included; 0: the tokens do not form rows
    line_length: int = 0
    # tokens of a coarser grid, which come before the tokens of the picture
    coarse_tokens: int = 0
    device: torch.device

    def session(self, batch: int, *, guided: bool, nodes: int) -> TargetSession:
        """Return a session, which may reuse caches.

        Args:
            batch: How many images there are.
            guided: Whether logits are guided.
            nodes: The most nodes of a tree, root included.
        """
        raise NotImplementedError

    @cached_property
    def n_codes(self) -> int:
        """How many tokens can be chosen; tokens n_codes and above are forced.

        The logits of target and drafter make a forced token certain at its positions and impossible
        elsewhere.
        """
        return self.vocab_size

    def ordered_session(
        self,
        batch: int,  # noqa: ARG002
        *,
        guided: bool,  # noqa: ARG002
        nodes: int,  # noqa: ARG002
        order: Sequence[int],  # noqa: ARG002
    ) -> TargetSession:
        """Return a session that commits the tokens of an image in a given order.

        A node sees those committed tokens whose position in the image comes before its own. The
        depth of a node is its position in the image less the number of committed tokens, and may
        be negative.

        Args:
            batch: As in `session`.
            guided: As in `session`.
            nodes: The most nodes of a step.
            order: The positions of the tokens, in the order in which they are committed.

        Raises:
            RefusedError: The sessions of this target have no other order than the raster order.
        """
        raise RefusedError(
            f"{type(self).__name__} decodes in raster order only, so no row can start early",
            "Use the mode sjd or scd.",
        )

    def forced_tokens(self, positions: Tensor) -> Tensor:
        """Return the forced tokens at `positions` int64 [...], -1 where no token is forced."""
        return torch.full_like(positions, -1)

    def sources(self, positions: Tensor) -> Tensor:
        """Return the positions of the coarse tokens that cover `positions` int64 [...], else -1."""
        return torch.full_like(positions, -1)

    def logits_without_cache(self, condition: Any, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the logits of `score` from one forward without a cache, for `check-model`.

        Args:
            condition: The argument of `TargetSession.prefill`.
            tokens: The tokens of the images, [B, N].

        Returns:
            The conditional and unconditional logits; None if the model has no such forward.
        """


class Drafter:
    """A model that proposes tokens."""

    def session(self, batch: int, *, guided: bool, nodes: int) -> DrafterSession:
        """Return a session, which may reuse caches.

        Args:
            batch: How many images there are.
            guided: Whether logits are guided.
            nodes: The most nodes that it extends in a step.
        """
        raise NotImplementedError


class PixelDecoder(Protocol):
    """Turns tokens into pictures."""

    def pixels(self, tokens: Tensor) -> Tensor:
        """Return the pictures of tokens int [B, N]: uint8 RGB [B, H, W, 3] on the CPU."""


class DecodableModel(Protocol):
    """What `decode` needs of a loaded model.

    Only some draftings use the drafter, and only some rules use the codes.
    """

    target: Target
    drafter: Drafter | None

    @property
    def codes(self) -> Tensor:
        """Embeddings of the tokens [V, d] on the target's device, in the space of neighbours."""

    def table(self, columns: int, metric: NeighbourMetric) -> Tensor:
        """Return the nearest codes int [V, columns] by a metric."""
