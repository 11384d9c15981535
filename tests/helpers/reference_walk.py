"""The oracle of verification: one image, one child after the other, written from the text of
docs/algorithms.md.

Slow and plain on purpose, in numpy, sharing no line with `lantern_bench.decoding`. Arithmetic is in
the dtype of the distributions it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating]


@dataclass
class Rules:
    """The relaxed rule as the text names it: `strict`, `additive` or `multiplicative`, k, bound,
    residual.
    """

    rule: str
    neighbours: int
    bound: float
    residual: str
    table: NDArray[np.integer] | None


@dataclass
class Walk:
    """What the walk did; `looks` lists (depth, token, uniform, current p(x)) for every child that
    used a uniform.
    """

    path: list[int]
    child_rank: list[int]
    next_probs: Vector
    neighbour_mass: float = 0.0
    neighbour_mass_tried: float = 0.0
    emitted_tv: float = 0.0
    smallest_rest: float = 1.0
    looks: list[tuple[int, int, float, float]] = field(default_factory=list)


def merge(p: Vector, x: int, rules: Rules) -> tuple[float, list[int]]:
    """Section 4: m(x) and A(x), the longest prefix of neighbours that keeps the bound."""
    if rules.rule == "strict" or rules.neighbours == 0:
        return p.dtype.type(0), []
    if rules.residual == "exact" and p[x] == 0:
        return p.dtype.type(0), []
    if rules.rule == "additive":
        bound = p.dtype.type(rules.bound)
    else:
        bound = p.dtype.type(p.dtype.type(rules.bound - 1) * p[x])
    total = p.dtype.type(0)
    taken = []
    for neighbour in rules.table[x][: rules.neighbours]:
        if total + p[neighbour] > bound:
            break
        total = total + p[neighbour]
        taken.append(int(neighbour))
    return total, taken


def relax(p: Vector, x: int, mass: float, taken: Sequence[int]) -> Vector:
    """Section 4: the relaxed distribution p~."""
    tilde = p.copy()
    tilde[list(taken)] = 0
    tilde[x] = p[x] + mass
    return tilde


def reject(
    p: Vector, q: Vector | None, x: int, *, mass: float, taken: Sequence[int], rules: Rules
) -> Vector:
    """Sections 3 and 4: the residual before it is renormalised."""
    if rules.residual == "official" and taken:
        zeroed = list(rules.table[x][: rules.neighbours + 1])
        if q is None:
            left = p.copy()
            left[[x, *zeroed]] = 0
            return left
        reduced = q.copy()
        reduced[zeroed] = 0
        return np.maximum(p - reduced, 0)
    tilde = p if rules.residual == "official" else relax(p=p, x=x, mass=mass, taken=taken)
    if q is not None:
        return np.maximum(tilde - q, 0)
    left = tilde.copy()
    left[x] = 0
    return left


def walk(
    children: Sequence[Sequence[int]],
    tokens: Sequence[int],
    p_of: Sequence[Vector],
    q_of: Sequence[Vector] | None,
    *,
    rules: Rules,
    uniform: Callable[[int, int], float],
    depth_limit: int,
) -> Walk:
    """Section 3. `children[n]` are the node numbers below node n (-1: none); `uniform(n, rank)` the
    random numbers.
    """
    done = Walk([0], [], p_of[0])
    node = 0
    depth = 0
    while True:
        own = p_of[node]
        p = own
        q = None if q_of is None else q_of[node]
        offered = [
            (rank, child)
            for rank, child in enumerate(children[node])
            if child >= 0 and depth < depth_limit
        ]
        moved = None
        for rank, child in offered:
            x = tokens[child]
            number = uniform(node, rank)
            done.looks.append((depth + 1, x, number, float(p[x])))
            q_x = 1.0 if q is None else q[x]
            if q_x <= 0:
                continue
            mass, taken = merge(p, x, rules)
            done.neighbour_mass_tried += mass
            done.emitted_tv += float(1 - p[x] if q is None else np.maximum(p - q, 0).sum())
            if number < min(1.0, (p[x] + mass) / q_x):
                done.neighbour_mass += mass
                moved = rank, child
                break
            done.emitted_tv -= 1
            left = reject(p=p, q=q, x=x, mass=mass, taken=taken, rules=rules)
            rest = left.sum()
            done.smallest_rest = min(done.smallest_rest, float(rest) if rest > 0 else 1.0)
            if rest > 0:
                p = left / rest
            elif rules.residual == "official":
                p = np.full_like(p, 1.0 / len(p))
            else:
                p = own
                break
            if q is not None:
                q = q.copy()
                q[x] = 0
                q = q / q.sum() if q.sum() > 0 else q
        if moved is None:
            done.child_rank.append(-1 if offered else -2)
            done.next_probs = p
            return done
        rank, node = moved
        done.child_rank.append(rank)
        depth = depth + 1
        done.path.append(node)


def walk_greedy(
    parents: Sequence[int],
    paths: Sequence[Sequence[int]],
    tokens: Sequence[int],
    p_of: Sequence[Vector],
    rules: Rules,
) -> tuple[list[int], int]:
    """Section 3, last paragraph: (winning path without its rejected end, next token).

    `paths` in path order.
    """
    best: list[int] = [0]
    for path in paths:
        accepted = [0]
        for node in path[1:]:
            p = p_of[parents[node]]
            mass, taken = merge(p, tokens[node], rules)
            if int(relax(p=p, x=tokens[node], mass=mass, taken=taken).argmax()) != tokens[node]:
                break
            accepted.append(node)
        if len(accepted) > len(best):
            best = accepted
    return best, int(p_of[best[-1]].argmax())
