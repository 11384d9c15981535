"""What the distance sees of emitters that are not the target: constructions, and lossless cells.

The images of a construction are drawn from p' instead of p, a token at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from lantern_bench.analysis.statistics import Interval
from lantern_bench.analysis.token_distance import FeatureSums, _compared, distance, p_value
from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.metrics.token_sums import token_sums
from lantern_bench.models.families.lanterns.description import HELD_OUT
from lantern_bench.models.loaded_model import LoadedModel
from tests.metrics.test_token_sums import ancestral, table_model

pytestmark = pytest.mark.long

IMAGES = 24
SIDE = 16
GUIDED = Decoding("ar", cfg_scale=2.0)


def brightness(model: LoadedModel) -> Tensor:
    """Brightness [V] of a small picture of nothing but one code, which the distance never reads."""
    network: Any = model.pixels
    pictures = []
    with torch.inference_mode():
        for codes in torch.arange(model.target.vocab_size).split(128):
            tokens = codes[:, None].expand(-1, 16).contiguous()
            pictures.append(network.model.decode_tokens(tokens, (4, 4)).mean(dim=(1, 2, 3)))
    return torch.cat(pictures).double()


def orthogonal(values: Tensor, others: list[Tensor], p: Tensor) -> Tensor:
    """Values [V] without what 1 and others [B, V] explain under p, in standard deviations."""
    basis = torch.stack([torch.ones_like(p), *others], dim=-1)
    weighted = basis * p[..., None]
    gram = weighted.transpose(1, 2) @ basis
    gram += 1e-9 * torch.eye(gram.shape[-1])
    target = weighted.transpose(1, 2) @ values.expand_as(p)[..., None]
    rest = values - (basis @ torch.linalg.solve(gram, target)).squeeze(-1)
    return rest / (p * rest.square()).sum(dim=-1, keepdim=True).sqrt()


def tilted(values: Tensor, p: Tensor, cond: Tensor, uncond: Tensor) -> Tensor:
    """p (1 + 0.5 g), with g orthogonal to surprise, squared surprise and prompt information."""
    surprise = -p.log()
    entropy = (p * surprise).sum(dim=-1, keepdim=True)
    information = cond.log_softmax(dim=-1) - uncond.log_softmax(dim=-1)
    seen = [surprise, (surprise - entropy).square(), information.double()]
    return p * (1.0 + 0.5 * orthogonal(values, seen, p)).clamp_min(0.0)


Change = Callable[[Tensor, int, Tensor, Tensor], Tensor]  # (p, position, cond, uncond) -> p'


def emitted(model: LoadedModel, change: Change) -> tuple[Tensor, float]:
    """Draw images of 24 prompts, and return the mean chi-square divergence of a token too."""
    generator = torch.Generator().manual_seed(1)
    prompts = [HELD_OUT[number].caption() for number in range(IMAGES)]
    session = model.target.session(IMAGES, guided=True, nodes=1)
    logits = session.prefill(model.condition(prompts))
    alone = torch.ones(IMAGES, 1, 1, dtype=torch.bool)
    tokens: list[Tensor] = []
    divergence = 0.0
    with torch.inference_mode():
        for position in range(model.target.image_tokens):
            if tokens:
                root = tokens[-1]
                logits = session.score(root, torch.zeros_like(root), alone)
                session.commit(torch.zeros_like(root), torch.ones_like(root[:, 0]))
            cond = logits.cond[:, -1]
            assert logits.uncond is not None
            uncond = logits.uncond[:, -1]
            p = decoding_probabilities(guide(cond, uncond, 2.0), GUIDED).double()
            changed = change(p, position, cond, uncond)
            changed = changed / changed.sum(dim=-1, keepdim=True)
            divergence += float(((changed - p).square() / p).sum(dim=-1).mean())
            tokens.append(torch.multinomial(changed, 1, generator=generator))
    return torch.cat(tokens, dim=1), divergence / len(tokens)


def measured(model: LoadedModel, tokens: Tensor, prompts: list[str]) -> tuple[Interval, float]:
    """The distance of images of a cell, and its p-value."""
    rows = token_sums(
        model=model, condition=model.condition(prompts), tokens=tokens, decoding=GUIDED
    )
    names = rows[0]["features"].split()
    sums = FeatureSums.of(np.array([row["feature_sums"] for row in rows]), len(names))
    counts = [row["tokens"] for row in rows]
    groups = [np.flatnonzero(np.array(prompts) == prompt) for prompt in dict.fromkeys(prompts)]
    of_prompts = FeatureSums(
        sums=np.stack([sums.sums[group].sum(axis=0) for group in groups]),
        covariance=np.stack([sums.covariance[group].sum(axis=0) for group in groups]),
    )
    figure = distance(
        _compared(of_prompts, names),
        tokens=np.array([float(np.array(counts)[group].sum()) for group in groups]),
    )
    p = p_value(sums, ranges=[row["feature_ranges"] for row in rows], tokens=counts)
    return figure, p


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("brightness", 0.05),
        ("temperatures of rows", 0.05),
        ("temperatures of columns", 0.05),
        ("brightness as on a chessboard", 0.05),
        ("the likeliest token in one column", 0.02),
    ],
)
def test_24_images_show_a_construction(lanterns: LoadedModel, name: str, least: float) -> None:
    of_codes = brightness(lanterns)

    def change(p: Tensor, position: int, cond: Tensor, uncond: Tensor) -> Tensor:
        row, column = divmod(position, SIDE)
        if name == "brightness":
            return tilted(of_codes, p, cond, uncond)
        if name == "brightness as on a chessboard":
            return tilted(of_codes * (-1) ** (row + column), p, cond, uncond)
        if name == "the likeliest token in one column":
            best = torch.zeros_like(p).scatter_(1, p.argmax(dim=-1, keepdim=True), 1.0)
            return best if column == 7 else p
        line = row if name == "temperatures of rows" else column
        return p ** (1 / 1.25 if line % 2 else 1 / 0.8)

    tokens, divergence = emitted(lanterns, change)
    figure, p = measured(lanterns, tokens, [HELD_OUT[n].caption() for n in range(IMAGES)])
    print(f"{name}: {figure.value:.4f} [{figure.low:.4f}, {figure.high:.4f}], p = {p:.1e}")
    print(f"  chi-square {divergence:.4f}")
    assert figure.value is not None
    assert figure.value >= least
    assert figure.low is not None
    assert figure.low <= divergence
    assert p < 1e-6


def test_24_images_show_that_every_image_of_a_prompt_is_the_same(lanterns: LoadedModel) -> None:
    tokens, _ = emitted(lanterns, lambda p, *_: p)
    captions = [HELD_OUT[n].caption() for n in range(IMAGES)]
    figure, p = measured(lanterns, tokens, captions)
    print(f"lossless: {figure.value:.4f} [{figure.low:.4f}, {figure.high:.4f}], p = {p:.2f}")
    assert p > 1e-3
    # 24 images of one prompt, and 2 images of each of 12 prompts
    for prompts in (1, 12):
        images = torch.arange(prompts).repeat_interleave(IMAGES // prompts)
        figure, p = measured(lanterns, tokens[images], [captions[n] for n in images])
        print(f"the same image of {prompts} prompts: {figure.value:.2f}, p = {p:.1e}")
        assert figure.value is not None
        assert figure.value >= 0.05
        assert p < 1e-6


def test_of_2000_lossless_cells_5_percent_are_rejected_and_5_percent_of_intervals_miss_0() -> None:
    """Cells of 24 images of 64 tokens, a quarter of an image of the bundled model."""
    table = TabularModel(8, 64, seed=5, memory=2)
    table.line_length = 8
    model = table_model(table, torch.randn(8, 3, generator=torch.Generator().manual_seed(6)))
    decoding = Decoding("speculative", drafting="static", rule="strict", tree="chain-3")
    decoding = decoding.changed(cfg_scale=2.0)
    values = []
    misses = 0
    p_values = []
    for seed in range(2000):
        tokens = ancestral(model=table, images=IMAGES, decoding=decoding, seed=seed)
        rows = token_sums(model=model, condition=None, tokens=tokens, decoding=decoding)
        names = rows[0]["features"].split()
        sums = FeatureSums.of(np.array([row["feature_sums"] for row in rows]), len(names))
        counts = [row["tokens"] for row in rows]
        figure = distance(_compared(sums, names), np.array(counts, dtype=float))
        assert figure.value is not None
        assert figure.low is not None
        assert figure.high is not None
        values.append(figure.value)
        misses += not figure.low <= 0.0 <= figure.high
        ranges = [row["feature_ranges"] for row in rows]
        p_values.append(p_value(sums, ranges=ranges, tokens=counts))
    p = np.array(p_values)
    error = np.std(values) / len(values) ** 0.5
    print(f"mean {np.mean(values):.5f} +- {error:.5f}, deviation {np.std(values):.5f}")
    print(f"missed {misses / len(values):.4f}")
    print("rejected", [(level, (p <= level).mean()) for level in (0.1, 0.05, 0.01, 0.001)])
    assert abs(np.mean(values)) < 4 * error
    assert 0.02 < misses / len(values) < 0.065
    # Twice the smaller of two p-values is conservative.
    assert (p <= 0.05).mean() < 0.065
    assert (p <= 0.01).mean() < 0.016
    assert kstest(p, "uniform", alternative="greater").pvalue > 1e-3
