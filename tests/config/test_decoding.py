"""One decoding configuration: presets, what belongs to what, and the id that names its cell.

The ids are written out in full, because folders, tables and links are named by them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.methods.catalog import DRAFTINGS, MODES, RULES, has_parameter
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.storage.schema import CELL_COLUMNS


@pytest.mark.parametrize(
    ("values", "cell_id"),
    [
        ({"mode": "ar"}, "ar-t1"),
        ({"mode": "ar", "temperature": 0}, "ar-t0"),
        ({"mode": "speculative", "tree": "small-7"}, "speculative-static-small-7-t1"),
        ({"mode": "speculative", "drafting": "dynamic"}, "speculative-dynamic-58n5d10b-t1"),
        ({"mode": "lantern", "delta": 0.005}, "lantern-dynamic-58n5d10b-k20-delta0.005-t1"),
        (
            {
                "mode": "lantern++",
                "tree": "chain-5",
                "neighbours": 1000,
                "lambda": 2.5,
                "temperature": 0.7,
            },
            "lantern++-static-chain-5-k1000-lambda2.5-t0.7",
        ),
        (
            {
                "mode": "lantern",
                "drafting": "static",
                "rule": "multiplicative",
                "lambda_": 2,
                "tree": "small-7",
            },
            "lantern-static-small-7-k10-lambda2-t1",
        ),
        (
            {
                "mode": "lantern",
                "delta": 0.1,
                "residual": "official",
                "top_k": 100,
                "top_p": 0.9,
                "cfg_scale": 3,
            }
            | {"filter_order": "top_p_first"},
            "lantern-dynamic-58n5d10b-k20-delta0.1-t1-residualofficial-topk100-topp0.9"
            "-filterordertoppfirst-cfgscale3",
        ),
        ({"mode": "ar", "cfg_scale": 3, "cfg_default": 3}, "ar-t1"),
        ({"mode": "ar", "cfg_scale": 1, "cfg_default": 3}, "ar-t1-cfgscale1"),
        (
            {"mode": "lantern", "delta": 0.1, "depth": 2, "beam": 3},
            "lantern-dynamic-12n2d3b-k20-delta0.1-t1",
        ),
        ({"mode": "speculative", "rule": "block"}, "speculative-static-chain-5-block-t1"),
        (
            {"mode": "lantern++", "rule": "block", "tree": "chain-3"},
            "lantern++-static-chain-3-block-t1",
        ),
        ({"mode": "speculative", "rule": "traversal"}, "speculative-static-eagle1-25-traversal-t1"),
        ({"mode": "zipar", "window": 3, "top_k": 5}, "zipar-w3-t1-topk5"),
    ],
)
def test_cell_ids(values: dict[str, Any], cell_id: str) -> None:
    assert Decoding(**values).cell_id == cell_id


def test_greedy_uses_no_filters_and_no_residual() -> None:
    greedy = Decoding(
        mode="lantern", delta=0.1, temperature=0, top_k=5, top_p=0.5, residual="official"
    )
    assert greedy == Decoding(mode="lantern", delta=0.1, temperature=0)
    assert greedy.greedy
    block = Decoding(mode="speculative", rule="block", temperature=0)
    assert block == Decoding(mode="speculative", tree="chain-5", temperature=0)


def test_a_default_neighbour_metric_is_not_in_the_id() -> None:
    decoding = Decoding("lantern", delta=0.1)
    assert decoding == Decoding("lantern", delta=0.1, neighbour_metric="l2")
    assert decoding.cell_id == "lantern-dynamic-58n5d10b-k20-delta0.1-t1"
    assert decoding.settings()["neighbour_metric"] == "l2"
    assert decoding.columns()["neighbour_metric"] == "l2"
    assert Decoding("speculative").columns()["neighbour_metric"] is None
    random = Decoding("lantern", delta=0.1, neighbour_metric="random", residual="official")
    assert random.cell_id.endswith("-t1-neighbourmetricrandom-residualofficial")
    assert random.settings()["neighbour_metric"] == "random"
    greedy = Decoding("lantern", delta=0.1, neighbour_metric="cosine", temperature=0)
    assert greedy.cell_id.endswith("-t0-neighbourmetriccosine")


def test_own_tree_is_named_by_its_shape() -> None:
    tree = Decoding(mode="speculative", tree=[[0], [1]])
    same = Decoding(mode="speculative", tree=[[1], [0]])
    other = Decoding(mode="speculative", tree=[[0], [0, 0]])
    assert tree.tree == same.tree != other.tree
    assert tree.paths == ((0,), (1,))
    assert Decoding(mode="speculative", tree="small-7").paths == STATIC_TREES["small-7"]
    assert Decoding(mode="ar", drafting="none", rule="none").paths == ()


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "ar", "drafting": "static", "rule": "strict"},
        {"mode": "lantern", "delta": 0.1, "drafting": "none", "rule": "none"},
        {"mode": "lantern"},
        {"mode": "lantern++"},
        {"mode": "speculative", "delta": 0.1},
        {"mode": "lantern++", "lambda": 2, "delta": 0.1},
        {"mode": "speculative", "nodes": 7},
        {"mode": "speculative", "rule": "block", "tree": "small-7"},
        {"mode": "speculative", "rule": "block", "tree": "small-7", "temperature": 0},
        {"mode": "speculative", "rule": "block", "drafting": "dynamic"},
        {"mode": "lantern", "delta": 0.1, "tree": "small-7"},
        {"mode": "lantern", "delta": 0.1, "nodes": 11, "depth": 1, "beam": 10},
        {"mode": "lantern++", "lambda": float("inf")},
        {"mode": "ar", "temperature": float("nan")},
        {"mode": "ar", "top_p": 1.01},
        {"mode": "ar", "top_k": True},
        {"mode": "ar", "speed": 3},
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        Decoding(**values)


def test_columns_are_those_of_the_schema_in_order() -> None:
    columns = Decoding(mode="lantern", delta=0.1).columns()
    assert list(columns) == [
        column.name for column in CELL_COLUMNS if column.name not in ("batch", "model")
    ]
    assert columns["lambda"] is None
    assert columns["residual"] == "exact"
    assert Decoding(mode="ar", drafting="none", rule="none").columns()["residual"] is None


@st.composite
def decodings(draw: st.DrawFn) -> Decoding:
    """Any decoding, ablations included."""
    mode = draw(st.sampled_from(list(MODES)))
    values: dict[str, Any] = {"mode": mode}
    drafting = MODES[mode].drafting
    rule = MODES[mode].rule
    if DRAFTINGS[drafting].drafts:
        drafting = values["drafting"] = draw(st.sampled_from(["static", "dynamic"]))
        rule = values["rule"] = draw(st.sampled_from(["strict", "additive", "multiplicative"]))
    if drafting == "static":
        values["tree"] = draw(st.sampled_from(list(STATIC_TREES)))
    if not RULES[rule].lossless:
        values["neighbours"] = draw(st.integers(0, 16383))
        values["residual"] = draw(st.sampled_from(["exact", "official"]))
    if rule == "additive":
        values["delta"] = draw(st.floats(1e-9, 0.999))
    if rule == "multiplicative":
        values["lambda"] = draw(st.floats(1.001, 1e9))
    values["temperature"] = draw(st.sampled_from([0, 0.5, 1, 1e-7, 1e12]))
    values["top_k"] = draw(st.integers(0, 1000))
    values["cfg_scale"] = draw(st.floats(0, 20))
    return Decoding(**values)


@given(decodings())
def test_settings_make_the_same_decoding_again(decoding: Decoding) -> None:
    assert Decoding(**decoding.settings()) == decoding


@given(decodings())
def test_ids_serve_as_folder_names(decoding: Decoding) -> None:
    assert re.fullmatch(r"[a-z][A-Za-z0-9.+_-]*", decoding.cell_id)


@given(decodings())
def test_a_parameter_is_there_exactly_where_it_belongs(decoding: Decoding) -> None:
    for key in ("nodes", "depth", "beam", "neighbours", "delta", "tree"):
        belongs = has_parameter(key, decoding.drafting, decoding.rule)
        assert (getattr(decoding, key) is not None) == belongs
