"""The plain implementation and the package decode the same model to the same greedy tokens, and
commit alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.models.families.lanterns.description import GUIDANCE, HELD_OUT
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.models.loaded_model import LoadedModel
from scripts.bench.plain_decoding import Plain, shape_of
from scripts.bench.plain_network import PlainDrafter, PlainTarget

TOKENS = 40
CAPTION = HELD_OUT[1].caption()
DRAFTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "static": ({"tree": "small-7"}, {"paths": STATIC_TREES["small-7"]}),
    "dynamic": (
        {"drafting": "dynamic", "nodes": 12, "depth": 3, "beam": 4},
        {"dynamic": (12, 3, 4)},
    ),
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return Lanterns().load(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> Plain:
    return Plain(
        target=PlainTarget(model.target),
        drafter=PlainDrafter(model.drafter),
        table=model.table(20),
        scale=GUIDANCE,
    )


@pytest.mark.parametrize("name", ["small-7", "eagle1-25"])
def test_the_buffers_of_a_static_tree_are_the_packages(name: str) -> None:
    levels, attention = shape_of(STATIC_TREES[name])
    tree = StaticTree.of(STATIC_TREES[name], torch.device("cpu"))
    assert torch.equal(attention, tree.attention)
    extended: list[int] = []
    for level, theirs in zip(levels, tree.levels, strict=True):
        assert level.nodes == theirs.nodes.tolist()
        extended += level.nodes if level.nodes != [0] else []
        assert torch.equal(level.seen.bool(), attention[level.nodes][:, extended])


def test_greedy_tokens_are_equal(model: LoadedModel, plain: Plain) -> None:
    condition = model.condition([CAPTION])
    images = decode(
        model=model,
        condition=condition,
        decoding=Decoding(mode="ar", temperature=0, cfg_scale=GUIDANCE),
        generators=[torch.Generator()],
        tokens=TOKENS,
    )
    wanted = images[0].tokens.tolist()
    assert plain.autoregressive(condition, torch.Generator(), TOKENS, greedy=True).tokens == wanted
    for ours, theirs in DRAFTINGS.values():
        course = plain.speculative(condition, torch.Generator(), TOKENS, greedy=True, **theirs)
        assert course.tokens == wanted
        decoding = Decoding(mode="speculative", **ours, temperature=0, cfg_scale=GUIDANCE)
        trace = decode(
            model=model,
            condition=condition,
            decoding=decoding,
            generators=[torch.Generator()],
            tokens=TOKENS,
        )[0].trace
        # Static trees of both draft the same tokens; dynamic ones may settle equal scores
        # otherwise.
        if "tree" in ours:
            assert sum(course.committed) / len(course.committed) == pytest.approx(trace.mal_uncut)


def test_a_relaxed_rule_commits_more(model: LoadedModel, plain: Plain) -> None:
    condition = model.condition([CAPTION])
    lengths = []
    for rule in (None, ("multiplicative", 20, 10.0)):
        committed = [
            plain.speculative(
                condition=condition,
                noise=torch.Generator().manual_seed(seed),
                tokens=TOKENS,
                paths=STATIC_TREES["small-7"],
                rule=rule,
            ).committed
            for seed in range(4)
        ]
        lengths.append(sum(map(sum, committed)) / sum(map(len, committed)))
    assert 1.0 < lengths[0] < lengths[1]
