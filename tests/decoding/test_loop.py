"""The whole loop with a tabular target: lossless by G-test with power, greedy equals greedy, counts
add up.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence
from torch import Tensor

from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import Decoded, decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.methods.catalog import MODES
from tests.decoding.test_engine import Small, decoded
from tests.helpers.mistakes import Mistake, strict_without_residual

VOCABULARY = 3
LENGTH = 5
BATCH = 30_000
WITHOUT_RESIDUAL = Mistake("residual left out", strict_without_residual)
STATIC: dict[str, Any] = {
    "mode": "speculative",
    "drafting": "static",
    "tree": [[0], [1], [0, 0], [1, 0]],
}
DYNAMIC: dict[str, Any] = {
    "mode": "speculative",
    "drafting": "dynamic",
    "nodes": 5,
    "depth": 2,
    "beam": 2,
}
BLOCK: dict[str, Any] = {"mode": "speculative", "rule": "block", "tree": [[0], [0, 0]]}
FILTERED: dict[str, Any] = {"temperature": 0.9, "top_k": 2, "top_p": 0.95, "cfg_scale": 1.5}
TREES = [STATIC, DYNAMIC, BLOCK, STATIC | {"rule": "traversal"}]
WINDOWS: list[dict[str, Any]] = [
    {"mode": "sjd", "window": 1},
    {"mode": "sjd", "window": 4},
    {"mode": "sjd", "window": 8, "initial": "row"},  # wider than the image
    {"mode": "sjd", "window": 4, "initial": "left", "coupling": "maximal"},
    {"mode": "sjd", "window": 4, "coupling": "maximal", "temperature": 0.9, "top_k": 2},
    {"mode": "sjd", "window": 4, "coupling": "gumbel"},
    {"mode": "sjd++", "window": 4},
    {"mode": "sjd", "window": 3, "rule": "block"},
    {"mode": "block-scd", "window": 4},
    {"mode": "block-scd", "window": 8, "initial": "row"},
    {"mode": "block-scd", "window": 4, "initial": "left", "temperature": 0.9, "top_k": 2},
    {"mode": "sjd-pac", "window": 4},
    {"mode": "sjd-pac", "window": 4, "coupling": "none", "initial": "left"},
    {"mode": "sjd-pac", "window": 8, "coupling": "gumbel", "candidates": 2},
    {"mode": "sjd-pac", "window": 3, "branching": 9, "temperature": 0.9, "top_k": 2},
    {"mode": "sjd-pac", "window": 1},
    {"mode": "sjd-pac", "window": 4, "branching": 1, "candidates": 2, "rule": "traversal"},
    {"mode": "hybrid", "window": 4},
    {"mode": "hybrid", "window": 4, "rule": "block"},
    {"mode": "hybrid", "window": 8, "drafted": 3, "coupling": "gumbel"},
    {"mode": "hybrid", "window": 3, "drafted": 9, "coupling": "none", "rule": "block"},
    {
        "mode": "hybrid",
        "window": 4,
        "drafted": 1,
        "drafter_weight": 1,
        "temperature": 0.9,
        "top_k": 2,
    },
]
LOSSLESS = TREES + [tree | FILTERED for tree in TREES] + WINDOWS
DRAFTED: dict[str, dict[str, Any]] = {
    "tree": STATIC,
    "dynamic": DYNAMIC,
    "jacobi": {"drafting": "jacobi", "window": 3},
    "copies": {"drafting": "jacobi", "window": 3, "initial": "left", "coupling": "maximal"},
}
RULES: list[dict[str, Any]] = [
    {"mode": "cool-sd", "strength": 1.3},
    {"mode": "gsd", "cluster": 3, "code_gap": 3.0, "residual": "official"},
    {"mode": "entropy", "entropy_scale": 0.5, "neighbours": 2},
    {"mode": "typical", "epsilon": 0.3, "alpha": 0.5},
    {"mode": "csd", "tv_limit": 0.65},
    {"mode": "addition", "added": 0.2},
]


def named(values: dict[str, Any]) -> str:
    return "-".join(map(str, values.values()))


class CodedModel(TabularModel):
    """Tables with a codebook of near codes; those behind x are nearest to it."""

    def __init__(self, vocab: int, length: int, seed: int) -> None:
        super().__init__(vocab, length, seed)
        self.codes = 0.5 * torch.randn(vocab, 2, generator=torch.Generator().manual_seed(seed))

    def table(self, columns: int, metric: str = "l2") -> Tensor:
        codes = torch.arange(self.vocab_size)
        return (codes[:, None] + 1 + codes[:columns]) % self.vocab_size


def images_of(
    model: TabularModel,
    decoding: Decoding,
    images: int,
    mistake: Mistake | None = None,
    batch: int = BATCH,
) -> list[Decoded]:
    if not decoding.drafting_row.needs_drafter:
        model.drafter = None
    images_done: list[Decoded] = []
    for start in range(0, images, batch):
        generators = [
            torch.Generator().manual_seed(seed) for seed in range(start, min(start + batch, images))
        ]
        broken = mistake.arguments(decoding, model, len(generators)) if mistake else {}
        images_done += decode(
            model=model,
            condition=[""] * len(generators),
            decoding=decoding,
            generators=generators,
            **broken,
        )
    return images_done


def emitted_tv_of(model: TabularModel, values: dict[str, Any], images: int) -> Tensor:
    """The emitted TV of each image, summed over its tokens."""
    decoded_images = images_of(model, Decoding(**values), images)
    return torch.tensor([image.trace.emitted_tv for image in decoded_images])


def joint_of(model: TabularModel, decoding: Decoding) -> Tensor:
    """The distribution of all tokens of an image."""
    return model.joint(
        lambda cond, uncond: decoding_probabilities(
            guide(cond, uncond, decoding.cfg_scale), decoding
        ),
        LENGTH,
    )


def g_test(
    decoding: Decoding,
    images: int,
    mistake: Mistake | None = None,
    spread: float = 1.0,
    *,
    vocabulary: int = VOCABULARY,
    seed: int = 2,
) -> float:
    """The p-value of the joint distribution of all tokens of an image."""
    model = CodedModel(vocabulary, LENGTH, seed)
    model.p *= spread
    tokens = torch.stack(
        [
            image.tokens
            for image in images_of(model=model, decoding=decoding, images=images, mistake=mistake)
        ]
    ).long()
    distribution = joint_of(model, decoding).numpy()
    place = (tokens * vocabulary ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    observed = np.bincount(place.numpy(), minlength=len(distribution))
    possible = distribution > 0
    if observed[~possible].any():
        return 0.0
    expected = distribution[possible] / distribution[possible].sum() * images
    return float(power_divergence(observed[possible], expected, lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize("images", [5_000, pytest.param(200_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("values", LOSSLESS, ids=named)
def test_images_follow_the_target(values: dict[str, Any], images: int) -> None:
    p = g_test(Decoding(**values), images)
    print(f"G-test, {images} images, {values}: p = {p:.3f}")
    assert p > 1e-3


@pytest.mark.parametrize(
    "values", [*TREES, {"mode": "sjd-pac", "window": 2}, {"mode": "hybrid", "window": 2}], ids=named
)
def test_a_missing_residual_is_rejected(values: dict[str, Any]) -> None:
    p = g_test(Decoding(**values), 20_000, WITHOUT_RESIDUAL, spread=1.5)
    print(f"residual left out, {values}: p = {p:.1e}")
    assert p < 1e-6


@pytest.mark.parametrize("values", LOSSLESS, ids=named)
def test_emitted_tv_of_lossless_images_is_0_on_average(values: dict[str, Any]) -> None:
    model = TabularModel(VOCABULARY, LENGTH, seed=2)
    if Decoding(**values).emitted_tv_problem is not None:
        assert Decoding(**values).rule in ("block", "traversal")
        assert all(
            image.trace.emitted_tv is None for image in images_of(model, Decoding(**values), 5)
        )
        return
    emitted = emitted_tv_of(model, values, 3_000)
    assert emitted.std() > 0.1
    assert abs(emitted.mean()) < 4 * emitted.std() / len(emitted) ** 0.5


RELAXED: list[dict[str, Any]] = [
    {"mode": "lantern++", "lambda_": 3.0, "neighbours": 2},
    {"mode": "cool-sd", "strength": 2.0},
    {"mode": "gsd", "cluster": 3, "code_gap": 3.0},
]
DRAWN = [{"drafting": "static", "tree": "chain-3"}, STATIC, DYNAMIC, *WINDOWS[:4], WINDOWS[8]]


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule["mode"])
@pytest.mark.parametrize("drafted", DRAWN, ids=named)
def test_emitted_tv_bounds_the_tv_of_images(drafted: dict[str, Any], rule: dict[str, Any]) -> None:
    """Of whole images, which is at most the sum over their tokens."""
    values = {"drafting": MODES[drafted.get("mode", "ar")].drafting} | drafted | rule
    model = CodedModel(VOCABULARY, LENGTH, seed=2)
    decoding = Decoding(**values)
    images = images_of(model, decoding, 4_000)
    p = joint_of(model, decoding)
    tokens = torch.stack([image.tokens for image in images]).long()
    place = (tokens * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    shares = torch.bincount(place, minlength=len(p)) / len(images)
    emitted = torch.tensor([image.trace.emitted_tv for image in images])
    noise = 4 * emitted.std() / len(images) ** 0.5
    assert emitted.mean() > noise
    # A lower bound of the total variation: images that are too frequent beyond chance.
    excess = shares - p
    tv = float(excess[excess > 4 * (p / len(images)) ** 0.5].sum())
    print(f"TV of images {tv:.3f}, emitted TV {emitted.mean():.3f}")
    assert 0.0 < tv <= emitted.mean() + noise


@pytest.mark.parametrize(
    ("values", "emitted"),
    [
        ({"mode": "ar"}, 0.0),
        ({"mode": "ar", "temperature": 0.0}, None),
        (STATIC | {"temperature": 0.0}, None),
        (BLOCK, None),
        (STATIC | RULES[1], None),
    ],
    ids=str,
)
def test_emitted_tv_is_left_out_where_its_conditions_do_not_hold(
    values: dict[str, Any], emitted: float | None
) -> None:
    (image,) = images_of(CodedModel(VOCABULARY, LENGTH, seed=2), Decoding(**values), 1)
    assert image.trace.emitted_tv == emitted


SPECULATED = [
    {"mode": "sjd", "initial": initial} for initial in ("uniform", "left", "above", "row")
]
SPECULATED += [{"mode": "sjd-pac"}, {"mode": "hybrid"}]
GREEDY = [STATIC, DYNAMIC] + [
    values | {"window": window} for values, window in product(SPECULATED, (1, 6, 30))
]


@pytest.mark.parametrize("values", GREEDY, ids=named)
def test_greedy_drafting_equals_greedy_decoding(values: dict[str, Any]) -> None:
    greedy = {"temperature": 0.0, "cfg_scale": 1.5}
    plain, drafted = (
        decoded(Small(), Decoding(**mode, **greedy), 3) for mode in ({"mode": "ar"}, values)
    )
    assert all(a.tokens.equal(b.tokens) for a, b in zip(plain, drafted, strict=True))
    steps = drafted[0].trace.target_forwards - 1
    if "window" in values:
        asked = min(2, values["window"]) * steps if values["mode"] == "hybrid" else 0
        assert drafted[0].trace.drafter_forwards == asked
    forwards = [sum(image.trace.target_forwards for image in images) for images in (drafted, plain)]
    assert forwards[0] < forwards[1]


@pytest.mark.parametrize(
    "values",
    LOSSLESS + [drafted | rule for rule, drafted in product(RULES, DRAFTED.values())],
    ids=named,
)
def test_images_of_a_batch_are_those_decoded_alone(values: dict[str, Any]) -> None:
    decoding = Decoding(**values)
    model = CodedModel(VOCABULARY, LENGTH, seed=2)
    together, alone = (images_of(model, decoding, 30, batch=batch) for batch in (30, 1))
    lossless = decoding.rule_row.lossless
    if lossless and values["mode"] != "sjd-pac":  # which may have every token among its candidates
        assert len({image.trace.accepted[0] for image in together}) > 1
    for image, single in zip(together, alone, strict=True):
        assert single.tokens.equal(image.tokens)
        assert single.trace.child_rank == image.trace.child_rank
        assert single.trace.emitted_tv == pytest.approx(image.trace.emitted_tv, abs=1e-5)
    assert (sum(image.trace.neighbour_mass_tried for image in together) > 0) != lossless


@pytest.mark.parametrize("values", LOSSLESS, ids=named)
def test_every_count_is_a_sum_over_the_trace(values: dict[str, Any]) -> None:
    decoding = Decoding(**values)
    for item in images_of(TabularModel(VOCABULARY, LENGTH, seed=2), decoding, 60):
        trace = item.trace
        assert trace.tokens == LENGTH == 1 + sum(trace.committed)
        assert trace.start == [1 + sum(trace.committed[:step]) for step in range(len(trace.start))]
        assert trace.target_forwards == 1 + len(trace.committed)
        assert (trace.drafter_forwards > 0) == decoding.drafting_row.needs_drafter
        assert [count - 1 for count in trace.uncut] == trace.accepted
        # With R positions left nothing deeper than R - 1 is drafted.
        for start, offered, ranks in zip(
            trace.start, trace.offered_depth, trace.child_rank, strict=True
        ):
            assert offered == min(values.get("window", 2), LENGTH - start - 1)
            assert len(ranks) <= offered
        assert [sum(rank >= 0 for rank in ranks) for ranks in trace.child_rank] == trace.accepted


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1_000_003 + image) for image in range(count)]


def test_fewer_tokens_are_cut_and_also_counted_uncut() -> None:
    images = decode(
        model=TabularModel(4, 5, seed=3),
        condition=None,
        decoding=Decoding(**STATIC),
        generators=generators(200),
        tokens=2,
    )
    assert all(len(item.tokens) == 2 == item.trace.tokens for item in images)
    assert all(item.trace.committed == [1] for item in images)
    assert max(item.trace.uncut[-1] for item in images) > 1


def test_ar_counts_one_token_a_step_and_compresses_nothing() -> None:
    trace = decode(
        model=TabularModel(4, 5, seed=3),
        condition=None,
        decoding=Decoding(mode="ar"),
        generators=generators(1),
    )[0].trace
    assert trace.mean_accepted_length == 1.0
    assert trace.step_compression == 1.0


@pytest.mark.parametrize("values", [{"mode": "ar"}, STATIC], ids=named)
def test_kept_logits_are_those_the_tokens_came_from(values: dict[str, Any]) -> None:
    model = TabularModel(4, 5, seed=9)
    decoding = Decoding(**values, cfg_scale=1.5)
    for item in decode(
        model=model, condition=None, decoding=decoding, generators=generators(8), keep_logits=True
    ):
        state = torch.zeros((), dtype=torch.int64)
        for place, token in enumerate(item.tokens.long()):
            wanted = guide(model.p[0, state], model.p[1, state], 1.5)
            assert torch.allclose(item.logits[place], wanted, atol=1e-5)
            state = model.state_after(state, token)
