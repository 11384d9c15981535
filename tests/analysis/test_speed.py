"""Speedup over the fastest lossless cell: known ratios, which cell it is, and its interval."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lantern_bench.analysis.cells import run_cells, timed_images
from lantern_bench.analysis.compare import compare_runs
from lantern_bench.analysis.statistics import repeat_interval, timing
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.format_tables import readable
from lantern_bench.storage.run_directory import RunData
from tests.helpers.made_up_run import (
    AR,
    LOOSE,
    STRICT,
    WALKS,
    build_tables,
    frame_of,
    make_record,
    run_of,
)

BLOCK = Decoding(mode="speculative", rule="block", tree="chain-5", cfg_scale=2, cfg_default=2)
PROMPTS = 6


def varied(prompt: int) -> float:
    """What the images of a prompt take more or less than others, in every cell."""
    return 1.0 + 0.1 * prompt


def timed_records(seconds: dict[Decoding, float], **changes: Any) -> list[dict[str, Any]]:
    """Records of cells whose images take so many seconds, times what their prompt takes."""
    return [
        make_record(
            cell=cell,
            prompt=prompt,
            walks=[[]] * 6 if cell.mode == "ar" else WALKS,
            seconds=seconds[cell] * varied(prompt),
            **changes,
        )
        for cell, prompt in product(seconds, range(PROMPTS))
    ]


def over_lossless(records: list[dict[str, Any]]) -> pd.DataFrame:
    return build_tables(records)["speed"].set_index("cell_id")


def test_known_ratios_over_the_fastest_lossless_cell() -> None:
    speed = over_lossless(timed_records({AR: 2.4, STRICT: 1.6, BLOCK: 1.2, LOOSE: 0.8}))
    expected = {AR: 0.5, STRICT: 0.75, BLOCK: 1.0, LOOSE: 1.5}
    for cell, ratio in expected.items():
        row = speed.loc[cell.cell_id]
        assert row["lossless_cell"] == BLOCK.cell_id
        assert row["speedup_over_lossless"] == pytest.approx(ratio)
        # Paired: prompts that take long take long in both cells, and no process differs.
        assert (
            row["speedup_over_lossless_low"]
            == pytest.approx(ratio)
            == row["speedup_over_lossless_high"]
        )
    assert speed.loc[BLOCK.cell_id, "speedup_over_lossless"] == 1.0


def test_ar_is_the_fastest_lossless_cell_where_drafting_does_not_pay() -> None:
    speed = over_lossless(timed_records({AR: 1.0, STRICT: 1.25, LOOSE: 0.8}))
    assert set(speed["lossless_cell"]) == {AR.cell_id}
    assert (
        speed.loc[LOOSE.cell_id, "speedup_over_lossless"]
        == speed.loc[LOOSE.cell_id, "speedup"]
        == pytest.approx(1.25)
    )


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"top_k": 3}, {"cfg_scale": 3}, {"seed_set": 1}]
)
def test_a_lossless_cell_of_other_sampling_does_not_count(change: dict[str, Any]) -> None:
    """Nor one of another model or batch size; without a lossless cell there is no figure, and the
    note says so.
    """
    settings = BLOCK.settings() | {"cfg_default": 2} | change
    fast = Decoding(**settings)
    speed = over_lossless(timed_records({AR: 2.0, STRICT: 1.6, fast: 0.4, LOOSE: 0.8}))
    assert speed.loc[LOOSE.cell_id, "lossless_cell"] == STRICT.cell_id
    assert speed.loc[LOOSE.cell_id, "speedup_over_lossless"] == pytest.approx(2.0)
    alone = over_lossless(timed_records({fast: 0.4, LOOSE: 0.8})).loc[LOOSE.cell_id]
    assert math.isnan(alone["speedup_over_lossless"])
    assert pd.isna(alone["lossless_cell"])
    assert "no speedup: no lossless cell to compare with in this run" in alone["note"]


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize("change", [{"model": "another"}, {"batch": 4}, {"rule": "gone"}])
def test_other_models_and_batches_unknown_rules_and_published_forms_are_no_reference(
    change: dict[str, Any],
) -> None:
    others = [row | change | {"cell_id": "other"} for row in timed_records({BLOCK: 0.1}, batch=1)]
    published = Decoding(mode="scd", drafting="scd-published", cfg_scale=2, cfg_default=2)
    speed = over_lossless(
        [*others, *timed_records({AR: 2.0, STRICT: 1.6, LOOSE: 0.8, published: 0.5}, batch=1)]
    )
    for cell, ratio in ((LOOSE, 2.0), (published, 3.2)):
        assert speed.loc[cell.cell_id, "lossless_cell"] == STRICT.cell_id
        assert speed.loc[cell.cell_id, "speedup_over_lossless"] == pytest.approx(ratio)


def test_images_that_both_have_are_paired_and_the_estimator_is_that_of_the_speedup() -> None:
    records = timed_records({AR: 2.0, LOOSE: 0.8}) + [
        make_record(
            cell=STRICT,
            prompt=prompt,
            walks=WALKS,
            seconds=(1.6 + 0.1 * (prompt % 2)) * varied(prompt),
            process=prompt % 3,
        )
        for prompt in range(PROMPTS)
    ]
    failed = next(row for row in records if row["cell_id"] == STRICT.cell_id)
    failed |= {"status": "failed", "seconds": None}
    row = over_lossless(records).loc[LOOSE.cell_id]
    cells = {cell.cell_id: cell for cell in run_cells(run_of(records))}
    expected = repeat_interval(timing(timed_images(cells[LOOSE.cell_id], cells[STRICT.cell_id])))
    assert row["speedup_over_lossless"] == pytest.approx(expected.value)
    speed = [row[f"speedup_over_lossless_{end}"] for end in ("low", "high")]
    assert speed == pytest.approx([expected.low, expected.high])
    assert speed[0] < expected.value < speed[1]
    assert "speedup over the 5 of 6 images that lossless_cell has too" in row["note"]


def test_images_of_smaller_batches_are_counted_in_the_note() -> None:
    """The last batch of a cell holds what is left; runs of earlier releases do not say it."""
    records = timed_records({AR: 2.0, STRICT: 1.0}, batch=4)
    together = [4, 4, 4, 4, 2, 2]
    of_strict = [row for row in records if row["cell_id"] == STRICT.cell_id]
    for row, size in zip(of_strict, together, strict=True):
        row["decoded_together"] = size
    notes = build_tables(records)["speed"].set_index("cell_id")["note"].fillna("")
    assert "2 of 6 images decoded 2 at a time" in notes[STRICT.cell_id]
    assert "at a time" not in notes[AR.cell_id]


def test_the_terminal_shows_it_and_names_the_cell() -> None:
    summary = build_tables(timed_records({AR: 2.4, STRICT: 1.6, LOOSE: 0.8}))["summary"]
    shown, notes = readable(summary, "summary")
    assert list(shown["over lossless"]) == ["0.67x", "1.00x", "2.00x"]
    assert (
        "Over lossless: over the fastest lossless cell of the run with the same sampling, "
        f"{STRICT.cell_id}." in " ".join(notes)
    )
    assert "lossless cell" not in shown


def test_compare_shows_it_for_relaxed_cells_without_a_verdict() -> None:
    """Each run has a fastest lossless cell of its own."""
    runs = [
        RunData(
            folder=Path("run"),
            manifest={},
            records=frame_of(timed_records({AR: 2.4, STRICT: strict, LOOSE: 0.8})),
            scores=[],
        )
        for strict in (1.6, 1.2)
    ]
    table = compare_runs(*runs).table
    (row,) = table[table["quantity"] == "speedup_over_lossless"].to_dict("records")
    assert row["cell_id"] == LOOSE.cell_id
    assert (row["a"], row["b"]) == (
        pytest.approx(2.0),
        pytest.approx(1.5),
    )
    assert "the fastest lossless cell of each run" in row["note"]
    assert pd.isna(row["p_value"])
    assert pd.isna(row["verdict"])
