"""A walk: what it adds up for each setting."""

from __future__ import annotations

import numpy as np
import torch

from lantern_bench.analysis.token_distance import FeatureSums
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.expectation import ScoredDrafts
from lantern_bench.decoding.loop import configured_rule, decode, image_generators
from lantern_bench.decoding.protocol import Logits
from lantern_bench.decoding.sampling import decoding_probabilities, guide
from lantern_bench.decoding.step import SpeculativeStep
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.metrics.token_sums import ImageLayout
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.shadow_walk import ShadowWalk, WalkSums, feature_names

PROMPTS = [
    "one round red lantern over a lake at dusk",
    "two square blue lanterns over a lake at dusk",
]
SAMPLING = {"temperature": 1.0, "cfg_scale": 2.0, "cfg_default": 2.0}
TOKENS = 24


def of_tree(tree: object, mode: str = "speculative", **values: object) -> Decoding:
    return Decoding(mode, drafting="static", tree=tree, **SAMPLING, **values)


def walked(
    model: LoadedModel,
    walk: Decoding,
    settings: list[Decoding],
    prompts: list[str],
    first_seed: int = 0,
) -> tuple[WalkSums, list[float]]:
    """The sums of a walk over the first tokens, and the progress that it told."""
    seeds = range(first_seed, first_seed + len(prompts))
    told: list[float] = []
    shadow = ShadowWalk(model, walk, settings, images=len(prompts), progress=told.append)
    decode(
        model=model,
        condition=model.condition(prompts),
        decoding=walk,
        generators=image_generators(model, seeds),
        tokens=TOKENS,
        observe=shadow.observe,
    )
    return shadow.sums, told


def test_a_tree_inside_another_has_the_reach_of_its_nodes(lanterns: LoadedModel) -> None:
    """A node-by-node rule decides on a child by its parent and its earlier siblings alone.

    `longest_trees` relies on it.
    """
    whole = of_tree("small-7")
    small = whole.changed(tree=[path for path in whole.paths if not any(path)])  # a chain
    number = {path: node for node, path in enumerate([(), *whole.paths])}
    nodes = torch.tensor([number[path] for path in [(), *small.paths]])
    shape = StaticTree.of(small.paths)
    rules = [
        configured_rule(setting, lanterns)
        for setting in (whole, of_tree("small-7", "lantern", neighbours=20, delta=0.05))
    ]

    def compare(step: SpeculativeStep, logits: Logits) -> None:
        tree = step.drafting.tree
        assert tree.q is not None
        guided = guide(logits.cond, logits.uncond, whole.cfg_scale)
        p = decoding_probabilities(guided, whole)
        features = torch.zeros_like(p).unsqueeze(2)
        part = shape.draft(tree.tokens[:, nodes], tree.q[:, nodes])
        every = ScoredDrafts(tree, p, features)
        inside = ScoredDrafts(part, p[:, nodes], features[:, nodes])
        for rule in rules:
            expected = every.expected(rule).reach[:, nodes]
            assert (expected[:, 1:] > 0).any()
            torch.testing.assert_close(inside.expected(rule).reach, expected)

    decode(
        model=lanterns,
        condition=lanterns.condition(PROMPTS),
        decoding=whole,
        generators=image_generators(lanterns, range(2)),
        tokens=TOKENS,
        observe=compare,
    )


def test_a_walk_counts_the_nodes_that_each_setting_commits(lanterns: LoadedModel) -> None:
    walk = of_tree("chain-4")
    relaxed = of_tree("chain-4", "lantern", neighbours=20, delta=0.05)
    sums, told = walked(lanterns, walk, [walk, relaxed], PROMPTS)
    np.testing.assert_allclose(sums.reach[:, :, 0], np.tile(sums.steps, (2, 1)))
    np.testing.assert_allclose(sums.committed.sum(axis=2), sums.reach.sum(axis=2))
    assert sums.reach[1].sum() > sums.reach[0].sum()
    assert not sums.features[0, ..., 0].any()
    assert told == sorted(told)
    assert 0.5 < told[-1] < 1.0


def test_features_are_summed_over_the_tokens_of_a_step(lanterns: LoadedModel) -> None:
    """The variance of a token's surprise is that of all tokens of the image, about."""
    walk = of_tree("chain-4")
    relaxed = of_tree("chain-4", "lantern", neighbours=20, delta=0.3)
    sums, _ = walked(lanterns, walk, [relaxed], PROMPTS)
    names = feature_names(lanterns, walk)
    columns = sums.features[0].reshape(len(PROMPTS), -1)
    total = FeatureSums.of(columns, len(names)).whole.total
    tokens = sums.reach[0].sum()
    assert names == [
        "surprise",
        "squared_surprise",
        "prompt_information",
        "first_component",
        "closeness",
    ]
    variance = ImageLayout.of(lanterns).component
    assert variance is not None
    assert 0 < total.covariance[0, 3, 3] / tokens < float(variance.square().max())
    assert total.sums[0, 0] != 0


def test_images_of_a_batch_have_the_sums_of_their_own_walks(lanterns: LoadedModel) -> None:
    """Also those that are done later than others."""
    walk = of_tree("chain-4")
    settings = [walk, of_tree("chain-4", "lantern", neighbours=20, delta=0.05)]
    together, _ = walked(lanterns, walk, settings, PROMPTS)
    alone = WalkSums.joined(
        [
            walked(lanterns, walk, settings, [prompt], first_seed=seed)[0]
            for seed, prompt in enumerate(PROMPTS)
        ]
    )
    assert together.steps[0] != together.steps[1]
    for name, sums in together._asdict().items():
        expected = getattr(alone, name)
        np.testing.assert_allclose(sums, expected, rtol=1e-3, atol=1e-3, err_msg=name)


def test_nothing_is_committed_behind_the_end_of_an_image(lanterns: LoadedModel) -> None:
    walk = of_tree("chain-4")
    greedy = of_tree("chain-4", "lantern", neighbours=100, delta=0.9)
    shadow = ShadowWalk(lanterns, walk, [greedy], images=1, progress=lambda _fraction: None)
    cut = []

    def observe(step: SpeculativeStep, logits: Logits) -> None:
        before = shadow.sums.committed.copy()
        shadow.observe(step, logits)
        limit = int(step.images.depth_limit[0])
        added = (shadow.sums.committed - before)[0, 0]
        assert added[: 1 + limit].all()
        assert not added[1 + limit :].any()
        cut.append(limit < 4)

    decode(
        model=lanterns,
        condition=lanterns.condition(PROMPTS[:1]),
        decoding=walk,
        generators=image_generators(lanterns, range(1)),
        observe=observe,
    )
    assert any(cut)


def test_joined_walks_have_the_images_of_both(lanterns: LoadedModel) -> None:
    walk = of_tree("chain-3")
    first, _ = walked(lanterns, walk, [walk], PROMPTS[:1])
    second, _ = walked(lanterns, walk, [walk], PROMPTS[1:])
    joined = WalkSums.joined([first, second])
    assert joined.steps.tolist() == [*first.steps, *second.steps]
    assert joined.reach.shape == (1, 2, 4)


def test_an_observed_decode_gives_the_same_tokens(lanterns: LoadedModel) -> None:
    """Keeping the logits of both rows changes nothing but rounding."""
    walk = of_tree("chain-3")
    tokens = []
    for observe in (None, lambda _step, _logits: None):
        images = decode(
            model=lanterns,
            condition=lanterns.condition(PROMPTS),
            decoding=walk,
            generators=image_generators(lanterns, range(2)),
            tokens=TOKENS,
            observe=observe,
        )
        tokens.append([image.tokens.tolist() for image in images])
    assert tokens[0] == tokens[1]
