"""A fixed draft tree (EAGLE-1, arXiv 2401.15077): one drafter forward a level, children sampled without replacement.

A chain is a tree. docs/algorithms.md, section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_without_replacement, most_probable
from lantern_bench.decoding.tree import DraftTree, StaticTree


class StaticDrafting(DraftMethod):
    """A fixed topology; the children of a node are drawn from its q without replacement, greedy: the top of it."""

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:  # noqa: ARG002  # keeps no state
        shape = StaticTree.of(decoding.paths, target.device)
        self._shape, self._greedy = shape, decoding.greedy
        self.nodes, self.depth, self.forwards = len(shape.parents), shape.max_depth, len(shape.levels)
        self.noises = 0 if decoding.greedy else shape.levels[-1].expanded.stop
        self.fanout = max(level.fanout for level in shape.levels)
        # The row of each node among the expanded ones. The q of leaves is never read: any row will do.
        self._q_row = shape.layout.slots.new_zeros(self.nodes)
        for level in shape.levels:
            rows = torch.arange(level.expanded.start, level.expanded.stop, device=self._q_row.device)
            self._q_row[level.nodes] = rows

    def draft(self, inputs: DraftInputs) -> Drafted:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        root, noise, proposer = inputs.root, inputs.noise, inputs.proposer
        assert proposer is not None
        tokens, valid = [root[:, None]], [torch.ones_like(root, dtype=torch.bool)[:, None]]
        q = proposer.root_q
        every_q: list[Tensor] = []
        for level in self._shape.levels:
            if len(tokens) > 1:
                nodes = tokens[-1][:, level.within]
                seen = level.seen[None].expand(len(root), -1, -1)
                q = proposer.extend(nodes, level.origin.expand(len(root), -1), seen)
            if self._greedy:
                drawn, able = most_probable(q, level.fanout)
            else:
                every_q.append(q)
                drawn, able = draw_without_replacement(q, level.fanout, noise[:, level.expanded])
            tokens.append(drawn[:, level.slot, level.rank])
            valid.append(able[:, level.slot, level.rank])
        q_of_nodes = None if self._greedy else torch.cat(every_q, dim=1)[:, self._q_row]
        return torch.cat(tokens, dim=1), q_of_nodes, torch.cat(valid, dim=1)

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and attention are the topology's."""
        return self._shape.to_score(drafted[0])

    def tree(self, drafted: Drafted) -> DraftTree:
        """The topology with the tokens that were drawn."""
        return self._shape.draft(*drafted)
