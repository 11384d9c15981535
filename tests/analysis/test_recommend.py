"""The recommended cell: the fastest whose whole interval keeps the condition, beside the fastest
lossless one.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pandas as pd
import pytest

from lantern_bench.analysis.recommend import MAX_DISTANCE, condition_of, recommendation
from lantern_bench.config.decoding import Decoding
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers.made_up_run import AR, STRICT, WALKS, build_tables, make_record

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
    figures: dict[Decoding, Ends], quantity: str = "distance", cells: Any = tuple(SECONDS)
) -> dict[str, Any]:
    """The tables of a run of six images a cell, with a figure and its interval for some of the
    cells.
    """
    records = [
        make_record(
            cell=cell, prompt=n, walks=[[]] * 6 if cell is AR else WALKS, seconds=SECONDS[cell]
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
    table = recommendation(tables, tables, condition_of(None, None))
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


def test_too_few_images_settle_nothing_and_say_how_many_would() -> None:
    """No difference was seen of the fastest cell, yet its interval passes the limit."""
    tables = run_with(
        {
            RELAXED[2]: (0.0, -0.02, 0.02),
            RELAXED[1]: (0.02, 0.015, 0.03),
            RELAXED[0]: (None, None, None),
        }
    )
    table = recommendation(tables, tables, condition_of(0.01, None))
    assert verdicts(table) == [
        (RELAXED[2].cell_id, "not settled: 50 images"),
        (STRICT.cell_id, "lossless"),
    ]


def test_scores_may_be_worse_by_the_margin_and_better_by_any_amount() -> None:
    figures = dict(
        zip(RELAXED, [(0.0, -0.009, 0.009), (0.3, 0.2, 0.4), (-0.2, -0.3, -0.1)], strict=True)
    )
    tables = run_with(figures, "prompt_accuracy_vs_ar")
    table = recommendation(tables, tables, condition_of(None, ("prompt_accuracy", 0.01)))
    assert verdicts(table) == [(RELAXED[1].cell_id, "keeps"), (STRICT.cell_id, "lossless")]
    assert table["condition"].unique().tolist() == ["prompt_accuracy_vs_ar >= -0.01"]
    with pytest.raises(UserError, match="--within fid") as refusal:
        condition_of(None, ("fid", 1.0))
    assert "clip_score" in str(refusal.value.advice)


def test_speed_and_quality_of_two_runs_join_by_cell() -> None:
    quality = run_with({RELAXED[0]: (0.001, 0.0, 0.002)}, cells=(RELAXED[0],))
    table = recommendation(run_with({}), quality, condition_of(None, None))
    assert verdicts(table) == [(RELAXED[0].cell_id, "keeps"), (STRICT.cell_id, "lossless")]
    assert math.isnan(table["measured"].iloc[1])


def test_runs_without_the_figures_are_refused() -> None:
    tables = run_with({})
    with pytest.raises(RefusedError, match="no cell has distance") as refusal:
        recommendation(tables, tables, condition_of(None, None))
    assert "lantern-bench score RUN" in str(refusal.value.advice)
    alone = run_with({RELAXED[0]: (0.0, 0.0, 0.0)}, cells=(RELAXED[0],))
    with pytest.raises(RefusedError, match="no cell has a speedup"):
        recommendation(alone, alone, condition_of(None, None))
