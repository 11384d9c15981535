"""The report page as text: self-contained, small, escaped, with the figures of the tables."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from lantern_bench.analysis.cells import run_cells
from lantern_bench.analysis.prompt_groups import tables_by
from lantern_bench.analysis.tables import tables_of
from lantern_bench.api import write_report
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.charts import curve_tables, run_styles
from lantern_bench.report.page import _cells, _figures, render, thumbnail
from lantern_bench.storage.run_directory import load_runs, run_names
from lantern_bench.utils.errors import UserError
from tests.helpers.made_up_run import (
    AR,
    LOOSE,
    STRICT,
    make_record,
    make_records,
    make_scores,
    write_run,
)
from tests.helpers.page_run import write_page_run


def data_of(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    )


def head_of(page: str) -> str:
    """The text of the page's first headline."""
    headline = re.search(r"<h1>.*?</h1>", page, re.DOTALL)[0]
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", headline).split()))


@pytest.fixture
def page(page_file: Path) -> str:
    return page_file.read_text(encoding="utf-8")


def test_page_needs_no_network(page):
    assert not re.search(r"<(script|img|iframe|source)[^>]+src=", page)
    assert re.findall(r"<link[^>]+>", page) == ['<link rel="icon" href="data:,">']
    without_plotly = re.sub(r'id="plotly">.*?</script>', "", page, flags=re.DOTALL)
    assert "http://" not in without_plotly
    assert "https://" not in without_plotly
    assert "@import" not in without_plotly
    packed = re.search(r'id="plotly">(.*?)</script>', page, re.DOTALL)[1]
    assert b"Plotly" in gzip.decompress(base64.b64decode(packed))


def test_page_table_has_the_figures_of_the_run(page_run, page):
    (data,) = load_runs([page_run]).values()
    speed = tables_of(data)["speed"].sort_values("speedup", ascending=False)
    body = re.search(r'id="table">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)[1]
    orders = [re.findall(r'<td data-order="([^"]*)"', row) for row in body.split("</tr>")[:-1]]
    assert [float(row[0]) for row in orders] == pytest.approx(speed["speedup"].tolist())
    assert [float(row[1]) for row in orders] == pytest.approx(
        speed["mean_accepted_length"].tolist()
    )
    heads = re.findall(r'<th scope="col"[^>]* class="figure( more|)" data-name="(\w+)"', page)
    first = [name for more, name in heads if not more]
    assert first == ["speedup", "mean_accepted_length", "emitted_tv"]
    # The run has a KID of few images, whose FID is withheld.
    assert not {"fid", "kid"} & {name for _, name in heads}
    place = [name for _, name in heads].index("speedup_over_lossless")
    assert [float(row[place]) for row in orders] == pytest.approx(
        speed["speedup_over_lossless"].tolist()
    )
    text = html.unescape(re.sub(r"<[^>]+>", " ", body))
    assert re.search(r"lantern\+\+ +lambda=2 +relaxed\s+3.22x", text)


def test_page_of_a_disturbed_run_has_no_other_verdict(tmp_path):
    records = [row | {"disturbed": number % 4 < 3} for number, row in enumerate(make_records())]
    folder = write_run(tmp_path / "run", records, make_scores(records))
    page = render(load_runs([folder]), folder)
    warning = "Speed cannot be measured now: 9 of 11 images disturbed"
    assert warning in head_of(page)
    assert "beat ar" not in head_of(page)
    calm = write_run(
        tmp_path / "calm", [row | {"disturbed": False} for row in records], make_scores(records)
    )
    of_disturbed, of_calm = head_of(render(load_runs([folder, calm]), tmp_path)).split("calm")
    assert "run" in of_disturbed
    assert warning in of_disturbed
    assert "Speed cannot" not in of_calm


def test_page_without_the_picture_files_has_their_thumbnails(tmp_path):
    folder = write_page_run(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"pictures_left_out": True}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    data = data_of(render(load_runs([folder]), folder))
    assert len(data["thumbs"]) == 12
    assert {picture["file"] for picture in data["pictures"]} == {None}


def test_pictures_have_figures_and_link_to_files(page_run, page):
    data = data_of(page)
    assert len(data["pictures"]) == 12
    assert len(data["prompts"]) == 4
    assert data["grid"] == 4
    for picture in data["pictures"]:
        assert (page_run / picture["file"]).is_file()
        cell = data["cells"][picture["cell"]]
        steps = {
            "ar": [1] * 15,
            "speculative": [2] * 7 + [1],
            "lantern++ lambda=2": [3] * 5,
        }
        assert picture["steps"] == steps[cell["name"]]
        assert cell["drafts"] == (cell["name"] != "ar")
        assert (cell["map"] is not None) == cell["drafts"]
        assert "clip_score" in picture
        assert picture["prompt_accuracy"] in (0, 1)
    assert data["cells"][2]["map"] == [None] + [3.0] * 15


def test_steps_without_drafts_have_no_map(tmp_path):
    """The tokens of a step of ZipAR are in several rows, so its steps are no stretches."""
    zipar = Decoding(mode="zipar", cfg_scale=2, cfg_default=2)
    folder = write_page_run(tmp_path / "zipar", prompts=2, cells=(AR, STRICT, zipar))
    data = data_of(render(load_runs([folder]), folder))
    assert [cell["drafts"] for cell in data["cells"]] == [False, True, False]
    assert [cell["map"] is None for cell in data["cells"]] == [True, False, True]


def test_page_has_a_chart_of_every_figure(page):
    figures = data_of(page)["figures"]
    names = {figure: [chart["name"] for chart in charts] for figure, charts in figures.items()}
    metrics = ("emitted_tv", "clip_score", "prompt_accuracy")
    assert names == {
        "front": [f"{x}-quality-{y}" for x, y in product(("speed", "length"), metrics)],
        "depth": ["acceptance-by-depth"],
        "lengths": ["accepted-lengths"],
        "position": ["acceptance-by-position"],
        "bound": [],
        "groups": ["speedup-by-colour", "speedup-by-shape"],
    }
    # One value of a bound makes no curve; the lines of a front are the front itself, and then a
    # cell each.
    assert [trace["customdata"] for trace in figures["front"][0]["data"]] == [[], [0], [1], [2]]


def test_groups_of_prompts_have_their_speedups_and_numbers_of_prompts(tmp_path):
    runs = load_runs([write_page_run(tmp_path / "run", prompts=12)])
    by_colour, by_shape = data_of(render(runs, tmp_path))["figures"]["groups"]
    assert by_colour["title"] == "speedup by colour"
    (data,) = runs.values()
    for chart, column in ((by_colour, "colour"), (by_shape, "shape")):
        speed = tables_by(data, column)["speed"].set_index("cell_id")
        assert [trace["customdata"] for trace in chart["data"]] == [[1, 1], [2, 2]]  # without ar
        left, right = chart["layout"]["xaxis"]["range"]
        assert 0.8 < left < 1.0
        highest = speed[["speedup", "speedup_high"]].max().max()
        assert highest < right < 1.1 * highest
        for trace, cell in zip(chart["data"], (STRICT, LOOSE), strict=True):
            rows = speed.loc[cell.cell_id]
            assert trace["y"] == rows["category"].tolist() == chart["layout"]["yaxis"]["tickvals"]
            assert trace["x"] == rows["speedup"].tolist()
            below = (rows["speedup"] - rows["speedup_low"]).tolist()
            assert trace["error_x"]["arrayminus"] == pytest.approx(pd.Series(below).fillna(0))
            assert below[-1] > 0
    rows = by_colour["layout"]["yaxis"]["ticktext"]
    assert rows == ["blue<br>6 prompts", "red<br>6 prompts"]
    # Plotly reads tags in names.
    rows = by_shape["layout"]["yaxis"]["ticktext"]
    assert rows[1] == "square,<br>&lt;b&gt;lit&lt;/b&gt; and<br>loud<br>10 prompts"


def test_groups_of_untimed_prompts_have_their_accepted_lengths(tmp_path):
    records = []
    for prompt in range(5):
        metadata = {"category": "few" if prompt < 2 else "many", "id": prompt}
        walks = [[0, 0]] if prompt < 2 else [[-1], [0, 0]]
        record = make_record(cell=STRICT, prompt=prompt, walks=walks, seconds=None)
        records.append(record | {"prompt_metadata": metadata})
    records[-1] |= {"status": "failed", "error": "out of memory"}
    folder = write_run(tmp_path / "run", records, [])
    (chart,) = data_of(render(load_runs([folder]), folder))["figures"]["groups"]
    assert chart["name"] == "mean-accepted-length-by-category"
    (trace,) = chart["data"]
    assert trace["y"] == ["few", "many"]
    assert trace["x"] == [3.0, 2.0]
    assert chart["layout"]["yaxis"]["ticktext"] == ["few<br>2 prompts", "many<br>2 prompts"]


def test_rows_of_several_runs_count_the_prompts_of_each(tmp_path):
    folders = []
    for prompts in (4, 6):
        folders.append(write_page_run(tmp_path / f"of-{prompts}", prompts=prompts))
    by_colour, *_ = data_of(render(load_runs(folders), tmp_path))["figures"]["groups"]
    assert [trace["customdata"] for trace in by_colour["data"]] == [[4, 4], [1, 1], [5, 5], [2, 2]]
    rows = by_colour["layout"]["yaxis"]["ticktext"]
    assert rows == ["blue<br>2 to 3 prompts", "red<br>2 to 3 prompts"]


def test_speed_against_distance_comes_first(page_run):
    (data,) = load_runs([page_run]).values()
    tables = curve_tables(data)
    tables["quality_with_speed"] = tables["quality_with_speed"].assign(
        distance=[0.0, 0.01, 0.2], distance_low=-0.01, distance_high=0.3
    )
    names = [
        chart["name"] for chart in _figures({"run": tables}, run_styles({"run": tables}))["front"]
    ]
    assert names[0] == "speed-quality-distance"
    assert "speed-quality-clip_score" in names


def test_cells_have_their_distance_and_their_ar(page_run):
    (data,) = load_runs([page_run]).values()
    tables = curve_tables(data)
    tables["quality_with_speed"] = tables["quality_with_speed"].assign(distance=[0.0, None, 0.01])
    records = {("run", "lanterns", cell.cell_id): cell for cell in run_cells(data)}
    cells = list(_cells({"run": tables}, records, run_styles({"run": tables})))
    assert [cell["distance"] for cell in cells] == ["0.0000", "", "0.0100"]
    assert [cell["base"] for cell in cells] == [0, 0, 0]
    assert [cell["output"] for cell in cells] == ["lossless", "lossless", "relaxed"]


def test_published_figures_have_their_source(page):
    section = page[page.index("Published figures") :]
    assert "A paper, Table 1" in section
    row = re.sub(
        r"<[^>]+>", " ", re.search(r"<tr>(?:(?!</tr>).)*their method.*?</tr>", section)[0]
    ).split()
    assert "2.50x" in row
    assert re.search(r"Published figures are from: [^<]*page", section)


def test_html_in_a_prompt_is_escaped(tmp_path):
    bad = "</script><script>alert(1)</script><!-- & \"quotes\" 'both'"
    records = [
        make_record(cell=cell, prompt=0, walks=[[0]], seconds=1.0) | {"prompt": bad}
        for cell in (AR, STRICT)
    ]
    folder = write_run(
        folder=tmp_path / "<b>run</b>",
        records=records,
        scores=[],
        experiment={"description": "<i>tilted</i>"},
    )
    page = render(load_runs([folder]), folder)
    assert "alert(1)</script>" not in page
    assert "<i>tilted" not in page
    assert "<b>run" not in page
    assert page.count("</script>") == 4
    assert data_of(page)["pictures"][0]["thumb"] is None
    assert data_of(page)["prompts"] == [bad]


def test_the_same_run_gives_the_same_page(page_run, page_file):
    assert render(load_runs([page_run]), page_run) == page_run.joinpath("report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.long
def test_eight_cells_of_64_pictures_stay_under_8_megabytes(tmp_path):
    loose = [
        {"mode": "lantern++", "lambda": 2 + n, "neighbours": 10, "cfg_scale": 2, "cfg_default": 2}
        for n in range(5)
    ]
    cells = (AR, STRICT, LOOSE, *(Decoding(**values | {"tree": "chain-5"}) for values in loose))
    folder = write_page_run(tmp_path / "run", prompts=64, side=128, cells=cells)
    out = write_report([folder], folder / "report.html")
    assert len(data_of(out.read_text(encoding="utf-8"))["thumbs"]) == 512
    assert out.stat().st_size < 8_000_000


def test_thumbnails_are_small(tmp_path):
    for name, side in (("large", 300), ("again", 300), ("small", 40)):
        Image.new("RGB", (side, side // 2), "red").save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    names = ("large", "again", "small", "broken", "missing")
    large, again, small, broken, missing = (thumbnail(tmp_path / f"{name}.png") for name in names)
    assert large == again
    assert broken is None
    assert missing is None
    for text, size in ((large, (128, 64)), (small, (40, 20))):
        (tmp_path / "one.webp").write_bytes(base64.b64decode(text))
        with Image.open(tmp_path / "one.webp") as picture:
            assert picture.size == size
            assert picture.format == "WEBP"


def test_one_page_shows_several_runs(page_run, tmp_path):
    other = write_page_run(tmp_path / "run", prompts=2)
    assert len(set(run_names([page_run, other]))) == 2
    out = write_report([page_run, other], tmp_path / "both.html")
    data = data_of(out.read_text(encoding="utf-8"))
    assert len(data["cells"]) == 6
    assert len({cell["name"] for cell in data["cells"]}) == 6
    assert all((tmp_path / picture["file"]).is_file() for picture in data["pictures"])


def test_page_of_a_run_without_quality_or_drafts(tmp_path):
    folder = write_run(
        tmp_path / "bare",
        [make_record(cell=AR, prompt=n, walks=[[]], seconds=1.0, image=None) for n in range(2)],
        [],
    )
    data = data_of(render(load_runs([folder]), folder))
    assert data["pictures"] == []
    assert not any(data["figures"].values())


def test_unwritable_file_is_refused(page_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report([page_run], tmp_path / "file" / "report.html")


def test_a_page_shows_the_first_prompts_of_a_large_run(tmp_path, monkeypatch):
    records = make_records()
    folder = write_run(tmp_path / "large", records, [])
    # four prompts of three cells; one image failed
    monkeypatch.setattr("lantern_bench.report.page.PICTURES", 7)
    shown = render(load_runs([folder]), folder)
    assert "the pictures of the first 2 of 4 prompts" in shown
    assert "4 prompts, 6 pictures on this page" in shown
    monkeypatch.undo()
    assert "of the first" not in render(load_runs([folder]), folder)
