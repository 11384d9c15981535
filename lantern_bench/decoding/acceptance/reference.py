"""The algorithms as the papers have them: one node, one draft after the other.

Read this first. Decoding runs the batched forms, and tests/decoding/acceptance/test_reference.py
compares the two:

- `verify_node`: `children.py` decides on all nodes of a batch at once, `verify.py` walks on.
- `traverse`: `traversal.py`.
- `couple`: `couple` in drafting/jacobi.py.

    p   the target's distribution [V] of the next token; after a rejection the residual
    q   what the drafts were drawn from, one after the other without replacement
    x   a draft
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Decide: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Any, Tensor]]
"""(p, q, x) -> the probability to accept x, and the weights that replace p if x is rejected."""


def verify_node(
    p: Tensor,
    q: Tensor | None,
    drafts: Sequence[int],
    uniforms: Sequence[float],
    decide: Decide,
) -> tuple[int | None, Tensor]:
    """Accept one of the drafts below a node, or none.

    Args:
        p: The target's distribution at the node.
        q: The distribution that the drafts were drawn from; None for deterministic drafts, which
            have probability 1.
        drafts: The tokens, in the order in which they were drawn.
        uniforms: A random number from [0, 1) for each draft.
        decide: The rule.

    Returns:
        The accepted draft and p; or None and the residual, which the next token is drawn from.

    Token 0 is a likely draft and an unlikely token. Its rejection leaves all of p at token 1:

    >>> p = torch.tensor([0.25, 0.75])
    >>> q = torch.tensor([0.5, 0.5])
    >>> verify_node(p, q, drafts=[0], uniforms=[0.6], decide=strict)
    (None, tensor([0., 1.]))

    LANTERN accepts it if its code is near the code of token 1 and may take a mass of 0.75:

    >>> lantern = by_neighbours(nearest=[[1], [0]], limit=lambda p, x: 0.75)
    >>> verify_node(p, q, drafts=[0], uniforms=[0.6], decide=lantern)
    (0, tensor([0.2500, 0.7500]))
    """
    for x, uniform in zip(drafts, uniforms, strict=True):
        drawn_from = one_hot(x, p) if q is None else q
        probability, residual = decide(p, drawn_from, x)
        if uniform < probability:
            return x, p
        p = residual / residual.sum()
        if q is not None:
            q = without(q, x)
    return None, p


def strict(p: Tensor, q: Tensor, x: int) -> tuple[Any, Tensor]:
    """Decide as speculative sampling does, losslessly (arXiv 2211.17192, 2302.01318).

    Args:
        p: The target's distribution.
        q: The distribution that x was drawn from.
        x: The draft.

    Returns:
        The probability to accept x, and the weights that replace p if x is rejected.
    """
    return min(1.0, p[x] / q[x]), (p - q).clamp_min(0.0)


def by_neighbours(nearest: Sequence[Sequence[int]], limit: Callable[[Tensor, int], Any]) -> Decide:
    """Make the rule of LANTERN: x also takes the mass of its nearest codes (arXiv 2410.03355).

    Args:
        nearest: The nearest codes of each code, nearest first.
        limit: (p, x) -> the most mass that x may take: delta in LANTERN, (lambda - 1) p(x) in
            LANTERN++.
    """

    def decide(p: Tensor, q: Tensor, x: int) -> tuple[Any, Tensor]:
        relaxed = p.clone()
        mass = torch.zeros_like(p[x])
        if p[x] > 0:  # what the target cannot give stays impossible
            for neighbour in nearest[x]:
                if mass + p[neighbour] > limit(p, x):
                    break
                mass += p[neighbour]
                relaxed[neighbour] = 0.0
        relaxed[x] += mass
        return min(1.0, relaxed[x] / q[x]), (relaxed - q).clamp_min(0.0)

    return decide


def by_probability(probability: Callable[[Tensor, Tensor], Tensor]) -> Decide:
    """Make a rule of the probability f to accept each token, a function of p and q.

    Acceptance gives out q(x) f(x) of every token x; the residual is the rest of p.
    """

    def decide(p: Tensor, q: Tensor, x: int) -> tuple[Any, Tensor]:
        f = probability(p, q)
        return f[x], (p - q * f).clamp_min(0.0)

    return decide


class Node(NamedTuple):
    """A node of a draft tree."""

    p: Tensor
    q: Tensor
    # the drafts below it, in the order in which they were drawn
    drafts: Sequence[tuple[int, Node]] = ()


def traverse(
    node: Node, happens: Callable[[float], bool], visit_probability: float = 1.0
) -> tuple[list[int], Tensor] | None:
    """Visit a tree from its leaves to its root (traversal verification, arXiv 2505.12398).

    Args:
        node: The tree.
        happens: (probability) -> whether an event of this probability happens.
        visit_probability: The probability that the visit ends at the node or below it.

    Returns:
        The accepted drafts and the distribution of the next token; None if the visit does not end
        at the node or below it. At the root it always does.

    The draft 0 fails, and the visit ends at the root:

    >>> q = torch.tensor([0.5, 0.5])
    >>> root = Node(p=torch.tensor([0.25, 0.75]), q=q, drafts=[(0, Node(p=q, q=q))])
    >>> traverse(root, happens=lambda probability: probability > 0.5)
    ([], tensor([0., 1.]))
    """
    p = node.p
    q = node.q
    for x, child in node.drafts:
        end = traverse(child, happens, min(1.0, visit_probability * float(p[x] / q[x])))
        if end is not None:
            drafts, after = end
            return [x, *drafts], after
        residual = (visit_probability * p - q).clamp_min(0.0)
        owed = float(residual.sum())
        spare = owed + 1.0 - visit_probability
        if owed > 0:
            p = residual / owed
        visit_probability = owed / spare if spare > 0 else 1.0
        q = without(q, x)
    return ([], p) if happens(visit_probability) else None


def couple(p: Tensor, q: Tensor, x: int) -> Tensor:
    """Return what the next draft is drawn from, given the last draft x (maximal coupling).

    Args:
        p: The distribution of the next draft.
        q: The distribution of the last draft.
        x: The last draft.

    If x was drawn from q, the next draft is distributed as p, and equals x as often as possible:

    >>> p = torch.tensor([0.25, 0.75])
    >>> q = torch.tensor([0.5, 0.5])
    >>> couple(p, q, x=0)
    tensor([0.5000, 0.5000])
    >>> couple(p, q, x=1)
    tensor([0., 1.])
    """
    residual = (p - q).clamp_min(0.0)
    if residual.sum() == 0:
        return one_hot(x, p)
    stays = min(1.0, float(p[x] / q[x]))
    return (1.0 - stays) * residual / residual.sum() + stays * one_hot(x, p)


def without(q: Tensor, x: int) -> Tensor:
    """Return q after x has been drawn from it without replacement."""
    left = q * (1 - one_hot(x, q))
    return left / left.sum() if left.sum() > 0 else left


def one_hot(x: int, like: Tensor) -> Tensor:
    """Return the distribution that gives x alone, of the size and type of another one."""
    return functional.one_hot(torch.tensor(x), len(like)).to(like)
