"""Jacobi drafting in the loop: mistakes show, windows shift, siblings and relaxed rules shorten the
decode.

The drafts of windows: alone (SJD, SCD), with siblings (SJD-PAC), and with a drafter at the first
positions (hybrid).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding
from tests.decoding.test_engine import Small, decoded
from tests.decoding.test_loop import LENGTH, VOCABULARY, g_test, images_of, named
from tests.helpers.mistakes import SHOWN, drafting_mistakes

WINDOW = 4

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"mode": "sjd", "window": WINDOW, "coupling": "none"}, "draft kept, with the new q"),
    ({"mode": "sjd", "window": WINDOW, "coupling": "maximal"}, "uniform number used again"),
    ({"mode": "sjd", "window": WINDOW, "coupling": "maximal"}, "old q kept with a draft"),
    ({"mode": "sjd++", "window": WINDOW}, "verified with the new p, as published"),
    (
        {"mode": "sjd", "window": WINDOW, "initial": "uniform", "coupling": "gumbel"},
        "noise kept by place in the window",
    ),
    ({"mode": "sjd", "window": WINDOW, "coupling": "gumbel"}, "old q kept with a draft"),
    ({"mode": "hybrid", "window": WINDOW}, "old q kept with a draft"),
    ({"mode": "hybrid", "window": WINDOW}, "verified with the drafter's q"),
]


BLOCK: list[dict[str, Any]] = [
    {"mode": "block-scd", "window": WINDOW},
    {"mode": "hybrid", "window": WINDOW, "rule": "block"},
]


@pytest.mark.parametrize(("values", "name"), BROKEN, ids=str)
def test_the_loop_sees_what_is_broken(values: dict[str, Any], name: str) -> None:
    decoding = Decoding(**values)
    (mistake,) = (mistake for mistake in drafting_mistakes(decoding) if mistake.name == name)
    p = g_test(decoding, 30_000, mistake, spread=1.5)
    print(f"broken, {name}: p = {p:.1e}")
    assert p < 1e-6


@pytest.mark.parametrize("name", ["", *SHOWN])
@pytest.mark.parametrize("values", BLOCK, ids=str)
def test_the_loop_sees_what_is_broken_behind_block_walks(values: dict[str, Any], name: str) -> None:
    """On two tokens, because these mistakes are small with three."""
    decoding = Decoding(**values)
    found = [mistake for mistake in drafting_mistakes(decoding) if mistake.name == name]
    p = g_test(decoding, 30_000, found[0] if found else None, vocabulary=2, seed=3)
    print(f"{values}, {name or 'nothing'} broken: p = {p:.1e}")
    assert (p < 1e-6) == bool(name)
    assert p > 1e-3 or name


def test_mistakes_that_cannot_be_made_are_left_out() -> None:
    for values, name in (
        ({"coupling": "none"}, "verified with the drafter's q"),
        ({"drafter_weight": 1}, "old q kept with a draft"),
    ):
        (mistake,) = drafting_mistakes(Decoding("hybrid", **values))
        assert mistake.name == name


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize("window", [2, 4])
def test_the_published_pac_is_rejected(window: int) -> None:
    p = g_test(
        Decoding("sjd-pac", drafting="sjd-pac-published", window=window, candidates=2),
        20_000,
        spread=1.5,
    )
    print(f"published SJD-PAC, window {window}: p = {p:.1e}")
    assert p < 1e-6


class FlatTarget(TabularModel):
    """Every position has a distribution of its own, whatever the tokens in front of it."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary, length, seed=0)
        tokens = (
            torch.arange(self.p.shape[1])[:, None] >= (vocabulary + 1) ** torch.arange(length)
        ).sum(dim=1)
        self.p = self.p[:, 7 * tokens]


@pytest.mark.parametrize(
    "values",
    [{"mode": "sjd", "initial": initial} for initial in ("uniform", "left", "row")]
    + [{"mode": "sjd-pac", "initial": "uniform", "candidates": 2}],
    ids=named,
)
@pytest.mark.parametrize("coupling", ["none", "maximal", "gumbel"])
def test_every_reused_draft_of_a_target_without_context_is_accepted(
    coupling: str, values: dict[str, Any]
) -> None:
    """A shift that is wrong in the same way everywhere stays lossless, and shows here."""
    window = 4
    length = 9
    reused_drafts = 0
    for image in images_of(
        FlatTarget(3, length), Decoding(**values, window=window, coupling=coupling), 250
    ):
        trace = image.trace
        before = window
        for start, ranks, uncut in zip(trace.start, trace.child_rank, trace.uncut, strict=True):
            reused = min(window - before, length - 1 - start)
            assert ranks[:reused] == [0] * reused
            reused_drafts += reused
            before = uncut - 1
    assert reused_drafts > 400


def test_a_whole_window_is_accepted_and_the_next_one_is_fresh() -> None:
    decoding = Decoding("sjd", window=2, initial="row")
    traces = [image.trace for image in images_of(FlatTarget(2, 12), decoding, 80)]
    whole = 0
    for trace in traces:
        whole += sum(accepted == 2 for accepted in trace.accepted[:-2])
    assert whole > 20


def test_siblings_shorten_the_decode() -> None:
    def steps_of(**values: Any) -> int:
        images = images_of(TabularModel(VOCABULARY, LENGTH, 2), Decoding(**values), 400)
        return sum(len(image.trace.start) for image in images)

    assert steps_of(mode="sjd-pac", window=4) < 0.95 * steps_of(mode="scd", window=4)


@pytest.mark.parametrize("residual", ["exact", "official"])
@pytest.mark.parametrize(
    "rule", [{"rule": "additive", "delta": 0.2}, {"rule": "multiplicative", "lambda": 3.0}]
)
def test_relaxed_rules_accept_more_jacobi_drafts(rule: dict[str, Any], residual: str) -> None:
    def steps_of(**values: Any) -> int:
        images = decoded(Small(), Decoding("sjd", window=5, coupling="maximal", **values), 3)
        return sum(len(image.trace.start) for image in images)

    relaxed = {**rule, "residual": residual}
    assert steps_of(**relaxed, neighbours=0) == steps_of()
    assert steps_of(**relaxed, neighbours=20) < steps_of()
