"""What a rule does to the drafts of a step on average over its random numbers.

`verify` draws random numbers and follows one path. Here every node has the probability that the
path gets to it, so the sum over the nodes is the expected number of tokens of the step. No token
is committed: the drafts of one step serve any number of rules (docs/prediction.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Residual
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import children_of, offered_children
from lantern_bench.decoding.tree import DraftTree

_EMPTY = 1e-6  # a smaller sum of a residual is a rounding error


@dataclass(frozen=True)
class ExpectedStep:
    """What a step of B images does on average, at each of the M nodes of its trees."""

    # the probability that the path gets to each node, 1 at the root, [B, M]; a row sums to the
    # expected tokens of the step, bonus token included
    reach: Tensor
    # the nodes with a child to try, bool [B, M]
    tries: Tensor
    # emitted TV of the children tried at a node, given that the path gets there, [B, M]; None: not
    # known
    emitted_tv: Tensor | None
    # features of the token emitted at a node, given that the path gets there, minus their means
    # under p, [B, M, F]
    shift: Tensor


class ScoredDrafts:
    """B draft trees with p and the features of every token, for any number of rules."""

    def __init__(
        self,
        tree: DraftTree,
        target_probs: Tensor,
        features: Tensor,
        *,
        depth_limit: Tensor | None = None,
        position: Tensor | None = None,
    ) -> None:
        """Read the drafts.

        Args:
            tree: The drafts.
            target_probs: p at every node, [B, M, V].
            features: Features of every token minus their means under p, [B, M, F, V].
            depth_limit: As in `verify`.
            position: As in `verify`.
        """
        self._tree = tree
        self._offered = offered_children(tree, depth_limit)
        # Rules overwrite p and q, so each gets a copy.
        self._copy = partial(children_of, tree, target_probs, self._offered, position=position)
        self._children = self._copy()
        rows = tree.rows(features)
        # The last feature is 1: its sum is the sum of the probabilities, [N, F + 1, V].
        self._features = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)

    def expected(self, rule: ConfiguredRule) -> ExpectedStep:
        """Return what `verify` does on average over its random numbers."""
        tree = self._tree
        is_chain = self._children.q is not None and self._offered.shape[2] == 1
        if is_chain and rule.takes_neighbours and rule.residual_class is Residual:
            acceptance, of_residual = self._chain_by_neighbours(rule)
        else:
            acceptance = rule.accept(self._copy())
            of_residual = _summed(self._features, acceptance.residual)

        # 1. Given that the path gets to a node: the probability that it goes on to each child.
        exists = self._children.offered
        tries = exists.any(dim=1)
        accept = acceptance.accept.masked_fill(~exists, 0.0)
        rejected = (1.0 - accept).cumprod(dim=1)
        tried = torch.cat([torch.ones_like(rejected[:, :1]), rejected[:, :-1]], dim=1)
        taken = tried * accept

        # 2. What the token emitted at a node adds. A node without children, or without a residual,
        # draws from p, whose shift is 0.
        total = of_residual[:, -1:]
        is_drawn = tries & ~acceptance.exhausted
        of_bonus = torch.where(is_drawn[:, None] & (total > 0), of_residual / total, 0.0)
        shift = _summed(self._features_at(self._children.tokens), taken)
        shift = shift + rejected[:, -1:] * of_bonus
        emitted_tv = None
        if acceptance.emitted_tv is not None:
            if_rejected, if_accepted = acceptance.emitted_tv
            of_child = torch.where(exists, accept * if_accepted + (1.0 - accept) * if_rejected, 0.0)
            emitted_tv = tree.by_node((tried * of_child).sum(dim=1))
        return ExpectedStep(
            reach=_reach(tree, self._offered, tree.by_node(taken)),
            tries=tree.by_node(tries),
            emitted_tv=emitted_tv,
            shift=tree.by_node(shift[:, :-1]),
        )

    def _features_at(self, tokens: Tensor) -> Tensor:
        """Return the features [N, F + 1, n] of tokens [N, n]."""
        columns = tokens.unsqueeze(1).expand(-1, self._features.shape[1], -1)
        return self._features.gather(2, columns)

    @cached_property
    def _strict_residual(self) -> tuple[Tensor, Tensor]:
        """The residual max(p - q, 0) [N, V], and the sums of its features [N, F + 1]."""
        q: Any = self._children.q
        residual = (self._children.p - q).clamp_min(0.0)
        return residual, _summed(self._features, residual)

    def _chain_by_neighbours(self, rule: ConfiguredRule) -> tuple[Acceptance, Tensor]:
        """Decide on a chain, and return the sums of the features of its residuals [N, F + 1].

        With one child at each node, a residual of a rule by neighbours is the strict residual
        without the neighbours taken. So it takes no pass over the vocabulary. Drafts have q(x) > 0.
        """
        children = self._children
        decision = rule.decide(Residual(children, rule.codebook).drafts(children.tokens.squeeze(1)))
        near: Any = decision.neighbours
        residual, of_strict = self._strict_residual
        lost = residual.gather(1, near.tokens) * near.taken
        of_residual = of_strict - _summed(self._features_at(near.tokens), lost)
        tv = of_strict[:, -1:]
        acceptance = Acceptance(
            accept=decision.probability[:, None],
            neighbour_mass=decision.neighbour_mass[:, None],
            residual=residual,  # strict; `of_residual` leaves out the neighbours taken
            exhausted=of_residual[:, -1] < _EMPTY,
            emitted_tv=torch.stack([tv - 1.0, tv]),
        )
        return acceptance, of_residual


def _summed(features: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [N, F] of features [N, F, n] with weights [N, n]."""
    return (features @ weights.unsqueeze(2)).squeeze(2)


def _reach(tree: DraftTree, offered: Tensor, taken: Tensor) -> Tensor:
    """Return the probability [B, M] that the path gets to each node, given `taken` [B, M, C]."""
    root = torch.zeros_like(tree.tokens, dtype=taken.dtype)
    root[:, 0] = 1.0
    # Places without a child write 0 to the root.
    below = offered.clamp_min(0).flatten(1)
    reach = root
    for _ in range(tree.max_depth):
        onward = (reach.unsqueeze(2) * taken).flatten(1)
        reach = root.scatter_add(1, below, onward)
    return reach
