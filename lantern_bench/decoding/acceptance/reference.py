"""The algorithms as the papers have them, in plain Python: one node, one draft after the other.

Read this first. Decoding runs the batched forms, and tests/decoding/acceptance/test_reference.py
compares the two:

- `verify_node`: `children.py` decides on all nodes of a batch at once, `verify.py` walks on.
- `traverse`: `traversal.py`.
- `couple`: `couple` in drafting/jacobi.py.

    p   the target's distribution of the next token; after a rejection the residual
    q   what the drafts were drawn from, one after the other without replacement
    x   a draft
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Distribution: TypeAlias = list[float]
Decide: TypeAlias = Callable[[Distribution, Distribution, int], tuple[float, Distribution]]
"""(p, q, x) -> the probability to accept x, and the weights that replace p if x is rejected."""


def verify_node(
    p: Distribution,
    q: Distribution | None,
    drafts: Sequence[int],
    uniforms: Sequence[float],
    decide: Decide,
) -> tuple[int | None, Distribution]:
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

    >>> verify_node(p=[0.25, 0.75], q=[0.5, 0.5], drafts=[0], uniforms=[0.6], decide=strict)
    (None, [0.0, 1.0])

    LANTERN accepts it if its code is near the code of token 1 and may take a mass of 0.75:

    >>> lantern = by_neighbours(nearest=[[1], [0]], limit=lambda p, x: 0.75)
    >>> verify_node(p=[0.25, 0.75], q=[0.5, 0.5], drafts=[0], uniforms=[0.6], decide=lantern)
    (0, [0.25, 0.75])
    """
    for x, uniform in zip(drafts, uniforms, strict=True):
        drawn_from = one_hot(x, len(p)) if q is None else q
        probability, residual = decide(p, drawn_from, x)
        if uniform < probability:
            return x, p
        p = normalised(residual)
        if q is not None:
            q = without(q, x)
    return None, p


def strict(p: Distribution, q: Distribution, x: int) -> tuple[float, Distribution]:
    """Decide as speculative sampling does, losslessly (arXiv 2211.17192, 2302.01318).

    Args:
        p: The target's distribution.
        q: The distribution that x was drawn from.
        x: The draft.

    Returns:
        The probability to accept x, and the weights that replace p if x is rejected.
    """
    return min(1.0, p[x] / q[x]), positive_difference(p, q)


def by_neighbours(
    nearest: Sequence[Sequence[int]], limit: Callable[[Distribution, int], float]
) -> Decide:
    """Make the rule of LANTERN: x also takes the mass of its nearest codes (arXiv 2410.03355).

    Args:
        nearest: The nearest codes of each code, nearest first.
        limit: (p, x) -> the most mass that x may take: delta in LANTERN, (lambda - 1) p(x) in
            LANTERN++.
    """

    def decide(p: Distribution, q: Distribution, x: int) -> tuple[float, Distribution]:
        relaxed = list(p)
        mass = 0.0
        if p[x] > 0:  # what the target cannot give stays impossible
            for neighbour in nearest[x]:
                if mass + p[neighbour] > limit(p, x):
                    break
                mass += p[neighbour]
                relaxed[neighbour] = 0.0
        relaxed[x] += mass
        return min(1.0, relaxed[x] / q[x]), positive_difference(relaxed, q)

    return decide


def by_probability(probability: Callable[[Distribution, Distribution], Sequence[float]]) -> Decide:
    """Make a rule of the probability f to accept each token, a function of p and q.

    Acceptance gives out q(x) f(x) of every token x; the residual is the rest of p.
    """

    def decide(p: Distribution, q: Distribution, x: int) -> tuple[float, Distribution]:
        f = probability(p, q)
        accepted = [weight * chance for weight, chance in zip(q, f, strict=True)]
        return f[x], positive_difference(p, accepted)

    return decide


class Node(NamedTuple):
    """A node of a draft tree."""

    p: Distribution
    q: Distribution
    # the drafts below it, in the order in which they were drawn
    drafts: Sequence[tuple[int, Node]] = ()


def traverse(
    node: Node, happens: Callable[[float], bool], visit_probability: float = 1.0
) -> tuple[list[int], Distribution] | None:
    """Visit a tree from its leaves to its root (traversal verification, arXiv 2505.12398).

    Args:
        node: The tree.
        happens: (probability) -> whether an event of this probability happens.
        visit_probability: The probability that the visit ends at the node or below it.

    Returns:
        The accepted drafts and the distribution of the next token; None if the visit does not end
        at the node or below it. At the root it always does.

    The draft 0 fails, and the visit ends at the root:

    >>> leaf = Node(p=[0.5, 0.5], q=[0.5, 0.5])
    >>> root = Node(p=[0.25, 0.75], q=[0.5, 0.5], drafts=[(0, leaf)])
    >>> traverse(root, happens=lambda probability: probability > 0.5)
    ([], [0.0, 1.0])
    """
    p = node.p
    q = node.q
    for x, child in node.drafts:
        end = traverse(child, happens, min(1.0, visit_probability * p[x] / q[x]))
        if end is not None:
            drafts, after = end
            return [x, *drafts], after
        residual = positive_difference([visit_probability * weight for weight in p], q)
        owed = sum(residual)
        spare = owed + 1.0 - visit_probability
        if owed > 0:
            p = normalised(residual)
        visit_probability = owed / spare if spare > 0 else 1.0
        q = without(q, x)
    return ([], p) if happens(visit_probability) else None


def couple(p: Distribution, q: Distribution, x: int) -> Distribution:
    """Return what the next draft is drawn from, given the last draft x (maximal coupling).

    Args:
        p: The distribution of the next draft.
        q: The distribution of the last draft.
        x: The last draft.

    If x was drawn from q, the next draft is distributed as p, and equals x as often as possible:

    >>> couple(p=[0.25, 0.75], q=[0.5, 0.5], x=0)
    [0.5, 0.5]
    >>> couple(p=[0.25, 0.75], q=[0.5, 0.5], x=1)
    [0.0, 1.0]
    """
    residual = positive_difference(p, q)
    if sum(residual) == 0:
        return one_hot(x, len(p))
    stays = min(1.0, p[x] / q[x])
    changed = [(1.0 - stays) * weight for weight in normalised(residual)]
    changed[x] += stays
    return changed


def positive_difference(p: Distribution, q: Distribution) -> Distribution:
    """Return max(p - q, 0) of each token."""
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def normalised(weights: Distribution) -> Distribution:
    """Return weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def without(q: Distribution, x: int) -> Distribution:
    """Return q after x has been drawn from it without replacement."""
    left = [0.0 if token == x else weight for token, weight in enumerate(q)]
    return normalised(left) if sum(left) > 0 else left


def one_hot(x: int, size: int) -> Distribution:
    """Return the distribution that gives x alone."""
    return [float(token == x) for token in range(size)]
