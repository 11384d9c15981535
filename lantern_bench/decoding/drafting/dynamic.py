"""A draft tree that grows (EAGLE-2, arXiv 2406.16858): rounds of expansion, then the best nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import DraftInputs, DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import most_probable
from lantern_bench.decoding.tree import DraftTree, at_nodes, link_nodes


class Frontier(NamedTuple):
    """The nodes to expand next, `beam` per image, in descending order of cumulative log q."""

    # the tokens, int64 [B, beam]
    tokens: Tensor
    # the slot of each node's parent in the previous frontier, int64 [B, beam]; at first 0, the root
    origin: Tensor
    # The expanded nodes that each node attends to, itself included, bool [B, beam, r * beam] in
    # round r. Slot s of frontier i is column i * beam + s.
    seen: Tensor


class Growth:
    """The candidates of one dynamic draft: from the root's q, then from D - 1 calls of `grow`.

    Candidates are numbered in the order of generation: by round, slot of their parent, rank.
    """

    def __init__(self, q: Tensor, beam: int) -> None:
        """Expand the root, whose distribution is `q` [B, V], into its most probable tokens."""
        self.beam = beam
        # by round, each [B, candidates of the round]
        self._tokens: list[Tensor] = []
        # cumulative, float32
        self.log_q: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._itself = torch.eye(beam, dtype=torch.bool, device=q.device).expand(len(q), -1, -1)

        # The first frontier is the root alone, whose number is -1.
        root = torch.full_like(q[:, :1], -1, dtype=torch.int64)
        # numbers and cumulative log q of the frontier's nodes, [B, beam]
        self._number = root
        self._reach = torch.zeros_like(root, dtype=torch.float32)
        self.frontier = Frontier(tokens=root, origin=root, seen=self._itself[:, :1, :0])
        self.grow(q[:, None])

    def grow(self, q: Tensor) -> Frontier:
        """Expand the frontier, whose distributions are `q` [B, beam, V]; return the next one."""
        first = sum(tokens.shape[1] for tokens in self._tokens)

        # 1. The children of all nodes of the frontier become candidates.
        tokens, log_q = _most_probable_children(q, self.beam)
        reach = (self._reach.unsqueeze(2) + log_q).flatten(1)
        parents = self._number.unsqueeze(2).expand_as(tokens).flatten(1)
        tokens = tokens.flatten(1)
        self._tokens.append(tokens)
        self.log_q.append(reach)
        self._parents.append(parents)

        # 2. The best of them are the next frontier.
        best = torch.sort(reach, dim=1, descending=True, stable=True).indices[:, : self.beam]
        self._number = first + best
        self._reach = reach.gather(1, best)
        origin = best // self.beam
        seen = torch.cat([at_nodes(self.frontier.seen, origin), self._itself], dim=2)
        self.frontier = Frontier(tokens=tokens.gather(1, best), origin=origin, seen=seen)
        return self.frontier

    def select(self, nodes: int, depth_limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keep the candidates of highest cumulative log q.

        Ties go to the smaller depth, then to the lower number, so that no node loses its parent
        (docs/algorithms.md, section 9, B1). A candidate with q = 0 is never selected.

        Args:
            nodes: How many candidates to keep.
            depth_limit: Leaves out deeper candidates, int64 [B].

        Returns:
            The numbers of the kept candidates, ascending, and which of them are valid, both
            [B, m] with m = min(nodes, candidates). Invalid numbers are at least the number of
            candidates.
        """
        reach = torch.cat(self.log_q, dim=1)
        total = reach.shape[1]
        if depth_limit is not None:
            depths = self._depths_of(torch.arange(total, device=reach.device))
            too_deep = depths > depth_limit[:, None]
            reach = reach.masked_fill(too_deep, -torch.inf)
        # Numbers rise with depth, so a stable sort prefers the smaller depth.
        best = torch.sort(reach, dim=1, descending=True, stable=True).indices[:, :nodes]
        is_possible = reach.gather(1, best) > -torch.inf
        numbers = torch.where(is_possible, best, total).sort(dim=1).values
        return numbers, numbers < total

    def _depths_of(self, numbers: Tensor) -> Tensor:
        """Return the depths of candidates: `beam` are at depth 1, `beam` squared at all others."""
        return 1 + (numbers + self.beam**2 - self.beam) // self.beam**2

    def tree(self, root: Tensor, nodes: int, depth_limit: Tensor | None = None) -> DraftTree:
        """Return the draft of the roots and the kept candidates: M = m + 1, C = beam.

        Args:
            root: The last committed tokens, int64 [B].
            nodes: How many candidates to keep.
            depth_limit: Leaves out deeper candidates, int64 [B].
        """
        numbers, valid = self.select(nodes, depth_limit)
        tokens = torch.cat(self._tokens, dim=1)
        parents = torch.cat(self._parents, dim=1)
        batch, total = tokens.shape

        # Candidate c is node `node[c + 1]`. Candidate -1 is the root, node 0.
        node = numbers.new_zeros(batch, total + 2)
        in_order = torch.arange(1, numbers.shape[1] + 1, device=numbers.device)
        node.scatter_(1, numbers + 1, in_order.expand_as(numbers))
        numbers = numbers.clamp_max(total - 1)
        parent_nodes = node.gather(1, parents.gather(1, numbers) + 1)
        return link_nodes(
            tokens=torch.cat([root[:, None], tokens.gather(1, numbers)], dim=1),
            parents=functional.pad(parent_nodes, (1, 0), value=-1),
            depths=functional.pad(self._depths_of(numbers), (1, 0)),
            # The children of the root and of every frontier node are `beam` consecutive candidates.
            ranks=functional.pad(numbers % self.beam, (1, 0)),
            valid=functional.pad(valid, (1, 0), value=True),
            fanout=self.beam,
            max_depth=len(self._tokens),
        )


def _most_probable_children(q: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """Return the `beam` most probable tokens and their log q [..., beam], -inf where q is 0."""
    tokens, valid = most_probable(q, beam)
    # At most 0: a probability rounded above 1 must not lift a child above its parent.
    log_q = q.gather(-1, tokens).float().log().clamp_max(0.0)
    return tokens, log_q.masked_fill(~valid, -torch.inf)


class DynamicDrafting(DraftMethod):
    """EAGLE-2: `depth` rounds of the `beam` best nodes, then the best `nodes` of all."""

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        self.depth = decoding.value("depth")
        self.forwards = self.depth
        self._beam = decoding.value("beam")
        self._nodes = decoding.value("nodes")  # without the root
        filler = torch.zeros(batch, self._nodes + 1, dtype=torch.int64, device=target.device)
        self.tree = link_nodes(
            tokens=filler,
            parents=filler,
            depths=filler,
            ranks=filler,
            valid=filler.bool(),
            fanout=self._beam,
            max_depth=self.depth,
        ).clone()

    def draft(self, inputs: DraftInputs) -> None:
        """Grow from the root; deterministic, given the prefix (docs/algorithms.md, section 2)."""
        proposer = inputs.proposer
        assert proposer is not None
        growth = Growth(proposer.root_q[:, 0], self._beam)
        for _ in range(self.depth - 1):
            growth.grow(proposer.extend(*growth.frontier))
        self.tree.copy_(growth.tree(inputs.root, self._nodes, inputs.depth_limit))
