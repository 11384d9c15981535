"""Guidance, filters and draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from lantern_bench.decoding.sampling import (
    Draws,
    broken_logits,
    draw_without_replacement,
    exponential,
    guide,
    most_probable,
    probabilities,
    sample,
    uniform,
)


def test_guidance_mixes_and_scale_one_is_conditional_only() -> None:
    cond = torch.tensor([1.0, 2.0, 3.0])
    uncond = torch.tensor([0.0, 4.0, 1.0])
    assert guide(cond, uncond, 2.0).tolist() == [2.0, 0.0, 5.0]
    assert torch.equal(guide(cond, None, 1.0), cond)
    assert torch.equal(guide(cond, uncond, 1.0), cond)
    assert guide(cond.bfloat16(), uncond.bfloat16(), 3.0).dtype == torch.float32
    with pytest.raises(ValueError, match="unconditional"):
        guide(cond, None, 3.0)


def test_what_both_rows_call_impossible_stays_so_and_finite_logits_keep_their_bits() -> None:
    noise = torch.Generator().manual_seed(0)
    cond, uncond = 4 * torch.randn(2, 3, 5, 40, generator=noise)
    cond[..., :3] = uncond[..., :3]
    uncond[..., 3] = -0.0
    guided = guide(cond, uncond, 2.5)
    assert torch.equal(
        guided.view(torch.int32), uncond.add(cond - uncond, alpha=2.5).view(torch.int32)
    )
    cond[..., 7] = uncond[..., 7] = -torch.inf
    masked = guide(cond, uncond, 2.5)
    assert (masked[..., 7] == -torch.inf).all()
    assert torch.equal(masked[..., :7], guided[..., :7])
    assert torch.equal(masked[..., 8:], guided[..., 8:])
    # Everything else that is not finite is still seen.
    for pair in ((-1.0, -torch.inf), (torch.nan, 0.0), (0.0, torch.nan), (torch.inf, torch.inf)):
        cond[0, 0, 9], uncond[0, 0, 9] = pair
        assert broken_logits(guide(cond, uncond, 2.5))[0].tolist() == [True, *[False] * 4]
    cond[1] = -torch.inf
    uncond[1] = -torch.inf
    assert broken_logits(guide(cond, uncond, 2.5))[1].all()


def test_filter_orders_give_the_figures_of_finding_c4() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    both = {"temperature": 1.0, "top_k": 2, "top_p": 0.6}
    torch.testing.assert_close(
        probabilities(logits, **both, filter_order="top_k_first"),
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
    )
    torch.testing.assert_close(
        probabilities(logits, **both, filter_order="top_p_first"),
        torch.tensor([0.625, 0.375, 0.0, 0.0]),
    )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=9),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
)
def test_filters_match_their_definitions(
    logits: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    """Integers make ties at the k-th logit frequent; each filter alone is checked by its
    definition.
    """
    rows = torch.tensor(logits, dtype=torch.float32)
    plain = torch.softmax(rows / temperature, dim=-1)
    by_k = probabilities(rows, temperature=temperature, top_k=top_k)
    kth = sorted(logits, reverse=True)[top_k - 1] if 0 < top_k < len(logits) else min(logits)
    above = rows >= kth
    torch.testing.assert_close(by_k, torch.where(above, plain, 0.0) / plain[above].sum())
    by_p = probabilities(rows, temperature=temperature, top_p=top_p)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass = 0.0
    smallest = []
    for token in order:
        smallest.append(token)
        mass += float(plain[token])
        if mass >= top_p - 1e-7:
            break
    if abs(mass - top_p) > 1e-5:
        assert sorted(by_p.nonzero().flatten().tolist()) == sorted(smallest)
        torch.testing.assert_close(by_p[smallest], plain[smallest] / plain[smallest].sum())
    one_filter = probabilities(
        rows, temperature=temperature, top_k=top_k, filter_order="top_p_first"
    )
    assert torch.equal(by_k, one_filter)


def test_top_p_stops_at_the_token_that_reaches_the_mass_exactly() -> None:
    assert probabilities(torch.zeros(4), temperature=1.0, top_p=0.5).tolist() == [
        0.5,
        0.5,
        0.0,
        0.0,
    ]


def test_draws_without_replacement_follow_sequential_draws() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    draws = 40_000
    noise = exponential(Draws([torch.Generator().manual_seed(5)], "cpu").bits(draws * 4)).view(
        draws, 4
    )
    tokens, valid = draw_without_replacement(p.expand(draws, 4), 2, noise)
    assert valid.all()
    for first in (0, 2, 3):
        for second in (0, 2, 3):
            expected = 0.0 if first == second else float(p[first] * p[second] / (1 - p[first]))
            seen = ((tokens[:, 0] == first) & (tokens[:, 1] == second)).float().mean()
            assert abs(float(seen) - expected) < 0.012
    assert not (tokens == 1).any()
    assert torch.equal(sample(p.expand(draws, 4), noise), tokens[:, 0])
    assert torch.equal(draw_without_replacement(p.expand(draws, 4), 1, noise)[0], tokens[:, :1])


def test_noise_is_exponential_down_to_its_smallest_values() -> None:
    bits = Draws([torch.Generator().manual_seed(11)], "cpu").bits(1_000_001)
    noise = exponential(bits)[0].double()
    assert noise.min() > 0
    assert noise.max() < 17
    assert noise[:4].unique().numel() == 4  # both halves of a number of 63 bits
    assert kstest(noise.numpy(), "expon").pvalue > 0.01
    # Not only as a whole: the even and the odd ones come from different bits, and small ones decide
    # draws.
    for part in (noise[0::2], noise[1::2]):
        assert kstest(part.numpy(), "expon").pvalue > 0.01
        small = part[part < 1e-3]
        assert kstest((1 - (-small).exp()).numpy() / (1 - math.exp(-1e-3)), "uniform").pvalue > 0.01
    assert torch.corrcoef(torch.stack([noise[0:-1:2], noise[1::2]]))[0, 1].abs() < 0.006


def test_the_ends_of_the_noise_are_finite_and_above_zero() -> None:
    ends = exponential(torch.tensor([0, 1, -(2**31), 2**31 - 1, -1], dtype=torch.int32))
    assert ends[0] == ends[2] > 0
    assert ends[0] < ends[1] < 1e-9
    assert 16 < ends[3] == ends[4] < 17


def test_tokens_without_mass_are_not_drafted() -> None:
    p = torch.tensor([[0.0, 0.6, 0.0, 0.4], [0.25, 0.25, 0.25, 0.25]])
    tokens, valid = draw_without_replacement(p, 5, torch.ones(2, 4))
    assert valid.tolist() == [[True, True, False, False, False], [True, True, True, True, False]]
    assert tokens[0].tolist() == [1, 3, 0, 0, 0]
    tokens, valid = most_probable(p, 3)
    assert tokens.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert valid.tolist() == [[True, True, False], [True, True, True]]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 12))
def test_most_probable_settles_ties_by_index(weights: list[int], count: int) -> None:
    tokens, valid = most_probable(torch.tensor(weights, dtype=torch.float32), count)
    expected = [
        i for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)) if weights[i] > 0
    ][:count]
    assert tokens[valid].tolist() == expected
    assert valid.tolist() == [place < len(expected) for place in range(count)]


def test_an_image_draws_the_same_numbers_whatever_is_beside_it() -> None:
    def draws(seeds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        source = Draws([torch.Generator().manual_seed(seed) for seed in seeds], "cpu")
        return exponential(source.bits(15)), uniform(source.bits(7))

    alone = draws([8])
    together = draws([3, 8, 1])
    assert torch.equal(alone[0][0], together[0][1])
    assert torch.equal(alone[1][0], together[1][1])
    assert (together[0] > 0).all()
    assert ((together[1] >= 0) & (together[1] < 1)).all()
