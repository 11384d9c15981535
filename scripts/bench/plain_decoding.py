"""Plain decoding of one image: a Python walk over children, distributions of V numbers for each, trees made anew.

The same mathematics as the package (docs/algorithms.md, sections 1 to 4, `exact` residuals, temperature 1, no filters),
written as the published code is: one child after the other, the host deciding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.models.networks.conditions import Condition
from lantern_bench.utils.clock import now
from scripts.bench.plain_network import PlainDrafter, PlainTarget

Path = tuple[int, ...]


@dataclass
class Course:
    """One image: its tokens, committed a step, and the seconds behind the prefill."""

    tokens: list[int]
    committed: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Tree:
    """Nodes with the root first: token, parent, children in the order of trial, q of each child when it was drawn.

    `attention` bool [M, M] where it is the shape's, for the whole tree or the first nodes of it.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    children: list[list[int]]
    attention: Tensor | None = None
    q: dict[int, Tensor] = field(default_factory=dict)


def guided(logits: Tensor, scale: float) -> Tensor:
    """[2, n, V] -> [n, V]."""
    cond = logits[0]
    uncond = logits[1]
    return uncond + scale * (cond - uncond)


def probabilities(logits: Tensor, scale: float) -> Tensor:
    return torch.softmax(guided(logits, scale), dim=-1)


class Plain:
    """A target, a drafter and the nearest codes."""

    def __init__(
        self, target: PlainTarget, drafter: PlainDrafter, table: Tensor, scale: float
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.table = table
        self.scale = scale
        self.grid = target.target.image_tokens

    # ---- one token a forward

    @torch.inference_mode()
    def autoregressive(
        self, condition: Condition, noise: torch.Generator, tokens: int, greedy: bool = False
    ) -> Course:
        logits, _ = self.target.prefill(condition)
        out = [self._next(probabilities(logits[:, -1:], self.scale)[0], noise, greedy)]
        course = Course([])
        began = now()
        while len(out) < tokens:
            logits, _ = self.target.forward(
                out[-1].view(1),
                torch.tensor([self.target.length]),
                torch.ones(1, 1, dtype=torch.bool),
            )
            out.append(self._next(probabilities(logits, self.scale)[0], noise, greedy))
            course.committed.append(1)
        course.tokens = torch.stack(out).tolist()
        course.seconds = now() - began
        return course

    # ---- a tree a step

    @torch.inference_mode()
    def speculative(
        self,
        condition: Condition,
        noise: torch.Generator,
        tokens: int,
        paths: tuple[Path, ...] | None = None,
        dynamic: tuple[int, int, int] | None = None,
        rule: tuple[str, int, float] | None = None,
        greedy: bool = False,
    ) -> Course:
        """`paths` of a static tree, or `dynamic` nodes, depth and beam; `rule` additive or multiplicative, k, bound."""
        logits, features = self.target.prefill(condition)
        first = self._next(probabilities(logits[:, -1:], self.scale)[0], noise, greedy)
        out = [int(first)]
        root = self.drafter.prefill(condition, features, first)
        course = Course(out)
        began = now()
        while len(out) < tokens:
            limit = self.grid - 1 - len(out)
            at = self.drafter.length
            if paths is not None:
                tree = self._static(
                    token=out[-1], root=root, paths=paths, noise=noise, limit=limit, greedy=greedy
                )
            else:
                assert dynamic is not None
                tree = self._dynamic(token=out[-1], root=root, shape=dynamic, limit=limit)
            self.drafter.cut(at)
            before = self.target.length
            seen = attention_of(tree)
            logits, features = self.target.forward(
                torch.tensor(tree.tokens), torch.tensor(tree.depths) + before, seen
            )
            path, last = self._walk(
                tree=tree, logits=guided(logits, self.scale), rule=rule, noise=noise, greedy=greedy
            )
            self.target.keep(before, path)
            new = [tree.tokens[node] for node in path[1:]] + [last]
            out += new
            course.committed.append(len(new))
            fed = len(new)
            root = self.drafter.forward(
                torch.tensor(new),
                features[:, path],
                torch.arange(at, at + fed),
                torch.ones(fed, fed).bool().tril(),
            )
        course.tokens = out[:tokens]
        course.seconds = now() - began
        return course

    def _next(self, p: Tensor, noise: torch.Generator, greedy: bool) -> Tensor:
        return p.argmax() if greedy else torch.multinomial(p, 1, generator=noise)[0]

    def _static(
        self,
        token: int,
        root: tuple[Tensor, Tensor],
        paths: tuple[Path, ...],
        noise: torch.Generator,
        limit: int,
        greedy: bool,
    ) -> Tree:
        """EAGLE-1: a fixed shape, a forward of the drafter for each level."""
        levels, attention = shape_of(paths)
        tree = Tree(tokens=[token], parents=[-1], depths=[0], children=[[]], attention=attention)
        logits = root[0][:, -1:]
        features = root[1][:, -1:]
        extended = 0
        for depth, level in enumerate(levels[:limit], start=1):
            if depth > 1:
                extended += len(level.nodes)
                position = self.drafter.length - (extended - len(level.nodes)) + depth - 2
                logits, features = self.drafter.forward(
                    torch.tensor([tree.tokens[node] for node in level.nodes]),
                    features[:, level.slots],
                    torch.full((len(level.nodes),), position),
                    level.seen,
                )
            q = probabilities(logits, self.scale)
            most = max(level.fanout)
            drawn = (
                q.topk(most).indices
                if greedy
                else torch.multinomial(q, most, replacement=False, generator=noise)
            )
            for node, left, row, fanout in zip(
                level.nodes, q, drawn.tolist(), level.fanout, strict=True
            ):
                for token in row[:fanout]:
                    tree.q[len(tree.tokens)] = left
                    tree.children[node].append(len(tree.tokens))
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.depths.append(depth)
                    tree.children.append([])
                    left = left.clone()
                    left[token] = 0
                    left = left / left.sum()
        return tree

    def _dynamic(
        self, token: int, root: tuple[Tensor, Tensor], shape: tuple[int, int, int], limit: int
    ) -> Tree:
        """EAGLE-2: the best of a beam, then the best of all."""
        nodes, rounds, beam = shape
        q = probabilities(root[0][:, -1:], self.scale)
        best = q[0].topk(beam)
        tokens = [best.indices]
        scores = [best.values.log()]
        parents = [torch.full((beam,), -1)]
        depths = [torch.ones(beam, dtype=torch.int64)]
        numbers = torch.arange(beam)
        reach = scores[0]
        frontier = best.indices
        features = root[1][:, -1:].expand(-1, beam, -1)
        seen = torch.eye(beam, dtype=torch.bool)
        start = self.drafter.length
        for depth in range(2, min(rounds, limit) + 1):
            positions = torch.full((beam,), start + depth - 2)
            logits, out = self.drafter.forward(frontier, features, positions, seen)
            top = probabilities(logits, self.scale).topk(beam, dim=-1)
            reached = reach[:, None] + top.values.log()
            tokens.append(top.indices.flatten())
            scores.append(reached.flatten())
            parents.append(numbers[:, None].expand(-1, beam).flatten())
            depths.append(torch.full((beam * beam,), depth))
            chosen = reached.flatten().topk(beam)
            first = sum(len(part) for part in tokens[:-1])
            slots = chosen.indices // beam
            numbers = first + chosen.indices
            reach = chosen.values
            frontier = tokens[-1][chosen.indices]
            features = out[:, slots]
            seen = torch.cat([seen[slots], torch.eye(beam, dtype=torch.bool)], dim=1)
        if limit < 1:
            return Tree(tokens=[token], parents=[-1], depths=[0], children=[[]])
        flat = [torch.cat(part) for part in (tokens, scores, parents, depths)]
        selected = flat[1].topk(min(nodes, len(flat[1]))).indices.sort().values.tolist()
        place = {candidate: node + 1 for node, candidate in enumerate(selected)} | {-1: 0}
        tree = Tree(
            tokens=[token],
            parents=[-1],
            depths=[0],
            children=[[] for _ in range(len(selected) + 1)],
        )
        for candidate in selected:
            node = place[candidate]
            parent = place[int(flat[2][candidate])]
            tree.tokens.append(int(flat[0][candidate]))
            tree.parents.append(parent)
            tree.depths.append(int(flat[3][candidate]))
            tree.children[parent].append(node)
        return tree

    def _walk(
        self,
        tree: Tree,
        logits: Tensor,
        rule: tuple[str, int, float] | None,
        noise: torch.Generator,
        greedy: bool,
    ) -> tuple[list[int], int]:
        """Section 3, one child after the other."""
        path = [0]
        while True:
            p = torch.softmax(logits[path[-1]], dim=-1)
            taken = None
            for child in tree.children[path[-1]]:
                x = tree.tokens[child]
                if greedy:
                    accepted = x == int(p.argmax())
                else:
                    mass, merged = self._merged(p, x, rule)
                    q = tree.q.get(child)
                    share = 1.0 if q is None else float(q[x])
                    accepted = float(torch.rand((), generator=noise)) * share < float(p[x]) + mass
                    if not accepted:
                        p = rejected(p=p, q=q, x=x, mass=mass, merged=merged)
                if accepted:
                    taken = child
                    break
            if taken is None:
                last = p.argmax() if greedy else torch.multinomial(p, 1, generator=noise)[0]
                return path, int(last)
            path.append(taken)

    def _merged(
        self, p: Tensor, x: int, rule: tuple[str, int, float] | None
    ) -> tuple[float, Tensor]:
        if rule is None:
            return 0.0, torch.empty(0, dtype=torch.int64)
        name, neighbours, bound = rule
        near = self.table[x, :neighbours].long()
        running = p[near].cumsum(0)
        limit = bound if name == "additive" else (bound - 1) * float(p[x])
        count = int((running <= limit).cumprod(0).sum())
        return (float(running[count - 1]) if count else 0.0), near[:count]


def rejected(p: Tensor, q: Tensor | None, x: int, mass: float, merged: Tensor) -> Tensor:
    """The exact residual."""
    tilde = p.clone()
    tilde[merged] = 0
    tilde[x] += mass
    if q is None:
        tilde[x] = 0
    else:
        tilde = (tilde - q).clamp_min(0)
    total = tilde.sum()
    return tilde / total if total > 0 else p


def attention_of(tree: Tree) -> Tensor:
    """Who sees whom, bool [M, M]."""
    if tree.attention is not None:
        return tree.attention[: len(tree.tokens), : len(tree.tokens)]
    seen = torch.eye(len(tree.tokens), dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class Level(NamedTuple):
    """The nodes of one depth that have children.

    Their numbers, how many children each has, the slots of their parents among those of the depth above, and which of
    the nodes extended so far each sees.
    """

    nodes: list[int]
    fanout: list[int]
    slots: list[int]
    seen: Tensor


@cache
def shape_of(paths: tuple[Path, ...]) -> tuple[list[Level], Tensor]:
    """The levels of a static tree and who sees whom in it, made once as the published code does."""
    assert list(paths) == sorted(paths, key=lambda path: (len(path), path)), (
        "nodes are numbered as they are drawn"
    )
    number: dict[Path, int] = {path: node for node, path in enumerate(((), *paths))}
    levels: list[Level] = []
    above: list[Path] = []
    extended: list[Path] = []
    for depth in range(len(paths[-1])):
        inner = [
            path
            for path in number
            if len(path) == depth and any(child[:-1] == path for child in paths)
        ]
        extended += inner if depth else []
        fanout = [sum(child[:-1] == path for child in paths) for path in inner]
        slots = [above.index(path[:-1]) for path in inner] if depth else [0]
        seen = torch.tensor([[path[: len(other)] == other for other in extended] for path in inner])
        levels.append(
            Level(nodes=[number[path] for path in inner], fanout=fanout, slots=slots, seen=seen)
        )
        above = inner
    every = [[path[: len(other)] == other for other in number] for path in number]
    return levels, torch.tensor(every)
