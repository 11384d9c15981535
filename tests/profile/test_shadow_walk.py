"""A walk over the union of trees: what it adds up for each setting."""

from __future__ import annotations

import numpy as np
import torch

from lantern_bench.analysis.token_distance import FeatureSums
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode, image_generators
from lantern_bench.methods.static_trees import check_topology
from lantern_bench.metrics.token_sums import ImageLayout
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile import shadow_walk
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
    model: LoadedModel, walk: Decoding, settings: list[Decoding], prompts: list[str]
) -> tuple[WalkSums, list[float]]:
    """The sums of a walk over the first tokens, and the progress that it told."""
    told: list[float] = []
    shadow = ShadowWalk(model, walk, settings, images=len(prompts), progress=told.append)
    decode(
        model=model,
        condition=model.condition(prompts),
        decoding=walk,
        generators=image_generators(model, range(len(prompts))),
        tokens=TOKENS,
        observe=shadow.observe,
    )
    return shadow.sums, told


def test_a_tree_inside_the_union_has_the_reach_of_its_nodes(lanterns: LoadedModel) -> None:
    """A node-by-node rule decides on a child by its parent and its earlier siblings alone."""
    small = of_tree("small-7")
    chain = of_tree("chain-4")
    union = small.changed(tree=check_topology({*small.paths, *chain.paths}))
    relaxed = of_tree("chain-4", "lantern", neighbours=20, delta=0.05)
    sums, told = walked(lanterns, union, [union, chain, relaxed], PROMPTS)

    number = {path: node for node, path in enumerate([(), *union.paths])}
    nodes = [number[path] for path in [(), *chain.paths]]
    np.testing.assert_allclose(sums.reach[1, :, :5], sums.reach[0][:, nodes], rtol=1e-5)
    assert not sums.reach[1, :, 5:].any()
    np.testing.assert_allclose(sums.reach[:, :, 0], np.tile(sums.steps, (3, 1)))
    np.testing.assert_allclose(sums.committed.sum(axis=2), sums.reach.sum(axis=2))
    assert sums.reach[2].sum() > sums.reach[1].sum()
    assert not sums.features[1, ..., 0].any()
    assert told == sorted(told)
    assert 0.5 < told[-1] < 1.0


def test_the_union_of_one_setting_is_the_setting(lanterns: LoadedModel) -> None:
    """A tree cut out of the union drafts, and is decided on, as the tree itself."""
    relaxed = of_tree("chain-4", "lantern++", neighbours=20, lambda_=3)
    (alone, _) = walked(lanterns, of_tree("chain-4"), [relaxed], PROMPTS)
    part = shadow_walk._Part(
        shape=shadow_walk.StaticTree.of(relaxed.paths), nodes=torch.arange(5), settings=[0]
    )
    walk = of_tree("chain-4")
    shadow = ShadowWalk(lanterns, walk, [relaxed], images=2, progress=lambda _done: None)
    shadow._parts = [part]
    decode(
        model=lanterns,
        condition=lanterns.condition(PROMPTS),
        decoding=walk,
        generators=image_generators(lanterns, range(2)),
        tokens=TOKENS,
        observe=shadow.observe,
    )
    for name, expected in alone._asdict().items():
        np.testing.assert_allclose(getattr(shadow.sums, name), expected, atol=1e-5, err_msg=name)


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
