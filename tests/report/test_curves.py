"""Curves: the CSV behind each, names as the papers use them, colours that are not the only difference."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from lantern_bench.config.decoding import Decoding
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.report import curves
from lantern_bench.report.curves import (
    KINDS,
    acceptance_points,
    curve_tables,
    draw_curves,
    fronts,
    is_dominated,
    pictures,
    run_styles,
    speed_quality_points,
)
from lantern_bench.runs.store import RunData
from tests.made_up_run import AR, STRICT, WALKS, make_record, make_records, make_scores


def tables_from(records, scores=()):
    return curve_tables(RunData(Path("run"), {}, records, list(scores)))


@pytest.fixture
def tables():
    records = make_records()
    return tables_from(records, make_scores(records))


def test_each_curve_has_png_svg_and_csv(tables, tmp_path):
    files = draw_curves({"run": tables}, tmp_path / "figures")
    names = ["acceptance-by-depth", "acceptance-by-position", "accepted-lengths"]
    names += [f"{x}-quality-{y}" for x in ("speed", "length") for y in ("clip_score", "prompt_accuracy")]
    assert [path.name for path in files] == [f"{name}.{kind}" for name in names for kind in KINDS]
    at = {path.name: path for path in files}
    with Image.open(at["acceptance-by-depth.png"]) as picture:
        assert picture.width > 800
    assert "<svg" in at["acceptance-by-depth.svg"].read_text()[:500]
    behind = pd.read_csv(at["acceptance-by-depth.csv"])
    wanted = tables["acceptance"][tables["acceptance"]["axis"] == "depth"]
    assert behind["rate"].tolist() == pytest.approx(wanted["rate"].tolist(), rel=1e-5)
    scatter = pd.read_csv(at["speed-quality-clip_score.csv"])
    assert scatter["speedup"].tolist() == pytest.approx(tables["speed"]["speedup"].tolist(), rel=1e-5)
    assert scatter["clip_score"].tolist() == pytest.approx(tables["quality"]["clip_score"].tolist(), rel=1e-5)
    assert "prompt_accuracy" not in scatter and "prompt_accuracy_low" not in scatter


def test_accepted_lengths_are_counted_by_step(tables):
    rows = tables["lengths"].set_index(["mode", "length"])["steps"].to_dict()
    assert rows == {
        ("speculative", 1): 4, ("speculative", 2): 4, ("speculative", 3): 4,
        ("lantern++", 1): 0, ("lantern++", 2): 0, ("lantern++", 3): 6,
    }  # fmt: skip
    means = tables["lengths"].groupby("mode")[["length", "share"]].apply(lambda t: (t["length"] * t["share"]).sum())
    assert means["lantern++"] == pytest.approx(3) and means["speculative"] == pytest.approx(2)


def test_positions_are_pooled(tables):
    long = [make_record(STRICT, 0, [[0, -1]] * 100, 1.0), make_record(AR, 0, [[]] * 200, 1.0)]
    whole = tables_from(long)["acceptance"]
    pooled = acceptance_points({"run": tables_from(long)}, "position")
    assert len(pooled) <= 32 < len(whole[whole["axis"] == "position"])
    assert pooled["offered"].sum() == 200 and pooled["accepted"].sum() == 100
    assert (pooled["index_end"] - pooled["index"]).max() == 6
    short = acceptance_points({"run": tables}, "position")
    assert (short["index"] == short["index_end"]).all()


def test_a_point_is_dominated_when_another_beats_it():
    points = pd.DataFrame({"run": "r", "model": "m", "x": [1, 2, 3, 3.0, 0.5], "y": [5, 4, 4, 3.0, 5]})
    assert is_dominated(points, "x", "y", less_is_better=False) == [False, True, False, True, True]
    assert is_dominated(points, "x", "y", less_is_better=True) == [True, True, True, False, True]
    twins = pd.DataFrame({"run": "r", "model": "m", "x": [1.0, 1.0], "y": [2.0, 2.0]})
    assert is_dominated(twins, "x", "y", less_is_better=True) == [False, False]
    apart = points.assign(run=list("abcde"))
    assert not any(is_dominated(apart, "x", "y", less_is_better=False))


def test_dominated_cells_are_pale_and_hollow(tables):
    front = next(front for front in fronts({"run": tables}) if front.name == "speed-quality-clip_score")
    points = front.points.assign(dominated=[False, True, False])
    axes = curves.draw_front(front._replace(points=points), run_styles({"run": tables})).axes[0]
    looks = [(c.lines[0].get_alpha() < 1, c.lines[0].get_markerfacecolor() == "none") for c in axes.containers]
    assert looks == [(False, False), (True, True), (False, False)]


def bounded(**parameters):
    cell = {"mode": "lantern", "neighbours": 20, "cfg_scale": 2, "cfg_default": 2} | parameters
    return Decoding.model_validate(cell)


@pytest.mark.parametrize(
    ("by", "cells"),
    [
        ("delta", [bounded(delta=d) for d in (0.05, 0.2)]),
        ("lambda", [bounded(mode="lantern++", **{"lambda": x}) for x in (2, 5)]),
        (
            "tree",
            [bounded(mode="speculative", drafting="static", neighbours=None, tree=t) for t in ("small-7", "chain-5")],
        ),
        ("temperature", [STRICT, STRICT.model_copy(update={"temperature": 0.0})]),
    ],
)
def test_curves_by_a_parameter(by, cells):
    records = [make_record(c, n, WALKS if c is not AR else [[]], 1.0) for c in [AR, *cells] for n in range(2)]
    tables = tables_from(records, make_scores(records))
    drawn = {picture.name: picture for picture in pictures({"run": tables}, by)}
    points = drawn[f"mean-accepted-length-by-{by}"].points
    assert points["mean_accepted_length"].tolist() == [2.0, 2.0] and points[by].nunique() == 2
    look = run_styles({"run": tables}, by)
    colours = [look["run", "lanterns", cell.cell_id].colour for cell in cells]
    assert colours[0] != colours[1]


def test_unknown_grouping_is_refused(tables, tmp_path):
    with pytest.raises(UserError, match="--by colour"):
        draw_curves({"run": tables}, tmp_path / "figures", "colour")
    assert not (tmp_path / "figures").exists()


def test_equal_tables_give_equal_pictures(tables, tmp_path):
    one, two = draw_curves({"run": tables}, tmp_path / "one"), draw_curves({"run": tables}, tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_labels_name_methods_as_the_papers_do():
    cells = [AR, STRICT, STRICT.model_copy(update={"temperature": 0.0})]
    guided = {"cfg_scale": 2, "cfg_default": 2}
    for delta in (0.005, 0.02):
        cells.append(Decoding.model_validate({"mode": "lantern", "delta": delta, "neighbours": 20, **guided}))
    for neighbours in (10, 100):
        cells.append(Decoding.model_validate({"mode": "lantern++", "lambda": 2, "neighbours": neighbours, **guided}))
    records = [make_record(cell, n, WALKS if cell is not AR else [[]], 1.0) for cell in cells for n in range(2)]
    tables = tables_from(records, make_scores(records))
    labels = set(speed_quality_points({"run": tables})["label"])
    assert labels == {
        "AR",
        "speculative (strict) small-7",
        "speculative (strict) small-7 greedy",
        "LANTERN δ=0.005 58n5d10b",
        "LANTERN δ=0.02 58n5d10b",
        "LANTERN++ λ=2 eagle1-25 k=10",
        "LANTERN++ λ=2 eagle1-25 k=100",
    }


def test_labels_tell_one_rule_on_two_draftings_apart():
    rule = {"mode": "lantern", "delta": 0.1, "neighbours": 20, "cfg_scale": 2, "cfg_default": 2}
    chain = {"drafting": "static", "tree": "chain-4"}
    multiplicative = rule | {"mode": "lantern++", "lambda": 5, "tree": "chain-4"}
    del multiplicative["delta"]
    cells = [Decoding.model_validate(one) for one in (rule | chain, rule, multiplicative)]
    records = [make_record(cell, n, WALKS, 1.0) for cell in cells for n in range(2)]
    found = tables_from(records, make_scores(records))
    assert list(speed_quality_points({"run": found})["label"]) == [
        "LANTERN δ=0.1 dynamic 58n5d10b",
        "LANTERN δ=0.1 static chain-4",
        "LANTERN++ λ=5 chain-4",
    ]


def test_labels_name_a_lossless_rule_once():
    block = Decoding.model_validate({**STRICT.settings(), "rule": "block", "tree": "chain-4"})
    window = Decoding.model_validate({"mode": "sjd", "rule": "block", "window": 8})
    records = [make_record(cell, n, WALKS, 1.0) for cell in (block, STRICT, window) for n in range(2)]
    found = tables_from(records, make_scores(records))
    labels = set(speed_quality_points({"run": found})["label"])
    assert labels == {"speculative (strict) small-7", "speculative (block) chain-4", "SJD (block) w8"}


def test_labels_name_runs_when_there_are_several(tables):
    points = acceptance_points({"a": tables, "b": tables})
    assert set(points["label"]) == {
        f"{run}: {label}" for run in "ab" for label in ("speculative (strict)", "LANTERN++ λ=2")
    }


def test_untimed_run_takes_the_speedup_from_another_run(tables):
    records = [{**row, "seconds": None} for row in make_records()]
    untimed = tables_from(records, make_scores(records))
    assert speed_quality_points({"quality": untimed})["speedup"].isna().all()
    assert all(front.speed != "speedup" for front in fronts({"quality": untimed}))
    points = speed_quality_points({"quality": untimed, "speed": tables})
    assert points.groupby("run")["speedup"].apply(list).to_dict() == {
        "quality": tables["speed"]["speedup"].tolist(),
        "speed": tables["speed"]["speedup"].tolist(),
    }
    assert set(points["speed_run"]) == {"speed"}


def test_pictures_name_only_what_differs_in_them(tables):
    """The timed run has no scores here: all points are of the other run, whose name tells nothing apart."""
    records = [{**row, "seconds": None} for row in make_records()]
    runs = {"quality": tables_from(records, make_scores(records)), "speed": tables_from(make_records())}
    (front,) = [front for front in fronts(runs) if front.name == "speed-quality-clip_score"]
    assert set(front.points["label"]) == {"AR", "speculative (strict)", "LANTERN++ λ=2"}


@pytest.mark.parametrize("banded", [True, False])
def test_the_spread_of_ar_is_a_grey_band(tables, banded):
    look, front = run_styles({"run": tables}), next(fronts({"run": tables}))
    ends = {f"{front.quality}_band_low": 9.0, f"{front.quality}_band_high": 12.5} if banded else {}
    points = front.points.drop(columns=[name for name in front.points if "_band_" in name]).assign(**ends)
    axes = curves.draw_front(front._replace(points=points), look).axes[0]
    assert [(patch.get_y(), patch.get_height()) for patch in axes.patches] == ([(9.0, 3.5)] if banded else [])


def test_a_timed_run_keeps_its_own_speedup(tables):
    records = [{**row, "seconds": 9.0} if row["mode"] == "ar" and row["seconds"] else row for row in make_records()]
    slow = tables_from(records, make_scores(records))
    points = speed_quality_points({"slow": slow, "fast": tables}).set_index(["run", "mode"])["speedup"]
    assert points["fast", "lantern++"] == pytest.approx(3.25)
    assert points["slow", "lantern++"] == pytest.approx(22.5)


def test_fid_of_different_features_has_separate_curves(tmp_path):
    records = make_records()
    scores = [{**row, "fid": 10.0} if row["level"] == "cell" else row for row in make_scores(records)]
    again = [{**row, "protocol": "full", "extractor": "inception"} for row in scores if row["level"] == "cell"]
    files = draw_curves({"run": tables_from(records, scores + again)}, tmp_path)
    fid = [path for path in files if path.name.startswith("speed-quality-fid") and path.suffix == ".csv"]
    assert [path.name for path in fid] == [
        "speed-quality-fid-inception.csv",
        "speed-quality-fid-lanterns-features-64-abcd.csv",
    ]
    assert [set(pd.read_csv(path)["fid_features"]) for path in fid] == [{"inception"}, {"lanterns-features-64@abcd"}]


def test_lines_differ_in_more_than_colour(tables):
    """In grey, too, every cell has a marker of its own, and every interval its whiskers."""
    look = run_styles({"run": tables})
    front = next(fronts({"run": tables}))
    axes = curves.draw_front(front, look).axes[0]
    markers = [container.lines[0].get_marker() for container in axes.containers]
    assert len(markers) == 3 == len(set(markers))
    assert all(container.has_xerr and container.has_yerr for container in axes.containers)
    lines = curves.draw_depths(acceptance_points({"run": tables}), look).axes[0].containers
    assert len({(line.lines[0].get_marker(), line.lines[0].get_linestyle()) for line in lines}) == len(lines) == 2


def test_nothing_to_draw(tmp_path):
    tables = tables_from([make_record(AR, n, [[]], 1.0) for n in range(2)])
    with pytest.raises(RefusedError, match="nothing to draw"):
        draw_curves({"run": tables}, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_unwritable_folder_is_refused(tables, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        draw_curves({"run": tables}, tmp_path / "file")
