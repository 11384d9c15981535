"""A fixed draft tree (EAGLE-1, arXiv 2401.15077): one drafter forward a level, children sampled without replacement.

A chain is a tree. docs/algorithms.md, section 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_without_replacement, most_probable
from lantern_bench.decoding.tree import DraftTree, StaticTree


class StaticDraft(NamedTuple):
    """The tokens drawn for a fixed topology."""

    tokens: Tensor  # int64 [B, M]
    q: Tensor | None  # [B, M, V], what the children of each node were drawn from
    valid: Tensor  # bool [B, M], False where there was nothing left to draw


class StaticDrafting(DraftMethod):
    """A fixed topology; the children of a node are drawn from its q without replacement, greedy: the top of it."""

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:  # noqa: ARG002  # keeps no state
        shape = StaticTree.of(decoding.paths, target.device)
        self._shape = shape
        self._greedy = decoding.greedy
        self.nodes = len(shape.depths)
        self.depth = shape.max_depth
        self.forwards = len(shape.levels)
        self.fanout = max(level.fanout for level in shape.levels)
        expanded = torch.cat([level.nodes for level in shape.levels])
        self.noises = 0 if decoding.greedy else len(expanded)
        # The row of each node among the expanded ones. The q of leaves is never read: any row will do.
        self._q_row = torch.zeros_like(shape.depths)
        self._q_row[expanded] = torch.arange(len(expanded), device=expanded.device)

    def draft(self, inputs: DraftInputs) -> StaticDraft:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        proposer = inputs.proposer
        assert proposer is not None
        batch = len(inputs.root)
        tokens = inputs.root[:, None]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        q = proposer.root_q
        every_q: list[Tensor] = []
        for depth, level in enumerate(self._shape.levels):
            if depth > 0:
                q = proposer.extend(
                    tokens=tokens[:, level.nodes],
                    origin=level.origin.expand(batch, -1),
                    seen=level.seen.expand(batch, -1, -1),
                )
            if self._greedy:
                drawn, able = most_probable(q, level.fanout)
            else:
                first = sum(rows.shape[1] for rows in every_q)
                noise = inputs.noise[:, first : first + q.shape[1]]
                drawn, able = draw_without_replacement(q, level.fanout, noise)
                every_q.append(q)
            tokens = torch.cat([tokens, drawn[:, level.slot, level.rank]], dim=1)
            valid = torch.cat([valid, able[:, level.slot, level.rank]], dim=1)
        q_of_nodes = None if self._greedy else torch.cat(every_q, dim=1)[:, self._q_row]
        return StaticDraft(tokens=tokens, q=q_of_nodes, valid=valid)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The topology with the tokens that were drawn."""
        draft = StaticDraft._make(drafted)
        return self._shape.draft(tokens=draft.tokens, q=draft.q, valid=draft.valid)
