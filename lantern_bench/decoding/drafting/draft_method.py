"""`DraftMethod`, the base class of all ways to draft, and its inputs in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.verify import Verdict, verify
from lantern_bench.decoding.protocol import DrafterLogits, DrafterSession, Target
from lantern_bench.decoding.sampling import broken_distributions, decoding_probabilities, guide
from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.parameters import load_code


class Proposer:
    """The drafter in one step: the distributions q that drafts are drawn from.

    q is computed from the drafter's logits as p is computed from the target's.
    """

    def __init__(
        self,
        session: DrafterSession,
        decoding: Decoding,
        *,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
    ) -> None:
        """Show the drafter the committed tokens, with the arguments of `DrafterSession.observe`."""
        self._session = session
        self._decoding = decoding
        # the images with NaN or infinite logits so far, [B]
        self.broken = torch.zeros_like(counts, dtype=torch.bool)
        # the q of the root's children, [B, 1, V]
        self.root_q = self._distributions(session.observe(tokens, features, counts))

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Tensor:
        """Expand n nodes and return the q [B, n, V] of their children.

        Args:
            tokens: The nodes, int64 [B, n].
            origin: As in `DrafterSession.extend`.
            seen: As in `DrafterSession.extend`.
        """
        return self._distributions(self._session.extend(tokens, origin, seen))

    def _distributions(self, logits: DrafterLogits) -> Tensor:
        guided = guide(logits.cond, logits.uncond, self._decoding.cfg_scale)
        q = decoding_probabilities(guided, self._decoding)
        self.broken = self.broken | broken_distributions(q).any(dim=1)
        return q


class DraftInputs(NamedTuple):
    """The inputs of a draft of B images."""

    # the last committed tokens, the roots of the drafts, int64 [B]
    root: Tensor
    # Exp(1) noise, float32 [B, noises, V]
    noise: Tensor
    # the largest useful depth, int64 [B]; verification ignores deeper drafts
    depth_limit: Tensor
    # None for a drafting without a drafter
    proposer: Proposer | None = None


class LastStep(NamedTuple):
    """The result of a step, for draftings that make the next draft from it."""

    # the target's distributions at the nodes, float32 [B, M, V] (greedy: at temperature 1)
    p: Tensor
    # as in `Verdict`
    path: Tensor
    accepted: Tensor
    tokens: Tensor
    # tokens committed with this step, int64 [B]
    position: Tensor
    # as in `Verdict`
    visit_probability: Tensor | None = None


class DraftMethod:
    """One way to draft, for B images; a subclass is constructed with (decoding, target, batch).

    A draft is one program of fixed shapes. No Python decision may depend on a tensor's values, and
    state is in tensors that `draft`, `start_images` and `after_step` write in place.
    """

    # the draft, which `draft` fills and verification reads
    tree: DraftTree
    # depth of the deepest node
    depth: int
    # forwards of the drafter in a step
    forwards = 0
    # how many vectors of Exp(1) noise over the vocabulary a step uses
    noises = 0
    # whether `after_step` must run
    reads_last_step = False
    # the verification at temperatures above 0
    verify: Callable[..., Verdict] = staticmethod(verify)

    def draft(self, inputs: DraftInputs) -> None:
        """Draft below the roots, into `tree`."""
        raise NotImplementedError

    def start_images(self, p: Tensor) -> None:
        """Start new images, whose first tokens have the distributions `p` float32 [B, V]."""

    def after_step(self, step: LastStep) -> None:
        """Use the result of a step; called in its last program if `reads_last_step`."""


def drafting_of(decoding: Decoding, target: Target, batch: int = 1) -> DraftMethod:
    """Return the drafting of a configuration.

    Args:
        decoding: The configuration.
        target: The target, on whose device the drafting's tensors are.
        batch: How many images are decoded together.
    """
    method: DraftMethod = load_code(decoding.drafting_row.make)(decoding, target, batch)
    return method
