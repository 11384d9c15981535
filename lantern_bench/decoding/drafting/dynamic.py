"""How a dynamic draft tree grows (EAGLE-2, arXiv 2406.16858): rounds of expansion, then the best nodes of all.

The network is left out: the drafter hands in the distributions of the nodes it was told to expand and is told the next
ones. Everything is batched over images, of fixed shape, and deterministic (docs/algorithms.md, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.static import draft_probabilities, given
from lantern_bench.decoding.interface import Drafted, DrafterSession, Drafts, Target
from lantern_bench.decoding.sampling import most_probable
from lantern_bench.decoding.tree import DraftTree, full_layout, link_nodes


def make_dynamic(decoding: Decoding, target: Target, batch: int) -> DynamicDrafting:  # noqa: ARG001  # keeps no state
    """The drafting of the row `dynamic`."""
    return DynamicDrafting(decoding)


@dataclass(frozen=True)
class Frontier:
    """The nodes to expand next, `beam` per image, in descending order of cumulative log q.

    tokens: int64 [B, beam]. origin: int64 [B, beam], the slot of each node's parent in the frontier before (0, the
    root, in the first). seen: bool [B, beam, r * beam] in round r, which expanded nodes below the root each of them
    attends to: slot s of frontier i is column i * beam + s, its own included. The prefix and the root come before.
    """

    tokens: Tensor
    origin: Tensor
    seen: Tensor


@dataclass(frozen=True)
class SelectedNodes:
    """The kept nodes [B, M], root first, then in the order they were generated, then those that only fill up.

    tokens, parents (-1 for the root), depths, ranks: int64. log_q: float32, cumulative, 0 for the root. valid: bool,
    False for those that only fill up; their other entries mean nothing.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    log_q: Tensor
    valid: Tensor


class Growth:
    """The candidates of one dynamic draft: `start` with the root's q, `grow` D - 1 times, then `tree`.

    Every node is numbered by its place in the order of generation: round, slot of its parent in the frontier, rank.
    """

    def __init__(self, beam: int) -> None:
        self.beam = beam
        self._tokens: list[Tensor] = []
        self._log_q: list[Tensor] = []
        self._parents: list[Tensor] = []
        # Of the frontier's nodes, [B, beam]: number, cumulative log q, and their `seen`.
        self._number: Tensor | None = None
        self._reach: Tensor | None = None
        self._seen: Tensor | None = None

    @property
    def rounds(self) -> int:
        """How many rounds have been made: the depth of the deepest candidates."""
        return len(self._tokens)

    def start(self, q: Tensor) -> Frontier:
        """Expand the root, whose distribution is `q` [B, V], into its `beam` most probable tokens."""
        tokens, log_q = _children(q, self.beam)
        self._tokens, self._log_q = [tokens], [log_q]
        self._parents = [torch.full_like(tokens, -1)]
        slots = torch.arange(self.beam, device=q.device)
        self._number, self._reach = slots.expand_as(tokens), log_q
        self._seen = torch.eye(self.beam, dtype=torch.bool, device=q.device).expand(len(q), -1, -1)
        return Frontier(tokens, torch.zeros_like(tokens), self._seen)

    def grow(self, q: Tensor) -> Frontier:
        """Expand the last frontier, whose distributions are `q` [B, beam, V], and return the next one."""
        if self._number is None or self._reach is None or self._seen is None:
            raise RuntimeError("start comes before grow")
        tokens, log_q = _children(q, self.beam)
        reach = (self._reach[:, :, None] + log_q).flatten(1)
        first = sum(made.shape[1] for made in self._tokens)
        self._tokens.append(tokens.flatten(1))
        self._log_q.append(reach)
        self._parents.append(self._number[:, :, None].expand_as(tokens).flatten(1))
        best = torch.sort(reach, dim=1, descending=True, stable=True).indices[:, : self.beam]
        origin = best // self.beam
        before = self._seen.gather(1, origin[:, :, None].expand(-1, -1, self._seen.shape[2]))
        itself = torch.eye(self.beam, dtype=torch.bool, device=q.device).expand(len(q), -1, -1)
        self._number, self._reach = first + best, reach.gather(1, best)
        self._seen = torch.cat([before, itself], dim=2)
        return Frontier(self._tokens[-1].gather(1, best), origin, self._seen)

    def select(self, root: Tensor, nodes: int, depth_limit: Tensor | None = None) -> SelectedNodes:
        """Keep the `nodes` candidates of highest cumulative log q below the tokens `root` int64 [B].

        Ties go to the smaller depth, then to the lower number, so that no kept node loses its parent
        (docs/algorithms.md, section 9, B1). `depth_limit` int64 [B] leaves out deeper candidates.
        A candidate with q = 0 is never kept; missing ones of the min(nodes, candidates) have valid False.
        """
        tokens, reach, parents = (torch.cat(made, dim=1) for made in (self._tokens, self._log_q, self._parents))
        total = tokens.shape[1]
        depths = self._depths(tokens)
        if depth_limit is not None:
            reach = reach.masked_fill(depths > depth_limit[:, None], -torch.inf)
        # Numbers rise with depth: a stable sort settles ties as asked.
        best = torch.sort(reach, dim=1, descending=True, stable=True).indices[:, :nodes]
        kept = torch.where(reach.gather(1, best) > -torch.inf, best, total).sort(dim=1).values
        valid, held = kept < total, kept.clamp_max(total - 1)
        # Candidate c is node `node[c + 1]`; what is above the root's children, -1, is node 0.
        places = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept)
        node = torch.zeros(len(tokens), total + 2, dtype=torch.int64, device=kept.device).scatter_(1, kept + 1, places)
        below = {
            "tokens": tokens.gather(1, held),
            "parents": node.gather(1, parents.gather(1, held) + 1),
            "depths": depths.expand_as(tokens).gather(1, held),
            # The root's candidates and every parent's are `beam` in a row.
            "ranks": held % self.beam,
            "log_q": reach.gather(1, held),
            "valid": valid,
        }
        above = {"parents": -1, "depths": 0, "ranks": 0, "log_q": 0, "valid": 1}
        padded = {name: torch.nn.functional.pad(below[name], (1, 0), value=value) for name, value in above.items()}
        return SelectedNodes(tokens=torch.cat([root[:, None], below["tokens"]], dim=1), **padded)

    def tree(self, root: Tensor, nodes: int, depth_limit: Tensor | None = None) -> DraftTree:
        """Return the DraftTree of what `select` keeps: M = min(nodes, candidates) + 1, C = beam."""
        kept = self.select(root, nodes, depth_limit)
        return link_nodes(kept.tokens, kept.parents, kept.depths, kept.ranks, kept.valid, self.beam, self.rounds)

    def _depths(self, tokens: Tensor) -> Tensor:
        made = [
            torch.full((part.shape[1],), depth + 1, device=tokens.device) for depth, part in enumerate(self._tokens)
        ]
        return torch.cat(made)


def _children(q: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """Return the `beam` most probable tokens and their log q [..., beam]; -inf where there is none."""
    tokens, valid = most_probable(q, beam)
    # At most 0: a probability rounded above 1 must not lift a child above its parent.
    return tokens, q.gather(-1, tokens).float().log().clamp_max(0.0).masked_fill(~valid, -torch.inf)


class DynamicDrafting:
    """EAGLE-2: `depth` rounds of the `beam` best nodes, then the best `nodes` of all."""

    def __init__(self, decoding: Decoding) -> None:
        if decoding.nodes is None or decoding.depth is None or decoding.beam is None:
            raise ValueError("dynamic drafting needs nodes, depth and beam")
        self._kept, self.depth, self.fanout = decoding.nodes, decoding.depth, decoding.beam
        self.nodes = self._kept + 1
        self.forwards, self.noises = self.depth, 0
        self._to_probabilities = draft_probabilities(decoding)

    def draft(
        self,
        session: DrafterSession | None,
        drafts: Drafts | None,
        root: Tensor,
        noise: Tensor,  # noqa: ARG002  # the draft is deterministic given the prefix
        depth_limit: Tensor,
    ) -> Drafted:
        """Grow from the root; the session extends `beam` nodes a round."""
        assert session is not None and drafts is not None
        growth = Growth(self.fanout)
        frontier = growth.start(self._to_probabilities(drafts)[:, 0])
        for _ in range(self.depth - 1):
            drafts = session.extend(frontier.tokens, frontier.origin, frontier.seen)
            frontier = growth.grow(self._to_probabilities(drafts))
        tree = growth.tree(root, self._kept, depth_limit)
        return tree.tokens, tree.parents, tree.depths, tree.children, tree.attention, tree.path_order

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """All of it was computed."""
        tokens, _, depths, _, attention, _ = map(given, drafted)
        return tokens, depths, attention

    def tree(self, drafted: Drafted) -> DraftTree:
        """The tree that grew; any of its nodes can have children."""
        tokens, parents, depths, children, attention, path_order = map(given, drafted)
        layout = full_layout(self.nodes, self.fanout, tokens.device)
        return DraftTree(tokens, parents, depths, children, attention, path_order, layout, self.depth)
