"""The acceptance of drafts as the papers have it, in plain Python: one node, one draft after the other.

Read this first. Decoding runs `children.py`, which computes the same for all nodes of a batch at once, and `verify.py`,
which goes from an accepted draft to the drafts below it; `tests/decoding/acceptance/test_reference.py` compares the two forms.

    p   the target's distribution of the next token; after a rejection, of what is still to be given out
    q   what the drafts were drawn from, one after the other without replacement
    x   a draft
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Distribution: TypeAlias = list[float]
Rule: TypeAlias = Callable[[Distribution, Distribution, int], tuple[float, Distribution]]
"""(p, q, x) -> the probability to accept x, and the weights that replace p if x is rejected."""


def verify_node(
    p: Distribution,
    q: Distribution | None,
    drafts: Sequence[int],
    uniforms: Sequence[float],
    rule: Rule,
) -> tuple[int | None, Distribution]:
    """Accept one of the drafts below a node, or none.

    Args:
        p: The target's distribution at the node.
        q: The distribution that the drafts were drawn from; None for deterministic drafts, each of probability 1.
        drafts: The tokens, in the order in which they were drawn.
        uniforms: A random number from [0, 1) for each draft.
        rule: How to decide on a draft.

    Returns:
        The accepted draft, or None and the distribution that the next token is drawn from instead, the residual.

    Token 0 is a likely draft and an unlikely token; what its rejection leaves of p lies all at token 1:

    >>> verify_node(p=[0.25, 0.75], q=[0.5, 0.5], drafts=[0], uniforms=[0.6], rule=strict)
    (None, [0.0, 1.0])

    LANTERN accepts it, where its code is near that of token 1 and may take as much as .75:

    >>> lantern = neighbours(nearest=[[1], [0]], limit=lambda p, x: 0.75)
    >>> verify_node(p=[0.25, 0.75], q=[0.5, 0.5], drafts=[0], uniforms=[0.6], rule=lantern)
    (0, [0.25, 0.75])
    """
    for x, uniform in zip(drafts, uniforms, strict=True):
        drawn_from = one_hot(x, len(p)) if q is None else q
        probability, residual = rule(p, drawn_from, x)
        if uniform < probability:
            return x, p
        p = normalised(residual)
        if q is not None:
            q = normalised([0.0 if token == x else weight for token, weight in enumerate(q)])
    return None, p


def strict(p: Distribution, q: Distribution, x: int) -> tuple[float, Distribution]:
    """Decide as speculative sampling does, which keeps the target's distribution (arXiv 2211.17192, 2302.01318)."""
    return min(1.0, p[x] / q[x]), positive_difference(p, q)


def neighbours(
    nearest: Sequence[Sequence[int]], limit: Callable[[Distribution, int], float]
) -> Rule:
    """Make the rule of LANTERN: x also takes the mass of its nearest codes (arXiv 2410.03355).

    Args:
        nearest: The nearest codes of each code, nearest first.
        limit: (p, x) -> the most mass that x may take: delta in LANTERN, (lambda - 1) p(x) in LANTERN++.
    """

    def rule(p: Distribution, q: Distribution, x: int) -> tuple[float, Distribution]:
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

    return rule


def by_probability(probability: Callable[[Distribution, Distribution], Sequence[float]]) -> Rule:
    """Make a rule of the probability f to accept each token, a function of p and q.

    Acceptance gives out q(x) f(x) of every token x, and the residual is what that leaves of p.
    """

    def rule(p: Distribution, q: Distribution, x: int) -> tuple[float, Distribution]:
        f = probability(p, q)
        accepted = [weight * chance for weight, chance in zip(q, f, strict=True)]
        return f[x], positive_difference(p, accepted)

    return rule


def positive_difference(p: Distribution, q: Distribution) -> Distribution:
    """Return max(p - q, 0) of each token."""
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def normalised(weights: Distribution) -> Distribution:
    """Return weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def one_hot(x: int, size: int) -> Distribution:
    """Return the distribution that gives x alone."""
    return [float(token == x) for token in range(size)]
