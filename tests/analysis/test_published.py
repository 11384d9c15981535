"""Published beside ours: which row stands beside which cell, when there is a difference, and what
is said of it.

The figures come from a made-up run; nothing is decoded.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from lantern_bench.analysis.published import NOT_HAD, comparability, reproduction_rows, sources
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.paper import Paper
from lantern_bench.report.format_tables import side_by_side
from lantern_bench.storage.schema import frame
from tests.helpers.made_up_run import AR, LOOSE, build_tables, make_record

FIGURE = {"source": "a note", "confidence": "secondary"}
COLUMNS = ["speedup", "mean_accepted_length", "fid", "clip_score"]


def paper(*rows: dict[str, Any], **more: Any) -> Paper:
    return Paper.model_validate({"title": "A paper", "columns": COLUMNS, "rows": rows} | more)


def compared(tables: dict[str, pd.DataFrame], *rows: dict[str, Any], **more: Any) -> pd.DataFrame:
    return frame("reproduction", reproduction_rows(tables, paper(*rows, **more)))


def test_a_difference_is_ours_minus_published(tables: dict[str, pd.DataFrame]) -> None:
    row = {
        "name": "its rule",
        "match": {"mode": "lantern++"},
        "figures": {"speedup": FIGURE | {"value": 2.0}},
    }
    beside = compared(tables, row)
    (match,) = beside[
        (beside["paper_row"] == "its rule") & (beside["figure"] == "speedup")
    ].to_dict("records")
    ours = tables["speed"].set_index("cell_id").loc[LOOSE.cell_id, "speedup"]
    assert match["ours"] == ours
    assert match["difference"] == pytest.approx(ours - 2.0)
    assert match["source"] == "a note"
    assert match["images"] == 3
    assert match["failed"] == 1
    rest = beside[(beside["paper_row"] == "its rule") & (beside["figure"] != "speedup")]
    assert rest["published"].isna().all()
    assert rest["note"].str.contains(NOT_HAD).all()


def test_figures_of_other_networks_have_no_difference(tables: dict[str, pd.DataFrame]) -> None:
    row = {
        "name": "ar",
        "match": {"mode": "ar"},
        "figures": {"clip_score": FIGURE | {"value": 0.32}},
    }
    other = compared(tables, row, clip_model="ViT-B-32")
    same = compared(tables, row, clip_model="tiny-clip")
    unknown = compared(tables, row)
    for beside, expected in ((other, None), (same, True), (unknown, None)):
        (match,) = beside[
            (beside["paper_row"] == "ar") & (beside["figure"] == "clip_score")
        ].to_dict("records")
        assert match["published"] == 0.32
        assert match["measured_by"] == "tiny-clip@1234"
        assert pd.isna(match["difference"]) == (expected is None)
        assert ("no difference: measured by another network" in str(match["note"])) == (
            expected is None
        )


def test_every_published_row_is_shown_and_every_cell(tables: dict[str, pd.DataFrame]) -> None:
    rows = [
        {"name": "one", "match": {"mode": "ar"}, "figures": {"speedup": FIGURE | {"value": 1.0}}},
        {"name": "again", "match": {"mode": "ar"}, "figures": {"speedup": FIGURE | {"value": 1.1}}},
        {
            "name": "no cell",
            "match": {"mode": "lantern"},
            "figures": {"speedup": FIGURE | {"value": 3.0}},
        },
        {
            "name": "no mode",
            "figures": {"fid": FIGURE | {"value": 20.0}},
            "note": "a method of its own",
        },
        {"name": "unread", "match": {"mode": "lantern"}},
    ]
    beside = compared(tables, *rows)
    assert set(beside["paper_row"].dropna()) == {row["name"] for row in rows}
    assert beside[beside["figure"] == "speedup"]["published"].dropna().tolist() == [1.0, 1.1, 3.0]
    assert set(beside["cell_id"].dropna()) == set(tables["speed"]["cell_id"])
    alone = beside[beside["cell_id"].isna()].set_index("paper_row")
    assert alone.loc["no cell", "note"] == "no cell of this run stands for this row"
    assert alone.loc["no mode", "note"] == "no mode of ours covers this row | a method of its own"
    assert alone.loc["unread", "note"].str.contains(NOT_HAD).all()
    assert len(alone.loc["unread"]) == len(COLUMNS)


def test_best_published_figure_matches_our_best_cell() -> None:
    records = []
    for bound, walks in ((2, [[0, -1]]), (5, [[0, 0, 0]]), (10, [[0, 0]])):
        cell = Decoding(**{"mode": "lantern++", "tree": "small-7", "lambda": bound})
        records += [
            make_record(cell=cell, prompt=prompt, walks=walks, seconds=1.0) for prompt in range(3)
        ]
    row = {"name": "best", "match": {"mode": "lantern++"}, "best": True}
    beside = compared(
        build_tables(records), row | {"figures": {"mean_accepted_length": FIGURE | {"value": 3.6}}}
    )
    assert beside[beside["paper_row"] == "best"]["parameters"].unique().tolist() == [
        "small-7 k=10 lambda=5"
    ]


def test_sentences_say_what_is_not_comparable(tables: dict[str, pd.DataFrame]) -> None:
    block = paper(model="Big", hardware="A40", images=5000, missing="The rest.")
    sentences = comparability(tables, block, {"device": "cpu"})
    text = " ".join(sentences)
    assert "published Big; ours lanterns" in text
    assert "published A40; ours a CPU" in text
    assert "published 5000 images; ours 3, 4 a cell" in text
    assert "published not stated; ours lanterns-features-64@abcd" in text
    assert sentences[-1] == "The rest."
    assert comparability(tables, None, {}) == [
        "This experiment names no published table: only our figures are shown."
    ]


def test_side_by_side_has_a_line_for_each_published_row() -> None:
    records = [
        make_record(cell=AR, prompt=prompt, walks=[[]] * 6, seconds=1.0) for prompt in range(3)
    ]
    for residual, seconds in (("exact", 0.5), ("official", 0.4)):
        values = {
            "mode": "lantern++",
            "tree": "small-7",
            "lambda": 2,
            "cfg_scale": 2,
            "residual": residual,
        }
        cell = Decoding(**values, cfg_default=2)
        records += [
            make_record(cell=cell, prompt=prompt, walks=[[0, 0]], seconds=seconds)
            for prompt in range(3)
        ]
    figures = {"speedup": FIGURE | {"value": 2.25}, "fid": FIGURE | {"value": 20.0}}
    row = {"name": "its rule", "match": {"mode": "lantern++"}, "figures": figures}
    table = compared(
        build_tables(records),
        row,
        {"name": "other", "figures": {"speedup": FIGURE | {"value": 3.0}}},
    )
    lines = side_by_side(table).to_dict("list")
    assert lines["published row"] == ["its rule", "other"]
    assert (lines["speedup"], lines["speedup official"]) == (["2.00x", ""], ["2.50x", ""])
    assert lines["speedup published"] == ["2.25x", "3.00x"]
    assert lines["MAL official"] == [
        "3.00",
        "",
    ]
    assert lines["ours"] == ["lantern++ small-7 k=10 lambda=2", "(none)"]
    assert not {"MAL published", "FID published"} & set(lines), "nothing to compare"
    assert sources(table) == ["Published figures are from: a note (secondary)."]


def test_side_by_side_has_a_line_for_each_cell_where_nothing_is_published(
    tables: dict[str, pd.DataFrame],
) -> None:
    table = compared(tables)
    assert side_by_side(table)["ours"].str.split(" ").str[0].tolist() == [
        "ar",
        "speculative",
        "lantern++",
    ]
    assert sources(table) == []


def test_missing_figure_ignores_notes_on_other_figures(tables: dict[str, pd.DataFrame]) -> None:
    noted = tables["quality"].assign(
        fid=None, note="fid needs 128 images, twice its features; there are 3"
    )
    beside = frame(
        "reproduction",
        reproduction_rows({**tables, "quality": noted}, paper(columns=["fid", "hpsv2"])),
    )
    why = beside[beside["cell_id"] == AR.cell_id].set_index("figure")["note"]
    assert why["fid"].endswith("fid needs 128 images, twice its features; there are 3")
    assert why["hpsv2"].endswith("not measured")


def test_a_published_mean_accepted_length_is_beside_ours_as_it_is_counted(
    tables: dict[str, pd.DataFrame],
) -> None:
    row = {
        "name": "its rule",
        "match": {"mode": "lantern++"},
        "figures": {"mean_accepted_length": FIGURE | {"value": 2.0}},
    }
    beside = compared(tables, row).set_index(["paper_row", "figure"])
    note = beside.loc[("its rule", "mean_accepted_length"), "note"]
    uncut = tables["speed"].set_index("cell_id").loc[LOOSE.cell_id, "mal_uncut"]
    assert f"ours with last steps uncut, as published code counts: {uncut:.2f}" in note
    said = comparability(tables, paper(row), {})
    assert any("counts the bonus token, and not the prefill" in sentence for sentence in said)
    without = paper(row).model_copy(update={"columns": ("speedup",)})
    assert not any("bonus token" in sentence for sentence in comparability(tables, without, {}))
