"""Verification: the path of a draft tree that a step commits (docs/algorithms.md, section 3).

`verify` accepts at most one child of each node, by random numbers. `verify_greedy` decides on each
child independently. Both return the longest path of accepted nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Decision, DraftView, ScaledDistributions
from lantern_bench.decoding.sampling import greedy_probabilities, sample
from lantern_bench.decoding.trace import ALL_REJECTED, NOT_OFFERED
from lantern_bench.decoding.tree import DraftTree, at_nodes, first_true, index_along


@dataclass(frozen=True)
class Verdict:
    """What one step commits to each of B images, for a tree of depth D."""

    # node numbers from the root to the last accepted node, then -1, int64 [B, D + 1]
    path: Tensor
    # number of accepted drafts, int64 [B]
    accepted: Tensor
    # the accepted drafts, then the bonus token, then 0, int64 [B, D + 1]
    tokens: Tensor
    # rank of the accepted child by depth, `ALL_REJECTED` or `NOT_OFFERED`, int64 [B, D]
    child_rank: Tensor
    # m(x) summed over accepted drafts, float32 [B]
    neighbour_mass: Tensor
    # m(x) summed over all drafts tried, float32 [B]
    neighbour_mass_tried: Tensor
    # emitted TV summed over all drafts tried, float32 [B]; 0 where it is not known
    emitted_tv: Tensor
    # the distribution of the bonus token (greedy: p of the last accepted node), float32 [B, V]
    next_probs: Tensor
    # w of each node [B, M], of rules whose decision on a node depends on the drafts below it
    visit_probability: Tensor | None = None


def verify(
    tree: DraftTree,
    target_probs: Tensor,
    rule: ConfiguredRule,
    *,
    uniforms: Tensor,
    noise: Tensor,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees by sampling.

    Args:
        tree: The drafts.
        target_probs: p at every node, float32 [B, M, V].
        rule: Decides how likely each child is accepted.
        uniforms: Numbers in [0, 1) that decide on the children of each node, [B, M, C].
        noise: Exp(1) noise that draws the bonus token, [B, V].
        depth_limit: The depth drafted to (free positions - 1), int64 [B]; 0 or less drafts nothing.
        position: The tokens committed so far, int64 [B], for rules that read it.
    """
    # 1. Compute how likely each child is accepted if its earlier siblings are rejected.
    offered, acceptance = accept_drafts(
        tree=tree, target_probs=target_probs, rule=rule, depth_limit=depth_limit, position=position
    )

    # 2. Accept the first child whose uniform number is below its probability.
    hit = tree.rows(uniforms) < acceptance.accept
    rank = index_along(hit, 1)
    first_hit = first_true(hit)[:, None]
    end, path = longest_path(tree, offered, tree.by_node(hit & (rank == first_hit)))

    # 3. Draw the bonus token, which follows the path.
    next_probs = bonus_distribution(
        tree=tree, offered=offered, acceptance=acceptance, target_probs=target_probs, end=end
    )
    visit_probability = acceptance.visit_probability
    if visit_probability is not None:
        visit_probability = tree.by_node(visit_probability)
    is_tried = rank <= first_hit
    mass_tried = torch.where(is_tried, acceptance.neighbour_mass, 0.0)
    emitted_tv = None
    if acceptance.emitted_tv is not None:
        if_rejected, if_accepted = acceptance.emitted_tv
        tv = torch.where(hit, if_accepted, if_rejected)
        emitted_tv = tree.by_node(torch.where(is_tried, tv, 0.0))
    return verdict_of(
        tree,
        offered,
        path,
        mass_tried=tree.by_node(mass_tried),
        next_probs=next_probs,
        bonus=sample(next_probs, noise),
        visit_probability=visit_probability,
        emitted_tv=emitted_tv,
    )


def verify_greedy(
    tree: DraftTree,
    guided_logits: Tensor,
    rule: ConfiguredRule,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees at temperature 0.

    A child is accepted if it is the argmax of its parent's p (strict) or of p~. Among the longest
    paths of accepted drafts the first in `tree.path_order` wins. The bonus token is the argmax of
    the unrelaxed p at its end.

    Args:
        tree: The drafts.
        guided_logits: The target's logits at every node, float32 [B, M, V].
        rule: Relaxes p if it takes neighbours.
        depth_limit: The depth drafted to, int64 [B], as in `verify`.
        position: The tokens committed so far, int64 [B], for rules that read it.
    """
    offered = offered_children(tree, depth_limit)
    # The argmax of the logits is the argmax of p, without ties by rounding in the softmax.
    best = guided_logits.argmax(dim=-1)
    tokens = tokens_of(tree, offered)
    taken = tokens == best.unsqueeze(2)
    mass = torch.zeros_like(tokens, dtype=torch.float32)
    if rule.takes_neighbours:
        children = children_of(tree, guided_logits, offered, position=position)
        is_relaxed_best, mass_of_rows = _relaxed_argmax(children, rule)
        taken |= tree.by_node(is_relaxed_best)
        mass = tree.by_node(mass_of_rows)
    end, path = longest_path(tree, offered, taken & (offered >= 0))
    images = index_along(best)
    return verdict_of(
        tree,
        offered,
        path,
        mass_tried=torch.where(offered >= 0, mass, 0.0),
        next_probs=greedy_probabilities(guided_logits[images, end]),
        bonus=best[images, end],
    )


def accept_drafts(
    tree: DraftTree,
    target_probs: Tensor,
    rule: ConfiguredRule,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Acceptance]:
    """Decide on the children of all nodes in `tree.layout`.

    Args:
        tree: The drafts.
        target_probs: p at every node, float32 [B, M, V].
        rule: Decides how likely each child is accepted.
        depth_limit: The depth drafted to, int64 [B], as in `verify`.
        position: The tokens committed so far, int64 [B], for rules that read it.

    Returns:
        The offered children [B, M, C], -1 where there is none, and their acceptance.
    """
    offered = offered_children(tree, depth_limit)
    return offered, rule.accept(children_of(tree, target_probs, offered, position=position))


def children_of(
    tree: DraftTree, p: Tensor, offered: Tensor, *, position: Tensor | None
) -> Children:
    """Return the children of all nodes in `tree.layout`.

    Args:
        tree: The drafts.
        p: Target distributions or logits at every node, [B, M, V]; they are copied.
        offered: The result of `offered_children`, [B, M, C].
        position: As in `verify`.
    """
    depth = tree.rows(tree.depths) + 1
    in_image = depth - 1
    if position is not None:
        in_image = in_image + position.repeat(len(tree.layout.nodes))
    return Children(
        p=tree.rows(p),
        q=None if tree.q is None else tree.rows(tree.q),
        tokens=tree.rows(tokens_of(tree, offered)),
        offered=tree.rows(offered) >= 0,
        nodes_per_rank=[nodes * len(tree.tokens) for nodes in tree.layout.nodes_per_rank],
        depth=depth,
        position=in_image,
        layout=tree.layout,
    )


def offered_children(tree: DraftTree, depth_limit: Tensor | None) -> Tensor:
    """Return the children [B, M, C] of `tree`, -1 for children below `depth_limit` int64 [B]."""
    if depth_limit is None:
        return tree.children
    too_deep = tree.depths >= depth_limit[:, None]
    return tree.children.masked_fill(too_deep.unsqueeze(2), -1)


def longest_path(tree: DraftTree, children: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest path of taken children; of equally long paths the first in `path_order`.

    Args:
        tree: The drafts.
        children: Node numbers, int64 [B, M, C], -1 where there is none.
        taken: Which of them are accepted, bool [B, M, C].

    Returns:
        The last node of the path, int64 [B], and its nodes from the root, then -1,
        int64 [B, D + 1].
    """
    reached = torch.zeros_like(tree.tokens, dtype=torch.bool)
    # Places without a taken child write to the root, which counts as accepted anyway.
    reached.scatter_(1, torch.where(taken, children, 0).flatten(1), value=True)
    reached[:, 0] = True
    connected = ~(tree.attention & ~reached[:, None, :]).any(dim=-1)
    length = torch.where(connected, tree.depths, -1)
    longest = length == length.amax(dim=1, keepdim=True)
    end = torch.where(longest, tree.path_order, tree.path_order.amax() + 1).argmin(dim=1)

    images = index_along(end)
    depth_on_path = torch.where(tree.attention[images, end], tree.depths, tree.max_depth + 1)
    numbers = index_along(depth_on_path, 1).expand_as(depth_on_path)
    nodes = end.new_full((len(end), tree.max_depth + 2), -1)
    return end, nodes.scatter_(1, depth_on_path, numbers)[:, :-1]


def bonus_distribution(
    tree: DraftTree, offered: Tensor, acceptance: Acceptance, target_probs: Tensor, end: Tensor
) -> Tensor:
    """Return what the bonus token is drawn from [B, V].

    It is the residual if the last accepted node has children, otherwise its p.

    Args:
        tree: The drafts.
        offered: The children of each node, int64 [B, M, C], -1 where there is none.
        acceptance: The decision on the children.
        target_probs: p at every node, [B, M, V].
        end: The last accepted node, int64 [B].
    """
    images = index_along(end)
    p = target_probs[images, end]
    rejected = (offered[images, end] >= 0).any(dim=1)
    rows = tree.layout.slots[end].clamp_min(0) * len(end) + images
    return torch.where(rejected[:, None], acceptance.bonus_distribution(rows, p), p)


def verdict_of(
    tree: DraftTree,
    offered: Tensor,
    path: Tensor,
    *,
    mass_tried: Tensor,
    next_probs: Tensor,
    bonus: Tensor,
    visit_probability: Tensor | None = None,
    emitted_tv: Tensor | None = None,
) -> Verdict:
    """Return the verdict on a path.

    Args:
        tree: The drafts.
        offered: The children of each node, int64 [B, M, C], -1 where there is none.
        path: The accepted nodes, as in `Verdict`.
        mass_tried: m(x) of the children tried, [B, M, C].
        next_probs: The distribution of the bonus token, [B, V].
        bonus: The bonus token, int64 [B].
        visit_probability: As in `Verdict`.
        emitted_tv: Emitted TV of the children tried, [B, M, C]; None: not known.
    """
    parents = path[:, :-1]
    drafts = path[:, 1:]
    goes_on = drafts >= 0
    accepted = goes_on.sum(dim=1)
    tokens = torch.zeros_like(path)
    tokens[:, :-1] = torch.where(goes_on, tree.tokens.gather(1, drafts.clamp_min(0)), 0)
    tokens = tokens.scatter_(1, accepted[:, None], bonus[:, None])

    # The children at each depth of the path, [B, D, C].
    on_path = parents.clamp_min(0)
    is_on_path = parents >= 0
    children = at_nodes(offered, on_path)
    mass = torch.where(is_on_path.unsqueeze(2), at_nodes(mass_tried, on_path), 0.0)
    tv = torch.zeros_like(mass)
    if emitted_tv is not None:
        tv = torch.where(is_on_path.unsqueeze(2), at_nodes(emitted_tv, on_path), 0.0)

    has_children = is_on_path & (children >= 0).any(dim=2)
    without_accepted = torch.where(has_children, ALL_REJECTED, NOT_OFFERED)
    rank = torch.where(goes_on, first_true(children == drafts.unsqueeze(2)), without_accepted)
    mass_at_rank = mass.gather(2, rank.clamp_min(0)[:, :, None]).squeeze(2)
    accepted_mass = torch.where(goes_on, mass_at_rank, 0.0)
    return Verdict(
        path=path,
        accepted=accepted,
        tokens=tokens,
        child_rank=rank,
        neighbour_mass=accepted_mass.sum(dim=1),
        neighbour_mass_tried=mass.sum(dim=(1, 2)),
        emitted_tv=tv.sum(dim=(1, 2)),
        next_probs=next_probs,
        visit_probability=visit_probability,
    )


def tokens_of(tree: DraftTree, children: Tensor) -> Tensor:
    """Return the tokens [B, M, C] of `children` [B, M, C], of the root where there is no child."""
    return tree.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)


def _relaxed_argmax(children: Children, rule: ConfiguredRule) -> tuple[Tensor, Tensor]:
    """Decide which children are the argmax of their own p~, given logits in place of p.

    Returns:
        The answers bool [N, C], and the m(x) of each child.
    """
    every_p = greedy_probabilities(children.p)
    agreed = torch.zeros_like(children.tokens, dtype=torch.bool)
    mass = torch.zeros_like(children.tokens, dtype=torch.float32)
    for rank, n in enumerate(children.nodes_per_rank):
        x = children.tokens[:n, rank]
        p = every_p[:n]
        draft = DraftView(
            token=x,
            depth=children.depth[:n],
            position=children.position[:n],
            target=ScaledDistributions(values=p, total=torch.ones_like(p[:, :1])),
            proposal=None,
            codebook=rule.codebook,
        )
        # Greedy decoding has no residual, so `residual: official` is ignored.
        decision = rule.decide_by_neighbours(draft)
        agreed[:n, rank] = relaxed_distribution(draft, decision).argmax(dim=1) == x
        mass[:n, rank] = decision.neighbour_mass
    return agreed, mass


def relaxed_distribution(draft: DraftView, decision: Decision) -> Tensor:
    """Return p~ [n, V]: p(x) + m(x) at x, 0 at the neighbours taken, p elsewhere."""
    relaxed = draft.p.clone()
    if decision.neighbours is not None:
        tokens = decision.neighbours.tokens
        left = torch.where(decision.neighbours.taken, 0.0, relaxed.gather(1, tokens))
        relaxed.scatter_(1, tokens, left)
    return relaxed.scatter_add_(1, draft.token[:, None], decision.neighbour_mass[:, None])
