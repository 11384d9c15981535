"""The recommended cell: the fastest whose whole interval keeps the condition, beside the fastest
lossless one.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lantern_bench.analysis.recommend import (
    MAX_DISTANCE,
    condition_of,
    joined_notes,
    recommendation,
)
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.format_tables import head_of, readable
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import ENDS
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers.made_up_run import AR, STRICT, WALKS, build_tables, frame_of, make_record

RELAXED = [
    Decoding(
        **{
            "mode": "lantern++",
            "tree": "small-7",
            "lambda": bound,
            "cfg_scale": 2,
            "cfg_default": 2,
        }
    )
    for bound in (2, 3, 5)
]
SECONDS = {AR: 2.4, STRICT: 1.6, **dict(zip(RELAXED, (1.2, 1.0, 0.8), strict=True))}
Ends = tuple[float | None, float | None, float | None]


def run_with(
    figures: dict[Decoding, Ends],
    quantity: str = "distance",
    cells: Any = tuple(SECONDS),
    seconds: dict[Decoding, float] = SECONDS,
) -> dict[str, Any]:
    """The tables of a run of six images a cell, with a figure and its interval for some of the
    cells.
    """
    records = [
        make_record(
            cell=cell, prompt=n, walks=[[]] * 6 if cell is AR else WALKS, seconds=seconds[cell]
        )
        for cell, n in product(cells, range(6))
    ]
    tables = build_tables(records)
    for cell, ends in figures.items():
        tables["quality"].loc[
            tables["quality"]["cell_id"] == cell.cell_id,
            [quantity, f"{quantity}_low", f"{quantity}_high"],
        ] = ends
    return tables


def with_distances(tables: dict[str, Any], distances: dict[Decoding, float]) -> dict[str, Any]:
    """The tables with distances and emitted TVs, whose intervals reach 0.001 to either side."""
    for cell, distance in distances.items():
        is_cell = tables["quality"]["cell_id"] == cell.cell_id
        ends = [distance, distance - 0.001, distance + 0.001]
        for name in ("distance", "emitted_tv"):
            tables["quality"].loc[is_cell, [name, f"{name}_low", f"{name}_high"]] = ends
    return tables


def with_impossible(tables: dict[str, Any], cell: Decoding) -> dict[str, Any]:
    is_cell = tables["quality"]["cell_id"] == cell.cell_id
    tables["quality"].loc[is_cell, "impossible"] = 0.002
    return tables


def verdicts(table: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(table["cell_id"], table["verdict"], strict=True))


def test_the_fastest_that_keeps_stands_beside_the_fastest_lossless() -> None:
    """The fastest breaks the condition, and the fastest that keeps it is faster than another that
    does.
    """
    figures = dict(
        zip(
            RELAXED,
            [(0.002, 0.001, 0.003), (0.008, 0.007, 0.0099), (0.03, 0.02, 0.04)],
            strict=True,
        )
    )
    tables = run_with(figures | {STRICT: (0.0, -0.001, 0.001)})
    table = recommendation(tables, tables, condition_of())
    assert verdicts(table) == [(RELAXED[1].cell_id, "keeps"), (STRICT.cell_id, "lossless")]
    row = table.iloc[0]
    assert (row["speedup"], row["speedup_over_lossless"]) == (
        pytest.approx(2.4),
        pytest.approx(1.6),
    )
    assert row["speedup_over_lossless_low"] == pytest.approx(1.6)
    assert row["images"] == 6
    assert (row["measured"], row["measured_high"], row["condition"]) == (
        0.008,
        0.0099,
        f"distance <= {MAX_DISTANCE}",
    )


def test_a_terminal_shows_what_was_measured_unless_it_is_the_distance() -> None:
    tables = run_with({RELAXED[0]: (0.002, 0.001, 0.003), STRICT: (0.0, -0.001, 0.001)})
    by_distance = recommendation(tables, tables, condition_of())
    assert by_distance["measured"].tolist() == [0.002, 0.0]
    head = head_of("measured")
    shown = readable(by_distance, "recommendation").frame
    assert head not in shown
    assert shown[head_of("distance")].iloc[0] == "0.0020 [0.0010, 0.0030]"

    of_relaxed = tables["quality"]["cell_id"] == RELAXED[0].cell_id
    names = [f"prompt_accuracy_vs_ar{end}" for end in ENDS]
    tables["quality"].loc[of_relaxed, names] = (0.01, 0.0, 0.02)
    by_score = recommendation(tables, tables, condition_of(within=("prompt_accuracy", 0.1)))
    shown = readable(by_score, "recommendation").frame
    assert head in shown
    assert head_of("distance") in shown


def test_too_few_images_settle_nothing_and_say_how_many_would() -> None:
    """No difference was seen of the fastest cell, yet its interval passes the limit."""
    tables = run_with(
        {
            RELAXED[2]: (0.0, -0.02, 0.02),
            RELAXED[1]: (0.02, 0.015, 0.03),
            RELAXED[0]: (None, None, None),
        }
    )
    table = recommendation(tables, tables, condition_of(max_distance=0.01))
    assert verdicts(table) == [
        (STRICT.cell_id, "lossless"),
        (RELAXED[2].cell_id, "not settled: more than 6 images"),
    ]


def test_scores_may_be_worse_by_the_margin_and_better_by_any_amount() -> None:
    figures = dict(
        zip(RELAXED, [(0.0, -0.009, 0.009), (0.3, 0.2, 0.4), (-0.2, -0.3, -0.1)], strict=True)
    )
    tables = run_with(figures, "prompt_accuracy_vs_ar")
    table = recommendation(tables, tables, condition_of(within=("prompt_accuracy", 0.01)))
    assert verdicts(table) == [(RELAXED[1].cell_id, "keeps"), (STRICT.cell_id, "lossless")]
    assert table["condition"].unique().tolist() == ["prompt_accuracy_vs_ar >= -0.01"]
    with pytest.raises(UserError, match="--within fid") as refusal:
        condition_of(within=("fid", 1.0))
    assert "clip_score" in str(refusal.value.advice)


def test_the_condition_may_be_the_emitted_tv() -> None:
    """Cells whose rule has no emitted TV are left out."""
    ends = [(0.08, 0.07, 0.09), (None, None, None), (0.2, 0.19, 0.21)]
    tables = run_with(dict(zip(RELAXED, ends, strict=True)), "emitted_tv")
    table = recommendation(tables, tables, condition_of(max_emitted_tv=0.1))
    assert verdicts(table) == [(RELAXED[0].cell_id, "keeps"), (STRICT.cell_id, "lossless")]
    assert table["condition"].unique().tolist() == ["emitted_tv <= 0.1"]
    assert head_of("measured") not in readable(table, "recommendation").frame


def test_one_condition_is_allowed() -> None:
    with pytest.raises(UserError, match="--max-distance and --max-emitted-tv: give one limit"):
        condition_of(max_distance=0.0, max_emitted_tv=0.1)
    with pytest.raises(UserError, match="--max-distance and --within: give one limit"):
        condition_of(max_distance=0.01, within=("clip_score", 0.1))
    with pytest.raises(UserError, match="--max-emitted-tv and --within: give one limit"):
        condition_of(max_emitted_tv=0.1, within=("clip_score", 0.1))


def test_speed_and_quality_of_two_runs_join_by_cell() -> None:
    quality = run_with({RELAXED[0]: (0.001, 0.0, 0.002)}, cells=(RELAXED[0],))
    table = recommendation(run_with({}), quality, condition_of())
    assert verdicts(table) == [(RELAXED[0].cell_id, "keeps"), (STRICT.cell_id, "lossless")]
    assert math.isnan(table["measured"].iloc[1])


def test_runs_without_the_figures_are_refused() -> None:
    tables = run_with({})
    with pytest.raises(RefusedError, match="no cell has distance") as refusal:
        recommendation(tables, tables, condition_of())
    assert "lantern-bench score RUN" in str(refusal.value.advice)
    assert "emitted TV is measured while decoding" in str(refusal.value.advice)
    # Tables have no columns of figures that no cell has.
    unscored = {name: table.filter(regex="^(?!clip_score)") for name, table in tables.items()}
    with pytest.raises(RefusedError, match="no cell has clip_score_vs_ar"):
        recommendation(unscored, unscored, condition_of(within=("clip_score", 0.02)))
    alone = run_with({RELAXED[0]: (0.0, 0.0, 0.0)}, cells=(RELAXED[0],))
    with pytest.raises(RefusedError, match="no cell has a speedup"):
        recommendation(alone, alone, condition_of())


def test_a_cell_with_impossible_tokens_breaks_whatever_its_distance() -> None:
    """Tokens of probability 0 take no part in the features, so the distance may be 0."""
    ends = [(0.005, 0.004, 0.006), (0.0, 0.0, 0.001), (0.0, 0.0, 0.001)]
    tables = run_with(dict(zip(RELAXED, ends, strict=True)))
    table = recommendation(*[with_impossible(tables, RELAXED[2])] * 2, condition=condition_of())
    assert verdicts(table) == [
        (RELAXED[1].cell_id, "keeps"),
        (STRICT.cell_id, "lossless"),
        (RELAXED[2].cell_id, "breaks"),
    ]
    assert "0.20% of the tokens cannot come from the target" in table["note"].iloc[-1]


def test_a_score_shows_the_distance_and_impossible_tokens_beside_it() -> None:
    tables = run_with({RELAXED[2]: (0.0, -0.001, 0.001)}, "prompt_accuracy_vs_ar")
    tables = with_distances(with_impossible(tables, RELAXED[2]), {RELAXED[2]: 0.4})
    table = recommendation(tables, tables, condition_of(within=("prompt_accuracy", 0.01)))
    row = table.iloc[0]
    assert row["verdict"] == "keeps"
    for name in ("distance", "emitted_tv"):
        assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == (0.4, 0.399, 0.401)
    assert row["impossible"] == 0.002


@pytest.mark.parametrize(
    ("fastest", "words"),
    [
        ((0.03, 0.02, 0.04), "nothing faster than ar keeps distance <= 0.01"),
        ((0.0, -0.02, 0.02), "nothing faster than ar is shown to keep distance <= 0.01"),
        ((0.0, -0.001, 0.001), None),
    ],
)
def test_where_nothing_faster_than_ar_keeps_the_condition(fastest: Ends, words: str | None) -> None:
    slow = SECONDS | {STRICT: 3.0}
    figures = dict(zip(RELAXED, [fastest, (0.03, 0.02, 0.04), (0.03, 0.02, 0.04)], strict=True))
    tables = run_with(figures, seconds=slow)
    table = recommendation(tables, tables, condition_of())
    by_cell = table.set_index("cell_id")
    notes = str(by_cell.loc[AR.cell_id, "note"])
    if words is None:
        assert "nothing faster" not in notes
    else:
        assert words in notes


def test_the_error_rate_counts_every_cell_that_was_tried() -> None:
    ends = [(0.002, 0.001, 0.003), (0.03, 0.02, 0.04), (0.0, -0.02, 0.02)]
    tables = run_with(dict(zip(RELAXED, ends, strict=True)))
    table = recommendation(tables, tables, condition_of()).set_index("cell_id")
    note = table.loc[RELAXED[0].cell_id, "note"]
    assert "the first of 3 cells tried" in note
    assert "wrong in at most 7.5% of repeats (2.5% for each cell)" in note
    alone = run_with({RELAXED[0]: (0.002, 0.001, 0.003)})
    table = recommendation(alone, alone, condition_of()).set_index("cell_id")
    assert "1 cell tried" in table.loc[RELAXED[0].cell_id, "note"]


def run_data(**changes: Any) -> RunData:
    key = {"dtype": "float32", "weights": {"lanterns/target": "a" * 64}}
    manifest = {
        "key": key | changes.get("key", {}),
        "experiment": {"prompts": "held-out"} | changes.get("experiment", {}),
        "machine": {"cpu": {"model": changes.get("cpu", "One")}},
    }
    return RunData(
        folder=Path("run"),
        manifest=manifest,
        records=frame_of([make_record(cell=AR, prompt=0, walks=[[]], seconds=1.0)]),
        scores=[],
    )


def test_two_runs_of_different_models_are_not_joined() -> None:
    zeroed = run_data(key={"weights": {"lanterns/target": "0" * 64}})
    with pytest.raises(RefusedError, match="the runs differ in weights"):
        joined_notes(run_data(), zeroed)
    assert "weights of lanterns/target" in joined_notes(run_data(), zeroed, ["weights"])[0]


def test_two_runs_of_other_settings_are_joined_with_a_note() -> None:
    other = run_data(key={"dtype": "bfloat16"}, experiment={"prompts": "other"}, cpu="Two")
    notes = joined_notes(run_data(), other)
    assert notes == [
        "speed and quality are of two runs, which differ in "
        "dtype: float32 in the first, bfloat16 in the second; "
        "prompts: held-out in the first, other in the second"
    ]  # seconds are of the first run, so that its machine alone counts
    quality = run_with({RELAXED[0]: (0.001, 0.0, 0.002)}, cells=(RELAXED[0],))
    table = recommendation(run_with({}), quality, condition_of(), notes=notes)
    assert table["note"].str.contains("bfloat16 in the second").all()


def test_the_rows_of_a_sampling_name_it() -> None:
    """Without the sampling, a run with greedy cells shows two rows of ar."""
    greedy = [cell.changed(temperature=0.0) for cell in (AR, STRICT)]
    cells = (AR, STRICT, *greedy)
    seconds = {AR: 1.0, STRICT: 2.0, greedy[0]: 1.0, greedy[1]: 2.0}
    tables = run_with({AR: (0.0, 0.0, 0.0)}, cells=cells, seconds=seconds)
    table = recommendation(tables, tables, condition_of())
    named = table.fillna({"sampling": ""}).set_index("cell_id")["sampling"]
    assert named.to_dict() == {AR.cell_id: "", greedy[0].cell_id: "T=0"}
    alone = run_with({AR: (0.0, 0.0, 0.0)}, cells=cells[:2], seconds=seconds)
    assert recommendation(alone, alone, condition_of())["sampling"].isna().all()
