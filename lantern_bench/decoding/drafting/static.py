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
        self.nodes, self.depth, self.forwards = len(shape.depths), shape.max_depth, len(shape.levels)
        self.fanout = max(level.fanout for level in shape.levels)
        expanded = torch.cat([level.nodes for level in shape.levels])
        self.noises = 0 if decoding.greedy else len(expanded)
        # The row of each node among the expanded ones. The q of leaves is never read: any row will do.
        self._q_row = torch.zeros_like(shape.depths)
        self._q_row[expanded] = torch.arange(len(expanded), device=expanded.device)

    def draft(self, inputs: DraftInputs) -> Drafted:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        proposer, batch = inputs.proposer, len(inputs.root)
        assert proposer is not None
        tokens = inputs.root[:, None]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        q = proposer.root_q
        every_q: list[Tensor] = []
        for depth, level in enumerate(self._shape.levels):
            if depth > 0:
                origin, seen = level.origin.expand(batch, -1), level.seen.expand(batch, -1, -1)
                q = proposer.extend(tokens[:, level.nodes], origin, seen)
            if self._greedy:
                drawn, able = most_probable(q, level.fanout)
            else:
                first = sum(rows.shape[1] for rows in every_q)
                drawn, able = draw_without_replacement(q, level.fanout, inputs.noise[:, first : first + q.shape[1]])
                every_q.append(q)
            tokens = torch.cat([tokens, drawn[:, level.slot, level.rank]], dim=1)
            valid = torch.cat([valid, able[:, level.slot, level.rank]], dim=1)
        return tokens, None if self._greedy else torch.cat(every_q, dim=1)[:, self._q_row], valid

    def tree(self, drafted: Drafted) -> DraftTree:
        """The topology with the tokens that were drawn."""
        return self._shape.draft(*drafted)
