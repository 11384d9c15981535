"""Two runs, cell by cell: what is matched, what is refused, what the verdicts say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lantern_bench.analysis.compare import (
    BETTER,
    EQUIVALENT,
    SAME,
    WORSE,
    check_comparability,
    compare_runs,
    differences,
    stated_differences,
    warn_of_unlike,
)
from lantern_bench.methods.catalog import METRICS
from lantern_bench.storage.run_directory import RunData
from lantern_bench.utils.errors import RefusedError
from tests.helpers.made_up_run import AR, LOOSE, STRICT, WALKS, frame_of, make_record, make_scores

MANIFEST = {
    "key": {"dtype": "float32", "weights": {"lanterns/target": "a" * 64}},
    "experiment": {"prompts": "held-out", "seed": 0},
    "machine": {"cpu": {"model": "One", "cores": 2}, "gpus": []},
    "device": "cpu",
    "threads": 2,
}


def make_run(
    prompts=16, factor=1.0, cells=(AR, STRICT, LOOSE), manifest=None, scores=make_scores, **changes
):
    """A run whose STRICT cell takes `factor` times as long, with some noise between prompts."""
    records = []
    for prompt in range(prompts):
        for cell in cells:
            noise = 1 + 0.02 * ((7 * prompt) % 5 - 2) * (1 if factor != 1 else 0)
            seconds = (1.0 + 0.1 * (prompt % 3)) * noise * (factor if cell is STRICT else 1)
            about = {"process": prompt % 4} | changes
            records.append(
                make_record(
                    cell=cell,
                    prompt=prompt,
                    walks=[[]] * 6 if cell is AR else WALKS,
                    seconds=seconds,
                    **about,
                )
            )
    return RunData(
        folder=Path("run"),
        manifest=MANIFEST | (manifest or {}),
        records=frame_of(records),
        scores=scores(records),
    )


def verdicts(comparison):
    tested = comparison.table[comparison.table["verdict"].notna()]
    return {
        (row["cell_id"].split("-")[0], row["quantity"]): row["verdict"]
        for _, row in tested.iterrows()
    }


def test_only_the_faster_cell_is_better_and_the_slower_worse():
    comparison = compare_runs(make_run(factor=1.0), make_run(factor=0.8))
    tested = verdicts(comparison)
    assert tested.pop(("speculative", "speedup")) == BETTER
    assert set(tested.values()) == {SAME}
    row = comparison.table.set_index(["cell_id", "quantity"]).loc[(STRICT.cell_id, "latency_s")]
    assert row["effect"] == pytest.approx(1.25, rel=0.02)
    assert row["effect_low"] < row["effect"] < row["effect_high"]
    assert row["a"] > row["b"]
    assert row["kind"] == "ratio"
    assert row["pairs"] == row["prompts"] == 16
    # Seconds of two runs get no verdict.
    assert isinstance(row["verdict"], type(pd.NA))
    assert np.isnan(row["p_value"])
    assert "not tested" in row["note"]
    assert (
        verdicts(compare_runs(make_run(factor=0.8), make_run(factor=1.0)))["speculative", "speedup"]
        == WORSE
    )


def test_speedup_of_one_process_gets_no_verdict():
    """Two processes may differ by more than the prompts of either one tell."""
    table = compare_runs(make_run(factor=1.0), make_run(factor=0.5, process=0)).table
    rows = table[table["quantity"] == "speedup"]
    assert rows["verdict"].isna().all()
    assert rows["effect_low"].isna().all()
    assert rows["note"].str.contains("needs 4 prompts and 3 processes").all()
    assert table.loc[table["quantity"] == "mean_accepted_length", "verdict"].eq(SAME).all()


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [(0.02, EQUIVALENT), (0.011, "not settled: "), (0.0001, BETTER), (0.01, "not settled")],
)
def test_a_margin_asks_for_equivalence(margin, verdict, monkeypatch):
    """Some prompts gain .005 and others .015: the interval of the difference lies around .01."""

    def gain(records):
        return [
            row
            | {
                "clip_score": row["clip_score"]
                + (0.015 if int(row["record_key"][-3]) % 2 else 0.005)
            }
            if row["level"] == "image"
            else row
            for row in make_scores(records)
        ]

    table = compare_runs(make_run(), make_run(scores=gain), {"clip_score": margin}).table.set_index(
        "quantity"
    )
    assert table.loc["clip_score", "verdict"].str.startswith(verdict).all()
    assert table.loc["prompt_accuracy", "verdict"].eq(SAME).all(), (
        "quantities without a margin keep their test"
    )
    monkeypatch.setitem(METRICS, "clip_score", replace(METRICS["clip_score"], better="lower"))
    for margins in (None, {"clip_score": 0.0001}):
        table = compare_runs(make_run(), make_run(scores=gain), margins).table.set_index("quantity")
        assert table.loc["clip_score", "verdict"].eq(WORSE).all()
    with pytest.raises(RefusedError, match="--margin speedup: no tested difference"):
        compare_runs(make_run(), make_run(), {"speedup": 0.1})


def test_a_run_is_not_distinguishable_from_itself():
    comparison = compare_runs(make_run(), make_run())
    assert set(verdicts(comparison).values()) == {SAME}
    ratios = comparison.table[comparison.table["kind"] == "ratio"]
    assert (ratios["effect"] == 1.0).all()
    assert (ratios["effect_low"] <= 1.0).all()


def test_distances_get_no_verdict():
    comparison = compare_runs(make_run(), make_run())
    recall = comparison.table[comparison.table["quantity"] == "recall"]
    assert len(recall) == 3
    assert recall["verdict"].isna().all()
    assert recall["note"].str.contains("not tested").all()
    # Both scores have a KID of few images. Their FID is withheld, and so is it.
    assert not comparison.table["quantity"].isin(["fid", "kid"]).any()


def test_many_comparisons_are_corrected_by_holm():
    comparison = compare_runs(make_run(prompts=4), make_run(prompts=4))
    assert set(verdicts(comparison).values()) == {SAME}
    assert any("Holm" in note for note in comparison.notes)
    assert any("4 prompts cannot tell" in note for note in comparison.notes)
    tested = comparison.table[comparison.table["p_value"].notna()]
    assert (tested["p_holm"] >= tested["p_value"]).all()


def test_only_shared_cells_and_prompts_are_compared():
    comparison = compare_runs(make_run(prompts=6), make_run(prompts=9, cells=(AR, LOOSE)))
    assert comparison.only_a == (STRICT.cell_id,)
    assert comparison.only_b == ()
    assert comparison.summary.endswith(f"cells only in A: 1 ({STRICT.cell_id})")
    assert set(comparison.table["cell_id"]) == {AR.cell_id, LOOSE.cell_id}
    assert set(comparison.table["pairs"].dropna()) == {6}


def test_runs_without_a_common_prompt_have_no_row():
    elsewhere = make_run(scores=lambda _: [])
    moved = elsewhere.records.assign(prompt_id="x" + elsewhere.records["prompt_id"])
    assert not len(
        compare_runs(
            make_run(scores=lambda _: []),
            RunData(folder=Path("b"), manifest=MANIFEST, records=moved, scores=[]),
        ).table
    )


def other(**changes):
    return make_run(manifest=changes)


@pytest.mark.parametrize(
    ("kind", "b"),
    [
        ("weights", other(key=MANIFEST["key"] | {"weights": {"lanterns/target": "b" * 64}})),
        ("machine", other(machine={"cpu": {"model": "Two", "cores": 64}, "gpus": []})),
        ("machine", other(machine=MANIFEST["machine"] | {"gpus": [{"name": "H"}]}, device="cuda")),
        (
            "protocol",
            make_run(
                scores=lambda rows: [row | {"protocol": "other"} for row in make_scores(rows)]
            ),
        ),
        (
            "protocol",
            make_run(
                scores=lambda rows: [row | {"clip_model": "big"} for row in make_scores(rows)]
            ),
        ),
    ],
)
def test_incomparable_runs_are_refused_unless_allowed(kind, b):
    unlike = differences(make_run(), b)
    with pytest.raises(RefusedError, match=f"differ in {kind}") as refusal:
        check_comparability(unlike, [])
    assert f"--across {kind}" in refusal.value.advice
    check_comparability(unlike, [kind])


def test_differing_settings_do_not_forbid_a_unlike():
    unlike = differences(make_run(), other(key=MANIFEST["key"] | {"dtype": "bfloat16"}))
    assert [str(difference) for difference in unlike] == [
        "dtype: float32 in the first, bfloat16 in the second"
    ]
    check_comparability(unlike, [])
    assert differences(make_run(), make_run()) == []


def test_differences_of_several_runs_are_sentences():
    machine = {"cpu": {"model": "another", "cores": 64}}
    faster = other(machine=machine, key=MANIFEST["key"] | {"dtype": "bfloat16", "compile": True})
    of_cpu = MANIFEST["machine"]["cpu"]
    assert stated_differences({"a": make_run(), "b": make_run(), "c": faster}) == [
        "b differs from a in nothing that both record",
        f"c differs from a in machine: processor, model (another instead of {of_cpu['model']}), "
        f"processor, cores (64 instead of {of_cpu['cores']}); setting: dtype (bfloat16 instead of "
        "float32), compile (True instead of not recorded)",
    ]


def test_a_prompt_file_of_the_same_name_with_other_prompts_is_a_difference():
    a = other(prompts={"set": "prompts.txt", "ids_sha256": "a" * 64})
    b = other(prompts={"set": "prompts.txt", "ids_sha256": "b" * 64})
    unlike = "hash of the prompts: aaaaaaaaaaaa in the first, bbbbbbbbbbbb in the second"
    assert [str(difference) for difference in differences(a, b)] == [unlike]
    with pytest.warns(UserWarning, match=f"one and two differ in {unlike}"):
        warn_of_unlike({"one": a, "two": b})


def test_distances_of_two_versions_are_not_compared():
    def of_version(alike):
        def scores(records):
            features = "surprise squared_surprise" + alike
            count = len(features.split())
            sums = [0.0] * count + [1.0] * (count * (count + 1) // 2)
            row = {
                "level": "tokens",
                "tokens": 256,
                "impossible_tokens": 0,
                "mismatched_tokens": None,
                "edge_tokens": 0,
                "entropy": 1.0,
                "largest_p": 0.5,
                "ten_largest_p": 1.0,
                "features": features,
                "feature_sums": sums,
                "feature_ranges": None,
            }
            return [
                row | {"cell_id": record["cell_id"], "record_key": record["record_key"]}
                for record in records
            ]

        return make_run(scores=scores)

    old = of_version("")
    new = of_version(" alike")
    assert [str(difference) for difference in differences(old, new)] == [
        "version of the distance: 1 in the first, 2 in the second"
    ]
    for pair, is_compared in (((new, new), True), ((old, new), False)):
        table = compare_runs(*pair).table
        rows = table[table["quantity"] == "distance"]
        assert len(rows) == 3
        assert rows["effect"].notna().all() == is_compared
        assert rows["note"].str.contains("two versions").all() != is_compared


def test_differing_protocols_are_compared_when_allowed():
    b = make_run(scores=lambda rows: [row | {"protocol": "other"} for row in make_scores(rows)])
    table = compare_runs(make_run(), b).table
    assert set(table[table["quantity"] == "clip_score"]["protocol"]) == {"embedded / other"}


def test_seconds_of_a_run_that_is_not_timed_are_not_compared():
    """Its sweep did not keep the machine free, and decoded disturbed images once only."""
    untimed = {"experiment": {"metrics": ["clip_score"]}}
    for first, second in ((None, untimed), (untimed, None), (untimed, untimed)):
        comparison = compare_runs(make_run(manifest=first), make_run(manifest=second, factor=30.0))
        quantities = set(comparison.table["quantity"])
        assert quantities.isdisjoint({"latency_s", "speedup", "speedup_over_lossless"})
        assert {"mean_accepted_length", "clip_score"} <= quantities
        assert "run is not timed (metrics without speed)" in comparison.notes[0]
