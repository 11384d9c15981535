"""Verification: walk down draft trees, by sampling or greedily (docs/algorithms.md, section 3).

`verify` accepts children with the probabilities of the rule and samples the bonus token where the walk ends.
`verify_greedy` accepts each child alone, and the longest path of accepted drafts wins; it has no residuals and no
random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, DraftView, relaxed_distribution
from lantern_bench.decoding.sampling import greedy_probabilities, sample
from lantern_bench.decoding.tree import DraftTree, first_true


@dataclass(frozen=True)
class Verdict:
    """What one step commits, for each of B images and a tree of depth D."""

    path: Tensor  # int64 [B, D + 1], node numbers from the root to the last accepted node, then -1
    accepted: Tensor  # int64 [B], number of accepted drafts
    tokens: Tensor  # int64 [B, D + 1], the accepted drafts, then the bonus token, then 0
    child_rank: Tensor  # int64 [B, D], rank of the accepted child by depth; -1 all were rejected, -2 none was offered
    neighbour_mass: Tensor  # float32 [B], m(x) summed over accepted drafts
    neighbour_mass_tried: Tensor  # float32 [B], m(x) summed over all drafts tried
    next_probs: Tensor  # float32 [B, V], the distribution of the bonus token (greedy: p of the last accepted node)


def accept_tree(
    tree: DraftTree,
    target_probs: Tensor,
    rule: AcceptanceRule,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Acceptance]:
    """Return the children int64 [N, C] of all nodes of B trees (-1: none within the depth limit) and their acceptance.

    Row `slot * B + image` is the node `tree.layout.nodes[slot]`. Arguments as of `verify`.
    """
    numbers = offered_children(tree, depth_limit)
    tokens = tree.rows(tree.tokens.gather(1, numbers.clamp_min(0).flatten(1)).view_as(numbers))
    numbers, images = tree.rows(numbers), len(tree.tokens)
    depth = tree.rows(tree.depths) + 1
    children = Children(
        p=tree.rows(target_probs),
        q=None if tree.q is None else tree.rows(tree.q),
        tokens=tokens,
        offered=numbers >= 0,
        nodes_per_rank=[nodes * images for nodes in tree.layout.active],
        depth=depth,
        position=None if position is None else _positions(position, depth),
        layout=tree.layout,
    )
    return numbers, (rule.accept or accept_children)(children, rule)


def _positions(start: Tensor, depth: Tensor) -> Tensor:
    """Return the positions in the image [N] of children at `depth` [N], `start` [B] that of the root's children."""
    return start.repeat(len(depth) // len(start)) + depth - 1


def offered_children(tree: DraftTree, depth_limit: Tensor | None) -> Tensor:
    """Return the children [B, M, C] of `tree` with -1 for those deeper than `depth_limit` int64 [B]."""
    if depth_limit is None:
        return tree.children
    too_deep = tree.depths >= depth_limit[:, None]
    return tree.children.masked_fill(too_deep[:, :, None], -1)


def verify(
    tree: DraftTree,
    target_probs: Tensor,
    rule: AcceptanceRule,
    uniforms: Tensor,
    noise: Tensor,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees by sampling and return what each commits.

    `target_probs` float32 [B, M, V] is p at every node, `uniforms` [B, M, C] in [0, 1) decides on children, `noise`
    [B, V] ~ Exp(1) draws the bonus token. `depth_limit` int64 [B] is the depth drafted to (free positions - 1); 0 or
    less drafts nothing. `position` int64 [B], the tokens committed so far, is for rules that read it.
    docs/algorithms.md, sections 3 and 4.
    """
    children, acceptance = accept_tree(tree, target_probs, rule, depth_limit, position)
    hit = tree.rows(uniforms) < acceptance.accept
    first, moves = first_true(hit), hit.any(dim=1)
    tried = (torch.arange(hit.shape[1], device=hit.device) <= first[:, None]) | ~moves[:, None]
    # Where a walk goes from each row, with what masses; ranks are -1 or -2 as in Verdict where it ends.
    rank_of_row = torch.where(moves, first, (children >= 0).any(dim=1).long() - 2)
    child_of_row = children.gather(1, first[:, None]).squeeze(1)
    mass_of_row = torch.where(moves, acceptance.mass.gather(1, first[:, None]).squeeze(1), 0.0)
    tried_mass_of_row = torch.where(tried, acceptance.mass, 0.0).sum(dim=1)

    images = torch.arange(len(tree.tokens), device=tree.tokens.device)
    node, moving = torch.zeros_like(images), torch.ones_like(images, dtype=torch.bool)
    mass, mass_tried = noise.new_zeros(len(images)), noise.new_zeros(len(images))
    nodes, ranks = [node], []
    for _ in range(tree.max_depth):
        row, internal = _row_of(tree, node, images)
        visited = moving & internal
        rank = torch.where(visited, rank_of_row[row], -2)
        moving = rank >= 0
        mass = mass + torch.where(visited, mass_of_row[row], 0.0)
        mass_tried = mass_tried + torch.where(visited, tried_mass_of_row[row], 0.0)
        node = torch.where(moving, child_of_row[row], node)
        nodes.append(torch.where(moving, node, -1))
        ranks.append(rank)
    row, internal = _row_of(tree, node, images)
    p = target_probs[images, node]
    rejected = internal & (rank_of_row[row] == -1)
    next_probs = torch.where(rejected[:, None], acceptance.bonus_distribution(row, p), p)
    path = torch.stack(nodes, dim=1)
    accepted, tokens = committed_tokens(tree, path, sample(next_probs, noise))
    return Verdict(path, accepted, tokens, torch.stack(ranks, dim=1), mass, mass_tried, next_probs)


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
    rule: AcceptanceRule,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees at temperature 0 and return what each commits.

    `guided_logits` [B, M, V] float32; the others as in `verify`. A child is accepted when it is the argmax of its
    parent's p (strict) or of p~; among the longest paths of accepted drafts the first in `tree.path_order` wins; the
    bonus token is the argmax of the unrelaxed p at its end. `neighbour_mass_tried` of the Verdict counts the children
    of all nodes on the winning path. docs/algorithms.md, section 3.
    """
    children = offered_children(tree, depth_limit)
    # The argmax of the logits is that of p, without the ties that rounding in the softmax makes.
    best = guided_logits.argmax(dim=-1)
    agreed, mass = _accept_alone(tree, children, guided_logits, best, rule, position)
    winner, on_path, path = longest_path(tree, children, agreed)
    images = torch.arange(len(winner), device=winner.device)
    accepted, tokens = committed_tokens(tree, path, best[images, winner])
    child_rank, accepted_mass = along_path(tree, children, mass, on_path, path)
    mass_tried = torch.where(on_path, mass.sum(dim=-1), 0.0).sum(dim=1)
    next_probs = greedy_probabilities(guided_logits[images, winner])
    return Verdict(path, accepted, tokens, child_rank, accepted_mass, mass_tried, next_probs)


def longest_path(tree: DraftTree, children: Tensor, agreed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last node [B] of the first of the longest paths of agreed `children`, who is on it, and the path.

    `agreed` bool and `children` [B, M, C]; who is on it bool [B, M]; the path as in `Verdict`.
    """
    reached = torch.zeros_like(tree.tokens, dtype=torch.bool)
    # Slots without an agreed child write to the root, which counts as accepted anyway.
    reached.scatter_(1, torch.where(agreed, children, 0).flatten(1), True)
    reached[:, 0] = True
    connected = ~(tree.attention & ~reached[:, None, :]).any(dim=-1)
    length = torch.where(connected, tree.depths, -1)
    longest = length == length.amax(dim=1, keepdim=True)
    winner = torch.where(longest, tree.path_order, tree.path_order.amax() + 1).argmin(dim=1)  # the path's last node
    on_path = tree.attention[torch.arange(len(winner), device=winner.device), winner]
    path = _by_depth(tree, on_path, torch.arange(on_path.shape[1], device=winner.device).expand_as(on_path))
    return winner, on_path, path


def _accept_alone(
    tree: DraftTree, children: Tensor, logits: Tensor, best: Tensor, rule: AcceptanceRule, position: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (agreed bool [B, M, C], m(x) float32 [B, M, C]), both empty where nothing is offered."""
    tokens = tree.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
    agreed = tokens == best[:, :, None]
    mass = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    if rule.uses_neighbours:
        rows, depth = tree.rows(tokens), tree.rows(tree.depths) + 1
        positions = None if position is None else _positions(position, depth)
        every_p = greedy_probabilities(tree.rows(logits))
        for rank, nodes in enumerate(tree.layout.active):
            n, parents = nodes * len(tokens), tree.layout.nodes[:nodes]
            x, p = rows[:n, rank], every_p[:n]
            p_x = p.gather(1, x[:, None]).squeeze(1)
            positions_n = None if positions is None else positions[:n]
            relaxed, m = relaxed_distribution(DraftView(rule, x, p_x, None, p, None, depth[:n], positions_n))
            agreed[:, parents, rank] |= (relaxed.argmax(dim=-1) == x).view(nodes, -1).T
            mass[:, parents, rank] = m.view(nodes, -1).T
    return agreed & (children >= 0), torch.where(children >= 0, mass, 0.0)


def _by_depth(tree: DraftTree, on_path: Tensor, values: Tensor) -> Tensor:
    """Return [B, D + 1]: the values [B, M] of the nodes on the path at their depths, -1 behind its end."""
    by_depth = torch.full((len(values), tree.max_depth + 2), -1, dtype=torch.int64, device=values.device)
    return by_depth.scatter_(1, torch.where(on_path, tree.depths, tree.max_depth + 1), values)[:, :-1]


def along_path(tree: DraftTree, children: Tensor, mass: Tensor, on_path: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Return child_rank [B, D] along the winning path, as in Verdict, and the masses of its children summed [B]."""
    parents, goes_on = path[:, :-1], path[:, 1:] >= 0
    offered = (children >= 0).any(dim=-1)
    # -1 where a node of the path offers children, -2 elsewhere; then the rank where the path goes on.
    ended = torch.where(parents >= 0, _by_depth(tree, on_path, offered.long() - 2)[:, :-1], -2)
    rows = parents.clamp_min(0)[:, :, None].expand(-1, -1, children.shape[2])
    rank = torch.where(goes_on, first_true(children.gather(1, rows) == path[:, 1:, None]), ended)
    accepted_mass = mass.gather(1, rows).gather(2, rank.clamp_min(0)[:, :, None]).squeeze(2)
    return rank, torch.where(rank >= 0, accepted_mass, 0.0).sum(dim=1)
