"""How far each image of a batch is, and what each step did: all that one step leaves for the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.verify import Verdict
from lantern_bench.decoding.trace import ImageTrace, StepRecord, image_trace

FINITE = 0
TARGET = 1
DRAFTER = 2
"""Whose logits were broken first, in `ImageState.host_view`."""

_COLUMNS_BEFORE_RANKS = 3  # of a row of `ImageState._counts`: start, accepted, offered depth


class FirstTokens(NamedTuple):
    """The first tokens of B images, drawn from the logits of the prefill."""

    tokens: Tensor  # int64 [B]
    logits: Tensor  # guided [B, V], what the tokens are drawn from
    broken: Tensor  # bool [B], which of the logits are NaN or infinite


class ImageState:
    """Where B images are, in tensors at fixed addresses: shared by configurations of equal size."""

    def __init__(self, batch: int, image_tokens: int, depth: int, prefix_features: Tensor) -> None:
        device = prefix_features.device
        rows, _, width = prefix_features.shape
        self._image_tokens = image_tokens
        self._depth = depth

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        # The images
        self.out = numbers(batch, image_tokens + depth + 1)  # the tokens so far, then filler
        self.position = numbers(batch)  # how many tokens of each image count
        self.tokens_wanted = numbers()

        # What the last step committed: the drafter is shown it, and the next step drafts below the root.
        self.tokens = numbers(batch, depth + 1)
        self.features = torch.zeros(
            rows, depth + 1, width, dtype=prefix_features.dtype, device=device
        )
        self.counts = numbers(batch)  # how many of them count
        self.root = numbers(batch)  # the last of them
        self.depth_limit = numbers(batch)  # how deep drafts below the root can be of use

        # What the host reads after each step: positions, and whose logits were broken first.
        self.host_view = numbers(2, batch)
        self.drafter_broken = torch.zeros(
            batch, dtype=torch.bool, device=device
        )  # in the draft of the running step

        # What each step did, for the trace
        self._step = numbers(1)
        self._counts = numbers(image_tokens, batch, _COLUMNS_BEFORE_RANKS + depth)
        self._masses = torch.zeros(image_tokens, batch, 2, device=device)
        self._ahead = torch.arange(depth + 1, device=device)

    def start_images(self, tokens_wanted: int, prefix_features: Tensor, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        self.tokens_wanted.fill_(tokens_wanted)
        self.position.fill_(1)
        self.out[:, 0] = first.tokens

        self.tokens[:, 0] = first.tokens
        # filler is computed with too, and a NaN of the images before would spread
        self.features.zero_()
        self.features[:, 0] = prefix_features[:, -1]
        self.counts.fill_(1)
        self.root.copy_(first.tokens)
        self.depth_limit.fill_(min(self._depth, self._image_tokens - 2))

        self.host_view[0] = 1
        self.host_view[1] = first.broken * TARGET
        self.drafter_broken.zero_()
        self._step.zero_()

    @property
    def active(self) -> Tensor:
        """Which images are not complete, bool [B]."""
        return self.position < self.tokens_wanted

    def commit(self, verdict: Verdict, features: Tensor, target_broken: Tensor) -> None:
        """Append what a step accepts; complete images stay as they are.

        Args:
            verdict: What verification decided.
            features: The target's features [rows, M, width] at the nodes of the tree.
            target_broken: Which images have NaN or infinite logits of the target, bool [B].
        """
        self._record(verdict)
        active = self.active
        counts = torch.where(active, verdict.accepted + 1, 0)

        # Filler behind the tokens that count is overwritten by the next step or cut off at the end.
        columns = (self.position[:, None] + self._ahead).clamp_max(self.out.shape[1] - 1)
        self.out.scatter_(
            1, columns, torch.where(active[:, None], verdict.tokens, self.out.gather(1, columns))
        )
        self.position.add_(counts)

        last = verdict.tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        self.root.copy_(torch.where(active, last, self.root))
        self.counts.copy_(counts)
        self.tokens.copy_(verdict.tokens)
        path = verdict.path.clamp_min(0).repeat(len(features) // len(active), 1)
        self.features.copy_(features.gather(1, path[:, :, None].expand(-1, -1, features.shape[-1])))
        self.depth_limit.copy_((self._image_tokens - 1 - self.position).clamp_max(self._depth))

        broken_now = torch.where(target_broken, TARGET, self.drafter_broken * DRAFTER)
        broken_before = self.host_view[1]
        broken = torch.where(active & (broken_before == FINITE), broken_now, broken_before)
        self.host_view.copy_(torch.stack([self.position, broken]))

    def traces(self, tokens_wanted: int, steps: int, drafter_forwards: int) -> list[ImageTrace]:
        """Return the trace of each image.

        Args:
            tokens_wanted: How many tokens each image has.
            steps: How many steps the batch took.
            drafter_forwards: How many forwards of the drafter each step took.
        """
        counts_of_images = self._counts[:steps].transpose(0, 1).tolist()
        masses_of_images = self._masses[:steps].transpose(0, 1).tolist()
        traces = []
        for counts, masses in zip(counts_of_images, masses_of_images, strict=True):
            records = [
                StepRecord(
                    start=start,
                    accepted=accepted,
                    offered_depth=offered_depth,
                    child_rank=child_rank,
                    neighbour_mass=mass,
                    neighbour_mass_tried=mass_tried,
                )
                for (start, accepted, offered_depth, *child_rank), (mass, mass_tried) in zip(
                    counts, masses, strict=True
                )
            ]
            traces.append(image_trace(records, tokens_wanted, drafter_forwards))
        return traces

    def _record(self, verdict: Verdict) -> None:
        """Write down what the running step decides."""
        counts = torch.stack([self.position, verdict.accepted, self.depth_limit], dim=1)
        self._counts.index_copy_(
            0, self._step, torch.cat([counts, verdict.child_rank], dim=1)[None]
        )
        masses = torch.stack([verdict.neighbour_mass, verdict.neighbour_mass_tried], dim=1)
        self._masses.index_copy_(0, self._step, masses[None])
        self._step.add_(1)
