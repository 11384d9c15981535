"""Jacobi drafting in the loop: whole images follow the target, mistakes show, ends, batches and compiled programs.

The drafts of windows: alone (SJD, SCD), with siblings (SJD-PAC), and with a drafter at the first positions (hybrid).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence

from lantern_bench.certify.run import strict_without_residual
from lantern_bench.certify.tabular import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.decoding.sampling import decoding_probabilities
from tests.decoding.broken_drafts import Mistake, drafting_mistakes
from tests.decoding.test_engine import Small, decoded, same

VOCABULARY, LENGTH, WINDOW = 3, 5, 4
COUPLINGS, INITIALS = ("none", "maximal", "gumbel"), ("uniform", "left", "above", "row")
WITHOUT_RESIDUAL = Mistake("residual left out", strict_without_residual)


def named(values: dict[str, Any]) -> str:
    return "-".join(map(str, values.values()))


def images_of(model: TabularModel, decoding: Decoding, images: int, mistake: Mistake | None = None) -> list[Decoded]:
    if not decoding.drafting_row.needs_drafter:
        model.drafter = None
    images_done: list[Decoded] = []
    for start in range(0, images, 30_000):
        generators = [torch.Generator().manual_seed(seed) for seed in range(start, min(start + 30_000, images))]
        broken = mistake.arguments(decoding, model, len(generators)) if mistake else {}
        images_done += decode(model, [""] * len(generators), decoding, generators, **broken)
    return images_done


def g_test(decoding: Decoding, images: int, mistake: Mistake | None = None, spread: float = 1.0) -> float:
    """The p-value of the joint distribution of all tokens of an image."""
    model = TabularModel(VOCABULARY, LENGTH, seed=2)
    model.p *= spread
    decoded_images = images_of(model, decoding, images, mistake)
    place = torch.zeros(images, dtype=torch.int64)
    for token in torch.stack([image.tokens for image in decoded_images]).long().T:
        place = place * VOCABULARY + token
    distribution = model.distribution(lambda cond, _: decoding_probabilities(cond, decoding)).numpy()
    observed = np.bincount(place.numpy(), minlength=len(distribution))
    if observed[distribution == 0].any():
        return 0.0
    possible = distribution > 0
    expected = distribution[possible] / distribution[possible].sum() * images
    return float(power_divergence(observed[possible], expected, lambda_="log-likelihood").pvalue)


CHAINS: list[dict[str, Any]] = [
    {"mode": "sjd", "window": 1},
    {"mode": "sjd", "window": WINDOW},
    {"mode": "sjd", "window": 8, "initial": "row"},  # wider than the image
    {"mode": "sjd", "window": WINDOW, "initial": "left", "coupling": "maximal"},
    {"mode": "sjd", "window": WINDOW, "coupling": "maximal", "temperature": 0.9, "top_k": 2},
    {"mode": "sjd", "window": WINDOW, "coupling": "gumbel"},
    {"mode": "sjd", "window": 3, "rule": "block"},
]
OTHERS: list[dict[str, Any]] = [
    {"mode": "sjd-pac", "window": 4},
    {"mode": "sjd-pac", "window": 4, "coupling": "none", "initial": "left"},
    {"mode": "sjd-pac", "window": 8, "coupling": "gumbel", "candidates": 2},
    {"mode": "sjd-pac", "window": 3, "branching": 9, "temperature": 0.9, "top_k": 2},
    {"mode": "sjd-pac", "window": 1},
    {"mode": "hybrid", "window": 4},
    {"mode": "hybrid", "window": 8, "drafted": 3, "coupling": "gumbel"},
    {"mode": "hybrid", "window": 3, "drafted": 9, "coupling": "none", "rule": "block"},
    {"mode": "hybrid", "window": 4, "drafted": 1, "share": 1, "temperature": 0.9, "top_k": 2},
]


@pytest.mark.parametrize("images", [5_000, pytest.param(200_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("values", CHAINS + OTHERS, ids=named)
def test_images_follow_the_target(values: dict[str, Any], images: int) -> None:
    p = g_test(Decoding(**values), images)
    print(f"G-test, {images} images, {values}: p = {p:.3f}")
    assert p > 1e-3


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"mode": "sjd", "window": WINDOW, "coupling": "none"}, "draft kept, with the new q"),
    ({"mode": "sjd", "window": WINDOW, "coupling": "maximal"}, "uniform number used again"),
    ({"mode": "sjd", "window": WINDOW, "coupling": "maximal"}, "old q kept with a draft"),
    ({"mode": "sjd", "window": WINDOW, "coupling": "gumbel"}, "noise kept by place in the window"),
    ({"mode": "sjd", "window": WINDOW, "coupling": "gumbel"}, "old q kept with a draft"),
    ({"mode": "hybrid", "window": WINDOW}, "old q kept with a draft"),
    ({"mode": "hybrid", "window": WINDOW}, "verified with the drafter's q"),
]


@pytest.mark.parametrize(("values", "name"), BROKEN, ids=str)
def test_the_loop_sees_what_is_broken(values: dict[str, Any], name: str) -> None:
    decoding = Decoding(**values)
    (mistake,) = (mistake for mistake in drafting_mistakes(decoding) if mistake.name == name)
    p = g_test(decoding, 30_000, mistake, spread=1.5)
    print(f"broken, {name}: p = {p:.1e}")
    assert p < 1e-6


def test_mistakes_that_cannot_be_made_are_left_out() -> None:
    for values, name in (
        ({"coupling": "none"}, "verified with the drafter's q"),
        ({"share": 1}, "old q kept with a draft"),
    ):
        (mistake,) = drafting_mistakes(Decoding("hybrid", **values))
        assert mistake.name == name


@pytest.mark.parametrize("mode", ["sjd-pac", "hybrid"])
def test_a_missing_residual_is_rejected(mode: str) -> None:
    assert g_test(Decoding(mode, window=2), 20_000, WITHOUT_RESIDUAL, spread=1.5) < 1e-6


@pytest.mark.parametrize("window", [2, 4])
def test_the_published_pac_is_rejected(window: int) -> None:
    p = g_test(Decoding("sjd-pac", drafting="sjd-pac-published", window=window, candidates=2), 20_000, spread=1.5)
    print(f"published SJD-PAC, window {window}: p = {p:.1e}")
    assert p < 1e-6


class FlatTarget(TabularModel):
    """Every position has a distribution of its own, whatever the tokens in front of it."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary, length, seed=0)
        tokens = (torch.arange(self.p.shape[1])[:, None] >= (vocabulary + 1) ** torch.arange(length)).sum(dim=1)
        self.p = self.p[:, 7 * tokens]


@pytest.mark.parametrize(
    "values",
    [{"mode": "sjd", "initial": initial} for initial in ("uniform", "left", "row")]
    + [{"mode": "sjd-pac", "candidates": 2}],
    ids=named,
)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_every_reused_draft_of_a_target_without_context_is_accepted(coupling: str, values: dict[str, Any]) -> None:
    """A shift that is wrong in the same way everywhere stays lossless, and shows here."""
    window, length, reused_drafts = 4, 9, 0
    for image in images_of(FlatTarget(3, length), Decoding(**values, window=window, coupling=coupling), 250):
        trace, before = image.trace, window
        for start, ranks, uncut in zip(trace.start, trace.child_rank, trace.uncut, strict=True):
            reused = min(window - before, length - 1 - start)
            assert ranks[:reused] == [0] * reused
            reused_drafts += reused
            before = uncut - 1
    assert reused_drafts > 400


GREEDY = [{"mode": "sjd", "initial": initial} for initial in INITIALS] + [{"mode": "sjd-pac"}, {"mode": "hybrid"}]


@pytest.mark.parametrize("values", GREEDY, ids=named)
def test_greedy_drafting_equals_greedy_decoding(values: dict[str, Any]) -> None:
    greedy = {"temperature": 0.0, "cfg_scale": 1.5}
    plain = decoded(Small(), Decoding("ar", **greedy), 3)
    for window in (1, 6, 30):
        drafted = decoded(Small(), Decoding(**values, window=window, **greedy), 3)
        assert all(a.tokens.equal(b.tokens) for a, b in zip(plain, drafted, strict=True))
        steps = drafted[0].trace.target_forwards - 1
        assert drafted[0].trace.drafter_forwards == (min(2, window) * steps if values["mode"] == "hybrid" else 0)
    forwards = [sum(image.trace.target_forwards for image in images) for images in (drafted, plain)]
    assert forwards[0] < forwards[1]


@pytest.mark.parametrize("values", CHAINS, ids=named)
def test_nothing_is_drafted_behind_the_image(values: dict[str, Any]) -> None:
    for item in images_of(TabularModel(VOCABULARY, LENGTH, seed=2), Decoding(**values), 60):
        trace = item.trace
        assert trace.tokens == LENGTH == 1 + sum(trace.committed)
        assert trace.drafter_forwards == 0
        for start, offered, ranks in zip(trace.start, trace.offered_depth, trace.child_rank, strict=True):
            assert offered == min(values["window"], LENGTH - start - 1)  # with one free position nothing
            assert len(ranks) <= offered


@pytest.mark.parametrize("values", [values for values in CHAINS if values["window"] > 1], ids=named)
def test_images_of_a_batch_accept_different_numbers(values: dict[str, Any]) -> None:
    decoding = Decoding(**values)
    model = TabularModel(VOCABULARY, LENGTH, seed=2)
    together = images_of(model, decoding, 30)
    accepted = [image.trace.accepted[0] for image in together]
    assert len(set(accepted)) > 2
    for seed, item in enumerate(together):
        alone = decode(model, [""], decoding, [torch.Generator().manual_seed(seed)])[0]
        assert alone.tokens.equal(item.tokens)
        assert alone.trace.child_rank == item.trace.child_rank


def test_a_whole_window_is_accepted_and_the_next_one_is_fresh() -> None:
    decoding = Decoding("sjd", window=2, initial="row")
    traces = [image.trace for image in images_of(FlatTarget(2, 12), decoding, 80)]
    whole = sum(trace.accepted[step] == 2 for trace in traces for step in range(len(trace.accepted) - 2))
    assert whole > 20


def test_siblings_shorten_the_decode() -> None:
    def steps_of(**values: Any) -> int:
        images = images_of(TabularModel(VOCABULARY, LENGTH, 2), Decoding(**values), 400)
        return sum(len(image.trace.start) for image in images)

    assert steps_of(mode="sjd-pac", window=4) < 0.95 * steps_of(mode="scd", window=4)


PROGRAMS: dict[str, dict[str, Any]] = {
    "left, maximal": {
        "mode": "sjd",
        "window": 4,
        "initial": "left",
        "coupling": "maximal",
        "cfg_scale": 1.5,
        "top_k": 30,
    },
    "above, gumbel": {"mode": "sjd", "window": 9, "initial": "above", "coupling": "gumbel"},
    "greedy": {"mode": "sjd", "window": 4, "initial": "row", "temperature": 0.0},
    "pac": {"mode": "sjd-pac", "window": 5, "cfg_scale": 1.5, "top_k": 30},
    "pac, gumbel, above": {"mode": "sjd-pac", "window": 6, "coupling": "gumbel", "initial": "above"},
    "pac, published": {"mode": "sjd-pac", "drafting": "sjd-pac-published", "window": 5},
    "pac, greedy": {"mode": "sjd-pac", "window": 5, "temperature": 0.0},
    "hybrid": {"mode": "hybrid", "window": 5, "drafted": 3, "initial": "above", "cfg_scale": 1.5, "top_k": 30},
    "hybrid, gumbel": {"mode": "hybrid", "window": 5, "drafted": 3, "coupling": "gumbel", "initial": "above"},
}
EVERY_TIME = ("left, maximal", "pac, gumbel, above", "hybrid")  # each compiles for some seconds
CAPTURED = [pytest.param(cell, marks=[] if cell in EVERY_TIME else pytest.mark.long) for cell in PROGRAMS]


@pytest.mark.parametrize("cell", CAPTURED)
def test_captured_programs_give_the_same_tokens(cell: str) -> None:
    model, decoding, engine = Small(), Decoding(**PROGRAMS[cell]), Engine(compile=True, backend="aot_eager")
    wanted = decoded(model, decoding, 3)
    for _again in range(2):
        same(decoded(model, decoding, 3, engine), wanted)


@pytest.mark.long
@pytest.mark.parametrize("cell", ["left, maximal", "pac"])
def test_inductor_gives_the_same_tokens(cell: str) -> None:
    model, decoding = Small(), Decoding(**PROGRAMS[cell])
    same(decoded(model, decoding, 1, Engine(compile=True)), decoded(model, decoding, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("cell", PROGRAMS)
def test_graphs_give_the_same_tokens(cell: str, images: int) -> None:
    model, decoding, engine = Small(device="cuda"), Decoding(**PROGRAMS[cell]), Engine(compile=True)
    wanted = decoded(model, decoding, images)
    for _again in range(2):
        same(decoded(model, decoding, images, engine), wanted)


@pytest.mark.parametrize("residual", ["exact", "official"])
@pytest.mark.parametrize("rule", [{"rule": "additive", "delta": 0.2}, {"rule": "multiplicative", "lambda": 3.0}])
def test_relaxed_rules_accept_more_jacobi_drafts(rule: dict[str, Any], residual: str) -> None:
    def steps_of(**values: Any) -> int:
        images = decoded(Small(), Decoding("sjd", window=5, coupling="maximal", **values), 3)
        return sum(len(image.trace.start) for image in images)

    relaxed = {**rule, "residual": residual}
    assert steps_of(**relaxed, neighbours=0) == steps_of()
    assert steps_of(**relaxed, neighbours=20) < steps_of()
