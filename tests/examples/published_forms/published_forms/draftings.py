"""Jacobi drafting as its authors coded it where that is not lossless, for comparison and audit.

SCD: arXiv 2510.24211 and github.com/junhyukso/SCD, its code for Lumina and Janus. SJD-PAC: arXiv
2603.18599 and github.com/KangJialiang/SJD-PAC at 4fbc099. SJD++: arXiv 2512.07503, as its paper has
it. PathSpec: arXiv 2606.10492 and github.com/Haodong-Lei-Ray/PathSpec at 8a3df484, its code
for Lumina. docs/algorithms.md, sections 8.2, 8.3, 8.9 and 8.11, have the smallest examples that
show the difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import (
    Verdict,
    accept_drafts,
    bonus_distribution,
    longest_path,
    verdict_of,
    verify,
)
from lantern_bench.decoding.drafting.draft_method import DraftInputs, DraftMethod, LastStep
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting, Redraft, couple
from lantern_bench.decoding.drafting.pac import PacDrafting
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import sample
from lantern_bench.decoding.tree import DraftTree, StaticTree
from lantern_bench.methods.catalog import RULES


class PublishedScd(JacobiDrafting):
    """Maximal coupling in which a draft that stays keeps its old q; a fresh draft has q = 1."""

    reads_last_drafts = True

    def draft(self, inputs: DraftInputs) -> None:
        """Draft with the right probabilities; a draft that stays is verified with its old row."""
        super().draft(inputs)
        x = self.tree.tokens[:, 1:, None]
        source = (self._offsets[:-1] + self._committed[:, None])[:, :, None]
        stays = (source < self.depth) & (x == self._last_drafts[:, :, None])
        q = torch.where(source > self.depth, (self._codes == x).float(), self._q)
        self._q.copy_(torch.where(stays, self._last_q, q))


class PublishedSjdPlusPlus(JacobiDrafting):
    """SJD++: drafts that stayed by a threshold are verified as draws from the new row p."""

    def redraft(self, p: Tensor, q: Tensor, x: Tensor) -> Redraft:
        """Draw as with `coupling: threshold`, and store p."""
        return super().redraft(p, q, x)._replace(q=p)


class PublishedSjdPac(PacDrafting):
    """SJD-PAC as its authors coded it.

    p is the target's new answer, q the distribution a draft was drawn from, r the old answer.

    - Each candidate is accepted by itself, and the longest accepted path wins; a uniform token
      follows a whole window.
    - A rejected first candidate that has siblings is redrawn from the residual that all of them
      leave.
    - Siblings are drawn from norm(max(r - q, 0)) and verified as draws from r.
    - The p behind the last draft is not reused.

    One thing differs from the authors' code: a sibling never equals the first candidate.
    """

    reads_last_drafts = True

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        # [B, branching, V], what siblings of drafts that stay come from.
        self._stayed_q = torch.zeros_like(self._q[:, : self._branching])

    def after_step(self, step: LastStep) -> None:
        """Also keep what the first candidates and their siblings will be drawn from."""
        branching = self._branching
        nodes = self._reused(step)
        x = self._main_drafts()
        images, columns = self._shifted(step.accepted + 1, self.depth - 1)
        p = step.p[images, nodes[:, :-1]]
        _, acceptance = accept_drafts(self.tree, step.p, ConfiguredRule(RULES["strict"]))
        rows = self.tree.layout.slots[nodes[:, :branching]] * len(x) + images
        by_all = acceptance.bonus_distribution(rows.flatten(), p[:, :branching].flatten(0, 1))
        alone = (p - self._q).clamp_min(0.0)
        residual = torch.cat([by_all.view_as(self._stayed_q), alone[:, branching:]], dim=1)
        coupled = couple(p, self._q, x, residual=residual)
        super().after_step(step)
        self._coupled_q.copy_(coupled[images, columns])
        self._stayed_q.copy_(alone[images, columns[:, :branching]])
        self._committed.add_(1)  # one row less is reused

    def sibling_q(self, first: Tensor) -> Tensor:
        """Return norm(max(r - q, 0)) where a first candidate stayed, and what all left where it was
        rejected.
        """
        branching = self._branching
        fresh = self._offsets[:branching] + self._committed[:, None] > self.depth
        old = self._last_drafts[:, :branching]
        rejected_q = self._coupled_q[:, :branching].scatter(2, old[:, :, None], 0.0)
        reused = torch.where((first == old)[:, :, None], self._stayed_q, rejected_q)
        return torch.where(fresh[:, :, None], self._uniform, reused)

    def verify(
        self,
        tree: DraftTree,
        target_probs: Tensor,
        rule: ConfiguredRule,
        *,
        uniforms: Tensor,
        noise: Tensor,
        **limits: Any,
    ) -> Verdict:
        """Accept each candidate by itself; arguments as of `verify` in acceptance/verify.py."""
        offered, acceptance = accept_drafts(tree, target_probs, rule, **limits)
        end, path = longest_path(
            tree, offered, tree.by_node(tree.rows(uniforms) < acceptance.accept)
        )
        next_probs = bonus_distribution(
            tree=tree,
            offered=offered,
            acceptance=acceptance,
            target_probs=target_probs,
            end=end,
        )
        next_probs = torch.where(path[:, -1:] >= 0, self._uniform, next_probs)
        no_mass = torch.zeros_like(offered, dtype=noise.dtype)
        return verdict_of(
            tree,
            offered,
            path,
            mass_tried=no_mass,
            next_probs=next_probs,
            bonus=sample(next_probs, noise),
        )


_CHAINS = 2


class PublishedPathSpec(DraftMethod):
    """PathSpec as its authors coded it: two Jacobi chains below one root.

    Each chain is verified by itself, from the root's own p, and the longest accepted one wins; of
    equally long ones the first. A rejection is followed by the residual of the chain that won.

    Two things differ from the authors' code: a fresh draft has q = 1 / V, where they have 1, and
    two equal drafts of a depth both stay, where they replace one by a uniform draft.
    """

    reads_last_step = True

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        self.depth = decoding.value("window")
        self.noises = 0 if decoding.greedy else _CHAINS * self.depth
        self._chains = [JacobiDrafting(decoding, target, batch) for _ in range(_CHAINS)]
        paths = []
        for depth in range(self.depth):
            paths += [(chain,) + (0,) * depth for chain in range(_CHAINS)]
        shape = StaticTree.of(paths, target.device)
        self.tree = shape.allocate(batch, None)
        # Nodes behind the root are numbered depth by depth: the nodes of each chain, root first.
        first = torch.arange(self.depth, device=target.device) * _CHAINS + 1
        root = first.new_zeros(1)
        self._nodes = [torch.cat([root, first + chain]) for chain in range(_CHAINS)]

    def start_images(self, p: Tensor) -> None:
        """Start new images in both chains."""
        for chain in self._chains:
            chain.start_images(p)

    def draft(self, inputs: DraftInputs) -> None:
        """Draft both chains with random numbers of their own."""
        noises = inputs.noise.chunk(_CHAINS, dim=1)
        for chain, nodes, noise in zip(self._chains, self._nodes, noises, strict=True):
            chain.draft(inputs._replace(noise=noise))
            self.tree.tokens.index_copy_(1, nodes, chain.tree.tokens)

    def after_step(self, step: LastStep) -> None:
        """Let each chain reuse the p rows of its drafts, also where the other chain won."""
        for chain, nodes in zip(self._chains, self._nodes, strict=True):
            chain.after_step(step._replace(p=step.p[:, nodes]))

    def verify(
        self,
        tree: DraftTree,  # not used: each chain has a separate tree
        target_probs: Tensor,
        rule: ConfiguredRule,
        *,
        uniforms: Tensor,
        **noise_and_limits: Any,
    ) -> Verdict:
        """Accept each chain by itself; arguments as of `verify` in acceptance/verify.py."""
        verdicts = []
        for number, (chain, nodes) in enumerate(zip(self._chains, self._nodes, strict=True)):
            verdict = verify(
                chain.tree,
                target_probs[:, nodes],
                rule,
                uniforms=uniforms[:, : len(nodes), number : number + 1],
                **noise_and_limits,
            )
            # The nodes and the rank at the root as they are in the tree of both chains.
            is_node = verdict.path >= 0
            path = torch.where(is_node, nodes[verdict.path.clamp_min(0)], -1)
            at_root = verdict.child_rank[:, :1]
            ranks = torch.cat(
                [torch.where(at_root == 0, number, at_root), verdict.child_rank[:, 1:]], dim=1
            )
            verdicts.append(replace(verdict, path=path, child_rank=ranks, visit_probability=None))
        first, second = verdicts
        second_wins = second.accepted > first.accepted

        def winner(name: str) -> Tensor:
            ours = getattr(first, name)
            wins = second_wins.view(-1, *[1] * (ours.dim() - 1))
            return torch.where(wins, getattr(second, name), ours)

        names = [name for name, value in vars(first).items() if value is not None]
        return Verdict(**{name: winner(name) for name in names})
