"""Plain decoding of one image, written as the published code is.

The host decides on one child after the other, with a distribution of V numbers for each, and trees
are built anew in every step. The mathematics is the package's (docs/algorithms.md, sections 1 to 4,
`exact` residuals, temperature 1, no filters).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.models.networks.target import Condition
from lantern_bench.utils.clock import now
from scripts.bench.plain_network import PlainDrafter, PlainTarget

Path = tuple[int, ...]


@dataclass
class Course:
    """How one image was decoded."""

    tokens: list[int]
    committed: list[int] = field(default_factory=list)  # tokens of each step
    seconds: float = 0.0  # after the prefill


@dataclass
class Tree:
    """Draft tokens; the root is node 0."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    children: list[list[int]] = field(default_factory=lambda: [[]])  # in the order of trial
    # Who sees whom in the whole tree, bool [M, M], if its shape is fixed.
    attention: Tensor | None = None
    q: dict[int, Tensor] = field(default_factory=dict)  # of each child when it was drawn

    def add(self, token: int, parent: int, depth: int) -> int:
        """Add a node; return its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.children.append([])
        self.children[parent].append(node)
        return node


def guided(logits: Tensor, scale: float) -> Tensor:
    """Combine logits with and without condition: [2, n, V] -> [n, V]."""
    cond = logits[0]
    uncond = logits[1]
    return uncond + scale * (cond - uncond)


def probabilities(logits: Tensor, scale: float) -> Tensor:
    """Return the distributions [n, V] that tokens are drawn from."""
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
        self, condition: Condition, noise: torch.Generator, tokens: int, *, greedy: bool = False
    ) -> Course:
        """Decode one token per forward.

        Args:
            condition: The condition of the image.
            noise: Draws the tokens.
            tokens: Number of tokens.
            greedy: Take the most likely token.
        """
        logits, _ = self.target.prefill(condition)
        p = probabilities(logits[:, -1:], self.scale)[0]
        out = [_next(p, noise, greedy=greedy)]
        course = Course([])
        itself = torch.ones(1, 1, dtype=torch.bool)
        began = now()
        while len(out) < tokens:
            position = torch.tensor([self.target.length])
            logits, _ = self.target.forward(out[-1].view(1), position, itself)
            p = probabilities(logits, self.scale)[0]
            out.append(_next(p, noise, greedy=greedy))
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
        *,
        paths: tuple[Path, ...] | None = None,
        dynamic: tuple[int, int, int] | None = None,
        rule: tuple[str, int, float] | None = None,
        greedy: bool = False,
    ) -> Course:
        """Decode a draft tree per forward.

        Args:
            condition: The condition of the image.
            noise: Draws the tokens.
            tokens: Number of tokens.
            paths: A static tree.
            dynamic: Nodes, depth and beam of a dynamic tree, if it is not static.
            rule: `additive` or `multiplicative`, number of neighbours, bound; None is strict.
            greedy: Take the most likely tokens.
        """
        logits, features = self.target.prefill(condition)
        p = probabilities(logits[:, -1:], self.scale)[0]
        first = _next(p, noise, greedy=greedy)
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
            path, last = self._verify(
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

    def _static(
        self,
        *,
        token: int,
        root: tuple[Tensor, Tensor],
        paths: tuple[Path, ...],
        noise: torch.Generator,
        limit: int,
        greedy: bool,
    ) -> Tree:
        """Draft as EAGLE-1: a fixed shape, and a forward of the drafter for each level."""
        levels, attention = shape_of(paths)
        tree = Tree([token], attention=attention)
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
            if greedy:
                drawn = q.topk(most).indices
            else:
                drawn = torch.multinomial(q, most, replacement=False, generator=noise)
            for row, node in enumerate(level.nodes):
                q_left = q[row]
                for drawn_token in drawn[row, : level.fanout[row]].tolist():
                    child = tree.add(drawn_token, parent=node, depth=depth)
                    tree.q[child] = q_left
                    q_left = q_left.clone()
                    q_left[drawn_token] = 0
                    q_left = q_left / q_left.sum()
        return tree

    def _dynamic(
        self, token: int, root: tuple[Tensor, Tensor], shape: tuple[int, int, int], limit: int
    ) -> Tree:
        """Draft as EAGLE-2: the best of a beam, then the best of all."""
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
            return Tree([token])
        all_scores = torch.cat(scores)
        best_nodes = all_scores.topk(min(nodes, len(all_scores))).indices
        all_tokens = torch.cat(tokens)
        all_parents = torch.cat(parents)
        all_depths = torch.cat(depths)
        tree = Tree([token])
        place = {-1: 0}
        for candidate in best_nodes.sort().values.tolist():
            place[candidate] = tree.add(
                int(all_tokens[candidate]),
                parent=place[int(all_parents[candidate])],
                depth=int(all_depths[candidate]),
            )
        return tree

    def _verify(
        self,
        *,
        tree: Tree,
        logits: Tensor,
        rule: tuple[str, int, float] | None,
        noise: torch.Generator,
        greedy: bool,
    ) -> tuple[list[int], int]:
        """Return the accepted path and one more token (section 3), one child after the other."""
        path = [0]
        while True:
            p = torch.softmax(logits[path[-1]], dim=-1)
            taken = None
            for child in tree.children[path[-1]]:
                x = tree.tokens[child]
                if greedy:
                    accepted = x == int(p.argmax())
                else:
                    mass, neighbours = self._neighbour_mass(p, x, rule)
                    q = tree.q.get(child)
                    q_x = 1.0 if q is None else float(q[x])
                    uniform = float(torch.rand((), generator=noise))
                    accepted = uniform * q_x < float(p[x]) + mass
                    if not accepted:
                        p = residual(p, q, x, mass=mass, neighbours=neighbours)
                if accepted:
                    taken = child
                    break
            if taken is None:
                return path, int(_next(p, noise, greedy=greedy))
            path.append(taken)

    def _neighbour_mass(
        self, p: Tensor, x: int, rule: tuple[str, int, float] | None
    ) -> tuple[float, Tensor]:
        """Return the neighbour mass of x, and the codes that it comes from."""
        if rule is None:
            return 0.0, torch.empty(0, dtype=torch.int64)
        name, neighbours, bound = rule
        near = self.table[x, :neighbours].long()
        running = p[near].cumsum(0)
        limit = bound if name == "additive" else (bound - 1) * float(p[x])
        count = int((running <= limit).cumprod(0).sum())
        mass = float(running[count - 1]) if count else 0.0
        return mass, near[:count]


def _next(p: Tensor, noise: torch.Generator, *, greedy: bool) -> Tensor:
    return p.argmax() if greedy else torch.multinomial(p, 1, generator=noise)[0]


def residual(p: Tensor, q: Tensor | None, x: int, *, mass: float, neighbours: Tensor) -> Tensor:
    """Return the exact residual after x was rejected with its neighbour mass."""
    tilde = p.clone()
    tilde[neighbours] = 0
    tilde[x] += mass
    if q is None:
        tilde[x] = 0
    else:
        tilde = (tilde - q).clamp_min(0)
    total = tilde.sum()
    return tilde / total if total > 0 else p


def attention_of(tree: Tree) -> Tensor:
    """Return who sees whom, bool [M, M]."""
    count = len(tree.tokens)
    if tree.attention is not None:
        # A tree at the end of the image has only the first nodes of its shape.
        return tree.attention[:count, :count]
    seen = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class Level(NamedTuple):
    """The nodes of one depth that have children."""

    nodes: list[int]
    fanout: list[int]  # number of children of each
    slots: list[int]  # place of each parent in the level above
    seen: Tensor  # which of the nodes extended so far each one sees, bool


@cache
def shape_of(paths: tuple[Path, ...]) -> tuple[list[Level], Tensor]:
    """Return the levels of a static tree, and who sees whom in it; made once, as published."""
    assert list(paths) == sorted(paths, key=lambda path: (len(path), path)), (
        "nodes are numbered as they are drawn"
    )
    number: dict[Path, int] = {path: node for node, path in enumerate(((), *paths))}
    levels: list[Level] = []
    above: list[Path] = []
    extended: list[Path] = []
    for depth in range(len(paths[-1])):
        parents = {child[:-1] for child in paths if len(child) == depth + 1}
        inner = [path for path in number if path in parents]
        if depth:
            extended += inner
        fanout = [sum(child[:-1] == path for child in paths) for path in inner]
        slots = [above.index(path[:-1]) for path in inner] if depth else [0]
        seen = torch.tensor([[path[: len(other)] == other for other in extended] for path in inner])
        levels.append(
            Level(nodes=[number[path] for path in inner], fanout=fanout, slots=slots, seen=seen)
        )
        above = inner
    every = [[path[: len(other)] == other for other in number] for path in number]
    return levels, torch.tensor(every)
