"""Jacobi drafts with siblings: several candidates at the depths just below the root (SJD-PAC, arXiv 2603.18599).

docs/algorithms.md, section 8.3, also says in what the authors' sampler differs, and why that is not lossless.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, LastStep
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import draw_without_replacement, most_probable
from lantern_bench.decoding.tree import DraftTree, StaticTree


class PacDraft(NamedTuple):
    """Several candidates at each of the first depths."""

    tokens: Tensor  # int64 [B, M]
    valid: Tensor  # bool [B, M], False where there was nothing left to draw


class PacDrafting(JacobiDrafting):
    """`candidates` drafts below all nodes of the first `branching` depths, the same for all of a depth, then a chain.

    The first candidate of a position is its Jacobi draft; the others are drawn anew from its row q without the first.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        width = decoding.value("candidates")
        device = target.device
        self._branching = min(decoding.value("branching"), self.depth)
        chain = {(0,) * depth for depth in range(1, self.depth + 1)}
        depths = range(1, self._branching + 1)
        paths = chain.union(*(itertools.product(range(width), repeat=depth) for depth in depths))
        self._shape = StaticTree.of(paths, device)
        self.nodes = len(self._shape.depths)
        self.fanout = width
        if not decoding.greedy and self._coupling != "gumbel":
            self.noises += self._branching
        nodes = [(), *sorted(paths, key=lambda path: (len(path), path))]
        number = {path: node for node, path in enumerate(nodes)}
        # The column of each node's token: behind the root and the first candidates stand the others of each depth.
        siblings = [
            self.depth + (len(path) - 1) * (width - 1) + path[-1] if any(path[-1:]) else 0
            for path in nodes
        ]
        columns = [sibling or len(path) for sibling, path in zip(siblings, nodes, strict=True)]
        self._column = torch.tensor(columns, device=device)
        # The nodes at all depths that first candidates lead to from a node; where they end, those of the chain.
        below = [
            [path + (0,) * (depth - len(path)) for depth in range(self.depth + 1)] for path in nodes
        ]
        onward = [
            [number.get(path, number[(0,) * depth]) for depth, path in enumerate(row)]
            for row in below
        ]
        self._onward = torch.tensor(onward, device=device)
        self._row = self._shape.depths.clamp_max(self.depth - 1)

    def after_step(self, step: LastStep) -> None:
        """Reuse the p of the nodes that first candidates lead to from the last accepted one."""
        images = torch.arange(len(step.path), device=step.path.device)[:, None]
        p = step.p[images, self._reused(step)]
        super().after_step(
            step._replace(tree=self._chain.draft(step.tree.tokens[:, self._onward[0]], None), p=p)
        )

    def draft(self, inputs: DraftInputs) -> PacDraft:  # type: ignore[override]  # `tree` reads what it returns
        """Draft the first candidates as Jacobi drafting does, and the others beside them."""
        (first,) = super().draft(inputs._replace(noise=inputs.noise[:, : self.depth]))
        x = first[:, 1 : self._branching + 1]
        q = self.sibling_q(x).scatter(2, x[:, :, None], 0.0)
        if self._greedy:
            others, able = most_probable(q, self.fanout - 1)
        else:
            noise = (
                self._clocks[:, : self._branching]
                if self._coupling == "gumbel"
                else inputs.noise[:, self.depth :]
            )
            others, able = draw_without_replacement(q, self.fanout - 1, noise)
        tokens = torch.cat([first, others.flatten(1)], dim=1)[:, self._column]
        valid = torch.cat([torch.ones_like(first, dtype=torch.bool), able.flatten(1)], dim=1)[
            :, self._column
        ]
        return PacDraft(tokens=tokens, valid=valid)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The candidates; those of a depth have the same row, whatever their parent."""
        tokens, valid = drafted
        return self._shape.draft(tokens, None if self._greedy else self._q[:, self._row], valid)

    def _reused(self, step: LastStep) -> Tensor:
        """Return the nodes [B, W + 1] whose p are reused, by depth."""
        return self._onward[step.path.gather(1, step.accepted[:, None]).squeeze(1)]

    def sibling_q(self, first: Tensor) -> Tensor:  # noqa: ARG002  # of a subclass it may depend on them
        """Return what the siblings of the candidates `first` [B, branching] are drawn from, [B, branching, V]."""
        return self._q[:, : self._branching]
