"""The state of the images of a batch: everything that one step leaves for the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.verify import Verdict
from lantern_bench.decoding.trace import StepRecorder
from lantern_bench.decoding.tree import at_nodes

FINITE = 0
TARGET = 1
DRAFTER = 2
"""Whose logits were broken first, in `ImageState.host_view`."""


class FirstTokens(NamedTuple):
    """The first tokens of B images, drawn from the logits of the prefill."""

    # the tokens, int64 [B]
    tokens: Tensor
    # guided [B, V], which the tokens are drawn from
    logits: Tensor
    # which of the logits are NaN or infinite, bool [B]
    broken: Tensor


class ImageState:
    """The state of B images, in tensors at fixed addresses that equal shapes share."""

    def __init__(
        self, *, batch: int, image_tokens: int, depth: int, prefix_features: Tensor
    ) -> None:
        device = prefix_features.device
        rows, _, width = prefix_features.shape
        self._image_tokens = image_tokens
        self._depth = depth

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        # the tokens of the images so far, then filler
        self.out = numbers(batch, image_tokens + depth + 1)
        # how many tokens each image has so far
        self.position = numbers(batch)
        self.tokens_wanted = numbers()

        # What the last step committed, for the drafter to read: tokens and features,
        self.tokens = numbers(batch, depth + 1)
        self.features = prefix_features.new_zeros(rows, depth + 1, width)
        # and how many of them are not filler.
        self.counts = numbers(batch)

        # What the host reads after each step: positions, and whose logits were broken first.
        self.host_view = numbers(2, batch)
        # whether the drafter's logits are broken in the running step
        self.drafter_broken = numbers(batch).bool()

        self.steps = StepRecorder(
            image_tokens=image_tokens, batch=batch, depth=depth, device=device
        )
        self._ahead = torch.arange(depth + 1, device=device)

    def start_images(self, tokens_wanted: int, prefix_features: Tensor, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens.

        Args:
            tokens_wanted: How many tokens each image gets.
            prefix_features: The target's features of the prefix [rows, P, width].
            first: The first tokens.
        """
        self.tokens_wanted.fill_(tokens_wanted)
        self.position.fill_(1)
        self.out[:, 0] = first.tokens

        self.tokens[:, 0] = first.tokens
        # Forwards read filler too, and a NaN left by earlier images would spread.
        self.features.zero_()
        self.features[:, 0] = prefix_features[:, -1]
        self.counts.fill_(1)

        self.host_view[0] = 1
        self.host_view[1] = first.broken * TARGET
        self.drafter_broken.zero_()
        self.steps.start()

    @property
    def root(self) -> Tensor:
        """The last token of each image, the root of its drafts, int64 [B]."""
        return self.out.gather(1, self.position[:, None] - 1).squeeze(1)

    @property
    def depth_limit(self) -> Tensor:
        """The largest useful depth of drafts below the root, int64 [B]."""
        return (self._image_tokens - 1 - self.position).clamp_max(self._depth)

    def commit(self, verdict: Verdict, features: Tensor, target_broken: Tensor) -> None:
        """Record a step and append the accepted tokens; complete images do not change.

        Args:
            verdict: The decision of the verification.
            features: The target's features [rows, M, width] at the nodes of the tree.
            target_broken: Which images have NaN or infinite logits of the target, bool [B].
        """
        self.steps.record(
            start=self.position,
            accepted=verdict.accepted,
            offered_depth=self.depth_limit,
            child_rank=verdict.child_rank,
            neighbour_mass=verdict.neighbour_mass,
            neighbour_mass_tried=verdict.neighbour_mass_tried,
            emitted_tv=verdict.emitted_tv,
        )
        active = self.position < self.tokens_wanted  # images that are not complete
        counts = torch.where(active, verdict.accepted + 1, 0)

        # Filler behind the tokens that count is overwritten by the next step or cut off at the end.
        columns = (self.position[:, None] + self._ahead).clamp_max(self.out.shape[1] - 1)
        before = self.out.gather(1, columns)
        self.out.scatter_(1, columns, torch.where(active[:, None], verdict.tokens, before))
        self.position.add_(counts)

        self.counts.copy_(counts)
        self.tokens.copy_(verdict.tokens)
        path = verdict.path.clamp_min(0).repeat(len(features) // len(active), 1)
        self.features.copy_(at_nodes(features, path))

        broken_now = torch.where(target_broken, TARGET, self.drafter_broken * DRAFTER)
        broken_before = self.host_view[1]
        broken = torch.where(active & (broken_before == FINITE), broken_now, broken_before)
        self.host_view.copy_(torch.stack([self.position, broken]))
