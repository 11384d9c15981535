"""Tests of whole images: definitions, uniform p-values of correct rules, power for broken ones."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from lantern_bench.checks.certification import LEVEL, TrialResult, trial_rows
from lantern_bench.checks.image_tests import (
    TESTS,
    Evidence,
    _wager,
    decoded_evidence,
    evidence,
    joined,
    p_values,
)
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.filter_edge import edge_tolerance
from lantern_bench.decoding.sampling import decoding_probabilities
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.utils.errors import LogitsError
from tests.helpers.mistakes import rule_mistakes, step_mistakes
from tests.helpers.tiny_model import CODES, PROMPTS, TOKENS, TinyModel

ALL = [Prompt(text) for text in PROMPTS]
CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "chain": (3, {"tree": "chain-3"}),
    "branching": (4, {"tree": "small-7"}),
    "dynamic": (2, {"drafting": "dynamic", "nodes": 10, "depth": 2, "beam": 5}),
    "block": (3, {"rule": "block", "tree": "chain-3"}),
}
ONE_BY_ONE = ("surprise", "bias toward the drafter", "alike in a batch")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The tiny model with a drafter that is wrong about as often as real ones."""
    loaded = TinyModel().load(torch.device("cpu"), torch.float32)
    noise = torch.randn(CODES + 1, CODES, generator=torch.Generator().manual_seed(5))
    loaded.drafter.cond += 0.5 * noise  # type: ignore[union-attr]
    return loaded


def decoding(cell: str, **values: Any) -> Decoding:
    return Decoding(**{"mode": "speculative", "cfg_scale": 2.0, **CELLS[cell][1], **values})


def decoded(model: LoadedModel, cell: str, images: int, seed: int = 0) -> Evidence:
    batches = decoded_evidence(
        model=model,
        prompts=ALL,
        decoding=decoding(cell),
        images=images,
        tolerance=1e-3,
        seed=seed,
    )
    return joined(batches)


def test_evidence_follows_its_definition() -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    q = torch.tensor([0.2, 0.2, 0.2, 0.4])
    logits = torch.cat([p[:3].log(), torch.tensor([-9.0])]).expand(1, 2, 4)
    sampling = Decoding(mode="ar", top_k=3)
    shown = evidence(
        logits=logits,
        q=q.expand(1, 1, 4),
        tokens=torch.tensor([[1, 2]]),
        starts=[[1]],
        decoding=sampling,
        tolerance=1e-3,
    )
    entropy = -(p[:3] * p[:3].log()).sum()
    assert shown.surprise[0] == pytest.approx((-p[1:3].log() - entropy).tolist(), abs=1e-6)
    square = (p[:3] * p[:3].log() ** 2).sum() - entropy**2
    assert shown.surprise_var[0] == pytest.approx([float(square)] * 2, abs=1e-6)
    drafted = q[:3] / q[:3].sum()  # a token outside the filter cannot come
    g = (drafted - p[:3]) / (drafted + p[:3])
    mean = (p[:3] * g).sum()
    assert shown.lean[0] == pytest.approx([0.0, float(g[2] - mean)], abs=1e-6)
    assert shown.lean_var[0, 1] == pytest.approx(float((p[:3] * (g - mean) ** 2).sum()), abs=1e-6)
    assert shown.ratio[0] == pytest.approx([1.0, float(drafted[2] / p[2])], abs=1e-6)
    assert shown.starts.tolist() == [[False, True]]


def test_the_drafter_is_restricted_to_the_tokens_of_its_own_position() -> None:
    p = torch.tensor([[0.6, 0.3, 0.07, 0.03], [0.03, 0.07, 0.3, 0.6]])
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tokens = torch.tensor([[0, 2]])
    sampling = Decoding(mode="ar", top_k=2)
    shown = evidence(
        logits=p.log()[None],
        q=q.expand(1, 1, 4),
        tokens=tokens,
        starts=[[1]],
        decoding=sampling,
        tolerance=1e-3,
    )
    assert shown.ratio[0] == pytest.approx([1.0, (0.3 / 0.7) / (0.3 / 0.9)], abs=1e-6)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.6614}])
def test_tokens_that_rounding_moves_across_a_filter_are_left_out(filters: dict[str, Any]) -> None:
    near = [2.0, 1.0, 0.9999, 0.9]
    far = [2.0, 1.0, 0.5, 0.4]
    logits = torch.tensor([near, far]).repeat(50, 1)[None]
    sampling = Decoding(mode="ar", **filters)
    for token, kind in enumerate(("passes", "edge", "edge", "fails")):
        tokens = torch.full((1, 100), token)
        shown = evidence(
            logits=logits, q=None, tokens=tokens, starts=[[1]], decoding=sampling, tolerance=1e-3
        )
        assert shown.edge[0].tolist() == [kind == "edge", False] * 50
        assert shown.impossible[0].tolist() == [kind == "fails", token > 1] * 50
        q = logits.softmax(dim=-1)[:, 1:].roll(1, -1)
        with_q = evidence(
            logits=logits, q=q, tokens=tokens, starts=[[1]], decoding=sampling, tolerance=1e-3
        )
        assert (with_q.ratio[shown.edge | shown.impossible] == 1.0).all()
        assert (with_q.ratio != 1.0).any() == (token < 2)
        outside = shown.edge | shown.impossible
        assert not shown.surprise[outside].any()
        assert not shown.surprise_var[outside].any()
        assert p_values(shown, 1)["support"] == float(token < 2)


@pytest.mark.parametrize("filters", [{"top_k": 12}, {"top_p": 0.9}, {"top_k": 12, "top_p": 0.9}])
@pytest.mark.parametrize("broken", [False, True])
def test_a_filter_is_tested_although_every_position_has_a_token_at_its_edge(
    filters: dict[str, Any], *, broken: bool
) -> None:
    noise = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 20_000, 20, generator=noise)
    moved = logits + 0.05 * torch.randn(logits.shape, generator=noise)  # as a step rounds them
    sampling = Decoding(mode="ar", **filters)
    p = decoding_probabilities(1.1 * moved if broken else moved, sampling)
    tokens = torch.multinomial(p[0], 1, generator=noise).T
    shown = evidence(
        logits=logits, q=None, tokens=tokens, starts=[[1]], decoding=sampling, tolerance=0.4
    )
    assert 0 < shown.edge.mean() < 0.5
    tests = p_values(shown, 0)
    print({name: f"{value:.2g}" for name, value in tests.items()}, shown.edge.mean())
    assert tests["support"] == 1.0
    assert (min(tests.values()) < 1e-5) is broken  # the valid tail costs a factor of 100 or so
    unfiltered = torch.multinomial(moved[0].softmax(dim=-1), 1, generator=noise).T
    assert (
        p_values(
            evidence(
                logits=logits,
                q=None,
                tokens=unfiltered,
                starts=[[1]],
                decoding=sampling,
                tolerance=0.4,
            ),
            0,
        )["support"]
        == 0.0
    )


def test_tokens_at_the_edge_of_a_filter_may_not_come_too_often() -> None:
    logits = torch.tensor([2.0, 1.9, 1.0, 0.99, 0.98, -3.0]).expand(1, 2000, 6)
    sampling = Decoding(mode="ar", top_k=3)
    noise = torch.Generator().manual_seed(0)
    p = decoding_probabilities(logits[0, 0], sampling)
    for share, right in ((float(p[2]), True), (3 * float(p[2]), False)):
        drawn_from = torch.tensor([(1 - share) / 2, (1 - share) / 2, share])
        tokens = torch.multinomial(drawn_from, 2000, replacement=True, generator=noise)
        shown = evidence(
            logits=logits,
            q=None,
            tokens=tokens[None],
            starts=[[1]],
            decoding=sampling,
            tolerance=0.05,
        )
        assert shown.edge.sum() == (tokens == 2).sum()
        assert (p_values(shown, 0)["edge"] > 1e-3) is right


def test_the_capital_of_a_wager_is_shared_between_its_stakes() -> None:
    ratios = np.array([[1.0, 30.0, 0.2], [1.0, 80.0, 3.0]])
    capital = np.mean([np.prod(1 + stake * (ratios - 1)) for stake in (0.005, 0.01, 0.02, 0.05)])
    assert capital > 1
    assert _wager(ratios) == pytest.approx(1 / capital)
    assert _wager(np.full((1, 3), 0.5)) == 1.0


def test_a_drafter_that_gives_no_numbers_is_an_error() -> None:
    q = torch.full((1, 1, 4), torch.nan)
    with pytest.raises(LogitsError):
        evidence(
            logits=torch.zeros(1, 2, 4),
            q=q,
            tokens=torch.tensor([[1, 2]]),
            starts=[[1]],
            decoding=Decoding(mode="ar"),
            tolerance=1e-3,
        )


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_a_wager_sees_a_small_share_of_drafts_that_the_sums_miss(share: float) -> None:
    noise = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(1, 4000, 50, generator=noise)
    q = (0.5 * logits + 2 * torch.randn(logits.shape, generator=noise)).softmax(dim=-1)
    sampling = Decoding(mode="ar")
    mixed = (1 - share) * decoding_probabilities(logits, sampling) + share * q
    tokens = torch.multinomial(mixed[0], 1, generator=noise).T
    tests = p_values(
        evidence(
            logits=logits,
            q=q[:, 1:],
            tokens=tokens,
            starts=[[1]],
            decoding=sampling,
            tolerance=1e-3,
        ),
        0,
    )
    print({name: f"{value:.2g}" for name, value in tests.items()})
    others = [value for name, value in tests.items() if name != "bets on the drafter"]
    assert min(others) > LEVEL / TESTS
    assert (
        tests["bets on the drafter"] < LEVEL / TESTS
        if share
        else tests["bets on the drafter"] > 0.05
    )


def test_one_of_two_equal_logits_may_be_kept() -> None:
    logits = torch.tensor([1.0, 1.0, 0.0]).expand(1, 2, 3)
    sampling = Decoding(mode="ar", top_k=1)
    shown = evidence(
        logits=logits,
        q=None,
        tokens=torch.tensor([[0, 1]]),
        starts=[[1]],
        decoding=sampling,
        tolerance=1e-3,
    )
    assert shown.edge.all()
    assert not shown.impossible.any()


def test_rounding_may_move_more_after_guidance() -> None:
    plain = Decoding(mode="ar", cfg_scale=1)
    guided = Decoding(mode="ar", cfg_scale=3, temperature=0.5)
    assert edge_tolerance("bfloat16", guided) == pytest.approx(
        10 * edge_tolerance("bfloat16", plain)
    )


def certificates(images: Evidence, size: int) -> list[Evidence]:
    first = range(0, len(images.starts) - size + 1, size)
    return [Evidence(*(column[start : start + size] for column in images)) for start in first]


@pytest.fixture(scope="module", params=[80, pytest.param(2400, marks=pytest.mark.long)])
def null(model: LoadedModel, request: pytest.FixtureRequest) -> dict[str, list[dict[str, float]]]:
    """The p-values of many certificates of correct rules, 25 images each, by cell."""
    values: dict[str, list[dict[str, float]]] = {cell: [] for cell in CELLS}
    for cell, (depth, _) in CELLS.items():
        for seed in range(request.param // 80):
            images = decoded(model, cell, 25 * 80, seed)
            values[cell] += [p_values(part, depth) for part in certificates(images, 25)]
    return values


def test_p_values_of_correct_rules_are_uniform(null: dict[str, list[dict[str, float]]]) -> None:
    for cell, several in null.items():
        for test in ONE_BY_ONE:
            values = np.array([p[test] for p in several])
            ks = float(kstest(values, "uniform").pvalue)
            print(f"{cell}, {test}: KS p = {ks:.3f}, below .05: {np.mean(values < 0.05):.3f}")
            assert ks > 1e-4
        # The smallest of several, corrected, and a bound from Ville's inequality: at most uniform.
        for test in ("distance", "depths", "last positions", "bets on the drafter"):
            below = float(np.mean([p[test] < 0.05 for p in several]))
            assert below < 0.05 + 4 * (0.05 * 0.95 / len(several)) ** 0.5, (cell, test)
        assert all(p["support"] == 1.0 and len(p) == TESTS for p in several)


def test_error_rate_of_the_whole_certificate_is_kept(
    null: dict[str, list[dict[str, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_bench.checks.certification.LEVEL", 0.1)
    rejected = []
    for together in zip(*null.values(), strict=True):
        results = [
            TrialResult(setting=cell, broken=None, p_values=p, images=25, tokens=300)
            for cell, p in zip(null, together, strict=True)
        ]
        checks, tests = trial_rows("tiny", results)
        assert len(tests) == TESTS * len(CELLS)
        rejected.append(any(row["passed"] == "NO" for row in checks))
    share = float(np.mean(rejected))
    count = len(rejected)
    print(f"{share:.3f} of {count} certificates of correct rules rejected at 0.1")
    assert share < 0.1 + 4 * (0.1 * 0.9 / count) ** 0.5


@pytest.mark.parametrize("cell", ["branching", "dynamic", "block"])
@pytest.mark.parametrize("siblings", [False, True])
def test_each_broken_rule_is_rejected(model: LoadedModel, cell: str, *, siblings: bool) -> None:
    # With few tokens, a rejected sibling changes the rest of q most.
    broken = decoding(cell, **{"top_k": 3} if siblings else {})
    of_siblings = "not renormalised after a rejected sibling"
    for mistake in rule_mistakes(broken, model):
        if (mistake.name == of_siblings) is not siblings:
            continue
        tests = {"none": 1.0}
        batches = []
        while min(tests.values()) >= LEVEL / (TESTS * 8) and len(batches) < 9:
            rule = mistake.acceptance_rule()
            seed = len(batches)
            batches += decoded_evidence(
                model=model,
                prompts=ALL,
                decoding=broken,
                images=1000,
                tolerance=1e-3,
                seed=seed,
                rule=rule,
            )
            tests = p_values(joined(batches), CELLS[cell][0])
        test = min(tests, key=lambda test: tests[test])
        print(f"{cell}, {mistake.name}: {test} p = {tests[test]:.1e}, {len(batches)},000 images")
        assert tests[test] < LEVEL / (TESTS * 8)


@pytest.mark.parametrize("shared", [False, True])
def test_images_of_a_batch_that_share_bits_are_alike(model: LoadedModel, *, shared: bool) -> None:
    cell = decoding("chain")
    mistake = next(
        mistake
        for mistake in step_mistakes(cell)
        if mistake.name == "two images of a batch share bits"
    )
    with mistake.patched() if shared else contextlib.nullcontext():
        batches = [
            next(
                decoded_evidence(
                    model=model, prompts=ALL, decoding=cell, images=8, tolerance=1e-3, seed=seed
                )
            )
            for seed in range(20 if shared else 40)
        ]
    tests = p_values(joined(batches), 3)
    print({name: f"{p:.2g}" for name, p in tests.items()})
    assert (tests["alike in a batch"] < 1e-6) is shared


def test_a_model_without_a_drafter_is_tested_by_its_tokens(model: LoadedModel) -> None:
    alone = replace(model, drafter=None)
    (shown,) = decoded_evidence(
        model=alone,
        prompts=ALL,
        decoding=Decoding(mode="ar", cfg_scale=2.0),
        images=200,
        tolerance=1e-3,
    )
    tests = p_values(shown, 0)
    assert "bias toward the drafter" not in tests
    assert min(tests.values()) > 1e-3
    assert shown.starts.sum() == 200 * (TOKENS - 1)
