"""A target and a drafter without a network: tables of logits, and the exact or sampled distribution
of one step.

The exact distribution enumerates drafts and accept/reject outcomes; the step under test is an
argument, so that a test can show a broken one to fail. Sequences are completed from the target to a
fixed length: steps commit unequal numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import accept_drafts, verify
from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.decoding.sampling import guide, probabilities
from lantern_bench.decoding.tree import DraftTree, StaticTree
from lantern_bench.methods.parameters import FilterOrder
from tests.helpers.rules import STRICT, parents_of

Prefix = tuple[int, ...]
# (drafts [B, M] and their tree, p [B, M, V]) -> (weights [S, B], path tokens [S, B, D], lengths [S,
# B], last [S, B, V])
Outcomes = tuple[Tensor, Tensor, Tensor, Tensor]
Step = Callable[[DraftTree, Tensor], Outcomes]
Drafts = tuple[Tensor, DraftTree]
"""The probability [B] of each draft, and the drafts."""
SHAPES = {
    "chain": [(0,), (0, 0), (0, 0, 0)],
    "wide": [(0,), (1,), (2,)],
    "small": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)],
}


@dataclass(frozen=True)
class Setting:
    """One filter and guidance setting."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    filter_order: FilterOrder = "top_k_first"
    cfg_scale: float = 1.0


class Tabular:
    """Distributions that depend on the whole prefix: p(prefix) and q(prefix), float64 [V]."""

    def __init__(
        self,
        vocabulary: int,
        setting: Setting,
        seed: int,
        *,
        spread: float = 1.5,
        alike: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self.setting = setting
        self.seed = seed
        self.spread = spread
        self.alike = alike
        self._made: dict[tuple[str, Prefix], Tensor] = {}

    def p(self, prefix: Prefix) -> Tensor:
        return self._distribution("target", prefix)

    def q(self, prefix: Prefix) -> Tensor:
        return self._distribution("target" if self.alike else "drafter", prefix)

    def _distribution(self, who: str, prefix: Prefix) -> Tensor:
        if (who, prefix) not in self._made:
            number = int("1" + "".join(f"{token:02d}" for token in prefix)) * 2 + (who == "drafter")
            noise = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            cond, uncond = self.spread * torch.randn(2, self.vocabulary, generator=noise)
            s = self.setting
            probs = probabilities(
                guide(cond, uncond, s.cfg_scale),
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                filter_order=s.filter_order,
            ).double()
            self._made[who, prefix] = probs / probs.sum()
        return self._made[who, prefix]

    def distribution_after(self, prefix: Prefix, length: int) -> dict[Prefix, float]:
        """The autoregressive distribution of the next `length` tokens."""
        distribution: dict[Prefix, float] = {(): 1.0}
        for _ in range(length):
            longer: dict[Prefix, float] = {}
            for tokens, weight in distribution.items():
                p = self.p((*prefix, *tokens)).tolist()
                longer |= {(*tokens, x): weight * p[x] for x in range(self.vocabulary) if p[x] > 0}
            distribution = longer
        return distribution

    def drafts(self, shape: str) -> Drafts:
        """The drafts of a shape in `SHAPES`, or the one dynamic draft."""
        if shape == "dynamic":
            return self.dynamic_drafts(6, 3, 2)
        return self.static_drafts(SHAPES[shape])

    def static_drafts(self, paths: Sequence[Sequence[int]]) -> Drafts:
        """Every draft that can be drawn in this shape."""
        shape = StaticTree.of(paths)
        parents = shape.parents.tolist()
        children = shape.children.tolist()
        drafts: list[tuple[float, list[int]]] = [(1.0, [0] * len(parents))]
        for node, below in enumerate(children):
            kids = [child for child in below if child >= 0]
            if not kids:
                continue
            longer = []
            for weight, tokens in drafts:
                q = self.q(_prefix(node, tokens, parents))
                for drawn, chance in _orders(q, len(kids)):
                    longer.append((weight * chance, _with(tokens, kids, drawn)))
            drafts = longer
        weights = torch.tensor([weight for weight, _ in drafts], dtype=torch.float64)
        rows = [tokens for _, tokens in drafts]
        valid = torch.tensor([[token >= 0 for token in tokens] for tokens in rows])
        tokens = torch.tensor(rows).clamp_min(0)
        q = torch.stack(
            [
                torch.stack([self.q(_prefix(n, row, parents)) for n in range(len(parents))])
                for row in tokens.tolist()
            ]
        )
        return weights, shape.draft(tokens, q, valid)

    def dynamic_drafts(self, nodes: int, rounds: int, beam: int) -> Drafts:
        """The one draft that Growth makes."""
        growth = Growth(self.q(())[None], beam)
        prefixes = [(token,) for token in growth.frontier.tokens[0].tolist()]
        for _ in range(rounds - 1):
            frontier = growth.grow(torch.stack([self.q(prefix) for prefix in prefixes])[None])
            grown = zip(frontier.origin[0].tolist(), frontier.tokens[0].tolist(), strict=True)
            prefixes = [(*prefixes[slot], token) for slot, token in grown]
        return torch.ones(1, dtype=torch.float64), growth.tree(
            torch.zeros(1, dtype=torch.int64), nodes
        )

    def target_at(self, tree: DraftTree) -> Tensor:
        """p [B, M, V] at every node."""
        rows = zip(tree.tokens.tolist(), parents_of(tree.attention).tolist(), strict=True)
        return torch.stack(
            [
                torch.stack([self.p(_prefix(n, tokens, parents)) for n in range(len(parents))])
                for tokens, parents in rows
            ]
        )


def _with(tokens: list[int], kids: Sequence[int], drawn: Sequence[int]) -> list[int]:
    changed = tokens.copy()
    for child, token in zip(kids, drawn, strict=True):
        changed[child] = token
    return changed


def _prefix(node: int, tokens: Sequence[int], parents: Sequence[int]) -> Prefix:
    prefix: list[int] = []
    while parents[node] >= 0:
        # Below a token that could not be drawn nothing is ever reached: any prefix will do.
        prefix.append(max(tokens[node], 0))
        node = parents[node]
    return tuple(reversed(prefix))


def _orders(q: Tensor, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All ordered draws without replacement with their probabilities; -1 where q has run out of
    tokens.
    """
    mass = q.tolist()
    able = [token for token, chance in enumerate(mass) if chance > 0]
    drawn_count = min(count, len(able))
    for order in itertools.permutations(able, drawn_count):
        chance = 1.0
        left = sum(mass)
        for token in order:
            chance *= mass[token] / left if left > 0 else 0.0
            left -= mass[token]
        yield (*order, *[-1] * (count - drawn_count)), chance


def verify_step(
    tree: DraftTree, p: Tensor, depth_limit: int | None = None, rule: ConfiguredRule | None = None
) -> Outcomes:
    """The step of the package under a rule, by default the strict one: `verify` forced to stop at
    each node in turn.

    Uniforms of 0 accept and of 1 reject; the weight of a stop is the product of the accept
    probabilities on the way.
    """
    batch, nodes, _ = p.shape
    limit = None if depth_limit is None else torch.full((batch,), depth_limit)
    rule = rule or STRICT
    _, acceptance = accept_drafts(tree=tree, target_probs=p, rule=rule, depth_limit=limit)
    weights, forced = force_stops(tree, tree.by_node(acceptance.accept))
    drafts = []
    lengths = []
    last = []
    for stop in range(nodes):
        verdict = verify(
            tree=tree,
            target_probs=p,
            rule=rule,
            uniforms=forced[stop],
            noise=torch.ones(batch, p.shape[2], dtype=p.dtype),
            depth_limit=limit,
        )
        drafts.append(verdict.tokens[:, :-1])
        lengths.append(verdict.accepted)
        last.append(verdict.next_probs)
    return weights, torch.stack(drafts), torch.stack(lengths), torch.stack(last)


def force_stops(tree: DraftTree, accept: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weights [M, B] of stopping at each node, uniforms [M, B, M, C] that make the walk
    stop there).
    """
    batch, nodes, fanout = accept.shape
    weights = torch.zeros(nodes, batch, dtype=accept.dtype)
    uniforms = torch.ones(nodes, batch, nodes, fanout, dtype=accept.dtype)
    for image in range(batch):
        reach = {0: (1.0, [])}
        for node in range(nodes):
            if node not in reach:
                continue
            left, way = reach[node]
            for rank, child in enumerate(tree.children[image, node].tolist()):
                chance = float(accept[image, node, rank])
                if child >= 0 and chance > 0:
                    reach[child] = left * chance, [*way, (node, rank)]
                left *= 1 - chance
            weights[node, image] = left
            for passed, rank in way:
                uniforms[node, image, passed, rank] = 0.0
    return weights, uniforms


def accepted(drafts: Drafts, p: Tensor, rule: ConfiguredRule | None = None) -> float:
    """The mean number of accepted drafts of a step."""
    weights, tree = drafts
    stops, _, lengths, _ = verify_step(tree, p, rule=rule)
    return float((stops * weights * lengths).sum())


def distribution_of_step(
    model: Tabular, drafts: Drafts, step: Step, length: int
) -> dict[Prefix, float]:
    """The distribution of `length` tokens when a step makes the first."""
    chances, tree = drafts
    outcomes = step(tree, model.target_at(tree))
    committed: dict[Prefix, float] = {}
    for weights, tokens, lengths, last in zip(*outcomes, strict=True):
        rows = zip(
            (chances * weights).tolist(),
            tokens.tolist(),
            lengths.tolist(),
            last.tolist(),
            strict=True,
        )
        for weight, path, accepted, probs in rows:
            for token, p in enumerate(probs):
                _add(committed, (*path[:accepted], token), weight * p)
    distribution: dict[Prefix, float] = {}
    for prefix, weight in committed.items():
        for rest, chance in model.distribution_after(prefix, length - len(prefix)).items():
            tokens = prefix + rest
            _add(distribution, tokens[:length], weight * chance)
    return distribution


def _add(distribution: dict[Prefix, float], key: Prefix, weight: float) -> None:
    if weight != 0:
        distribution[key] = distribution.get(key, 0.0) + weight


def error_of(distribution: dict[Prefix, float], truth: dict[Prefix, float]) -> float:
    """The largest difference between two distributions."""
    return max(
        abs(distribution.get(key, 0.0) - truth.get(key, 0.0))
        for key in distribution.keys() | truth.keys()
    )


def first_tokens(distribution: dict[Prefix, float]) -> dict[Prefix, float]:
    """The distribution of the first token alone."""
    first: dict[Prefix, float] = {}
    for sequence, weight in distribution.items():
        first[sequence[:1]] = first.get(sequence[:1], 0.0) + weight
    return first


def step_errors(model: Tabular, drafts: Drafts, step: Step = verify_step) -> tuple[float, float]:
    """The largest errors (first token, joint) of a step and one more token, against autoregressive
    decoding.
    """
    weights, tree = drafts
    assert abs(float(weights.sum()) - 1.0) < 1e-9
    distribution = distribution_of_step(
        model=model, drafts=drafts, step=step, length=tree.max_depth + 1
    )
    truth = model.distribution_after((), tree.max_depth + 1)
    return error_of(first_tokens(distribution), first_tokens(truth)), error_of(distribution, truth)
