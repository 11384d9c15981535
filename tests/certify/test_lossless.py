"""The G-test of first tokens: exact distribution, level and power."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lantern_bench.certify.lossless import (
    Distribution,
    first_token_distribution,
    first_tokens_test,
    g_test,
    strict_without_residual,
)
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt
from lantern_bench.decoding.sampling import probabilities
from lantern_bench.models.loaded_model import LoadedModel
from tests.tiny_family import CODES, PROMPTS, TinyFamily

PROMPT = Prompt(PROMPTS[0])
DRAFTINGS = {"static": {"tree": "small-7"}, "dynamic": {"drafting": "dynamic", "nodes": 6, "depth": 2, "beam": 3}}
DRAFTINGS["block"] = {"rule": "block", "tree": "chain-3"}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return TinyFamily().load("tiny", torch.device("cpu"), torch.float32)


def test_distribution_is_product_of_filtered_probabilities(model: LoadedModel) -> None:
    exact = first_token_distribution(model, PROMPT, Decoding(mode="ar", top_k=3, cfg_scale=2.0), 3)
    assert exact.sequences.shape == (27, 3)
    assert float(exact.probabilities.sum()) == pytest.approx(1.0)
    cond, uncond = model.target.cond, model.target.uncond  # type: ignore[attr-defined]
    p = probabilities(uncond + 2.0 * (cond - uncond), temperature=1.0, top_k=3).double()
    for sequence, chance in zip(exact.sequences.tolist(), exact.probabilities.tolist(), strict=True):
        before = [CODES, *sequence[:-1]]
        assert chance == pytest.approx(
            float(torch.stack([p[a, b] for a, b in zip(before, sequence, strict=True)]).prod())
        )


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_decoding_passes_and_broken_rule_fails(model: LoadedModel, drafting: str) -> None:
    decoding = Decoding(mode="speculative", top_k=4, cfg_scale=2.0, **DRAFTINGS[drafting])
    prompts = [Prompt(text) for text in PROMPTS[:2]]
    exact = [first_token_distribution(model, prompt, decoding, 3) for prompt in prompts]
    right = first_tokens_test(model, prompts, exact, decoding, 600, batch=200)
    wrong = first_tokens_test(model, prompts, exact, decoding, 600, batch=200, accept=strict_without_residual)
    print(f"{drafting}: p = {right.p_value:.3f}; residual left out: p = {wrong.p_value:.1e}, {right.samples} samples")
    assert right.samples == wrong.samples == 1200
    assert right.impossible == 0
    assert right.p_value > 1e-3
    assert wrong.p_value < 1e-6


def test_g_test_rejects_at_its_nominal_level() -> None:
    """A test at 5 % rejects about 5 % of samples of the distribution itself, with rare cells pooled."""
    rng = np.random.default_rng(3)
    chances = rng.dirichlet(np.full(40, 0.6))
    exact = Distribution(torch.arange(40)[:, None], torch.from_numpy(chances))
    found = [
        g_test([exact, exact], [torch.from_numpy(rng.choice(40, size=(250, 1), p=chances)) for _ in range(2)]).p_value
        for _ in range(600)
    ]
    share = float(np.mean(np.array(found) < 0.05))
    print(f"rejected at 5 %: {share:.3f}")
    assert 0.025 < share < 0.085


def test_impossible_sample_gives_p_value_zero() -> None:
    exact = Distribution(torch.tensor([[0], [1]]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    found = g_test([exact], [torch.tensor([[0], [1]] * 50 + [[2]])])
    assert found.impossible == 1
    assert found.p_value == 0.0
