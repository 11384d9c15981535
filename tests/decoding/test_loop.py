"""The whole loop with a tabular target: lossless by G-test with power, greedy equals greedy, counts add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence
from torch import Tensor

from lantern_bench.certify.run import strict_without_residual
from lantern_bench.certify.tabular import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide

VOCABULARY, LENGTH, IMAGES = 4, 3, 5_000
TREE = [[0], [1], [0, 0], [1, 0]]
DRAFTINGS = {
    "static": {"drafting": "static", "tree": TREE},
    "dynamic": {"drafting": "dynamic", "nodes": 5, "depth": 2, "beam": 2},
    "block": {"drafting": "static", "rule": "block", "tree": [[0], [0, 0]]},
    "traversal": {"drafting": "static", "rule": "traversal", "tree": TREE},
}
SETTINGS = {
    "plain": {"temperature": 1.0, "cfg_scale": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 3, "top_p": 0.95, "cfg_scale": 1.5},
}


class CodedModel(TabularModel):
    """Tables with a codebook of near codes; those behind x are nearest to it."""

    def __init__(self, vocab: int, length: int, seed: int) -> None:
        super().__init__(vocab, length, seed)
        self.codes = 0.5 * torch.randn(vocab, 2, generator=torch.Generator().manual_seed(seed))

    def table(self, columns: int, metric: str = "l2") -> Tensor:
        codes = torch.arange(self.vocab_size)
        return (codes[:, None] + 1 + codes[:columns]) % self.vocab_size


def generators(count: int, seed: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed * 1_000_003 + image) for image in range(count)]


def run(
    decoding: Decoding, images: int = IMAGES, seed: int = 1, batch: int = 1000, rule: AcceptanceRule | None = None
) -> tuple[TabularModel, list[Decoded]]:
    model = CodedModel(VOCABULARY, LENGTH, seed=4)
    decoded_images: list[Decoded] = []
    streams = generators(images, seed)
    for start in range(0, images, batch):
        decoded_images += decode(model, None, decoding, streams[start : start + batch], rule=rule)
    return model, decoded_images


def p_value(model: TabularModel, decoded_images: list[Decoded], decoding: Decoding) -> float:
    def p(cond: Tensor, uncond: Tensor) -> Tensor:
        logits = guide(cond, uncond if decoding.cfg_scale != 1 else None, decoding.cfg_scale)
        return decoding_probabilities(logits, decoding)

    distribution = model.distribution(p).numpy()
    tokens = torch.stack([item.tokens for item in decoded_images]).long()
    place = (tokens * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    observed = np.bincount(place.numpy(), minlength=len(distribution))
    possible = distribution > 0
    if observed[~possible].any():
        return 0.0
    expected = distribution[possible] / distribution[possible].sum() * len(decoded_images)
    return float(power_divergence(observed[possible], expected, lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_the_loop_is_lossless(drafting: str, setting: str) -> None:
    decoding = Decoding(mode="speculative", **DRAFTINGS[drafting], **SETTINGS[setting])
    model, decoded_images = run(decoding)
    value = p_value(model, decoded_images, decoding)
    print(f"loop, {drafting}, {setting}: G-test over {IMAGES} images p = {value:.3f}")
    assert value > 1e-3


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_without_the_residual_the_loop_is_rejected(drafting: str) -> None:
    decoding = Decoding(mode="speculative", **DRAFTINGS[drafting], **SETTINGS["plain"])
    model, decoded_images = run(decoding, rule=AcceptanceRule(accept=strict_without_residual))
    value = p_value(model, decoded_images, decoding)
    print(f"loop, residual left out, {drafting}: p = {value:.1e}")
    assert value < 1e-6


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_greedy_speculation_equals_greedy_decoding(drafting: str) -> None:
    greedy = {"temperature": 0.0, "cfg_scale": 1.7}
    for seed in range(20):
        model = TabularModel(VOCABULARY, 5, seed=seed)
        stream = generators(1, seed)
        plain = decode(model, None, Decoding(mode="ar", **greedy), stream)[0]
        drafted = decode(model, None, Decoding(mode="speculative", **DRAFTINGS[drafting], **greedy), stream)[0]
        assert plain.tokens.equal(drafted.tokens)


def test_a_batch_gives_each_image_what_it_gets_alone() -> None:
    decoding = Decoding(mode="speculative", **DRAFTINGS["static"], **SETTINGS["filtered"])
    _model, together = run(decoding, images=24, batch=24)
    _model, alone = run(decoding, images=24, batch=1)
    assert all(
        a.tokens.equal(b.tokens) and a.trace.committed == b.trace.committed
        for a, b in zip(together, alone, strict=True)
    )


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_every_count_is_a_sum_over_the_trace(drafting: str) -> None:
    decoding = Decoding(mode="speculative", **DRAFTINGS[drafting], **SETTINGS["plain"])
    _model, decoded_images = run(decoding, images=60, batch=60)
    for item in decoded_images:
        trace = item.trace
        assert trace.tokens == LENGTH == 1 + sum(trace.committed)
        assert trace.start == [1 + sum(trace.committed[:step]) for step in range(len(trace.start))]
        assert trace.target_forwards == 1 + len(trace.committed)
        assert [count - 1 for count in trace.uncut] == trace.accepted
        # With R positions left nothing deeper than R - 1 is drafted.
        for start, offered, ranks in zip(trace.start, trace.offered_depth, trace.child_rank, strict=True):
            assert offered == min(2, LENGTH - start - 1)
            assert len(ranks) <= offered
        assert [sum(rank >= 0 for rank in ranks) for ranks in trace.child_rank] == trace.accepted


def test_fewer_tokens_are_cut_and_also_counted_uncut() -> None:
    model = TabularModel(VOCABULARY, 5, seed=3)
    decoding = Decoding(mode="speculative", **DRAFTINGS["static"])
    decoded_images = decode(model, None, decoding, generators(200, 2), tokens=2)
    assert all(len(item.tokens) == 2 == item.trace.tokens for item in decoded_images)
    assert all(item.trace.committed == [1] for item in decoded_images)
    assert max(item.trace.uncut[-1] for item in decoded_images) > 1


def test_ar_counts_one_token_a_step_and_compresses_nothing() -> None:
    model = TabularModel(VOCABULARY, 5, seed=3)
    trace = decode(model, None, Decoding(mode="ar"), generators(1, 0))[0].trace
    assert trace.mean_accepted_length == 1.0
    assert trace.step_compression == 1.0


@pytest.mark.parametrize("mode", ["ar", "speculative"])
def test_kept_logits_are_those_the_tokens_came_from(mode: str) -> None:
    model = TabularModel(VOCABULARY, 5, seed=9)
    shape = DRAFTINGS["static"] if mode == "speculative" else {}
    decoding = Decoding(mode=mode, **shape, cfg_scale=1.5)
    for item in decode(model, None, decoding, generators(8, 5), keep_logits=True):
        state = torch.zeros((), dtype=torch.int64)
        for place, token in enumerate(item.tokens.long()):
            wanted = guide(model.p[0, state], model.p[1, state], 1.5)
            assert torch.allclose(item.logits[place], wanted, atol=1e-5)
            state = model.state_after(state, token)
