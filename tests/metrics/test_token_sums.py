"""The distance from the target: its definition, its null distribution, its power, and its
independence of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from lantern_bench.analysis.token_distance import FeatureSums, distance, p_value
from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import drafter_logits_along, teacher_forced
from lantern_bench.metrics import token_sums as scorer
from lantern_bench.metrics.token_sums import token_sums
from lantern_bench.models.families.lanterns.description import HELD_OUT
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.networks.packed_linear import pack_for_decoding
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import LogitsError

CHAIN: dict[str, Any] = {"drafting": "static", "rule": "strict", "tree": ((0,), (0, 0), (0, 0, 0))}


def table_model(model: TabularModel, codebook: Tensor | None = None) -> LoadedModel:
    return LoadedModel(
        name="tables",
        target=model,
        drafter=model.drafter,
        pixels=None,
        codebook=codebook,
        condition=lambda _: None,
        weights={},
        grid=(1, model.image_tokens),
    )


def sums_of(rows: Sequence[dict[str, Any]]) -> FeatureSums:
    features = len(rows[0]["features"].split())
    return FeatureSums.of(np.array([row["feature_sums"] for row in rows]), features)


def distribution(cond: Tensor, uncond: Tensor | None, decoding: Decoding) -> Tensor:
    guided = guide(cond, uncond, decoding.cfg_scale)
    return decoding_probabilities(guided, decoding).double()


def ancestral(model: TabularModel, images: int, decoding: Decoding, seed: int) -> Tensor:
    """Images [images, N] drawn from the target, a token at a time, in one batch."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.zeros(images, dtype=torch.int64)
    tokens = []
    for _ in range(model.image_tokens):
        p = decoding_probabilities(
            guide(model.p[0, states], model.p[1, states], decoding.cfg_scale), decoding
        )
        tokens.append(torch.multinomial(p, 1, generator=generator).squeeze(1))
        states = model.state_after(states, tokens[-1])
    return torch.stack(tokens, dim=1)


CODES = torch.randn(5, 3, generator=torch.Generator().manual_seed(6))
LINE = 2
BLOCKS_OF_POSITIONS = [0, 1, 2, 4 + 3, 4]  # half, row and column parity, of five tokens


def features_of_codes(tokens: Tensor, image: int, position: int, v: int) -> list[float]:
    """First component, closeness and `alike` of token v in lines of two tokens."""
    codes = CODES.double().numpy()
    centred = codes - codes.mean(axis=0)
    axis = np.linalg.svd(centred)[2][0]
    axis *= np.sign(axis[np.abs(axis).argmax()])
    near = [position - 1] if position % LINE else []
    if position >= LINE:
        near.append(position - LINE)
    squares = [((codes[v] - codes[tokens[image, other]]) ** 2).sum() for other in near]
    same = int((tokens[:image, position] == v).sum())
    return [centred[v] @ axis, -sum(squares), same / max(1, image) ** 0.5]


@pytest.mark.parametrize(
    "values", [{}, {"cfg_scale": 2.0}, {"cfg_scale": 2.0, "top_k": 3, "temperature": 0.8}]
)
def test_sums_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    # two positions at once: chunks meet inside the image
    monkeypatch.setattr(scorer, "_VALUES", 10)
    table = TabularModel(5, 5, seed=3)
    table.line_length = LINE
    decoding = Decoding("speculative", **CHAIN, **values)
    tokens = ancestral(table, 4, decoding, seed=1)
    model = table_model(table, CODES)
    rows = token_sums(model=model, condition=None, tokens=tokens, decoding=decoding)
    guided = decoding.cfg_scale != 1
    forced = teacher_forced(target=table, condition=None, tokens=tokens, guided=guided)
    drafts = drafter_logits_along(table.drafter, forced)
    for image, row in enumerate(rows):
        expected = np.zeros((8, 6 + guided))
        entropy = 0.0
        covariance = np.zeros((8, 6 + guided, 6 + guided))
        above = np.zeros(6 + guided)
        below = np.zeros(6 + guided)
        for position, x in enumerate(tokens[image].tolist()):
            cond = forced.logits.cond[image, position]
            uncond = (
                forced.logits.uncond[image, position] if forced.logits.uncond is not None else None
            )
            p = distribution(cond, uncond, decoding).numpy()
            q = p
            if position:
                draft = drafts.cond[image, position - 1]
                without = None if drafts.uncond is None else drafts.uncond[image, position - 1]
                q = distribution(draft, without, decoding).numpy()
            possible = [v for v in range(5) if p[v] > 0]
            h = -sum(p[v] * np.log(p[v]) for v in possible)
            values_of = {}
            for v in possible:
                feature = [-np.log(p[v]), (-np.log(p[v]) - h) ** 2]
                if uncond is not None:
                    feature.append(float(cond.log_softmax(-1)[v] - uncond.log_softmax(-1)[v]))
                feature += features_of_codes(tokens, image, position, v)
                values_of[v] = np.array([*feature, (q[v] - p[v]) / (q[v] + p[v])])
            mean = sum(p[v] * values_of[v] for v in possible)
            block = BLOCKS_OF_POSITIONS[position]
            expected[block] += values_of[x] - mean
            above = np.max([above, *(values_of[v] - mean for v in possible)], axis=0)
            below = np.max([below, *(mean - values_of[v] for v in possible)], axis=0)
            covariance[block] += sum(
                p[v] * np.outer(values_of[v] - mean, values_of[v] - mean) for v in possible
            )
            entropy += h / 5
        sums = sums_of([row])
        np.testing.assert_allclose(sums.sums[0], expected, atol=1e-5)
        np.testing.assert_allclose(sums.covariance[0], covariance, atol=1e-5)
        np.testing.assert_allclose(row["feature_ranges"], [*above, *below], atol=1e-5)
        assert row["tokens"] == 5
        assert row["impossible_tokens"] == 0
        assert row["entropy"] == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize(
    ("guided", "codebook", "names"),
    [
        (True, True, "prompt_information first_component closeness alike"),
        (False, True, "first_component closeness alike"),
        (True, False, "prompt_information alike"),
    ],
)
def test_models_without_guidance_or_codebook_have_fewer_features(
    guided: bool, codebook: bool, names: str
) -> None:
    table = TabularModel(5, 5, seed=3)
    (row,) = token_sums(
        model=table_model(table, CODES if codebook else None),
        condition=None,
        tokens=torch.zeros(1, 5, dtype=torch.int64),
        decoding=Decoding("ar", cfg_scale=1.0 + guided),
    )
    assert row["features"] == f"surprise squared_surprise {names}"


def test_p_values_of_2000_lossless_cells_are_uniform() -> None:
    """Each cell has 240 images of four tokens: fewer tokens than a cell of the default sweep, where
    chi-square fits.
    """
    table = TabularModel(8, 4, seed=5)
    decoding = Decoding("speculative", **CHAIN, cfg_scale=2.0)
    is_drawn = torch.ones(960, dtype=torch.bool)
    block = torch.zeros(960, dtype=torch.int64)
    cells = []
    for seed in range(10):
        tokens = ancestral(model=table, images=200 * 240, decoding=decoding, seed=seed)
        forced = teacher_forced(target=table, condition=None, tokens=tokens, guided=True)
        cond = forced.logits.cond
        uncond = forced.logits.uncond
        p = distribution(cond, uncond, decoding)
        drafts = drafter_logits_along(table.drafter, forced)
        q = torch.cat([p[:, :1], distribution(drafts.cond, drafts.uncond, decoding)], dim=1)
        information = cond.log_softmax(-1) - uncond.log_softmax(-1)
        values = [
            each.reshape(200, 960, -1) for each in (p, tokens, information, (q - p) / (q + p))
        ]
        for of_p, x, *further in zip(*values, strict=True):
            sums = scorer._sums(of_p, x, further, is_drawn=is_drawn, block=block)
            cells.append(FeatureSums.of(sums.of_features[:1].numpy(), 4))
    p_values = np.array([cell.total.p_value for cell in cells])
    assert kstest(p_values, "uniform").pvalue > 0.01
    assert (p_values < 1e-3).mean() < 4e-3
    # The mean of `distance` is 0: its standard error over the cells is sqrt(2 m / cells) / tokens.
    distances = [distance(cell, np.array([960.0])).value for cell in cells]
    assert abs(np.mean(distances)) < 4 * np.sqrt(2 * 4 / len(cells)) / 960


@pytest.fixture(scope="module")
def decoded(lanterns: LoadedModel) -> Callable[..., tuple[Any, Tensor, Decoding]]:
    def decode_cell(images: int, **values: Any) -> tuple[Any, Tensor, Decoding]:
        decoding = Decoding(**{"mode": "ar", "cfg_scale": 2.0, **values})
        prompts = [HELD_OUT[number].caption() for number in range(images)]
        condition = lanterns.condition(prompts)
        generators = [torch.Generator().manual_seed(seed) for seed in range(images)]
        tokens = torch.stack(
            [
                image.tokens
                for image in decode(
                    model=lanterns, condition=condition, decoding=decoding, generators=generators
                )
            ]
        ).long()
        return condition, tokens, decoding

    return decode_cell


@pytest.mark.long
def test_24_images_tell_lambda_2_from_the_target(
    lanterns: LoadedModel, decoded: Callable[..., Any]
) -> None:
    relaxed = {"mode": "lantern++", "tree": "chain-7", "neighbours": 100, "lambda": 2.0}
    strict = {"mode": "speculative", "drafting": "static", "rule": "strict", "tree": "chain-7"}
    p_values = []
    for values in (strict, relaxed):
        condition, tokens, decoding = decoded(24, **values)
        rows = token_sums(model=lanterns, condition=condition, tokens=tokens, decoding=decoding)
        p = p_value(
            sums_of(rows),
            ranges=[row["feature_ranges"] for row in rows],
            tokens=[row["tokens"] for row in rows],
        )
        p_values.append(p)
    assert p_values[0] > 1e-3
    assert p_values[1] < 1e-9


def test_sums_do_not_depend_on_batch_and_packed_weights(
    lanterns: LoadedModel, decoded: Callable[..., Any]
) -> None:
    condition, tokens, decoding = decoded(
        4, mode="speculative", drafting="static", rule="strict", tree="chain-7"
    )
    together = token_sums(model=lanterns, condition=condition, tokens=tokens, decoding=decoding)
    prompts = [HELD_OUT[number].caption() for number in range(4)]
    packed = model_of("lanterns").load(torch.device("cpu"), torch.float32)
    pack_for_decoding(packed.target, packed.drafter)
    for number, row in enumerate(together):
        (alone,) = token_sums(
            model=packed,
            condition=packed.condition([prompts[number]]),
            tokens=tokens[number : number + 1],
            decoding=decoding,
            earlier=list(tokens[:number]),
        )
        np.testing.assert_allclose(alone["feature_sums"], row["feature_sums"], rtol=1e-3, atol=1e-2)
        assert alone["features"] == row["features"]


def test_greedy_images_are_counted_token_by_token(
    lanterns: LoadedModel, decoded: Callable[..., Any]
) -> None:
    condition, tokens, decoding = decoded(1, temperature=0.0)
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 2048  # no later token depends on it
    counts = [
        token_sums(model=lanterns, condition=condition, tokens=each, decoding=decoding)[0]
        for each in (tokens, changed)
    ]
    assert counts[1]["mismatched_tokens"] == counts[0]["mismatched_tokens"] + 1
    assert counts[0]["mismatched_tokens"] <= 1
    assert counts[0]["tokens"] == 256
    assert "features" not in counts[0]


def test_tokens_outside_the_filter_are_counted_as_impossible() -> None:
    table = TabularModel(5, 5, seed=3)
    unfiltered = Decoding("ar")
    tokens = ancestral(table, 200, unfiltered, seed=1)
    rows = token_sums(
        model=table_model(table),
        condition=None,
        tokens=tokens,
        decoding=unfiltered.changed(top_k=2),
    )
    assert sum(row["impossible_tokens"] for row in rows) > 50
    assert all(np.isfinite(row["feature_sums"]).all() for row in rows)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    table = TabularModel(4, 3, seed=1)
    table.p[0, 0, 0] = torch.nan
    with pytest.raises(LogitsError, match="NaN"):
        token_sums(
            model=table_model(table),
            condition=None,
            tokens=torch.zeros(1, 3, dtype=torch.int64),
            decoding=Decoding("ar"),
        )


def test_a_feature_that_cannot_vary_counts_nothing() -> None:
    covariance = np.array([[4.0, 2.0, 0.0], [2.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    sums = FeatureSums(np.array([[2.0, -1.0, 0.0]]), covariance[None])
    assert sums.freedom == 2
    assert sums.chi_square == pytest.approx(sums.chosen([0, 1]).chi_square)
    constant = FeatureSums(np.zeros((2, 1, 1)), np.zeros((2, 1, 1, 1)))
    assert distance(constant, np.ones(2)).value is None


def test_the_digits_of_the_sums_keep_their_rank() -> None:
    """With the same p everywhere, surprise, its square and the component span two dimensions.

    Closeness and `alike` change from token to token, so they add one each.
    """
    table = TabularModel(3, 16, seed=3, memory=1)
    table.line_length = 4
    table.p[:] = torch.tensor([0.3, -0.4, 1.1])
    tokens = ancestral(table, 40, Decoding("ar"), seed=1)
    model = table_model(table, CODES[:3])
    rows = token_sums(model=model, condition=None, tokens=tokens, decoding=Decoding("ar"))
    assert sums_of(rows).total.freedom == 8 * 4


def test_intervals_of_the_distance_cover_a_true_shift() -> None:
    """Prompts whose sums have mean `shift` in units of their covariance: the distance is shift'
    shift.
    """
    generator = np.random.default_rng(4)
    shift = np.array([0.1, 0.0, -0.1])
    tokens = 256.0
    covered = []
    for _ in range(200):
        noise = generator.standard_normal((24, 1, 3)) * np.sqrt(tokens)
        covariance = np.broadcast_to(tokens * np.eye(3), (24, 1, 3, 3))
        sums = FeatureSums(tokens * shift + noise, covariance)
        interval = distance(sums, np.full(24, tokens))
        assert interval.low is not None
        assert interval.high is not None
        covered.append(interval.low <= shift @ shift <= interval.high)
    assert np.mean(covered) > 0.88


def test_rounding_may_let_tokens_at_the_edge_of_a_filter_pass() -> None:
    """Two of five logits almost tie at the edge of top-k 2; the next one is 0.1 below."""
    table = TabularModel(5, 5, seed=3)
    table.p[:] = torch.tensor([0.4, 0.2, 0.2 * (1 - 1e-4), 0.1, 0.1])
    decoding = Decoding("ar", top_k=2)
    rows = []
    for token in (1, 2, 3):
        tokens = torch.full((1, 5), token)
        rows += token_sums(
            model=table_model(table), condition=None, tokens=tokens, decoding=decoding
        )
    counts = [(row["impossible_tokens"], row["edge_tokens"]) for row in rows]
    assert counts == [(0, 0), (5, 5), (5, 0)]
    (rounded,) = token_sums(
        model=table_model(table),
        condition=None,
        tokens=torch.full((1, 5), 3),
        decoding=decoding,
        dtype="bfloat16",
    )
    assert rounded["edge_tokens"] == 5
