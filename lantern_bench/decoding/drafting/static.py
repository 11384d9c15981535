"""How a step's draft tree is made from a drafter session: fixed topology sampled, or grown along the best paths.

The only two kinds there are (algorithms.md, section 2). Both ask the session for one forward a level and return the
`DraftTree` that verification walks; neither knows the acceptance rule. Randomness comes in as noise, and all shapes are
known beforehand, so that a whole draft is one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.decoding.interface import DrafterSession, Drafts
from lantern_bench.decoding.sampling import decoding_probabilities, draw_without_replacement, guide, most_probable
from lantern_bench.decoding.tree import DraftTree, Level, StaticTree, first_true, full_layout

ToProbabilities = Callable[[Drafts], Tensor]
Drafted: TypeAlias = tuple[Tensor | None, ...]
"""What a draft computed, for its `Drafting` to read; what is the same for every draft is not in it."""


class Drafting(Protocol):
    """One way to draft: `nodes` of the tree with its root, `depth` of the deepest, `forwards` of the drafter a step.

    `noises` is how many vectors of Exp(1) noise over the vocabulary a step takes, `fanout` the most children of a node.
    """

    nodes: int
    depth: int
    forwards: int
    noises: int
    fanout: int

    def draft(
        self, session: DrafterSession, drafts: Drafts, root: Tensor, noise: Tensor, depth_limit: Tensor
    ) -> Drafted:
        """Draft below the tokens `root` [B], whose children `drafts` describes.

        `noise` float32 [B, noises, V], `depth_limit` int64 [B].
        """
        ...

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """What the target is shown: tokens, depths [B, M] and attention [B, M, M]."""
        ...

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that verification walks."""
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
    """One level: its nodes are drawn from what `extend` gives (the root's from what `observe` gave).

    within: int64 [n], which nodes of the level above are extended. origin: int64 [n], slot of their parent in the round
    before; seen: bool [n, extended so far], who sees whom. All three are None for the root. noise: the place of its
    noise in that of the step.
    """

    level: Level
    within: Tensor | None
    origin: Tensor | None
    seen: Tensor | None
    noise: slice


class StaticDrafting:
    """A fixed topology; the children of a node are drawn from its q without replacement, greedy: the top of it."""

    def __init__(self, tree: StaticTree, decoding: Decoding) -> None:
        self._shape = tree
        self.nodes, self.depth = len(tree.parents), tree.max_depth
        self._greedy = decoding.greedy
        self._to_probabilities = _draft_probabilities(decoding)
        self._rounds = _rounds(tree)
        self.forwards = len(self._rounds)
        self.noises = 0 if decoding.greedy else self._rounds[-1].noise.stop
        self.fanout = max(level.fanout for level in tree.levels)
        self._q_row = _places(torch.cat([level.nodes for level in tree.levels]), self.nodes)

    def draft(
        self,
        session: DrafterSession,
        drafts: Drafts,
        root: Tensor,
        noise: Tensor,
        depth_limit: Tensor,  # noqa: ARG002  # what is too deep is left out by the verification
    ) -> Drafted:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        batch = len(root)
        tokens, valid = [root[:, None]], [torch.ones_like(root, dtype=torch.bool)[:, None]]
        made: list[Tensor] = []
        for step in self._rounds:
            if step.within is not None and step.origin is not None and step.seen is not None:
                nodes = tokens[-1][:, step.within]
                drafts = session.extend(nodes, step.origin.expand(batch, -1), step.seen[None].expand(batch, -1, -1))
            q = self._to_probabilities(drafts)
            if self._greedy:
                drawn, able = most_probable(q, step.level.fanout)
            else:
                made.append(q)
                drawn, able = draw_without_replacement(q, step.level.fanout, noise[:, step.noise])
            tokens.append(drawn[:, step.level.slot, step.level.rank])
            valid.append(able[:, step.level.slot, step.level.rank])
        # The rows of leaves are never read: any q will do.
        of_nodes = None if self._greedy else torch.cat(made, dim=1)[:, self._q_row]
        return torch.cat(tokens, dim=1), of_nodes, torch.cat(valid, dim=1)

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and attention are the topology's."""
        tokens, shape = _given(drafted[0]), self._shape
        return tokens, shape.depths.expand(len(tokens), -1), shape.attention.expand(len(tokens), -1, -1)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The topology with the tokens that were drawn."""
        tokens, q, valid = drafted
        return self._shape.draft(_given(tokens), q, valid)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _places(nodes: Tensor, total: int) -> Tensor:
    """Where each of `total` nodes stands in `nodes`, 0 where it does not: int64 [total]."""
    places = torch.zeros(total, dtype=torch.int64, device=nodes.device)
    return places.scatter_(0, nodes, torch.arange(len(nodes), device=nodes.device))


def _rounds(tree: StaticTree) -> list[_Round]:
    """One `_Round` for each level of a tree."""
    first = tree.levels[0]
    rounds = [_Round(first, None, None, None, slice(0, 1))]
    extended = tree.parents.new_zeros(0)
    for above, level in zip(tree.levels, tree.levels[1:], strict=False):
        parents = tree.parents[level.nodes]
        origin = first_true(parents[:, None] == above.nodes[None, :])
        within = first_true(level.nodes[:, None] == above.children[None, :])
        extended = torch.cat([extended, level.nodes])
        begin = rounds[-1].noise.stop
        seen = tree.attention[level.nodes][:, extended]
        rounds.append(_Round(level, within, origin, seen, slice(begin, begin + len(level.nodes))))
    return rounds


class DynamicDrafting:
    """EAGLE-2: `depth` rounds of the `beam` best nodes, then the best `nodes` of all."""

    def __init__(self, decoding: Decoding) -> None:
        if decoding.nodes is None or decoding.depth is None or decoding.beam is None:
            raise ValueError("dynamic drafting needs nodes, depth and beam")
        self._kept, self.depth, self.fanout = decoding.nodes, decoding.depth, decoding.beam
        self.nodes = self._kept + 1
        self.forwards, self.noises = self.depth, 0
        self._to_probabilities = _draft_probabilities(decoding)

    def draft(
        self,
        session: DrafterSession,
        drafts: Drafts,
        root: Tensor,
        noise: Tensor,  # noqa: ARG002  # the draft is deterministic given the prefix
        depth_limit: Tensor,
    ) -> Drafted:
        """Grow from the root; the session extends `beam` nodes a round."""
        growth = Growth(self.fanout)
        frontier = growth.start(self._to_probabilities(drafts)[:, 0])
        for _ in range(self.depth - 1):
            drafts = session.extend(frontier.tokens, frontier.origin, frontier.seen)
            frontier = growth.grow(self._to_probabilities(drafts))
        tree = growth.tree(root, self._kept, depth_limit)
        return tree.tokens, tree.parents, tree.depths, tree.children, tree.attention, tree.path_order

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """All of it was computed."""
        tokens, _, depths, _, attention, _ = map(_given, drafted)
        return tokens, depths, attention

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that grew; any of its nodes can have children."""
        tokens, parents, depths, children, attention, path_order = map(_given, drafted)
        layout = full_layout(self.nodes, self.fanout, tokens.device)
        return DraftTree(tokens, parents, depths, children, attention, path_order, layout, self.depth)
