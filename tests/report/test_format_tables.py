"""Tables for reading: units, intervals, what is said once, what is left blank."""

from __future__ import annotations

import pandas as pd
import pytest

from lantern_bench.report.format_tables import (
    BEST_NOTE,
    best_of,
    head_of,
    join_runs,
    latex,
    may_be_best,
    readable,
)
from tests.helpers.made_up_run import AR, LOOSE, STRICT


def test_summary(tables):
    shown, notes = readable(tables["summary"], "summary")
    heads = ["method", "parameters", "images", "failed"]
    heads += ["speedup", "over lossless", "MAL", "output", "emitted TV (at most)"]
    assert list(shown.columns) == [*heads, "CLIP score (tiny-clip)", "precision", "recall"]
    assert list(shown["speedup"]) == [
        "1.00x [1.00, 1.00]",
        "2.09x [1.98, 2.21]",
        "3.25x",  # of three prompts
    ]
    assert list(shown["MAL"]) == ["1.00", "2.00", "3.00"]
    assert list(shown["over lossless"]) == ["0.48x", "1.00x", "1.57x"]
    shared, reading, of_rows = notes
    assert shared.startswith("model: lanterns; ")
    assert "; fid features: lanterns-features-64@abcd" in shared
    assert reading.startswith("MAL: ")
    assert "fid needs 128 images, twice its features; there are 4" in of_rows


def test_the_summary_shows_distance_and_fid_in_place_of_other_quality(tables):
    table = tables["summary"].assign(distance=[0.0, 0.001, 0.25], distance_p=[0.5, 0.5, 1e-9])
    heads = [
        "method",
        "parameters",
        "images",
        "failed",
        "speedup",
        "over lossless",
        "MAL",
        "output",
        "distance (at least)",
        "emitted TV (at most)",
    ]
    assert list(readable(table, "summary").frame.columns) == heads
    shown, _ = readable(table.assign(fid=[10.0, 11.25, 12.0]), "summary")
    assert list(shown.columns) == [*heads, "FID (lanterns-features-64)"]
    shown, _ = readable(
        table.assign(distance=None, clip_score=None, precision=None, recall=None), "summary"
    )
    heads.remove("distance (at least)")
    assert list(shown.columns) == heads


def test_a_wide_summary_has_all_intervals_and_the_p_value(tables):
    table = tables["summary"].assign(distance=[0.0, 0.001, 0.25], distance_p=[0.5, 0.5, 1e-9])
    table = table.assign(distance_low=[-0.01, -0.01, 0.2], distance_high=[0.01, 0.01, 0.3])
    shown, _ = readable(table, "summary", intervals=True)
    assert shown["distance (at least)"].iloc[2] == "0.2500 [0.2000, 0.3000]"
    assert list(shown["p (H0: lossless)"]) == ["0.5", "0.5", "1e-09"]
    bare = readable(table, "summary").frame
    assert bare["distance (at least)"].iloc[2] == "0.2500"
    assert "p (H0: lossless)" not in bare
    without_p = readable(table.drop(columns="distance_p"), intervals=True).frame
    assert "p (H0: lossless)" not in without_p
    assert "0.2500 & [0.2000, 0.3000]" in latex(table, "summary")


def test_runs_are_joined_by_cell(tables):
    first = tables["summary"].assign(distance=[0.0, 0.001, 0.25])
    other = first.iloc[[2, 0]].assign(
        speedup=[4.0, 1.0], distance=None, cell_id=["new", AR.cell_id], note="a note of b"
    )
    # A cell that two protocols scored stays one row.
    joined, notes = join_runs({"a_run": pd.concat([first, first.iloc[:1]]), "b": other})
    assert list(joined.columns) == [
        "cell",
        "a_run: speedup",
        "a_run: MAL",
        "a_run: distance (at least)",
        "b: speedup",
        "b: MAL",
    ]
    assert [head_of(name) for name in joined] == list(joined.columns)
    assert list(joined["cell"]) == [AR.cell_id, STRICT.cell_id, LOOSE.cell_id, "new"]
    speedups = list(readable(first, "summary").frame["speedup"])
    assert list(joined["a_run: speedup"]) == [*speedups, ""]
    assert list(joined["a_run: distance (at least)"]) == ["0.0000", "0.0010", "0.2500", ""]
    assert list(joined["b: speedup"]) == ["1.00x [1.00, 1.00]", "", "", "4.00x"]
    assert len([note for note in notes if "tokens committed per step" in note]) == 1
    assert notes[-1] == "b: a note of b"
    together = join_runs({"a": first, "b": first}).notes
    reading, of_rows = readable(first, "summary").notes[1:]
    assert together == (
        "model: lanterns",
        reading.partition(" Over lossless")[0],
        of_rows,
    )


def test_runs_are_joined_by_cell_and_category(tables):
    parts = [tables["summary"].assign(category=category) for category in ("animals", "food")]
    joined, _ = join_runs({"a": pd.concat(parts), "b": parts[1]})
    assert list(joined["category"]) == ["animals"] * 3 + ["food"] * 3
    assert list(joined["b: MAL"]) == ["", "", "", "1.00", "2.00", "3.00"]


def test_each_category_of_a_run_has_its_own_best_figures(tables):
    table = tables["summary"].assign(distance=0.001, distance_high=0.005)
    slow = table.assign(speedup=table["speedup"] / 2)
    for parts in (
        {"category": ["animals", "food"]},
        {"run": ["a", "b"]},
        {"run": ["a", "a"], "category": ["food", None]},
    ):
        of_parts = [
            part.assign(**{name: values[number] for name, values in parts.items()})
            for number, part in enumerate((table, slow))
        ]
        text = latex(pd.concat(of_parts, ignore_index=True), "summary")
        assert text.count(r"\textbf{3.25$\times$}") == 1
        assert text.count(r"\textbf{1.62$\times$}") == 1


def test_features_are_named_in_the_head_or_in_a_column(tables):
    table = tables["summary"].assign(fid=[10.0, 11.25, 12.0])
    assert list(readable(table, "summary").frame["FID (lanterns-features-64)"]) == [
        "10.00",
        "11.25",
        "12.00",
    ]
    shown, _ = readable(table.assign(fid_features=["a", "b", "b"]), "summary")
    assert list(shown["FID features"]) == ["a", "b", "b"]
    assert "FID" in shown


def test_speed_table_has_units_and_blanks(tables):
    shown, notes = readable(tables["speed"], "speed")
    assert shown["s / image"].iloc[1] == "0.645 s [0.587, 0.709]"
    assert shown["draft / step"].iloc[1] == "43.00 ms"
    assert shown["acceptance rate"].iloc[0] == ""
    assert "peak memory" not in shown  # measured nowhere in this run
    assert "mode" not in shown  # the cell's id says it
    assert list(shown["failed"]) == ["0", "0", "1"]
    assert "failed" not in readable(tables["speed"].assign(failed=0), "speed").frame
    assert any("15 tokens of a prefill and 11 steps have MAL 14 / 11" in note for note in notes)


def test_acceptance_is_shown_by_depth(tables):
    shown, notes = readable(tables["acceptance"], "acceptance")
    assert list(shown["depth"]) == ["1", "2", "1", "2"]
    assert shown["rate"].iloc[0] == "0.667 [0.391, 0.862]"
    assert any("acceptance.csv" in note for note in notes)


def test_a_note_names_its_cells(tables):
    table = tables["speed"]
    table.loc[1, "note"] = "first | second"
    table.loc[2, "note"] = "second"
    _, notes = readable(table, "speed")
    ids = list(table["cell_id"])
    assert f"{ids[1]}: first. {ids[1]}, {ids[2]}: second" in notes[-1]


def test_a_table_without_a_name_is_shown_whole():
    table = pd.DataFrame({"model": ["a", "a"], "size": [1, 2], "share": [0.123456, None]})
    shown, notes = readable(table)
    assert shown.to_dict("list") == {
        "model": ["a", "a"],
        "size": ["1", "2"],
        "share": ["0.1235", ""],
    }
    assert notes == ()


@pytest.mark.parametrize(
    ("distance", "high", "best"),
    [
        (0.002, 0.009, 2),  # near the target, by its whole interval
        (0.002, 0.011, 1),
        (0.009, None, 2),
        (None, None, 1),  # not measured
    ],
)
def test_the_best_figure_is_of_a_cell_near_the_target(tables, distance, high, best):
    summary = tables["summary"].assign(
        distance=[0.0, 0.001, distance], distance_high=[0.001, 0.002, high]
    )
    assert latex(summary, "summary").count(BEST_NOTE) == 1
    near = may_be_best(summary)
    speedups = ["1.00x", "2.00x", "3.00x"]
    assert best_of("speedup", speedups, among=near).index(True) == best
    # Smaller is noise: lossless cells differ in it by chance.
    assert not any(best_of("distance", ["-0.001", "0.001", "0.002"], among=near))
    far = summary.assign(distance=0.5, distance_high=0.6)
    assert not any(may_be_best(far))
    assert not any(best_of("speedup", speedups, among=may_be_best(far)))


def test_output_is_a_column_where_cells_differ_in_it(tables):
    for name in ("summary", "speed", "quality"):
        shown = readable(tables[name], name).frame
        assert list(shown["output"]) == ["lossless", "lossless", "relaxed"], name
    lossless = tables["summary"].head(2)
    assert "output: lossless" in readable(lossless, "summary").notes[0].split("; ")


def test_latex_is_ready_for_a_paper(tables):
    text = latex(
        tables["summary"].assign(
            speedup_low=[1.0, None, -2.5], speedup_high=[1.0, None, 4.26], precision=None
        ),
        "summary",
        "50%_a run",
    )
    remarks = [line for line in text.splitlines() if line.startswith("%")]
    _, _, head, _, *rows, _, _ = (line for line in text.splitlines() if line not in remarks)
    assert remarks[:2] == ["% 50%_a run", r"% needs \usepackage{booktabs}"]
    assert r"\begin{tabular}{llrrr@{ }lr@{ }lr@{ }llr@{ }lr@{ }lr}" in text
    assert r"\toprule" in text
    assert r"\bottomrule" in text
    cells = [row.removesuffix(r" \\").split(" & ") for row in rows]
    assert r"\multicolumn{2}{c}{speedup}" in head
    assert "FID" not in head
    assert "precision" not in head
    assert cells[2][1] == r"small-7 k=10 $\lambda$=2"
    speedups = [row[4:6] for row in cells]
    assert speedups == [
        [r"1.00$\times$", "[1.00, 1.00]"],
        [r"\textbf{2.09$\times$}", ""],  # the best of the lossless cells
        [r"3.25$\times$", "[$-$2.50, 4.26]"],
    ]
    # CLIP score: a tie
    assert [row[-3].startswith(r"\textbf") for row in cells] == [True, True, False]
    assert cells[1][8:10] == [r"\textbf{2.00}", "[2.00, 2.00]"]  # MAL
    assert not any(row[-1].startswith(r"\textbf") for row in cells)  # recall: all are equal
    low = latex(tables["summary"].assign(fid=[12.0, 11.0, 13.0]), "summary")
    assert low.count(r"\textbf{11.00}") == 1
    assert r"\textbf{13.00}" not in low
    assert r"50\%\_x" in latex(pd.DataFrame({"delta": [0.1], "method": ["50%_x"]}))
    assert r"$\delta$ & method" in latex(pd.DataFrame({"delta": [0.1], "method": ["a"]}))
