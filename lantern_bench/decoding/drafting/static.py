"""A fixed draft tree (EAGLE-1, arXiv 2401.15077): one drafter forward a level, children sampled without replacement.

A chain is a tree. docs/algorithms.md, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.interface import Drafted, DrafterSession, Drafts, Target
from lantern_bench.decoding.sampling import decoding_probabilities, draw_without_replacement, guide, most_probable
from lantern_bench.decoding.tree import DraftTree, Level, StaticTree, first_true

ToProbabilities = Callable[[Drafts], Tensor]


def make_static(decoding: Decoding, target: Target, batch: int) -> StaticDrafting:  # noqa: ARG001  # keeps no state
    """The drafting of the row `static`."""
    return StaticDrafting(StaticTree.of(decoding.paths, target.device), decoding)


def draft_probabilities(decoding: Decoding) -> ToProbabilities:
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
        self._to_probabilities = draft_probabilities(decoding)
        self._rounds = _rounds(tree)
        self.forwards = len(self._rounds)
        self.noises = 0 if decoding.greedy else self._rounds[-1].noise.stop
        self.fanout = max(level.fanout for level in tree.levels)
        self._q_row = _places(torch.cat([level.nodes for level in tree.levels]), self.nodes)

    def draft(
        self,
        session: DrafterSession | None,
        drafts: Drafts | None,
        root: Tensor,
        noise: Tensor,
        depth_limit: Tensor,  # noqa: ARG002  # what is too deep is left out by the verification
    ) -> Drafted:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        assert session is not None and drafts is not None
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
        tokens, shape = given(drafted[0]), self._shape
        return tokens, shape.depths.expand(len(tokens), -1), shape.attention.expand(len(tokens), -1, -1)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The topology with the tokens that were drawn."""
        tokens, q, valid = drafted
        return self._shape.draft(given(tokens), q, valid)


def given(tensor: Tensor | None) -> Tensor:
    """The tensor, which is there."""
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
