"""The cache: tree nodes get the logits of a plain run of their path; attention reads the filled
columns only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lantern_bench.decoding.sampling import guide
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.models.networks.kv_cache import KVCache
from lantern_bench.models.networks.target import (
    Condition,
    TransformerTarget,
    WordCaption,
    prefix_mask,
)
from lantern_bench.models.networks.transformer import _grouped_attention, attend_cached
from lantern_bench.models.networks.transformer_config import TransformerConfig
from tests.decoding.drafting.test_golden_shapes import leaf_paths

TREE = StaticTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
BATCH = 3
PREFIX = 5


@pytest.fixture
def target() -> TransformerTarget:
    config = TransformerConfig(
        vocab_size=23,
        dim=32,
        layers=3,
        heads=4,
        kv_heads=2,
        ffn_dim=48,
        prefix=PREFIX,
        grid=(4, 6),
        prefix_rotary="identity",
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)  # fresh layers draw from torch's own stream
        return TransformerTarget(config, WordCaption(9, PREFIX, 32)).eval()


def condition() -> Condition:
    values = torch.tensor([[0, 0, 3, 4, 5], [1, 2, 3, 4, 5], [0, 7, 8, 1, 2]])
    return Condition(values, values > 0)


def row(number: int) -> Condition:
    return Condition(*(part[number : number + 1] for part in condition()))


def causal(n: int) -> Tensor:
    return torch.ones(1, n, n, dtype=torch.bool).tril()


@torch.no_grad()
def logits_of(target: TransformerTarget, number: int, tokens: list[int]) -> Tensor:
    """Guided rows of the last token of a plain causal run: [2, V]."""
    session = target.session(1, guided=True, nodes=24)
    session.prefill(row(number))
    n = len(tokens)
    scores = session.score(torch.tensor([tokens]), torch.arange(n)[None], causal(n))
    return torch.cat([scores.cond[:, -1], scores.uncond[:, -1]])


@pytest.mark.parametrize("accepted", [[0, 2, 3], [1, 1, 0]])
@torch.no_grad()
def test_trees_and_commits_equal_plain_runs(target: TransformerTarget, accepted: list[int]) -> None:
    """Images of a batch accept different numbers of drafts, then are scored again."""
    draws = torch.Generator().manual_seed(2)
    session = target.session(BATCH, guided=True, nodes=7)
    session.prefill(condition())
    committed: list[list[int]] = [[] for _ in range(BATCH)]
    for _step in range(2):
        tokens = torch.randint(23, (BATCH, 7), generator=draws)
        scores = session.score(
            tokens, TREE.depths.expand(BATCH, -1), TREE.attention.expand(BATCH, -1, -1)
        )
        for image in range(BATCH):
            for node in range(7):
                path = tokens[image, TREE.attention[node]].tolist()
                wanted = logits_of(target, image, committed[image] + path)
                got = torch.stack([scores.cond[image, node], scores.uncond[image, node]])
                assert (got - wanted).abs().max() < 1e-5
        paths = torch.full((BATCH, 4), -1)
        for image, drafts in enumerate(accepted):
            path = next(path for path in leaf_paths(TREE) if path[drafts] >= 0)[: drafts + 1]
            paths[image, : drafts + 1] = torch.tensor(path)
            committed[image] += tokens[image, path].tolist()
        counts = torch.tensor(accepted) + 1
        session.commit(paths, counts)


@torch.no_grad()
def test_prefill_resets_a_session(target: TransformerTarget) -> None:
    first = logits_of(target, 0, [1, 2, 3])
    logits_of(target, 1, [7, 7, 7, 7, 7])
    assert logits_of(target, 0, [1, 2, 3]).equal(first)


@torch.no_grad()
def test_cached_forward_equals_the_training_forward(target: TransformerTarget) -> None:
    tokens = torch.tensor([[4, 9, 1, 0, 22]])
    x = torch.cat(
        [target.prefix(row(2), guided=False), target.transformer.tok_embeddings(tokens)], dim=1
    )
    hidden = target.transformer(
        x, prefix_mask(row(2).valid, x.shape[1]), torch.arange(x.shape[1])[None]
    )
    assert (
        target.transformer.output(hidden[0, -1]) - logits_of(target, 2, tokens[0].tolist())[0]
    ).abs().max() < 1e-5


@torch.no_grad()
def test_guided_features_give_guided_logits(target: TransformerTarget) -> None:
    session = target.session(BATCH, guided=True, nodes=7)
    tokens = torch.randint(23, (BATCH, 7), generator=torch.Generator().manual_seed(3))
    depths = TREE.depths.expand(BATCH, -1)
    attention = TREE.attention.expand(BATCH, -1, -1)
    session.prefill(condition())
    scores = session.score(tokens, depths, attention)
    logits, features = session.score_guided(
        tokens=tokens, depths=depths, attention=attention, cfg_scale=2.5
    )
    assert (logits - guide(scores.cond, scores.uncond, 2.5)).abs().max() < 1e-5
    assert logits.dtype == torch.float32
    assert torch.equal(features, scores.features)


NODES = 9
CAPACITY = 100


def filled_cache(lengths: list[int], dtype: torch.dtype, kv_heads: int) -> KVCache:
    config = TransformerConfig(
        vocab_size=2, dim=8 * kv_heads, layers=1, heads=kv_heads, ffn_dim=1, prefix=1, grid=(1, 1)
    )
    cache = KVCache(
        config=config,
        groups=2,
        batch=len(lengths),
        capacity=CAPACITY,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    draws = torch.Generator().manual_seed(0)
    store = torch.randn(cache._store.shape, generator=draws).to(dtype)  # what earlier steps left
    cache._store.copy_(store)
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5], [40], [50], [3, 50, 20]])
@pytest.mark.parametrize("nodes", [1, NODES, 50])
def test_filled_columns_are_enough(
    lengths: list[int], dtype: torch.dtype, kv_heads: int, nodes: int
) -> None:
    cache = filled_cache(lengths, dtype, kv_heads)
    rows = 2 * len(lengths)
    draws = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(rows, nodes, heads, 8, generator=draws).to(dtype)
        for heads in (4, kv_heads, kv_heads)
    )
    seen = torch.ones(len(lengths), nodes, nodes, dtype=torch.bool).tril()
    mask = cache.mask(seen, dtype)
    slots = cache.slots(0, nodes)
    got = attend_cached(cache=cache, layer=0, slots=slots, mask=mask)(q, k, v)
    # All of them, hidden by a mask made here.
    keys, values = cache.write(0, slots=slots, keys=k, values=v, used=CAPACITY)
    behind = torch.arange(CAPACITY) - torch.tensor(lengths * 2)[:, None]
    allowed = behind[:, None, :] <= torch.arange(nodes)[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, allowed[:, None], enable_gqa=kv_heads == 2
    )
    assert got.shape == q.shape
    assert (got.float() - wanted.transpose(1, 2).float()).abs().max() < (
        1e-6 if dtype == torch.float32 else 2e-2
    )


@pytest.mark.parametrize("nodes", [1, 3])
def test_heads_that_share_keys_may_be_nodes(nodes: int) -> None:
    """As on a GPU, where torch has no fast attention for grouped heads."""
    noise = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, nodes, 8, generator=noise)
    keys, values = torch.randn(2, 2, 2, 5, 8, generator=noise)
    mask = torch.randn(2, 1, nodes, 5, generator=noise)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, enable_gqa=True
    )
    got = _grouped_attention(q, k=keys, v=values, mask=mask)
    torch.testing.assert_close(got, wanted)


def test_the_capacity_is_a_multiple_of_eight_except_on_a_cpu() -> None:
    assert filled_cache([5], torch.float32, 2).capacity == CAPACITY
    on_gpu = KVCache(
        TransformerConfig(
            vocab_size=2, dim=16, layers=1, heads=2, ffn_dim=1, prefix=1, grid=(1, 1)
        ),
        groups=2,
        batch=1,
        capacity=CAPACITY,
        dtype=torch.float32,
        device=torch.device("meta"),
    )
    assert on_gpu.capacity == CAPACITY + 4


def test_unused_columns_are_not_read() -> None:
    """NaN behind the last block would pass any mask."""
    cache = filled_cache([5], torch.float32, 4)
    cache._store[..., 32:, :] = torch.nan
    q, k, v = torch.randn(3, 2, NODES, 4, 8, generator=torch.Generator().manual_seed(2))
    seen = torch.ones(1, NODES, NODES, dtype=torch.bool).tril()
    got = attend_cached(
        cache=cache, layer=0, slots=cache.slots(0, NODES), mask=cache.mask(seen, torch.float32)
    )(q, k, v)
    assert torch.isfinite(got).all()
