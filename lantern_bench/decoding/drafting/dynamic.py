"""How a dynamic draft tree grows (EAGLE-2, arXiv 2406.16858): rounds of expansion, then the best nodes of all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import most_probable
from lantern_bench.decoding.tree import DraftTree, full_layout, link_nodes


class Frontier(NamedTuple):
    """The nodes to expand next, `beam` per image, in descending order of cumulative log q."""

    tokens: Tensor  # int64 [B, beam]
    # int64 [B, beam], the slot of each node's parent in the frontier before (0, the root, in the
    # first)
    origin: Tensor
    # bool [B, beam, r * beam] in round r, which expanded nodes below the root each of them attends to: slot s of
    # frontier i is column i * beam + s, its own included. The prefix and the root come before.
    seen: Tensor


class Growth:
    """The candidates of one dynamic draft: made from the root's q, `grow` D - 1 times, then `tree`.

    Nodes are numbered in the order of generation: round, slot of their parent in the frontier, rank.
    """

    def __init__(self, q: Tensor, beam: int) -> None:
        """Expand the root, whose distribution is `q` [B, V], into its `beam` most probable tokens."""
        tokens, log_q = _children(q, beam)
        self.beam = beam
        self._tokens = [tokens]
        self.log_q = [log_q]  # of each round, float32 [B, candidates], cumulative
        self._parents = [torch.full_like(tokens, -1)]
        self._depths = [torch.ones_like(tokens)]
        # Number and cumulative log q of the frontier's nodes, [B, beam].
        self._number = torch.arange(beam, device=q.device).expand_as(tokens)
        self._reach = log_q
        self._itself = torch.eye(beam, dtype=torch.bool, device=q.device).expand(len(q), -1, -1)
        self.frontier = Frontier(tokens, torch.zeros_like(tokens), self._itself)

    def grow(self, q: Tensor) -> Frontier:
        """Expand the last frontier, whose distributions are `q` [B, beam, V], and return the next one."""
        tokens, log_q = _children(q, self.beam)
        reach = (self._reach[:, :, None] + log_q).flatten(1)
        first = sum(tokens.shape[1] for tokens in self._tokens)
        self._tokens.append(tokens.flatten(1))
        self.log_q.append(reach)
        self._parents.append(self._number[:, :, None].expand_as(tokens).flatten(1))
        self._depths.append(torch.full_like(self._tokens[-1], len(self._tokens)))
        best = torch.sort(reach, dim=1, descending=True, stable=True).indices[:, : self.beam]
        origin = best // self.beam
        before = self.frontier.seen.gather(
            1, origin[:, :, None].expand(-1, -1, self.frontier.seen.shape[2])
        )
        self._number = first + best
        self._reach = reach.gather(1, best)
        seen = torch.cat([before, self._itself], dim=2)
        self.frontier = Frontier(self._tokens[-1].gather(1, best), origin, seen)
        return self.frontier

    def select(self, nodes: int, depth_limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keep the `nodes` candidates of highest cumulative log q: numbers and `valid` [B, m].

        m = min(nodes, candidates). Numbers ascend; missing ones are at least the number of candidates. Ties go to the
        smaller depth, then to the lower number, so that no node loses its parent (docs/algorithms.md, section 9,
        B1). `depth_limit` int64 [B] leaves out deeper candidates. A candidate with q = 0 is never selected.
        """
        reach = torch.cat(self.log_q, dim=1)
        total = reach.shape[1]
        if depth_limit is not None:
            reach = reach.masked_fill(
                torch.cat(self._depths, dim=1) > depth_limit[:, None], -torch.inf
            )
        # Numbers rise with depth: a stable sort settles ties as asked.
        best = torch.sort(reach, dim=1, descending=True, stable=True).indices[:, :nodes]
        numbers = torch.where(reach.gather(1, best) > -torch.inf, best, total).sort(dim=1).values
        return numbers, numbers < total

    def tree(self, root: Tensor, nodes: int, depth_limit: Tensor | None = None) -> DraftTree:
        """Return the DraftTree of the tokens `root` int64 [B] and of what `select` keeps: M = m + 1, C = beam."""
        numbers, valid = self.select(nodes, depth_limit)
        candidates = (self._tokens, self._parents, self._depths)
        tokens, parents, depths = (torch.cat(rounds, dim=1) for rounds in candidates)
        total = tokens.shape[1]
        # Candidate c is node `node[c + 1]`; what is above the root's children, -1, is node 0.
        nodes_in_order = torch.arange(1, numbers.shape[1] + 1, device=numbers.device).expand_as(
            numbers
        )
        node = torch.zeros(len(tokens), total + 2, dtype=torch.int64, device=numbers.device)
        node.scatter_(1, numbers + 1, nodes_in_order)
        numbers = numbers.clamp_max(total - 1)
        pad = torch.nn.functional.pad
        return link_nodes(
            tokens=torch.cat([root[:, None], tokens.gather(1, numbers)], dim=1),
            parents=pad(node.gather(1, parents.gather(1, numbers) + 1), (1, 0), value=-1),
            depths=pad(depths.gather(1, numbers), (1, 0)),
            # The candidates below the root and below every frontier node are `beam` in a row.
            ranks=pad(numbers % self.beam, (1, 0)),
            valid=pad(valid, (1, 0), value=True),
            fanout=self.beam,
            max_depth=len(self._tokens),
        )


def _children(q: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """Return the `beam` most probable tokens and their log q [..., beam]; -inf where there is none."""
    tokens, valid = most_probable(q, beam)
    # At most 0: a probability rounded above 1 must not lift a child above its parent.
    return tokens, q.gather(-1, tokens).float().log().clamp_max(0.0).masked_fill(~valid, -torch.inf)


class DynamicDraft(NamedTuple):
    """A tree that grew, as in `DraftTree`."""

    tokens: Tensor
    depths: Tensor
    children: Tensor
    attention: Tensor
    path_order: Tensor


class DynamicDrafting(DraftMethod):
    """EAGLE-2: `depth` rounds of the `beam` best nodes, then the best `nodes` of all."""

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:  # noqa: ARG002  # keeps no state
        self.depth = decoding.value("depth")
        self.forwards = self.depth
        self.fanout = decoding.value("beam")
        self.nodes = decoding.value("nodes") + 1  # with the root

    def draft(self, inputs: DraftInputs) -> DynamicDraft:
        """Grow from the root: deterministic, given the prefix (docs/algorithms.md, section 2)."""
        assert inputs.proposer is not None
        growth = Growth(inputs.proposer.root_q[:, 0], self.fanout)
        for _ in range(self.depth - 1):
            frontier = growth.frontier
            growth.grow(inputs.proposer.extend(frontier.tokens, frontier.origin, frontier.seen))
        tree = growth.tree(inputs.root, self.nodes - 1, inputs.depth_limit)
        return DynamicDraft(
            tokens=tree.tokens,
            depths=tree.depths,
            children=tree.children,
            attention=tree.attention,
            path_order=tree.path_order,
        )

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that grew; any of its nodes can have children."""
        draft = DynamicDraft._make(drafted)
        return DraftTree(
            **draft._asdict(),
            layout=full_layout(self.nodes, self.fanout, draft.tokens.device),
            max_depth=self.depth,
        )
