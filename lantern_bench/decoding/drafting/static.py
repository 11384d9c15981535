"""A fixed draft tree (EAGLE-1, arXiv 2401.15077): one drafter forward a level.

The children of a node are drawn without replacement. A chain is a tree. docs/algorithms.md,
section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import DraftInputs, DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_without_replacement, most_probable
from lantern_bench.decoding.tree import StaticTree, index_along


class StaticDrafting(DraftMethod):
    """A fixed topology.

    The children of a node are drawn from its q without replacement; greedy: its most probable ones.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        shape = StaticTree.of(decoding.paths, target.device)
        self._shape = shape
        self._greedy = decoding.greedy
        self.depth = len(shape.levels)
        self.forwards = self.depth

        q = None
        if not decoding.greedy:
            q = torch.zeros(batch, len(shape.depths), target.vocab_size, device=target.device)
        self.tree = shape.allocate(batch, q)

        # The row of each node among the expanded ones; the q of leaves is never read.
        expanded = torch.cat([level.nodes for level in shape.levels])
        # how many vectors of noise each level takes
        self._rows = [0 if decoding.greedy else len(level.nodes) for level in shape.levels]
        self.noises = sum(self._rows)
        self._q_row = torch.zeros_like(shape.depths)
        self._q_row[expanded] = index_along(expanded)

    def draft(self, inputs: DraftInputs) -> None:
        """Draw level by level; a node with children is one row of a drafter forward."""
        proposer = inputs.proposer
        assert proposer is not None
        batch = len(inputs.root)
        tokens = inputs.root[:, None]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        q = proposer.root_q
        every_q: list[Tensor] = []
        noises = torch.split(inputs.noise, self._rows, dim=1)
        for level, noise in zip(self._shape.levels, noises, strict=True):
            if tokens.shape[1] > 1:  # below the root
                q = proposer.extend(
                    tokens=tokens[:, level.nodes],
                    origin=level.origin.expand(batch, -1),
                    seen=level.seen.expand(batch, -1, -1),
                )
            if self._greedy:
                drawn, able = most_probable(q, level.fanout)
            else:
                drawn, able = draw_without_replacement(q, level.fanout, noise)
                every_q.append(q)
            tokens = torch.cat([tokens, drawn[:, level.slot, level.rank]], dim=1)
            valid = torch.cat([valid, able[:, level.slot, level.rank]], dim=1)

        q_of_nodes = None
        if not self._greedy:
            q_of_nodes = torch.cat(every_q, dim=1)[:, self._q_row]
        self.tree.copy_(self._shape.draft(tokens, q_of_nodes, valid))
