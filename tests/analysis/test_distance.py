"""The distance of a cell: its bias, its interval, and tokens that the target cannot give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from lantern_bench.analysis import token_distance
from lantern_bench.analysis.cells import run_cells
from lantern_bench.analysis.statistics import Array
from lantern_bench.analysis.tables import tables_of
from lantern_bench.analysis.token_distance import (
    FeatureSums,
    distance,
    distance_columns,
    distance_version,
    p_value,
)
from lantern_bench.storage.run_directory import RunData
from tests.helpers.made_up_run import STRICT, WALKS, make_record, run_of, token_scores

TOKENS = 256
FEATURES = 3


def sums_of_prompts(
    prompts: int, generator: np.random.Generator, *, shift: float = 0.0, spread: float = 0.0
) -> FeatureSums:
    """Sums of one image per prompt, in one block. `shift` a token is that of the first feature.

    `spread` is the standard deviation of the shifts of all features between prompts.
    """
    shifts = spread * generator.standard_normal((prompts, 1, FEATURES))
    shifts[..., 0] += shift
    noise = generator.standard_normal((prompts, 1, FEATURES))
    covariance = np.broadcast_to(TOKENS * np.eye(FEATURES), (prompts, 1, FEATURES, FEATURES))
    return FeatureSums(TOKENS * shifts + TOKENS**0.5 * noise, covariance)


@pytest.mark.parametrize("spread", [0.0, 0.08])
@pytest.mark.parametrize("prompts", [2, 4, 24])
def test_the_distance_has_no_bias_where_prompts_differ(prompts: int, spread: float) -> None:
    """Q of all prompts holds the spread between prompts: for two prompts it gave 0.019."""
    generator = np.random.default_rng(0)
    tokens = np.full(prompts, float(TOKENS))
    values = []
    for _ in range(2000):
        sums = sums_of_prompts(prompts, generator, shift=0.1, spread=spread)
        total = sums.total
        value = float((total.sums**2).sum()) / (TOKENS * prompts)
        centred = sums.sums - sums.sums.mean(axis=0)
        noise = (centred**2).sum() / TOKENS / prompts * prompts / (prompts - 1)
        values.append((value - noise) / tokens.sum())
    sums = sums_of_prompts(prompts, generator, shift=0.1, spread=spread)
    error = np.std(values) / 2000**0.5
    assert abs(np.mean(values) - 0.01) < 4 * error
    # The function is this statistic.
    total = sums.total
    pairs = ((total.sums**2).sum() - (sums.sums**2).sum()) / (TOKENS * prompts)
    expected = prompts / (prompts - 1) * pairs / tokens.sum()
    assert distance(sums, tokens).value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("prompts", "most_missed"), [(4, 0.09), (24, 0.06)])
def test_intervals_of_1000_lossless_cells_hold_0(
    prompts: int, most_missed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_distance, "_RESAMPLES", 200)
    generator = np.random.default_rng(1)
    tokens = np.full(prompts, float(TOKENS))
    missed = 0
    for _ in range(1000):
        interval = distance(sums_of_prompts(prompts, generator), tokens)
        assert interval.low is not None
        assert interval.high is not None
        missed += not interval.low <= 0.0 <= interval.high
    assert missed / 1000 <= most_missed


@pytest.mark.parametrize(
    ("prompts", "shift", "spread", "most_missed"),
    [
        (4, 0.0, 0.0, 0.06),
        (24, 0.0, 0.0, 0.06),
        (24, 0.0, 0.1, 0.06),
        (24, 0.1, 0.08, 0.08),
        (24, 0.3, 0.1, 0.08),
        (100, 0.1, 0.0, 0.07),
    ],
)
def test_intervals_of_blocks_hold_the_true_distance_and_are_not_too_wide(
    prompts: int, shift: float, spread: float, most_missed: float
) -> None:
    """Eight blocks of six features: 1,000 cells, whose first feature is shifted in every block."""
    blocks = 8
    features = 6
    generator = np.random.default_rng(3)
    tokens = np.full(prompts, float(TOKENS))
    size = TOKENS / blocks
    shape = (prompts, blocks, features, features)
    covariance = np.broadcast_to(size * np.eye(features), shape)
    missed = 0
    widths = []
    values = []
    for _ in range(1000):
        means = spread * generator.standard_normal((prompts, 1, features))
        means[..., 0] += shift
        noise = generator.standard_normal(shape[:3])
        figure = distance(FeatureSums(size * means + size**0.5 * noise, covariance), tokens)
        assert figure.value is not None
        assert figure.low is not None
        assert figure.high is not None
        missed += not figure.low <= shift**2 <= figure.high
        widths.append(figure.high - figure.low)
        values.append(figure.value)
    assert missed / 1000 <= most_missed
    assert np.mean(widths) < 1.4 * 2.0 * 1.96 * np.std(values)


def uneven_sums(prompts: int = 6) -> FeatureSums:
    """Sums of prompts in two blocks, with a shift, whose covariances differ."""
    generator = np.random.default_rng(3)
    factors = generator.standard_normal((prompts, 2, FEATURES, 2 * FEATURES))
    covariance = factors @ factors.transpose(0, 1, 3, 2) * TOKENS
    noise = generator.standard_normal((prompts, 2, FEATURES)) * TOKENS**0.5
    size = generator.uniform(0.5, 2.0, (prompts, 1, 1))
    return FeatureSums(size * TOKENS * 0.4 + noise, covariance)


def test_the_interval_of_blocks_solves_its_equation() -> None:
    """Its ends d have (d - distance)^2 = t^2 V1 d + 1.96^2 V2. V1 follows from derivatives of the
    distance by the weights of prompts.
    """
    sums = uneven_sums()
    prompts = len(sums.sums)
    tokens = np.linspace(200.0, 300.0, prompts)
    inverse = sums.total.inverse
    own = np.einsum("nki,kij,nkj->n", sums.sums, inverse, sums.sums)

    def weighted(weights: Array) -> float:
        shift = np.tensordot(weights, sums.sums, axes=1)
        covariance = np.tensordot(weights, sums.covariance, axes=1)
        chi_square = np.einsum("ki,kij,kj->", shift, np.linalg.inv(covariance), shift)
        pairs = chi_square - (weights**2 * own).sum()
        return float(prompts / (prompts - 1) * pairs / (weights * tokens).sum())

    found = distance(sums, tokens)
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(weighted(np.ones(prompts)))

    steps = 1e-5 * np.eye(prompts)
    influence = [(weighted(1.0 + step) - weighted(1.0 - step)) / 2e-5 for step in steps]
    per_token = prompts / (prompts - 1) / tokens.sum()
    noise = 4 * prompts * (prompts - 1) * 2 * FEATURES / prompts**2 * per_token**2
    v2 = found.value**2 - found.low * found.high
    v1 = (prompts * np.var(influence, ddof=1) - noise) / max(found.value, v2**0.5)
    assert v1 > 0
    slope = student.ppf(0.975, prompts - 1) ** 2 * v1
    assert found.low + found.high == pytest.approx(2 * found.value + slope, rel=1e-5)


def test_distance_p_counts_both_of_its_tests() -> None:
    sums = replace(uneven_sums(), sums=uneven_sums().sums / 4.0)
    alone = [sums.whole.total.p_value, sums.total.p_value]
    assert max(alone) < 0.5
    found = p_value(sums, ranges=[None] * len(sums.sums), tokens=[TOKENS] * len(sums.sums))
    assert found == pytest.approx(2.0 * min(alone))


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_fewer_than_four_prompts_have_no_interval(prompts: int) -> None:
    sums = sums_of_prompts(prompts, np.random.default_rng(2))
    figure = distance(sums, np.full(prompts, float(TOKENS)))
    assert figure.value is not None
    assert (figure.low, figure.high) == (None, None)
    assert figure.note == f"no interval: {prompts} of the 4 prompts that it needs"


# ---- Tokens that the target cannot give


def run_with(prompts: int, **changes: Any) -> RunData:
    """A run of one lossless cell, whose images have no shift."""
    records = [
        make_record(cell=STRICT, prompt=prompt, walks=WALKS, seconds=1.0)
        for prompt in range(prompts)
    ]
    scores = [token_scores(record, **changes) for record in records]
    return run_of(records, scores)


def figures_of(run: RunData) -> dict[str, Any]:
    return distance_columns(run_cells(run), run.scores)[STRICT.cell_id]


@pytest.mark.parametrize(
    ("changes", "impossible", "is_zero"),
    [
        ({}, 0.0, False),
        ({"impossible_tokens": 1}, 1 / 256, True),
        ({"impossible_tokens": 1, "edge_tokens": 1}, 0.0, False),  # rounding let it pass
        ({"impossible_tokens": 3, "edge_tokens": 1}, 2 / 256, True),
        ({"impossible_tokens": 1, "edge_tokens": None}, 1 / 256, True),  # older scores
    ],
)
def test_a_token_that_the_target_cannot_give_rejects_the_cell(
    changes: dict[str, Any], impossible: float, is_zero: bool
) -> None:
    figures = figures_of(run_with(4, **changes))
    assert figures["impossible"] == impossible
    assert (figures["distance_p"] == 0.0) is is_zero


@pytest.mark.parametrize(("ranges", "is_far"), [(None, True), ([8.0, 8.0, 8.0, 8.0], False)])
def test_the_tail_of_distance_p_is_valid_where_ranges_are_recorded(
    ranges: list[float] | None, is_far: bool
) -> None:
    """Older scores have no ranges: their tail is that of chi-square."""
    sums = [40.0, 0.0, 256.0, 0.0, 256.0]
    figures = figures_of(run_with(4, feature_ranges=ranges, feature_sums=sums))
    assert (figures["distance_p"] < 1e-4) is is_far
    assert figures["distance_p"] <= 0.01


# ---- Scores of an earlier version


def test_scores_of_two_versions_are_never_added() -> None:
    """Version 1 had one block and no `alike`."""
    old = run_with(4)
    assert distance_version(old.scores) == "1"
    assert figures_of(old)["note"] is None

    other = old.scores[0] | {"record_key": "of another cell", "features": "alike"}
    assert "version 1" in figures_of(replace(old, scores=[*old.scores, other]))["note"]

    blocks = [0.0] * (2 * 8)
    blocks[:2] = [1.0, 1.0]
    new = run_with(4, features="alike", feature_sums=blocks)
    assert distance_version(new.scores) == "2"
    assert figures_of(new)["note"] is None

    mixed = run_with(8, features="alike", feature_sums=blocks)
    mixed.scores[:4] = old.scores
    assert distance_version(mixed.scores) == "1 and 2"
    of_new = figures_of(mixed)
    assert of_new["note"] == "distance without 4 images, which were scored by version 1"
    assert of_new["distance"] == figures_of(new)["distance"]


def test_the_quality_table_says_how_many_prompts_an_interval_needs() -> None:
    table = tables_of(run_with(3))["quality"]
    assert table["distance_low"].isna().all()
    assert "3 of the 4 prompts" in table["note"].iloc[0]
    assert tables_of(run_with(4))["quality"]["distance_low"].notna().all()
