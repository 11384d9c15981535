"""Verification: walk down draft trees, by sampling or greedily (docs/algorithms.md, section 3).

`verify` accepts children with the probabilities of the rule and samples the bonus token where the walk ends.
`verify_greedy` accepts each child alone, and the longest path of accepted drafts wins; it has no residuals and no
random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.relaxation import Place, Relaxation, relaxed
from lantern_bench.decoding.acceptance.tree_acceptance import Accept, Acceptance, accept_children
from lantern_bench.decoding.sampling import greedy_probabilities, sample
from lantern_bench.decoding.tree import DraftTree, first_true


@dataclass(frozen=True)
class Verdict:
    """What one step commits, for each of B images and a tree of depth D.

    path: int64 [B, D + 1], node numbers from the root to the last accepted node, then -1.
    accepted: int64 [B], number of accepted drafts.
    tokens: int64 [B, D + 1], the accepted drafts, then the bonus token, then 0; `accepted + 1` of them count.
    child_rank: int64 [B, D], by depth: rank of the accepted child, -1 offered and all rejected, -2 nothing offered.
    neighbour_mass, neighbour_mass_tried: float32 [B], m(x) summed over accepted drafts, and over all drafts tried.
    next_probs: float32 [B, V], the distribution of the bonus token (greedy: p of the last accepted node).
    """

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    child_rank: Tensor
    neighbour_mass: Tensor
    neighbour_mass_tried: Tensor
    next_probs: Tensor


def accept_tree(
    tree: DraftTree,
    target_probs: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    depth_limit: Tensor | None = None,
    accept: Accept | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Acceptance]:
    """Return the children int64 [N, C] of all nodes of B trees (-1: none within the depth limit) and their acceptance.

    Row `slot * B + image` is the node `tree.layout.nodes[slot]`. Arguments as of `verify`.
    """
    children = offered_children(tree, depth_limit)
    tokens = tree.rows(tree.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children))
    children = tree.rows(children)
    q = None if tree.q is None else tree.rows(tree.q)
    p, offered, images = tree.rows(target_probs), children >= 0, len(tree.tokens)
    active = [nodes * images for nodes in tree.layout.active]
    rule = accept or relaxation.accept or accept_children
    return children, rule(p, q, tokens, offered, relaxation, table, active, images, Place(tree, position))


def offered_children(tree: DraftTree, depth_limit: Tensor | None) -> Tensor:
    """Return the children [B, M, C] of `tree` with -1 for those deeper than `depth_limit` int64 [B]."""
    if depth_limit is None:
        return tree.children
    too_deep = tree.depths >= depth_limit[:, None]
    return tree.children.masked_fill(too_deep[:, :, None], -1)


def verify(
    tree: DraftTree,
    target_probs: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    uniforms: Tensor,
    noise: Tensor,
    depth_limit: Tensor | None = None,
    accept: Accept | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees by sampling and return what each commits.

    `target_probs` float32 [B, M, V] is p at every node, `table` int [V, >= relaxation.columns] the nearest codes (None
    for the strict rule), `uniforms` [B, M, C] in [0, 1) decides on children, `noise` [B, V] ~ Exp(1) draws the bonus
    token. `depth_limit` int64 [B] is the depth drafted to (free positions - 1); 0 or less drafts nothing. `accept`
    replaces the rule, for tests of broken rules. `position` int64 [B], the tokens committed so far, is for rules that
    read it. docs/algorithms.md, sections 3 and 4.
    """
    children, acceptance = accept_tree(tree, target_probs, relaxation, table, depth_limit, accept, position)
    hit = tree.rows(uniforms) < acceptance.accept
    first, taken = first_true(hit), hit.any(dim=1)
    tried = (torch.arange(hit.shape[1], device=hit.device) <= first[:, None]) | ~taken[:, None]
    # Where a walk goes from each row, with what masses; ranks are -1 or -2 as in Verdict where it ends.
    rank_at = torch.where(taken, first, (children >= 0).any(dim=1).long() - 2)
    child_at = children.gather(1, first[:, None]).squeeze(1)
    accepted_at = torch.where(taken, acceptance.mass.gather(1, first[:, None]).squeeze(1), 0.0)
    tried_at = torch.where(tried, acceptance.mass, 0.0).sum(dim=1)

    images = torch.arange(len(tree.tokens), device=tree.tokens.device)
    node, moving = torch.zeros_like(images), torch.ones_like(images, dtype=torch.bool)
    neighbour_mass, neighbour_mass_tried = noise.new_zeros(len(images)), noise.new_zeros(len(images))
    path, ranks = [node], []
    for _ in range(tree.max_depth):
        row, internal = _row_of(tree, node, images)
        here = moving & internal
        rank = torch.where(here, rank_at[row], -2)
        moving = rank >= 0
        neighbour_mass = neighbour_mass + torch.where(here, accepted_at[row], 0.0)
        neighbour_mass_tried = neighbour_mass_tried + torch.where(here, tried_at[row], 0.0)
        node = torch.where(moving, child_at[row], node)
        path.append(torch.where(moving, node, -1))
        ranks.append(rank)
    row, internal = _row_of(tree, node, images)
    own = target_probs[images, node]
    rejected = internal & (rank_at[row] == -1)
    next_probs = torch.where(rejected[:, None], acceptance.final(row, own), own)
    trail = torch.stack(path, dim=1)
    accepted, tokens = committed_tokens(tree, trail, sample(next_probs, noise))
    return Verdict(trail, accepted, tokens, torch.stack(ranks, dim=1), neighbour_mass, neighbour_mass_tried, next_probs)


def _row_of(tree: DraftTree, node: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row [B] of `accept_tree` of the nodes [B], and whether they have one."""
    slot = tree.layout.slots[node]
    return slot.clamp_min(0) * len(images) + images, slot >= 0


def committed_tokens(tree: DraftTree, path: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return (accepted [B], tokens [B, D + 1]) of a `path` [B, D + 1] and the bonus token `last` [B]."""
    drafts, on_path = path[:, 1:], path[:, 1:] >= 0
    accepted = on_path.sum(dim=1)
    tokens = torch.zeros_like(path)
    tokens[:, :-1] = torch.where(on_path, tree.tokens.gather(1, drafts.clamp_min(0)), 0)
    return accepted, tokens.scatter_(1, accepted[:, None], last[:, None])


def verify_greedy(
    tree: DraftTree,
    guided_logits: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees at temperature 0 and return what each commits.

    `guided_logits` [B, M, V] float32; the others as in `verify`. A child is accepted when it is the argmax of its
    parent's p (strict) or of p~; among the longest paths of accepted drafts the first in `tree.path_order` wins; the
    bonus token is the argmax of the unrelaxed p at its end. `neighbour_mass_tried` of the Verdict counts children of
    all nodes on the winning path. docs/algorithms.md, section 3.
    """
    children = offered_children(tree, depth_limit)
    # The argmax of the logits is that of p, without the ties that rounding in the softmax makes.
    best = guided_logits.argmax(dim=-1)
    agreed, mass = _accept_alone(tree, children, guided_logits, best, relaxation, table, Place(tree, position))
    winner, on_path, path = longest_path(tree, children, agreed)
    images = torch.arange(len(winner), device=winner.device)
    accepted, tokens = committed_tokens(tree, path, best[images, winner])
    child_rank, neighbour_mass = along_path(tree, children, mass, on_path, path)
    neighbour_mass_tried = torch.where(on_path, mass.sum(dim=-1), 0.0).sum(dim=1)
    next_probs = greedy_probabilities(guided_logits[images, winner])
    return Verdict(path, accepted, tokens, child_rank, neighbour_mass, neighbour_mass_tried, next_probs)


def longest_path(tree: DraftTree, children: Tensor, agreed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last node [B] of the first of the longest paths of agreed `children`, who is on it, and the path.

    `agreed` bool and `children` [B, M, C]; who is on it bool [B, M]; the path as in `Verdict`.
    """
    reached = torch.zeros_like(tree.tokens, dtype=torch.bool)
    # Slots without an agreed child write to the root, which counts as accepted anyway.
    reached.scatter_(1, torch.where(agreed, children, 0).flatten(1), True)
    reached[:, 0] = True
    whole = ~(tree.attention & ~reached[:, None, :]).any(dim=-1)
    length = torch.where(whole, tree.depths, -1)
    longest = length == length.amax(dim=1, keepdim=True)
    winner = torch.where(longest, tree.path_order, tree.path_order.amax() + 1).argmin(dim=1)  # the path's last node
    on_path = tree.attention[torch.arange(len(winner), device=winner.device), winner]
    path = _by_depth(tree, on_path, torch.arange(on_path.shape[1], device=winner.device).expand_as(on_path))
    return winner, on_path, path


def _accept_alone(
    tree: DraftTree,
    children: Tensor,
    logits: Tensor,
    best: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    place: Place,
) -> tuple[Tensor, Tensor]:
    """Return (agreed bool [B, M, C], m(x) float32 [B, M, C]), both empty where nothing is offered."""
    tokens = tree.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
    agreed = tokens == best[:, :, None]
    mass = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    if relaxation.merges:
        rows = tree.rows(tokens)
        p = greedy_probabilities(tree.rows(logits))
        for rank, nodes in enumerate(tree.layout.active):
            held, x = tree.layout.nodes[:nodes], rows[: nodes * len(tokens), rank]
            tilde, lent = relaxed(p[: len(x)], x, table, relaxation, place)
            agreed[:, held, rank] |= (tilde.argmax(dim=-1) == x).view(nodes, -1).T
            mass[:, held, rank] = lent.view(nodes, -1).T
    return agreed & (children >= 0), torch.where(children >= 0, mass, 0.0)


def _by_depth(tree: DraftTree, on_path: Tensor, values: Tensor) -> Tensor:
    """Return [B, D + 1]: the values [B, M] of the nodes on the path at their depths, -1 behind its end."""
    held = torch.full((len(values), tree.max_depth + 2), -1, dtype=torch.int64, device=values.device)
    return held.scatter_(1, torch.where(on_path, tree.depths, tree.max_depth + 1), values)[:, :-1]


def along_path(tree: DraftTree, children: Tensor, mass: Tensor, on_path: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Return child_rank [B, D] along the winning path, as in Verdict, and the masses of its children summed [B]."""
    above, goes_on = path[:, :-1], path[:, 1:] >= 0
    offered = (children >= 0).any(dim=-1)
    # -1 where a node of the path offers children, -2 elsewhere; then the rank where the path goes on.
    ended = torch.where(above >= 0, _by_depth(tree, on_path, offered.long() - 2)[:, :-1], -2)
    at = above.clamp_min(0)[:, :, None].expand(-1, -1, children.shape[2])
    rank = torch.where(goes_on, first_true(children.gather(1, at) == path[:, 1:, None]), ended)
    accepted = mass.gather(1, at).gather(2, rank.clamp_min(0)[:, :, None]).squeeze(2)
    return rank, torch.where(rank >= 0, accepted, 0.0).sum(dim=1)
