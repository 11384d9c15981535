"""What the loop asks of a way to draft: `DraftMethod`, the base class of all, and what it gets each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.verify import Verdict, verify
from lantern_bench.decoding.protocol import DrafterLogits, DrafterSession, Target
from lantern_bench.decoding.sampling import broken_distributions, decoding_probabilities, guide
from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.parameters import load_code

Drafted: TypeAlias = tuple[Any, ...]
"""What a draft computed, for its `DraftMethod` to read: a named tuple of tensors (or None)."""


class Proposer:
    """The drafter in one step: the distributions q that drafts are drawn from, made of its logits as p is."""

    def __init__(
        self,
        session: DrafterSession,
        decoding: Decoding,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
    ) -> None:
        """Show the drafter committed tokens, as `DrafterSession.observe`."""
        self._session = session
        self._decoding = decoding
        self.broken = torch.zeros_like(
            counts, dtype=torch.bool
        )  # [B], the images with NaN or infinite logits so far
        self.root_q = self._distributions(session.observe(tokens, features, counts))  # [B, 1, V]

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Tensor:
        """Expand n nodes one level deeper and return the q [B, n, V] of their children, as `DrafterSession.extend`."""
        return self._distributions(self._session.extend(tokens, origin, seen))

    def _distributions(self, logits: DrafterLogits) -> Tensor:
        guided = guide(logits.cond, logits.uncond, self._decoding.cfg_scale)
        q = decoding_probabilities(guided, self._decoding)
        self.broken = self.broken | broken_distributions(q).any(dim=1)
        return q


class DraftInputs(NamedTuple):
    """What a draft of B images is made from."""

    root: Tensor  # int64 [B], the last committed tokens, which are drafted below
    noise: Tensor  # float32 [B, noises, V], Exp(1)
    depth_limit: (
        Tensor  # int64 [B], how deep drafts can be of use; verification leaves out deeper ones
    )
    proposer: Proposer | None = None  # None for a drafting without a drafter


class LastStep(NamedTuple):
    """What a step found, for draftings that make the next draft from it."""

    tree: DraftTree
    # float32 [B, M, V] at the nodes of the tree (greedy: of the guided logits at temperature 1)
    p: Tensor
    path: Tensor  # as in `Verdict`
    accepted: Tensor  # as in `Verdict`
    tokens: Tensor  # as in `Verdict`
    position: Tensor  # int64 [B], tokens committed with this step
    active: Tensor  # bool [B], False for images that were complete before it


class DraftMethod:
    """One way to draft, for B images; a subclass is constructed with (decoding, target, batch).

    A draft is one program of fixed shapes: no Python decision may depend on a tensor's values, and state is in tensors
    that `start_images` and `after_step` write in place.
    """

    nodes: int  # of the tree, with its root
    depth: int  # of the deepest node
    forwards = 0  # of the drafter in a step
    noises = 0  # vectors of Exp(1) noise over the vocabulary that a step takes
    fanout = 1  # the most children of a node
    learns = False  # whether `after_step` reads what a step found
    verify: Callable[..., Verdict] = staticmethod(
        verify
    )  # the walk down its trees at temperatures above 0

    def draft(self, inputs: DraftInputs) -> Drafted:
        """Draft below the roots."""
        raise NotImplementedError

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that verification walks."""
        raise NotImplementedError

    def start_images(self, p: Tensor) -> None:
        """New images start; `p` float32 [B, V] is the distribution of their first token."""

    def after_step(self, step: LastStep) -> None:
        """A step was verified; runs in the same program, where `learns`."""


def drafting_of(decoding: Decoding, target: Target, batch: int = 1) -> DraftMethod:
    """Return the drafting of a configuration; its tensors are where the target computes."""
    method: DraftMethod = load_code(decoding.drafting_row.make)(decoding, target, batch)
    return method
