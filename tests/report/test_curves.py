"""Curves: the CSV behind each, names as the papers use them, colours that are not the only difference."""

from __future__ import annotations

import pandas as pd
import pytest
from PIL import Image

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.report import curves
from lantern_bench.report.curves import acceptance_points, draw_curves, speed_quality_points
from lantern_bench.report.tables import build_tables
from lantern_bench.spec.decoding import Decoding
from tests.made_up_run import AR, STRICT, WALKS, make_record, make_records, make_scores


@pytest.fixture
def tables():
    records = make_records()
    return build_tables(records, make_scores(records))


def test_files_and_the_data_behind_them(tables, tmp_path):
    files = draw_curves({"run": tables}, tmp_path / "figures")
    names = ["acceptance-by-depth", "speed-quality-clip_score", "speed-quality-prompt_accuracy"]
    assert [path.name for path in files] == [f"{name}.{kind}" for name in names for kind in ("png", "csv")]
    with Image.open(files[0]) as picture:
        assert picture.width > 800
    behind = pd.read_csv(files[1])
    wanted = tables["acceptance"][tables["acceptance"]["axis"] == "depth"]
    assert behind["rate"].tolist() == pytest.approx(wanted["rate"].tolist(), rel=1e-5)
    scatter = pd.read_csv(files[3])
    assert scatter["speedup"].tolist() == pytest.approx(tables["speed"]["speedup"].tolist(), rel=1e-5)
    assert scatter["clip_score"].tolist() == pytest.approx(tables["quality"]["clip_score"].tolist(), rel=1e-5)
    assert "prompt_accuracy" not in scatter and "prompt_accuracy_low" not in scatter


def test_equal_tables_give_equal_pictures(tables, tmp_path):
    one, two = draw_curves({"run": tables}, tmp_path / "one"), draw_curves({"run": tables}, tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_methods_are_named_as_in_the_papers():
    cells = [AR, STRICT, STRICT.model_copy(update={"temperature": 0.0})]
    guided = {"cfg_scale": 2, "cfg_default": 2}
    for delta in (0.005, 0.02):
        cells.append(Decoding.model_validate({"mode": "lantern", "delta": delta, "neighbours": 20, **guided}))
    for neighbours in (10, 100):
        cells.append(Decoding.model_validate({"mode": "lantern++", "lambda": 2, "neighbours": neighbours, **guided}))
    records = [make_record(cell, n, WALKS if cell is not AR else [[]], 1.0) for cell in cells for n in range(2)]
    tables = build_tables(records, make_scores(records))
    labels = set(speed_quality_points({"run": tables})["label"])
    assert labels == {
        "AR",
        "speculative (strict)",
        "speculative (strict) greedy",
        "LANTERN δ=0.005",
        "LANTERN δ=0.02",
        "LANTERN++ λ=2 k=10",
        "LANTERN++ λ=2 k=100",
    }


def test_several_runs_are_named(tables):
    points = acceptance_points({"a": tables, "b": tables})
    assert set(points["label"]) == {
        f"{run}: {label}" for run in "ab" for label in ("speculative (strict)", "LANTERN++ λ=2")
    }


def test_an_untimed_run_takes_the_speedup_of_the_same_cell_elsewhere(tables):
    records = [{**row, "seconds": None} for row in make_records()]
    untimed = build_tables(records, make_scores(records))
    assert len(speed_quality_points({"quality": untimed})) == 0
    points = speed_quality_points({"quality": untimed, "speed": tables})
    assert points.groupby("run")["speedup"].apply(list).to_dict() == {
        "quality": tables["speed"]["speedup"].tolist(),
        "speed": tables["speed"]["speedup"].tolist(),
    }
    assert set(points["speed_run"]) == {"speed"}


def test_a_timed_run_keeps_its_own_speedup(tables):
    records = [{**row, "seconds": 9.0} if row["mode"] == "ar" and row["seconds"] else row for row in make_records()]
    slow = build_tables(records, make_scores(records))
    points = speed_quality_points({"slow": slow, "fast": tables}).set_index(["run", "mode"])["speedup"]
    assert points["fast", "lantern++"] == pytest.approx(3.25)
    assert points["slow", "lantern++"] == pytest.approx(22.5)


def test_fid_of_different_features_never_shares_an_axis(tmp_path):
    records = make_records()
    scores = [{**row, "fid": 10.0} if row["level"] == "cell" else row for row in make_scores(records)]
    again = [{**row, "protocol": "full", "extractor": "inception"} for row in scores if row["level"] == "cell"]
    files = draw_curves({"run": build_tables(records, scores + again)}, tmp_path)
    fid = [path for path in files if "fid" in path.name and path.suffix == ".csv"]
    assert [path.name for path in fid] == [
        "speed-quality-fid-inception.csv",
        "speed-quality-fid-lanterns-features-64-abcd.csv",
    ]
    assert [set(pd.read_csv(path)["fid_features"]) for path in fid] == [{"inception"}, {"lanterns-features-64@abcd"}]


def test_lines_differ_in_more_than_colour(tables):
    """In grey, too, every cell has a marker of its own, and every interval its whiskers."""
    axes = curves._draw_speed_quality(
        speed_quality_points({"run": tables}).drop(columns=["fid", "prompt_accuracy"]), "y"
    ).axes[0]
    markers = [container.lines[0].get_marker() for container in axes.containers]
    assert len(markers) == 3 == len(set(markers))
    assert all(container.has_xerr and container.has_yerr for container in axes.containers)
    lines = curves._draw_acceptance(acceptance_points({"run": tables})).axes[0].containers
    assert len({(line.lines[0].get_marker(), line.lines[0].get_linestyle()) for line in lines}) == len(lines) == 2


def test_nothing_to_draw(tmp_path):
    tables = build_tables([make_record(AR, n, [[]], 1.0) for n in range(2)])
    with pytest.raises(RefusedError, match="nothing to draw"):
        draw_curves({"run": tables}, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_a_folder_that_cannot_be_made(tables, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        draw_curves({"run": tables}, tmp_path / "file")
