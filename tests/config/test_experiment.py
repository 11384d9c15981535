"""Experiments: grids, layers, flags and defaults, and files that say themselves again.

What is refused, and in which words, is in test_experiment_problems.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lantern_bench.config.experiment import ResolvedExperiment, load_experiment, shipped_experiments
from lantern_bench.config.settings import Overrides
from lantern_bench.models import registry
from lantern_bench.utils.errors import UserError

MODELS: dict[str, dict[str, Any]] = {
    "lanterns": {"cfg_scale": 3.0, "tree": "small-7", "neighbours": None},
    "big": {"cfg_scale": 7.5, "tree": "eagle1-25", "neighbours": 1000, "delta": 0.2, "lambda": 2.0},
}


def resolved(
    folder: Path, text: str, flags: dict[str, Any] | None = None, **more: Any
) -> ResolvedExperiment:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_experiment(path, MODELS, Overrides.from_flags(flags or {}, **more))


def ids(experiment: ResolvedExperiment) -> list[str]:
    return [cell.cell_id for cell in experiment.cells]


def cells(text: str) -> str:
    return f"model: lanterns\nbaseline: false\ncells:\n  - {text}\n"


def test_the_default_experiment() -> None:
    assert ids(load_experiment("lanterns", MODELS)) == [
        "ar-t1",
        "ar-t0",
        "speculative-static-chain-7-t1",
        "speculative-static-chain-7-block-t1",
        "lantern-static-chain-7-k5-delta0.2-t1",
        "lantern-static-chain-7-k100-delta0.1-t1",
        "lantern++-static-chain-7-k100-lambda2-t1",
        "lantern++-static-chain-7-k100-lambda5-t1",
        "block-scd-jacobi-w32-row-maximal-t1",
        "lantern++-jacobi-w32-row-maximal-k100-lambda5-t1",
        "speculative-dynamic-3n1d3b-t1",
        "lantern-dynamic-3n1d3b-k100-delta0.1-t1",
        "speculative-static-eagle1-25-t1",
        "speculative-static-chain-7-t0",
    ]


@pytest.mark.parametrize("name", shipped_experiments())
def test_shipped_experiments_load_by_name_and_bear_it(name: str) -> None:
    assert load_experiment(name, registry.defaults_of).settings.name == name


PARTS = "{mode: speculative, drafting: [static, dynamic], tree: [small-7, chain-5], depth: 3}"
LAYERS = """
models: {lanterns: {neighbours: 7, delta: 0.3}, big: {}}
neighbours: 8
baseline: false
cells:
  - {mode: lantern}
  - {mode: lantern, neighbours: 9, delta: 0.4}
"""
OF_MODELS = """
model: [lanterns, big]
cells: [{mode: speculative, model: big}, {mode: lantern++, model: [lanterns], lambda: 3}]
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A parameter of a grid reaches the cells that have it.
        (
            cells(PARTS),
            "speculative-static-small-7-t1 speculative-static-chain-5-t1 "
            "speculative-dynamic-58n3d10b-t1",
        ),
        # Layers: the cell, then the model, then the top level, then the model's default.
        (
            LAYERS,
            "lanterns-lantern-dynamic-58n5d10b-k7-delta0.3-t1 "
            "lanterns-lantern-dynamic-58n5d10b-k9-delta0.4-t1 "
            "big-lantern-dynamic-58n5d10b-k8-delta0.2-t1 "
            "big-lantern-dynamic-58n5d10b-k9-delta0.4-t1",
        ),
        # A cell may be for one model.
        (
            OF_MODELS,
            "lanterns-ar-t1 lanterns-lantern++-static-small-7-k10-lambda3-t1 "
            "big-ar-t1 big-speculative-static-eagle1-25-t1",
        ),
        # Guidance is in the id where it is not the model's own; what comes twice runs once.
        (
            cells("{mode: speculative, cfg_scale: [3, 1, 2.5]}"),
            "speculative-static-small-7-t1 "
            "speculative-static-small-7-t1-cfgscale1 speculative-static-small-7-t1-cfgscale2.5",
        ),
        (
            cells("{mode: speculative, temperature: [0, 0.0], top_k: [1, 2]}"),
            "speculative-static-small-7-t0",
        ),
    ],
)
def test_cells_of_a_file(tmp_path: Path, text: str, expected: str) -> None:
    assert ids(resolved(tmp_path, text)) == expected.split()


@pytest.mark.parametrize("tree", ["small-7", ((0,), (1,)), "chain-4"])
def test_a_block_takes_a_chain_where_the_models_own_tree_is_none(
    tmp_path: Path, tree: object
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(cells("{mode: speculative, rule: block}"))
    (block,) = ids(load_experiment(path, {"lanterns": {"tree": tree}}, Overrides()))
    assert block == f"speculative-static-{'chain-4' if tree == 'chain-4' else 'chain-5'}-block-t1"


def test_the_baseline_is_added_once_with_the_top_level_values(tmp_path: Path) -> None:
    text = "model: lanterns\ntemperature: 0.8\ncells: [{mode: speculative}]"
    assert ids(resolved(tmp_path, text)) == ["ar-t0.8", "speculative-static-small-7-t0.8"]
    assert ids(resolved(tmp_path, text, {"baseline": False})) == ["speculative-static-small-7-t0.8"]
    assert ids(resolved(tmp_path, text + "\nbaseline: false")) == [
        "speculative-static-small-7-t0.8"
    ]


@pytest.mark.parametrize(
    ("flags", "more", "expected"),
    [
        (
            {"tree": "small-7"},
            {"modes": "speculative"},
            "ar-t1 ar-t0 speculative-static-small-7-t1 speculative-dynamic-3n1d3b-t1 "
            "speculative-static-small-7-t0",
        ),
        ({}, {"modes": "ar"}, "ar-t1 ar-t0"),
        (
            {"baseline": False},
            {"modes": ["lantern"], "settings": ["delta=0.3"]},
            "lantern-static-chain-7-k5-delta0.3-t1 lantern-static-chain-7-k100-delta0.3-t1 "
            "lantern-dynamic-3n1d3b-k100-delta0.3-t1",
        ),
        (
            {"drafting": "static", "tree": "chain-5"},
            {"modes": "speculative"},
            "ar-t1 ar-t0 speculative-static-chain-5-t1 speculative-static-chain-5-block-t1 "
            "speculative-static-chain-5-t0",
        ),
        (
            {"drafting": "dynamic"},
            {"modes": "speculative"},
            "ar-t1 ar-t0 speculative-dynamic-58n5d10b-t1 speculative-dynamic-3n1d3b-t1 "
            "speculative-dynamic-58n5d10b-t0",
        ),
        (
            {"temperature": 0},
            {"modes": "speculative"},
            "ar-t0 speculative-static-chain-7-t0 speculative-dynamic-3n1d3b-t0 "
            "speculative-static-eagle1-25-t0",
        ),
        (
            {"nodes": "2,3", "delta": ["0.1"], "temperature": 1},
            {"modes": "lantern"},
            "ar-t1 lantern-static-chain-7-k5-delta0.1-t1 lantern-static-chain-7-k100-delta0.1-t1 "
            "lantern-dynamic-2n1d3b-k100-delta0.1-t1 "
            "lantern-dynamic-3n1d3b-k100-delta0.1-t1",
        ),
        (
            {"lambda": "3"},
            {"modes": "lantern++", "settings": ["neighbours=99"]},
            "ar-t1 lantern++-static-chain-7-k99-lambda3-t1 "
            "lantern++-jacobi-w32-row-maximal-k99-lambda3-t1",
        ),
        (
            {"rule": "strict,block", "tree": "chain-3", "drafting": "static"},
            {"modes": "speculative"},
            "ar-t1 ar-t0 speculative-static-chain-3-t1 speculative-static-chain-3-block-t1 "
            "speculative-static-chain-3-t0",
        ),
        ({}, {"modes": "ar", "settings": ["top-p=0.5,0.25"]}, "ar-t1-topp0.5 ar-t1-topp0.25 ar-t0"),
    ],
)
def test_flags_lie_over_the_file(
    flags: dict[str, Any], more: dict[str, Any], expected: str
) -> None:
    assert (
        ids(load_experiment("lanterns", MODELS, Overrides.from_flags(flags, **more)))
        == expected.split()
    )


SETS = """model: lanterns
cells:
  - {mode: ar, temperature: [1, 0.5, 0], seed_set: [0, 1]}
  - {mode: ar, top_k: 9}
  - {mode: scd, temperature: [0, 0.7]}
  - {mode: sjd, top_k: 9}
  - {mode: hybrid, top_k: 5}
"""


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        # Of 0.7 there is no ar cell: the tables compare with the first of the others.
        ("scd", "ar-t1 ar-t1-seedset1 ar-t0.5 ar-t0.5-seedset1 ar-t0 ar-t0-seedset1"),
        ("ar,sjd", "ar-t1-topk9"),
        ("hybrid", "ar-t1 ar-t1-seedset1 ar-t1-topk9"),
        ("cool-sd", "ar-t1 ar-t1-seedset1"),
        ("ar", "ar-t1 ar-t1-seedset1 ar-t0.5 ar-t0.5-seedset1 ar-t0 ar-t0-seedset1 ar-t1-topk9"),
        ((), "ar-t1 ar-t1-seedset1 ar-t0.5 ar-t0.5-seedset1 ar-t0 ar-t0-seedset1 ar-t1-topk9"),
    ],
)
def test_picked_modes_have_only_ar_cells_that_they_are_compared_with(
    tmp_path: Path, modes: str, expected: str
) -> None:
    plan = ids(resolved(tmp_path, SETS, modes=modes))
    assert [cell for cell in plan if cell.startswith("ar-")] == expected.split()


@pytest.mark.parametrize(
    ("cell", "flags", "remark"),
    [
        ("mode: cool-sd, strength: [2, 3]", {"temperature": 0}, "cool-sd follows the strict rule"),
        ("mode: gsd, cluster: 3", {"temperature": "0,1"}, "gsd follows the strict rule"),
        ("mode: typical, epsilon: 0.1", {"temperature": 0}, "typical follows the strict rule"),
        ("mode: scd, rule: typical", {"epsilon": 0.1, "temperature": 0}, "typical follows"),
        ("mode: speculative, rule: block, tree: chain-3", {"temperature": 0}, "block follows"),
        ("mode: speculative, rule: block, tree: chain-3", {"tree": "small-7"}, "on these drafts"),
        ("mode: cool-sd, strength: 2", {"temperature": 1}, None),
        ("mode: lantern, delta: 0.1", {"temperature": 0}, None),
        ("mode: ar", {"temperature": 0}, None),
    ],
)
def test_a_rule_that_gives_way_is_said(
    tmp_path: Path, cell: str, flags: dict[str, Any], remark: str | None
) -> None:
    experiment = resolved(tmp_path, cells(f"{{{cell}}}"), flags)
    if remark is None:
        assert experiment.remarks == ()
        return
    (text,) = experiment.remarks
    assert remark in text
    changed = [row.cell_id for row in experiment.cells if row.decoding.rule == "strict"]
    assert text.endswith(f": {', '.join(changed)}")


def test_flags_of_the_run() -> None:
    flags = {
        "images": 3,
        "seed": "7",
        "metrics": "speed",
        "dtype": "bfloat16",
        "prompts": "mine.txt",
        "delta": None,
    }
    settings = load_experiment("lanterns", MODELS, Overrides.from_flags(flags)).settings
    assert (settings.images, settings.seed, settings.metrics) == (3, 7, ("speed",))
    assert (settings.dtype, settings.prompts) == ("bfloat16", "mine.txt")


def test_own_trees(tmp_path: Path) -> None:
    (tmp_path / "mine-tree.yaml").write_text("[[0], [0, 0], [1]]")
    inline = resolved(tmp_path, cells("{mode: speculative, tree: [[0], [1], [0, 0]]}"))
    from_file = resolved(tmp_path, cells("{mode: speculative, tree: '@mine-tree.yaml'}"))
    grid = resolved(tmp_path, cells("{mode: speculative, tree: [[[0], [1], [0, 0]], chain-5]}"))
    by_flag = resolved(tmp_path, cells("{mode: speculative}"), {"tree": "[[0],[1],[0,0]]"})
    assert inline.cells == from_file.cells == by_flag.cells == grid.cells[:1]
    assert inline.cells[0].decoding.paths == ((0,), (1,), (0, 0))
    named = resolved(
        tmp_path,
        cells("{mode: speculative, tree: [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]}"),
    )
    assert ids(named) == ["speculative-static-chain-5-t1"]


def test_the_neighbour_metric_is_a_grid_in_a_file_and_a_flag(tmp_path: Path) -> None:
    text = cells("{mode: lantern, delta: 0.1}") + "neighbour_metric: [l2, cosine]\n"
    experiment = resolved(tmp_path, text)
    assert [cell.decoding.neighbour_metric for cell in experiment.cells] == ["l2", "cosine"]
    (cell,) = resolved(tmp_path, text, {"neighbour_metric": "random"}).cells
    assert cell.decoding.neighbour_metric == "random"


def test_a_block_of_a_model_may_hold_images_and_prompts(tmp_path: Path) -> None:
    text = (
        "model: lanterns\nbaseline: false\ncells: [{mode: lantern}]\nmodels:\n"
        "  lanterns: {delta: 0.1, images: 3}\n"
        "  big: {delta: 0.4, images: 1000, prompts: coco.txt}\n"
    )
    assert resolved(tmp_path, text).settings.images == 3
    big = resolved(tmp_path, text, {"model": ["big"]}).settings
    assert (big.images, big.prompts) == (1000, "coco.txt")
    assert resolved(tmp_path, text, {"model": ["big"], "images": "5"}).settings.images == 5
    with pytest.raises(UserError, match="differs from another model's"):
        resolved(tmp_path, text, {"model": ["lanterns", "big"]})


def test_columns_and_settings_of_a_cell(tmp_path: Path) -> None:
    cell = resolved(tmp_path, "model: [lanterns, big]\ncells: [{mode: ar}]").cells[1]
    assert cell.columns()["cell_id"] == "big-ar-t1"
    assert cell.columns()["model"] == cell.settings()["model"] == "big"


def test_the_hash_changes_with_what_runs_and_not_with_words(tmp_path: Path) -> None:
    text = cells("{mode: lantern, delta: 0.1}")
    first = resolved(tmp_path, text)
    assert first.run_name == f"mine-{first.hash8}"
    assert resolved(tmp_path, text + "description: other\npaper: {table: 2}\n").hash8 == first.hash8
    assert resolved(tmp_path, text.replace("0.1", "1e-1")).hash8 == first.hash8
    changes = {
        resolved(tmp_path, text + line).hash8
        for line in ("seed: 1\n", "images: 9\n", "cfg_scale: 2\n", "")
    }
    assert len(changes) == 4


def axis(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values | st.lists(values, min_size=1, max_size=3)


MAPPINGS = st.fixed_dictionaries(
    {"mode": axis(st.sampled_from(["speculative", "lantern", "lantern++"]))},
    optional={
        "drafting": axis(st.sampled_from(["static", "dynamic"])),
        "rule": axis(st.sampled_from(["strict", "additive", "multiplicative"])),
        "temperature": axis(st.sampled_from([0, 0.5, 1])),
        "top_k": axis(st.integers(0, 50)),
        "cfg_scale": axis(st.sampled_from([1, 3, 7.5])),
    },
)
DEFAULTS = {
    "delta": [0.1, 0.2],
    "lambda": 2,
    "neighbours": 4,
    "residual": "official",
    "tree": [[[0], [1]], "deep-25"],
}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(MAPPINGS, min_size=1, max_size=3), st.sampled_from([["lanterns"], ["lanterns", "big"]])
)
def test_a_resolved_experiment_resolves_to_itself(
    tmp_path: Path, entries: list[Any], models: list[str]
) -> None:
    first = resolved(tmp_path, yaml.safe_dump({"model": models, "cells": entries, **DEFAULTS}))
    again = resolved(tmp_path, yaml.safe_dump(first.to_dict()))
    assert again.to_dict() == first.to_dict()
    assert ids(again) == ids(first)
    assert again.run_name == first.run_name
    path = tmp_path / "elsewhere.yaml"
    path.write_text(yaml.safe_dump(first.to_dict()))
    other_defaults = {model: {"cfg_scale": 99.0, "tree": "medusa-63"} for model in models}
    assert ids(load_experiment(path, other_defaults)) == ids(first)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # Rounded: values that a name cannot tell apart are refused, which is another test's matter.
    st.lists(st.floats(1e-3, 0.9).map(lambda delta: round(delta, 4)), min_size=1, max_size=4),
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.lists(st.sampled_from([0.25, 0.5, 1]), min_size=1, max_size=3),
)
def test_a_grid_has_every_combination_once_in_fixed_order(
    tmp_path: Path, deltas: list[float], neighbours: list[int], temperatures: list[float]
) -> None:
    cell = {
        "mode": "lantern",
        "temperature": temperatures,
        "delta": deltas,
        "neighbours": neighbours,
    }
    text = yaml.safe_dump(
        {"model": "lanterns", "baseline": False, "cells": [cell]}, sort_keys=False
    )
    decodings = [cell.decoding for cell in resolved(tmp_path, text).cells]
    values = [(decoding.neighbours, decoding.delta, decoding.temperature) for decoding in decodings]
    assert values == list(dict.fromkeys(itertools.product(neighbours, deltas, temperatures)))
