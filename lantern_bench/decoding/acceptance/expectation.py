"""What a rule does to the drafts of a step on average over its random numbers.

`verify` draws random numbers and follows one path. Here every node has the probability that the
path gets to it, so the sum over the nodes is the expected number of tokens of the step. No token
is committed: the drafts of one step serve any number of rules (docs/prediction.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import accept_drafts, tokens_of
from lantern_bench.decoding.tree import DraftTree


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
    # under p, [B, M, F]; None: without features
    shift: Tensor | None


def expected_step(
    tree: DraftTree,
    target_probs: Tensor,
    rule: ConfiguredRule,
    *,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
    features: Tensor | None = None,
) -> ExpectedStep:
    """Return what `verify` does to B draft trees on average over its random numbers.

    Args:
        tree: The drafts.
        target_probs: p at every node, [B, M, V].
        rule: Decides how likely each child is accepted.
        depth_limit: As in `verify`.
        position: As in `verify`.
        features: Features of every token minus their means under p, at the nodes of `tree.rows`,
            [I * B, F, V].
    """
    offered, acceptance = accept_drafts(
        tree=tree, target_probs=target_probs, rule=rule, depth_limit=depth_limit, position=position
    )

    # 1. Given that the path gets to a node: the probability that it goes on to each child.
    exists = offered >= 0
    accept = tree.by_node(acceptance.accept).masked_fill(~exists, 0.0)
    rejected = (1.0 - accept).cumprod(dim=2)
    tried = torch.cat([torch.ones_like(rejected[..., :1]), rejected[..., :-1]], dim=2)
    taken = tried * accept

    # 2. What the token emitted at a node adds.
    emitted_tv = None
    if acceptance.emitted_tv is not None:
        if_rejected, if_accepted = acceptance.emitted_tv
        of_child = acceptance.accept * if_accepted + (1.0 - acceptance.accept) * if_rejected
        emitted_tv = (tried * tree.by_node(of_child)).sum(dim=2)
    shift = None
    if features is not None:
        shift = tree.by_node(
            _shift(
                features,
                acceptance,
                tokens=tree.rows(tokens_of(tree, offered)),
                taken=tree.rows(taken),
                tries=tree.rows(exists).any(dim=1),
            )
        )
    return ExpectedStep(
        reach=_reach(tree, offered, taken),
        tries=exists.any(dim=2),
        emitted_tv=emitted_tv,
        shift=shift,
    )


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


def _shift(
    features: Tensor, acceptance: Acceptance, *, tokens: Tensor, taken: Tensor, tries: Tensor
) -> Tensor:
    """Return the mean features [N, F] of the tokens emitted at N nodes.

    Args:
        features: Features minus their means under p, [N, F, V].
        acceptance: The decision on the children.
        tokens: The children, int64 [N, C].
        taken: The probability to go on to each child, [N, C].
        tries: Which nodes have a child to try, bool [N].
    """
    # A node without children, or without a residual, draws from p, whose shift is 0.
    total = acceptance.residual.sum(dim=1)
    is_drawn = tries & (total > 0) & ~acceptance.exhausted
    of_residual = (features @ acceptance.residual.unsqueeze(2)).squeeze(2)
    of_bonus = torch.where(is_drawn[:, None], of_residual / total[:, None], 0.0)
    columns = tokens.unsqueeze(1).expand(-1, features.shape[1], -1)
    of_children = (features.gather(2, columns) @ taken.unsqueeze(2)).squeeze(2)
    return of_children + (1.0 - taken.sum(dim=1, keepdim=True)) * of_bonus
