"""How a step's draft tree is made from a drafter session: fixed topology sampled, or grown along the best paths.

The only two kinds there are (algorithms.md, section 2). Both ask the session for one forward a level and return the
`DraftTree` that verification walks; neither knows the acceptance rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lantern_bench.decode.growth import Growth
from lantern_bench.decode.interface import DrafterSession, Drafts
from lantern_bench.decode.sampling import Draws, decoding_probabilities, draw_without_replacement, guide, most_probable
from lantern_bench.decode.tree import DraftTree, StaticTree
from lantern_bench.spec.decoding import Decoding

__all__ = ["Drafting", "DynamicDrafting", "StaticDrafting", "drafting_of"]

ToProbabilities = Callable[[Drafts], Tensor]


class Drafting(Protocol):
    """One way to draft: `nodes` of the tree with its root, `depth` of the deepest, `forwards` of the drafter a step."""

    nodes: int
    depth: int
    forwards: int

    def draft(
        self, session: DrafterSession, drafts: Drafts, root: Tensor, draws: Draws, depth_limit: Tensor
    ) -> DraftTree:
        """The tree below the tokens `root` [B], whose children `drafts` describes; `depth_limit` [B]."""
        ...


def drafting_of(decoding: Decoding, device: torch.device) -> Drafting:
    """The drafting of a configuration, its index tensors on `device`."""
    if decoding.drafting == "static":
        return StaticDrafting(StaticTree.of(decoding.paths, device), decoding)
    return DynamicDrafting(decoding)


def _draft_probabilities(decoding: Decoding) -> ToProbabilities:
    """Q is made the way p is; greedy children are the top of the unfiltered q at temperature 1 (section 2)."""

    def to_probabilities(drafts: Drafts) -> Tensor:
        return decoding_probabilities(guide(drafts.cond, drafts.uncond, decoding.cfg_scale), decoding)

    return to_probabilities


class _Round(NamedTuple):
    """What is handed to `extend` at one level: nodes [n], slot of their parent in the round before, who sees whom."""

    nodes: Tensor
    origin: Tensor
    seen: Tensor


class StaticDrafting:
    """A fixed topology; the children of a node are drawn from its q without replacement, greedy: the top of it."""

    def __init__(self, tree: StaticTree, decoding: Decoding) -> None:
        self.tree = tree
        self.nodes, self.depth = len(tree.parents), tree.max_depth
        self._greedy = decoding.greedy
        self._to_probabilities = _draft_probabilities(decoding)
        self._rounds = _rounds(tree)
        self.forwards = 1 + len(self._rounds)
        self._q: Tensor | None = None

    def draft(
        self,
        session: DrafterSession,
        drafts: Drafts,
        root: Tensor,
        draws: Draws,
        depth_limit: Tensor,  # noqa: ARG002  # what is too deep is left out by the verification
    ) -> DraftTree:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        batch, device = len(root), root.device
        tokens = torch.zeros(batch, self.nodes, dtype=torch.int64, device=device)
        valid = torch.ones(batch, self.nodes, dtype=torch.bool, device=device)
        tokens[:, 0] = root
        for number, level in enumerate(self.tree.levels):
            if number:
                step = self._rounds[number - 1]
                drafts = session.extend(
                    tokens[:, step.nodes], step.origin.expand(batch, -1), step.seen.expand(batch, -1, -1)
                )
            q = self._to_probabilities(drafts)
            if self._greedy:
                drawn, able = most_probable(q, level.fanout)
            else:
                self._buffer(q)[:, level.nodes] = q
                drawn, able = draw_without_replacement(q, level.fanout, draws.exponential(*q.shape[1:]))
            tokens[:, level.children] = drawn[:, level.slot, level.rank]
            valid[:, level.children] = able[:, level.slot, level.rank]
        return self.tree.draft(tokens, None if self._greedy else self._q, valid)

    def _buffer(self, q: Tensor) -> Tensor:
        """Where the q of all nodes is gathered, allocated once for a batch size."""
        if self._q is None or len(self._q) != len(q):
            self._q = torch.zeros(len(q), self.nodes, q.shape[-1], device=q.device)
        return self._q


def _rounds(tree: StaticTree) -> list[_Round]:
    """One `_Round` for each level below the root's."""
    rounds: list[_Round] = []
    extended = tree.parents.new_zeros(0)
    above = tree.levels[0].nodes
    for level in tree.levels[1:]:
        parents = tree.parents[level.nodes]
        origin = (parents[:, None] == above[None, :]).to(torch.uint8).argmax(dim=1)
        extended = torch.cat([extended, level.nodes])
        rounds.append(_Round(level.nodes, origin, tree.attention[level.nodes][:, extended]))
        above = level.nodes
    return rounds


class DynamicDrafting:
    """EAGLE-2: `depth` rounds of the `beam` best nodes, then the best `nodes` of all."""

    def __init__(self, decoding: Decoding) -> None:
        if decoding.nodes is None or decoding.depth is None or decoding.beam is None:
            raise ValueError("dynamic drafting needs nodes, depth and beam")
        self._kept, self.depth, self._beam = decoding.nodes, decoding.depth, decoding.beam
        self.nodes = self._kept + 1
        self.forwards = self.depth
        self._to_probabilities = _draft_probabilities(decoding)

    def draft(
        self,
        session: DrafterSession,
        drafts: Drafts,
        root: Tensor,
        draws: Draws,  # noqa: ARG002  # the draft is deterministic given the prefix
        depth_limit: Tensor,
    ) -> DraftTree:
        """Grow from the root; the session extends `beam` nodes a round."""
        growth = Growth(self._beam)
        frontier = growth.start(self._to_probabilities(drafts)[:, 0])
        for _ in range(self.depth - 1):
            drafts = session.extend(frontier.tokens, frontier.origin, frontier.seen)
            frontier = growth.grow(self._to_probabilities(drafts))
        return growth.tree(root, self._kept, depth_limit)
