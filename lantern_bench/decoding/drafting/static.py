"""A fixed draft tree (EAGLE-1, arXiv 2401.15077): one drafter forward a level, children sampled without replacement.

A chain is a tree. docs/algorithms.md, section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import Drafted, DrafterLogits, DrafterSession, Target
from lantern_bench.decoding.sampling import decoding_probabilities, draw_without_replacement, guide, most_probable
from lantern_bench.decoding.tree import DraftTree, StaticTree


def make_static(decoding: Decoding, target: Target, batch: int) -> StaticDrafting:  # noqa: ARG001  # keeps no state
    """Make the drafting of the row `static`."""
    return StaticDrafting(StaticTree.of(decoding.paths, target.device), decoding)


def draft_probabilities(drafts: DrafterLogits, decoding: Decoding) -> Tensor:
    """Return q [B, n, V], made as p is; greedy: the unfiltered softmax at temperature 1 (section 2)."""
    return decoding_probabilities(guide(drafts.cond, drafts.uncond, decoding.cfg_scale), decoding)


class StaticDrafting:
    """A fixed topology; the children of a node are drawn from its q without replacement, greedy: the top of it."""

    def __init__(self, tree: StaticTree, decoding: Decoding) -> None:
        self._shape, self._decoding = tree, decoding
        self.nodes, self.depth, self.forwards = len(tree.parents), tree.max_depth, len(tree.levels)
        self.noises = 0 if decoding.greedy else tree.levels[-1].place.stop
        self.fanout = max(level.fanout for level in tree.levels)
        # Where each node stands among the expanded ones. The q of leaves is never read: any row will do.
        self._q_row = tree.layout.slots.new_zeros(self.nodes)
        for level in tree.levels:
            self._q_row[level.nodes] = torch.arange(level.place.start, level.place.stop, device=self._q_row.device)

    def draft(
        self,
        session: DrafterSession | None,
        drafts: DrafterLogits | None,
        root: Tensor,
        noise: Tensor,
        depth_limit: Tensor,
    ) -> Drafted:
        """Draw level by level; every node below the root that has children is one row of a drafter forward."""
        del depth_limit  # verification leaves out deeper nodes
        assert session is not None
        batch, greedy = len(root), self._decoding.greedy
        tokens, valid = [root[:, None]], [torch.ones_like(root, dtype=torch.bool)[:, None]]
        made: list[Tensor] = []
        for level in self._shape.levels:
            if len(tokens) > 1:
                nodes = tokens[-1][:, level.within]
                drafts = session.extend(nodes, level.origin.expand(batch, -1), level.seen[None].expand(batch, -1, -1))
            assert drafts is not None
            q = draft_probabilities(drafts, self._decoding)
            if greedy:
                drawn, able = most_probable(q, level.fanout)
            else:
                made.append(q)
                drawn, able = draw_without_replacement(q, level.fanout, noise[:, level.place])
            tokens.append(drawn[:, level.slot, level.rank])
            valid.append(able[:, level.slot, level.rank])
        of_nodes = None if greedy else torch.cat(made, dim=1)[:, self._q_row]
        return torch.cat(tokens, dim=1), of_nodes, torch.cat(valid, dim=1)

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and attention are the topology's."""
        tokens, shape = drafted[0], self._shape
        return tokens, shape.depths.expand(len(tokens), -1), shape.attention.expand(len(tokens), -1, -1)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The topology with the tokens that were drawn."""
        return self._shape.draft(*drafted)
