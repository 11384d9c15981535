"""Random drafts for property tests: shapes, tokens, distributions, rules and limits from one
generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.official import OfficialRule
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.sampling import draw_without_replacement, guide, probabilities
from lantern_bench.decoding.tree import DraftTree, StaticTree, link_nodes
from lantern_bench.methods.parameters import FilterOrder
from tests.helpers.reference_walk import Rules
from tests.helpers.rules import rule_named

FILTERS: tuple[tuple[float, int, float, FilterOrder], ...] = (
    (1.0, 0, 1.0, "top_k_first"),
    (0.7, 3, 1.0, "top_k_first"),
    (1.0, 0, 0.8, "top_k_first"),
    (1.3, 4, 0.9, "top_k_first"),
    (1.0, 5, 0.9, "top_p_first"),
)


@dataclass
class Draft:
    """B drafts of one kind with all that a verification takes."""

    tree: DraftTree
    logits: Tensor
    probs: Tensor
    rule: ConfiguredRule
    uniforms: Tensor
    noise: Tensor
    depth_limit: Tensor | None

    @property
    def rules(self) -> Rules:
        return rules_of(self.rule)

    def limit(self, image: int) -> int:
        return self.tree.max_depth if self.depth_limit is None else int(self.depth_limit[image])


def rules_of(rule: ConfiguredRule) -> Rules:
    """The rule for the oracle."""
    residual = "official" if isinstance(rule, OfficialRule) else "exact"
    table = None if rule.codebook.nearest is None else rule.codebook.nearest.numpy().astype(int)
    return Rules(
        rule=rule.name,
        neighbours=rule.codebook.neighbours,
        bound=next(iter(rule.values.values()), 0.0),
        residual=residual,
        table=table,
    )


def random_rule(
    rng: np.random.Generator, vocabulary: int, table: Tensor | None = None, residual: str = ""
) -> ConfiguredRule:
    residuals = ("exact", "official")
    residual = residual or residuals[rng.integers(2)]
    neighbours = int(rng.integers(0, vocabulary))
    names = ("strict", "additive", "multiplicative")
    name = names[rng.integers(3)]
    if name == "strict":
        return rule_named("strict", residual=residual)
    if name == "additive":
        bound = float(rng.choice([0.02, 0.1, 0.3, 0.8]) * rng.uniform(0.9, 1))
    else:
        bound = float(rng.choice([1.1, 2.0, 6.0]) * rng.uniform(1, 1.1))
    return rule_named(name=name, neighbours=neighbours, bound=bound, residual=residual, table=table)


def random_probs(
    rng: np.random.Generator,
    noise: torch.Generator,
    filters: tuple[float, int, float, FilterOrder],
    *,
    shape: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Return (guided logits, probabilities) of the given shape, guidance on or off."""
    temperature, top_k, top_p, order = filters
    spread = float(rng.choice([0.5, 2.0, 4.0]))
    cond, uncond = (spread * torch.randn(2, *shape, generator=noise)).unbind(0)
    logits = guide(cond, uncond, float(rng.choice([1.0, 1.0, 2.5])))
    return logits, probabilities(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, filter_order=order
    )


def random_topology(
    rng: np.random.Generator, nodes: int, fanout: int, depth: int
) -> list[tuple[int, ...]]:
    """A tree without gaps: nodes hung one after the other below a random one that may have one more
    child.
    """
    count: dict[tuple[int, ...], int] = {(): 0}  # children by path
    for _ in range(nodes):
        free = [path for path, children in count.items() if len(path) < depth and children < fanout]
        if not free:
            break
        parent = free[rng.integers(len(free))]
        count[*parent, count[parent]] = 0
        count[parent] += 1
    return list(count)[1:]


def random_static(
    rng: np.random.Generator,
    noise: torch.Generator,
    q: Tensor,
    shape: StaticTree,
    *,
    filled: bool | None = None,
) -> DraftTree:
    """Draw the children of every node from `q` [B, M, V]; `filled` says whether those with q = 0
    stay in the table.
    """
    batch, nodes, _ = q.shape
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    valid = torch.ones(batch, nodes, dtype=torch.bool)
    for level in shape.levels:
        clocks = torch.empty(batch, len(level.nodes), q.shape[2]).exponential_(generator=noise)
        drawn, able = draw_without_replacement(q[:, level.nodes], level.fanout, clocks)
        children = shape.children[level.nodes[level.slot], level.rank]
        tokens[:, children] = drawn[:, level.slot, level.rank]
        valid[:, children] = able[:, level.slot, level.rank]
    # Leaving q = 0 children in the table must give the same walk: they are skipped.
    if filled is None:
        filled = not rng.integers(2)
    return shape.draft(tokens, q, None if filled else valid)


def random_dynamic(rng: np.random.Generator, batch: int, nodes: int, vocabulary: int) -> DraftTree:
    """Trees of a different shape for each image, distinct tokens below each node, some nodes
    filling up.
    """
    depth = int(rng.integers(1, 5))
    fanout = int(rng.integers(1, min(6, vocabulary) + 1))
    return dynamic_trees(
        rng=rng, batch=batch, nodes=nodes, vocabulary=vocabulary, depth=depth, fanout=fanout
    )


def dynamic_trees(
    rng: np.random.Generator, *, batch: int, nodes: int, vocabulary: int, depth: int, fanout: int
) -> DraftTree:
    """As `random_dynamic`, of a given depth and width."""
    columns: list[list[list[int]]] = [[], [], [], [], []]
    for _ in range(batch):
        grown = random_topology(
            rng=rng, nodes=int(rng.integers(0, nodes)), fanout=fanout, depth=depth
        )
        paths = [(), *sorted(grown, key=lambda path: (len(path), path))]
        order = {path: rng.permutation(vocabulary) for path in paths}
        number = {path: place for place, path in enumerate(paths)}
        missing = nodes - len(paths)
        rows = [(int(order[p[:-1]][p[-1]]), number[p[:-1]], len(p), p[-1], 1) for p in paths[1:]]
        rows = [(int(rng.integers(vocabulary)), -1, 0, 0, 1), *rows, *[(0, 0, 1, 0, 0)] * missing]
        for column, values in zip(columns, zip(*rows, strict=True), strict=True):
            column.append(list(values))
    tokens, parents, depths, ranks, valid = (torch.tensor(column) for column in columns)
    return link_nodes(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ranks=ranks,
        valid=valid.bool(),
        fanout=fanout,
        max_depth=depth,
    )


def random_draft(seed: int, dtype: torch.dtype = torch.float32) -> Draft:
    """Everything from one seed; `dtype` is that of the distributions."""
    rng = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)
    batch = int(rng.integers(1, 4))
    vocabulary = int(rng.integers(3, 20))
    filters = FILTERS[rng.integers(len(FILTERS))]
    if rng.integers(2):
        shape = StaticTree.of(
            random_topology(
                rng=rng, nodes=int(rng.integers(1, 14)), fanout=int(rng.integers(1, 5)), depth=4
            )
        )
        _, q = random_probs(rng, noise, filters, shape=(batch, len(shape.depths), vocabulary))
        tree = random_static(rng=rng, noise=noise, q=q.to(dtype), shape=shape)
    else:
        tree = random_dynamic(
            rng=rng, batch=batch, nodes=int(rng.integers(2, 14)), vocabulary=vocabulary
        )
    nodes = tree.tokens.shape[1]
    logits, probs = random_probs(rng, noise, filters, shape=(batch, nodes, vocabulary))
    limit = None
    if rng.integers(3) == 0:
        limit = torch.tensor(rng.integers(-1, tree.max_depth + 1, size=batch))
    return Draft(
        tree=tree,
        logits=logits,
        # What sums to 1 in float32 does not in float64, and a walk may divide by the sum or not.
        probs=probs.to(dtype) / probs.to(dtype).sum(dim=-1, keepdim=True),
        rule=random_rule(
            rng,
            vocabulary,
            nearest_codes(torch.randn(vocabulary, 3, generator=noise), vocabulary - 1),
        ),
        # Sharper than uniform: more of the later children are looked at.
        uniforms=torch.rand(tree.children.shape, generator=noise).sqrt().to(dtype).clamp(max=0.999),
        noise=torch.empty(batch, vocabulary, dtype=dtype).exponential_(generator=noise),
        depth_limit=limit,
    )
