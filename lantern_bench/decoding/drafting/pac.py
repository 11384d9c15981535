"""Jacobi drafts with siblings: several candidates at the depths just below the root.

SJD-PAC, arXiv 2603.18599. docs/algorithms.md, section 8.3, also says how the authors' sampler
differs, and why it is not lossless.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_without_replacement, most_probable
from lantern_bench.decoding.tree import StaticTree, index_along
from lantern_bench.methods.static_trees import check_topology


class PacDrafting(JacobiDrafting):
    """Jacobi drafts with siblings at the first `branching` depths.

    Each node of these depths has `candidates` children, which are the same below all nodes of a
    depth. A chain follows. The first candidate of a position is its Jacobi draft. The others are
    drawn anew from its row q without the first.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        width = decoding.value("candidates")
        self._branching = min(decoding.value("branching"), self.depth)
        paths = {(0,) * depth for depth in range(1, self.depth + 1)}
        for depth in range(1, self._branching + 1):
            paths |= set(itertools.product(range(width), repeat=depth))
        nodes = [(), *check_topology(paths)]
        device = target.device
        self._shape = StaticTree.of(paths, device)
        self._siblings = width - 1
        if not decoding.greedy and self._coupling != "gumbel":
            self.noises += self._branching
        # the index in `_q` of the row that the children of each node are drawn from
        self._row = self._shape.depths.clamp_max(self.depth - 1)
        q = None if decoding.greedy else self._q[:, self._row]
        self.tree = self._shape.allocate(batch, q)

        # Tokens come as the root, the first candidates by depth, then the siblings by depth.
        columns = []
        for path in nodes:
            is_sibling = any(path[-1:])
            siblings_above = (len(path) - 1) * self._siblings
            columns.append(self.depth + siblings_above + path[-1] if is_sibling else len(path))
        self._column = torch.tensor(columns, device=device)

        # onward[node, d], for d from the node's own depth on: the node at depth d that first
        # children lead to, or the node of the main chain where there is no such child
        number = {path: node for node, path in enumerate(nodes)}
        onward = []
        for path in nodes:
            below = [path + (0,) * (depth - len(path)) for depth in range(self.depth + 1)]
            onward.append([number.get(at, number[(0,) * d]) for d, at in enumerate(below)])
        self._onward = torch.tensor(onward, device=device)

    def after_step(self, step: LastStep) -> None:
        """Reuse the p of the first candidates below the last accepted node, then of the chain."""
        images = index_along(step.path)[:, None]
        reused = self._reused(step)
        visit_probability = step.visit_probability
        if visit_probability is not None:
            visit_probability = visit_probability[images, reused]
        along = step._replace(p=step.p[images, reused], visit_probability=visit_probability)
        super().after_step(along)

    def draft(self, inputs: DraftInputs) -> None:
        """Draft the first candidates as Jacobi drafting does, then their siblings."""
        noise = inputs.noise[:, : self.depth]
        first = self._draw_window(inputs._replace(noise=noise))
        x = first[:, 1 : self._branching + 1]
        q = self.sibling_q(x).scatter(2, x.unsqueeze(2), 0.0)
        if self._greedy:
            others, able = most_probable(q, self._siblings)
        else:
            noise = inputs.noise[:, self.depth :]
            if self._coupling == "gumbel":
                noise = self._position_noise[:, : self._branching]
            others, able = draw_without_replacement(q, self._siblings, noise)
        tokens = torch.cat([first, others.flatten(1)], dim=1)
        valid = torch.cat([torch.ones_like(first, dtype=torch.bool), able.flatten(1)], dim=1)
        self._fill(tokens[:, self._column], valid[:, self._column])

    def _fill(self, tokens: Tensor, valid: Tensor) -> None:
        """Write the candidates to the tree; the nodes of a depth have the same row of q."""
        q = None if self._greedy else self._q[:, self._row]
        self.tree.copy_(self._shape.draft(tokens, q, valid))

    def _main_drafts(self) -> Tensor:
        return self.tree.tokens[:, self._onward[0, 1:]]

    def _reused(self, step: LastStep) -> Tensor:
        """Return the nodes [B, W + 1] whose p are reused, by depth."""
        return self._onward[step.path.gather(1, step.accepted[:, None]).squeeze(1)]

    def sibling_q(self, first: Tensor) -> Tensor:  # noqa: ARG002  # for subclasses
        """Return what siblings are drawn from [B, branching, V].

        Args:
            first: The first candidates, [B, branching].
        """
        return self._q[:, : self._branching]
