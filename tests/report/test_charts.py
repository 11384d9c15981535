"""Curves: the CSV behind each, names as the papers use them, colours that are not the only
difference.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from lantern_bench.analysis.labels import BOUNDS
from lantern_bench.analysis.prompt_groups import split_run
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.charts import (
    acceptance_points,
    charts,
    choose_cells,
    curve_tables,
    fronts,
    group_charts,
    group_styles,
    is_dominated,
    line_label,
    run_styles,
    speed_quality_points,
    stack_runs,
    symlog,
)
from lantern_bench.report.draw import draw_curves, to_matplotlib
from lantern_bench.report.page import to_plotly
from lantern_bench.utils.errors import RefusedError, UserError
from tests.helpers.made_up_run import (
    AR,
    LOOSE,
    STRICT,
    WALKS,
    make_record,
    make_records,
    make_scores,
    run_of,
    write_run,
)


def tables_from(records, scores=()):
    return curve_tables(run_of(records, scores))


def tables_of_cells(cells):
    """Two images of each cell, with scores."""
    records = [
        make_record(cell=cell, prompt=n, walks=WALKS if cell != AR else [[]], seconds=1.0)
        for cell, n in product(cells, range(2))
    ]
    return tables_from(records, make_scores(records))


@pytest.fixture
def tables():
    records = make_records()
    return tables_from(records, make_scores(records))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("curves")
    records = make_records()
    files = draw_curves(
        [write_run(folder / "run", records, make_scores(records))], folder / "figures", width="one"
    )
    return {path.name: path for path in files}


def test_each_curve_has_its_files_at_the_width_of_a_column(tables, drawn):
    names = ["acceptance-by-depth", "acceptance-by-position", "accepted-lengths"]
    axes = product(("speed", "length"), ("emitted_tv", "clip_score", "prompt_accuracy"))
    names += [f"{x}-quality-{y}" for x, y in axes]
    kinds = ("png", "svg", "pdf", "csv")
    assert list(drawn) == [f"{name}.{kind}" for name, kind in product(names, kinds)]
    with Image.open(drawn["acceptance-by-depth.png"]) as picture:
        assert picture.width == 3.3 * 200
    assert f'width="{3.3 * 72:.1f}' in drawn["acceptance-by-depth.svg"].read_text()[:500]
    assert (
        f"/MediaBox [ 0 0 {3.3 * 72:.1f}".encode() in drawn["acceptance-by-depth.pdf"].read_bytes()
    )
    behind = pd.read_csv(drawn["acceptance-by-depth.csv"])
    wanted = tables["acceptance"][tables["acceptance"]["axis"] == "depth"]
    assert behind["rate"].tolist() == pytest.approx(wanted["rate"].tolist(), rel=1e-5)
    scatter = pd.read_csv(drawn["speed-quality-clip_score.csv"])
    assert scatter["speedup"].tolist() == pytest.approx(
        tables["speed"]["speedup"].tolist(), rel=1e-5
    )
    assert scatter["clip_score"].tolist() == pytest.approx(
        tables["quality"]["clip_score"].tolist(), rel=1e-5
    )
    assert "prompt_accuracy" not in scatter
    assert "prompt_accuracy_low" not in scatter


def test_equal_tables_give_equal_files(drawn, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lantern_bench.report.charts.charts", lambda *_: list(charts({"run": tables}))[:1]
    )
    for path in draw_curves(
        [drawn["acceptance-by-depth.csv"].parent.parent / "run"], tmp_path, width="one"
    ):
        assert path.read_bytes() == drawn[path.name].read_bytes()


def test_cells_are_chosen_by_id_pattern_or_mode(tables):
    both = {"a": tables, "b": tables}
    for patterns, modes in (
        (["speculative"], {"speculative"}),
        (["ar", "*-lambda2-*"], {"ar", "lantern++"}),
    ):
        chosen = choose_cells(both, patterns)
        for of_run in chosen.values():
            for table in of_run.values():
                if "mode" in table:
                    assert set(table["mode"]) <= modes
        assert set(stack_runs(chosen, "speed")["mode"]) == modes
        assert list(chosen) == [
            "a",
            "b",
        ]
    with pytest.raises(UserError, match="--cells lantern: no cell") as caught:
        choose_cells(both, ["ar", "lantern"])
    assert STRICT.cell_id in str(caught.value.advice)


def test_accepted_lengths_are_counted_by_step(tables):
    rows = tables["lengths"].set_index(["mode", "length"])["steps"].to_dict()
    assert rows == {
        ("speculative", 1): 4,
        ("speculative", 2): 4,
        ("speculative", 3): 4,
        ("lantern++", 1): 0,
        ("lantern++", 2): 0,
        ("lantern++", 3): 6,
    }
    means = (
        tables["lengths"]
        .groupby("mode")[["length", "share"]]
        .apply(lambda t: (t["length"] * t["share"]).sum())
    )
    assert means["lantern++"] == pytest.approx(3)
    assert means["speculative"] == pytest.approx(2)


def test_positions_are_pooled(tables):
    long = [
        make_record(cell=STRICT, prompt=0, walks=[[0, -1]] * 100, seconds=1.0),
        make_record(cell=AR, prompt=0, walks=[[]] * 200, seconds=1.0),
    ]
    whole = tables_from(long)["acceptance"]
    pooled = acceptance_points({"run": tables_from(long)}, "position")
    assert len(pooled) <= 32 < len(whole[whole["axis"] == "position"])
    assert pooled["offered"].sum() == 200
    assert pooled["accepted"].sum() == 100
    assert (pooled["index_end"] - pooled["index"]).max() == 6
    short = acceptance_points({"run": tables}, "position")
    assert (short["index"] == short["index_end"]).all()


@pytest.mark.parametrize(("tokens", "row"), [(256, 16), (16 * 17, 17), (250, math.nan)])
def test_positions_show_the_rows_of_the_image(tokens, row):
    long = [make_record(cell=STRICT, prompt=0, walks=[[-1]] * (tokens - 1), seconds=1.0)]
    tables = {"run": tables_from(long)}
    chart = next(chart for chart in charts(tables) if chart.panels)
    lines = to_matplotlib(chart, run_styles(tables)).axes[0].lines
    ends = [float(line.get_xdata()[0]) for line in lines if line.get_color() == "#CCCCCC"]
    assert ends == ([] if math.isnan(row) else [row * number - 0.5 for number in range(1, 16)])


def test_a_point_is_dominated_when_another_beats_it():
    points = pd.DataFrame(
        {"run": "r", "model": "m", "x": [1, 2, 3, 3.0, 0.5], "y": [5, 4, 4, 3.0, 5]}
    )
    assert is_dominated(points, "x", "y", less_is_better=False) == [False, True, False, True, True]
    assert is_dominated(points, "x", "y", less_is_better=True) == [True, True, True, False, True]
    twins = pd.DataFrame({"run": "r", "model": "m", "x": [1.0, 1.0], "y": [2.0, 2.0]})
    assert is_dominated(twins, "x", "y", less_is_better=True) == [False, False]
    apart = points.assign(run=list("abcde"))
    assert not any(is_dominated(apart, "x", "y", less_is_better=False))


def front_of(tables, figure="clip_score"):
    return next(
        chart for chart in fronts({"run": tables}) if chart.name == f"speed-quality-{figure}"
    )


def test_distances_that_chance_explains_are_equal(tables):
    ordered = tables["quality_with_speed"].sort_values("speedup", ascending=False)
    for low, dominated in ((-0.001, [False, True, True]), (0.001, [False, False, False])):
        cells = ordered.assign(distance=[0.003, 0.002, 0.001], distance_low=low, distance_high=0.01)
        points = front_of({**tables, "quality_with_speed": cells}, "distance").points
        assert points.sort_values("speedup", ascending=False)["dominated"].tolist() == dominated


def test_a_distance_is_linear_near_0_and_logarithmic_above(tables):
    """Most distances are near 0, where a linear axis would draw them as one line."""
    assert symlog(pd.Series([-0.04, 0.0, 0.01, 0.02, 0.2, 2.0]), 0.02).tolist() == pytest.approx(
        [-1 - math.log10(2), 0.0, 0.5, 1.0, 2.0, 3.0]
    )
    assert symlog(pd.Series([-3.0, 3.0]), None).tolist() == [-3.0, 3.0]
    scored = tables["quality_with_speed"].assign(distance=0.2, distance_low=0.02, distance_high=2.0)
    chart = front_of({**tables, "quality_with_speed": scored}, "distance")
    plotly = to_plotly(chart, run_styles({"run": tables}))
    _, trace, *_ = plotly["data"]
    assert trace["y"] == pytest.approx([2.0])
    assert trace["error_y"]["arrayminus"] == pytest.approx([1.0])
    assert trace["error_y"]["array"] == pytest.approx([1.0])
    assert "0.2000 [0.0200, 2.0000]" in trace["hovertext"][0]
    axis = plotly["layout"]["yaxis"]
    assert "log above 0.02" in axis["title"]["text"]
    assert dict(zip(axis["ticktext"], axis["tickvals"], strict=True))["0.2"] == pytest.approx(2.0)
    axes = to_matplotlib(chart, run_styles({"run": tables})).axes[0]
    assert axes.get_yscale() == "symlog"
    assert axes.yaxis_inverted()  # what is good is on top, as on the page


def test_dominated_cells_are_pale_and_hollow(tables):
    chart = front_of(tables)
    styles = run_styles({"run": tables})
    chart = dataclasses.replace(chart, points=chart.points.assign(dominated=[False, True, False]))
    axes = to_matplotlib(chart, styles).axes[0]
    drawn = [
        (c.lines[0].get_alpha() < 1, c.lines[0].get_markerfacecolor() == "none")
        for c in axes.containers
    ]
    assert drawn == [(False, False), (True, True), (False, False)]
    front, *traces = to_plotly(chart, styles)["data"]
    assert [
        (trace["opacity"] < 1, "-open" in trace["marker"]["symbol"][0]) for trace in traces
    ] == drawn
    assert front["x"] == sorted(chart.points["speedup"][[0, 2]])
    assert front["customdata"] == []


def test_plotly_has_the_points_intervals_and_cells(tables):
    styles = run_styles({"run": tables})
    depth, *_ = (to_plotly(chart, styles) for chart in charts({"run": tables}))
    points = acceptance_points({"run": tables})
    strict, loose = depth["data"]
    assert strict["y"] == pytest.approx(points["rate"][points["mode"] == "speculative"].tolist())
    assert strict["customdata"] == [1] * len(strict["x"])
    assert set(loose["customdata"]) == {2}
    low = points["rate"] - points["rate_low"]
    assert strict["error_y"]["arrayminus"] + loose["error_y"]["arrayminus"] == pytest.approx(
        low.tolist()
    )
    assert "speculative" in strict["hovertext"][0]
    front = to_plotly(front_of(tables), styles)
    assert front["layout"]["shapes"][0]["x0"] == 1.0
    assert front["title"] == "CLIP score against speedup"


def test_a_line_has_the_words_that_its_points_share():
    table = pd.DataFrame({"label": ["lantern k=10 lambda=2", "lantern k=10 lambda=5"]})
    assert line_label(table) == "lantern k=10"
    assert line_label(table[:1]) == "lantern k=10 lambda=2"


def bounded(**parameters):
    cell = {"mode": "lantern", "neighbours": 20, "cfg_scale": 2, "cfg_default": 2} | parameters
    return Decoding(**cell)


@pytest.mark.parametrize(
    ("by", "cells"),
    [
        ("delta", [bounded(delta=d) for d in (0.05, 0.2, 0.5, 0.9)]),
        ("lambda", [bounded(mode="lantern++", **{"lambda": x}) for x in (2, 5)]),
        (
            "tree",
            [
                bounded(mode="speculative", drafting="static", neighbours=None, tree=t)
                for t in ("small-7", "chain-5")
            ],
        ),
        ("temperature", [STRICT, STRICT.changed(temperature=0.0)]),
    ],
)
def test_curves_by_a_parameter(by, cells):
    tables = tables_of_cells([AR, *cells])
    drawn = {chart.name: chart for chart in charts({"run": tables}, [by])}
    chart = drawn[f"mean-accepted-length-by-{by}"]
    assert set(chart.points["mean_accepted_length"]) == {2.0}
    of_rate = drawn[f"acceptance-rate-by-{by}"].points
    assert of_rate[by].nunique() == len(cells)
    assert (of_rate["acceptance_rate_low"] < of_rate["acceptance_rate"]).all()
    assert (of_rate["acceptance_rate"] < of_rate["acceptance_rate_high"]).all()
    assert chart.points[by].nunique() == len(cells)
    styles = run_styles({"run": tables}, by)
    assert to_matplotlib(chart, styles).axes
    colours = [styles["run", "lanterns", cell.cell_id].colour for cell in cells]
    assert colours[0] != colours[1]
    for colour in {*colours} if by in BOUNDS else ():  # a baseline is grey
        channels = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
        assert max(channels) - min(channels) > 100


def with_categories(cells, prompts=4):
    """Records of cells over prompts of two categories, which accept differently."""
    records = []
    for cell, prompt in product(cells, range(prompts)):
        walks = [[]] * 6 if cell == AR else [*WALKS, *[[0, 0]] * (prompt % 2)]
        record = make_record(cell=cell, prompt=prompt, walks=walks, seconds=1.0)
        category = "fine $^ detail$" if prompt % 2 else "animals"
        records.append(record | {"prompt_metadata": {"category": category}})
    return records


def test_curves_by_category_have_a_panel_a_cell_and_a_line_a_category():
    records = with_categories([AR, STRICT, LOOSE])
    groups = {
        name: curve_tables(part) for name, part in split_run(run_of(records), "category").items()
    }
    styles = group_styles(groups)
    chart, *others = group_charts(groups, "category")
    assert chart.name == "acceptance-by-depth-by-category"
    assert [other.name for other in others] == [
        "acceptance-by-position-by-category",
        "accepted-lengths-by-category",
    ]
    panels = chart.in_panels()
    assert [panel.points["cell_id"].unique().tolist() for panel in panels] == [
        [STRICT.cell_id],
        [LOOSE.cell_id],
    ]
    for panel in panels:
        assert [line["run"].iloc[0] for line in panel.lines()] == ["animals", "fine $^ detail$"]
        for line in panel.lines():
            alone = [
                row for row in records if row["prompt_metadata"]["category"] == line["run"].iloc[0]
            ]
            expected = acceptance_points({"run": tables_from(alone)})
            expected = expected[expected["cell_id"] == line["cell_id"].iloc[0]]
            assert line["rate"].tolist() == expected["rate"].tolist()
            assert line["rate_low"].tolist() == expected["rate_low"].tolist()
    figure = to_matplotlib(chart, styles)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["speculative (lossless)", "lantern++ lambda=2 (relaxed)"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["animals", r"fine \$^ detail\$"]
    colours = {axes.lines[0].get_color() for axes in figure.axes}
    assert len(colours) == 1
    # No text overlaps another: the legend is above the panels, the title of the axes below.
    figure.draw_without_rendering()
    title = figure.get_supxlabel()
    below = next(text for text in figure.texts if text.get_text() == title)
    assert not legend.get_window_extent().overlaps(below.get_window_extent())


def test_curves_against_a_bound_have_a_line_a_category():
    records = with_categories([AR, LOOSE, LOOSE.changed(**{"lambda": 5.0})])
    groups = {
        name: curve_tables(part) for name, part in split_run(run_of(records), "category").items()
    }
    drawn = {chart.name: chart for chart in group_charts(groups, "item type")}
    (panel,) = drawn["mean-accepted-length-by-lambda-by-item-type"].in_panels()
    assert [line["lambda"].tolist() for line in panel.lines()] == [[2.0, 5.0], [2.0, 5.0]]


def test_curves_by_category_of_several_runs(tmp_path):
    records = with_categories([AR, STRICT])
    runs = [write_run(tmp_path / name, records, []) for name in "ab"]
    files = draw_curves(runs, tmp_path / "drawn", by="category", cells=["speculative"])
    points = pd.read_csv(next(path for path in files if path.suffix == ".csv"))
    assert points["run"].unique().tolist() == [
        f"{run}: {category} (2 prompts)"
        for run, category in product("ab", ("animals", "fine $^ detail$"))
    ]
    with pytest.raises(UserError, match="--by colour: must be one of mode") as raised:
        draw_curves(runs, tmp_path / "drawn", by="colour")
    assert raised.value.advice == "The columns of these prompts are category."


def test_unknown_widths_are_refused(tmp_path):
    with pytest.raises(UserError, match="--width 3"):
        draw_curves([], tmp_path, width="3")


def cool_sd(strength):
    return Decoding(mode="cool-sd", drafting="jacobi", window=8, strength=strength)


MULTIPLICATIVE = {"mode": "lantern++", "lambda": 2, "delta": None}
CHAIN = {"drafting": "static", "tree": "chain-4"}


@pytest.mark.parametrize(
    "cells",
    [
        {
            AR: "ar",
            STRICT: "speculative small-7 (lossless)",
            STRICT.changed(temperature=0.0): "speculative small-7 T=0 (lossless)",
            bounded(delta=0.005): "lantern 58n5d10b delta=0.005 (relaxed)",
            bounded(delta=0.02): "lantern 58n5d10b delta=0.02 (relaxed)",
            bounded(**MULTIPLICATIVE, neighbours=10): "lantern++ eagle1-25 k=10 lambda=2 (relaxed)",
            bounded(**MULTIPLICATIVE, neighbours=100): (
                "lantern++ eagle1-25 k=100 lambda=2 (relaxed)"
            ),
        },
        {  # one rule on two draftings is told apart
            bounded(delta=0.1): "lantern 58n5d10b delta=0.1 (relaxed)",
            bounded(delta=0.1, **CHAIN): "lantern static chain-4 delta=0.1 (relaxed)",
            bounded(**MULTIPLICATIVE, tree="chain-4"): "lantern++ chain-4 lambda=2 (relaxed)",
        },
        {  # a rule that is not the mode's own is named
            STRICT: "speculative small-7 (lossless)",
            STRICT.changed(rule="block", tree="chain-4"): "speculative block chain-4 (lossless)",
            Decoding(mode="sjd", rule="block", window=8): "sjd block w8-row (lossless)",
        },
        {  # the w of a window is no parameter of a rule
            cool_sd(2): "cool-sd jacobi strength=2 (relaxed)",
            cool_sd(3): "cool-sd jacobi strength=3 (relaxed)",
        },
    ],
)
def test_labels_name_methods_and_what_differs(cells):
    points = speed_quality_points({"run": tables_of_cells(cells)})
    assert dict(zip(points["cell_id"], points["label"], strict=True)) == {
        cell.cell_id: label for cell, label in cells.items()
    }


def test_labels_name_runs_when_there_are_several(tables):
    points = acceptance_points({"a": tables, "b": tables})
    methods = ("speculative (lossless)", "lantern++ lambda=2 (relaxed)")
    assert set(points["label"]) == {f"{run}: {method}" for run, method in product("ab", methods)}


def test_untimed_run_takes_the_speedup_from_another_run(tables):
    records = [{**row, "seconds": None} for row in make_records()]
    untimed = tables_from(records, make_scores(records))
    assert speed_quality_points({"quality": untimed})["speedup"].isna().all()
    assert all(chart.x != "speedup" for chart in fronts({"quality": untimed}))
    points = speed_quality_points({"quality": untimed, "speed": tables})
    assert points.groupby("run")["speedup"].apply(list).to_dict() == {
        "quality": tables["speed"]["speedup"].tolist(),
        "speed": tables["speed"]["speedup"].tolist(),
    }
    assert set(points["speed_run"]) == {"speed"}


def test_charts_name_only_what_differs_in_them(tables):
    """The timed run has no scores here: all points are of the other run, whose name tells nothing
    apart.
    """
    records = [{**row, "seconds": None} for row in make_records()]
    runs = {
        "quality": tables_from(records, make_scores(records)),
        "speed": tables_from(make_records()),
    }
    (front,) = [front for front in fronts(runs) if front.name == "speed-quality-clip_score"]
    assert set(front.points["label"]) == {
        "ar",
        "speculative (lossless)",
        "lantern++ lambda=2 (relaxed)",
    }


@pytest.mark.parametrize("has_spread", [True, False])
def test_ar_spread_is_a_grey_strip(tables, has_spread):
    chart = front_of(tables)
    ends = (
        {"clip_score_ar_spread_low": 9.0, "clip_score_ar_spread_high": 12.5} if has_spread else {}
    )
    points = chart.points.drop(
        columns=[name for name in chart.points if "_ar_spread_" in name]
    ).assign(**ends)
    axes = to_matplotlib(
        dataclasses.replace(chart, points=points), run_styles({"run": tables})
    ).axes[0]
    assert [(patch.get_y(), patch.get_height()) for patch in axes.patches] == (
        [(9.0, 3.5)] if has_spread else []
    )


def test_a_timed_run_keeps_its_own_speedup(tables):
    records = [
        {**row, "seconds": 9.0} if row["mode"] == "ar" and row["seconds"] else row
        for row in make_records()
    ]
    slow = tables_from(records, make_scores(records))
    points = speed_quality_points({"slow": slow, "fast": tables}).set_index(["run", "mode"])[
        "speedup"
    ]
    assert points["fast", "lantern++"] == pytest.approx(3.25)
    assert points["slow", "lantern++"] == pytest.approx(22.5)


def test_fid_of_different_features_has_separate_charts():
    records = make_records()
    scores = [
        {**row, "fid": 10.0} if row["level"] == "cell" else row for row in make_scores(records)
    ]
    again = [
        {**row, "protocol": "full", "extractor": "inception"}
        for row in scores
        if row["level"] == "cell"
    ]
    fid = [
        chart
        for chart in fronts({"run": tables_from(records, scores + again)})
        if "speed-quality-fid" in chart.name
    ]
    assert [chart.name for chart in fid] == [
        "speed-quality-fid-inception",
        "speed-quality-fid-lanterns-features-64-abcd",
    ]
    features = [set(chart.points["fid_features"]) for chart in fid]
    assert features == [{"inception"}, {"lanterns-features-64@abcd"}]
    assert all("lower is better" in chart.y_title for chart in fid)


def test_lines_differ_in_more_than_colour(tables):
    """In grey, too, every cell has a marker of its own, and every interval its whiskers."""
    styles = run_styles({"run": tables})
    axes = to_matplotlib(front_of(tables), styles).axes[0]
    markers = [container.lines[0].get_marker() for container in axes.containers]
    assert len(markers) == 3 == len(set(markers))
    assert all(container.has_xerr and container.has_yerr for container in axes.containers)
    lines = to_matplotlib(next(charts({"run": tables})), styles).axes[0].containers
    assert (
        len({(line.lines[0].get_marker(), line.lines[0].get_linestyle()) for line in lines})
        == len(lines)
        == 2
    )


def test_nothing_to_draw(tmp_path):
    run = write_run(
        tmp_path / "run",
        [make_record(cell=AR, prompt=n, walks=[[]], seconds=1.0) for n in range(2)],
        [],
    )
    with pytest.raises(RefusedError, match="nothing to draw"):
        draw_curves([run], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        draw_curves([write_run(tmp_path / "run", make_records(), [])], tmp_path / "file")
