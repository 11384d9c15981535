"""Tables by a column of the prompts: each group has the rows of a run of only its prompts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import lantern_bench
from lantern_bench.analysis.prompt_groups import (
    NO_VALUE,
    grouping_columns,
    prompt_columns,
    split_run,
    tables_by,
)
from lantern_bench.analysis.tables import NAMES, tables_of, write_tables
from lantern_bench.storage.run_directory import RunData
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers.made_up_run import (
    AR,
    LOOSE,
    STRICT,
    WALKS,
    Row,
    make_record,
    make_scores,
    run_of,
    token_scores,
    write_run,
)

CATEGORIES = ("animals", "food", "animals", "food", "animals", "food", "animals", "animals")
PACES = {AR: 1.0, STRICT: 0.5, LOOSE: 0.3}


def recorded(categories: Iterable[Any] = CATEGORIES) -> list[Row]:
    """Three cells over a prompt of each category. Walks and seconds differ between prompts."""
    records = []
    for prompt, category in enumerate(categories):
        for cell, pace in PACES.items():
            walks = [[]] * 6 if cell == AR else [*WALKS, *[[0, 0]] * (prompt % 3)]
            record = make_record(
                cell=cell,
                prompt=prompt,
                walks=walks,
                seconds=pace * (1.0 + 0.05 * prompt),
                prompt_metadata={"category": category, "id": prompt},
            )
            records.append(record)
    records[-1] |= {"status": "failed", "error": "out of memory", "seconds": None}
    return records


def scored(records: Iterable[Row]) -> list[Row]:
    """Scores of the tokens and of the picture of each finished image."""
    records = list(records)
    rows = [row for row in make_scores(records) if row["level"] == "image"]
    for record in records:
        if record["status"] == "ok":
            shift = 20.0 + record["order_index"]
            sums = [shift, 0.0, 256.0, 0.0, 256.0]
            rows.append(token_scores(record, feature_sums=sums))
    return rows


@pytest.fixture
def run() -> RunData:
    records = recorded()
    return run_of(records, scored(records))


def test_a_column_groups_prompts_if_its_values_have_two_prompts_on_average() -> None:
    def grouping(*categories: Any) -> list[str]:
        return grouping_columns(run_of(recorded(categories)))

    assert grouping("animals", "food", "food", "animals") == ["category"]
    assert grouping("animals", "food", "food", None) == []  # three groups of four prompts
    assert grouping("animals", "animals") == []
    assert grouping_columns(run_of([make_record(cell=AR, prompt=0, walks=[[]], seconds=1)])) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_group_has_the_rows_of_a_run_of_only_its_prompts(name: str, run: RunData) -> None:
    table = tables_by(run, "category")[name]
    assert table.columns[0] == "category"
    for group in ("animals", "food"):
        records = [row for row in recorded() if row["prompt_metadata"]["category"] == group]
        alone = tables_of(run_of(records, scored(records)))[name].drop(
            columns="category", errors="ignore"
        )
        rows = table[table["category"] == group].drop(columns=["category", "prompts"])
        if "distance_p" in alone:
            assert alone["distance_p"].gt(0).any()
            alone["distance_p"] = (2 * alone["distance_p"]).clip(upper=1.0)  # of two groups
        pd.testing.assert_frame_equal(rows.reset_index(drop=True), alone)


def test_counts_of_the_groups_add_up_to_those_of_the_run(run: RunData) -> None:
    parts = tables_by(run, "category")
    whole = tables_of(run)
    for name, counts in {
        "speed": ["images", "failed"],
        "quality": ["images", "failed"],
        "acceptance": ["offered", "accepted"],
    }.items():
        keys = ["cell_id", "axis", "index"] if name == "acceptance" else ["cell_id"]
        expected = whole[name].groupby(keys)[counts].sum()
        assert parts[name].groupby(keys)[counts].sum().equals(expected)
        assert expected.to_numpy().min() >= 0
        assert expected.to_numpy().sum() > 0
    prompts = parts["speed"].groupby("cell_id")["prompts"].sum()
    assert prompts.to_dict() == {AR.cell_id: 8, STRICT.cell_id: 8, LOOSE.cell_id: 7}


def test_quality_is_compared_with_ar_of_the_same_prompts(run: RunData) -> None:
    for row in run.scores:
        if row["cell_id"] == STRICT.cell_id and row["level"] == "image":
            is_animal = CATEGORIES[int(row["record_key"].split("/")[1])] == "animals"
            row["clip_score"] += 0.25 if is_animal else -0.125
    table = tables_by(run, "category")["quality"].set_index(["category", "cell_id"])
    differences = table["clip_score_vs_ar"].xs(STRICT.cell_id, level="cell_id")
    assert differences.to_dict() == pytest.approx({"animals": 0.25, "food": -0.125})
    # Three prompts of food are too few for an interval, as in any run.
    assert table["clip_score_low"].notna().to_dict()["animals", AR.cell_id]
    assert table.loc[("food", AR.cell_id), "clip_score_low":"clip_score_high"].isna().all()
    assert "3 of the 4 prompts" in table["note"]["food", AR.cell_id]


def test_figures_of_all_pictures_of_a_cell_are_left_out_with_a_note() -> None:
    records = recorded()
    of_cells = [row for row in make_scores(records) if row["level"] == "cell"]
    whole = tables_of(run_of(records, of_cells))["quality"]
    assert whole["kid"].isna().all()
    assert whole["precision"].notna().all()
    for scores in (of_cells, make_scores(records)):
        table = tables_by(run_of(records, scores), "category")["quality"]
        assert table["protocol"].eq("embedded").all()
        assert table[["fid", "kid", "precision", "recall"]].isna().all(axis=None)
        assert table["note"].str.contains("precision and recall compare all images of a cell").all()
        assert table["images"].tolist() == [5, 5, 4, 3, 3, 3]


def test_any_column_makes_groups_and_none_loses_a_prompt() -> None:
    records = recorded(["b", None, 10, True, ["x"], "a"])
    del records[3]["prompt_metadata"]["category"]
    records[4]["prompt_metadata"] = None
    run = run_of(records)
    assert prompt_columns(run) == ["category", "id"]
    groups = split_run(run, "category")
    assert list(groups) == ["10", '["x"]', "a", "b", "true", NO_VALUE]
    assert sum(len(group.records) for group in groups.values()) == len(records)
    assert list(split_run(run, "id")) == ["0", "1", "2", "3", "4", "5", NO_VALUE]


def test_prompts_without_the_column_are_refused(run: RunData) -> None:
    with pytest.raises(UserError, match="--by colour: the prompts of run") as raised:
        tables_by(run, "colour")
    assert raised.value.advice == "They have category, id."
    bare = [row | {"prompt_metadata": None} for row in recorded()]
    with pytest.raises(UserError, match="--by category") as raised:
        tables_by(run_of(bare), "category")
    assert "only their text" in str(raised.value.advice)


def test_the_api_has_the_same_tables(tmp_path: Path) -> None:
    records = recorded()
    folder = write_run(tmp_path / "run", records, make_scores(records))
    tables = lantern_bench.load_run(folder).tables_by("category")
    assert set(tables) == set(NAMES)
    assert tables["summary"]["category"].tolist() == ["animals"] * 3 + ["food"] * 3
    write_tables(folder)
    (folder / "records.jsonl").unlink()
    with pytest.raises(RefusedError, match="holds tables only"):
        lantern_bench.load_run(folder).tables_by("category")
