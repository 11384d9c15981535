"""The report page in a real browser: it opens without an error or a request, and what can be moved
moves the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pandas as pd
import pytest
from PIL import Image

from lantern_bench.analysis.tables import tables_of
from lantern_bench.api import write_report
from lantern_bench.config.decoding import Decoding
from lantern_bench.report.draw import SURFACE
from lantern_bench.storage.run_directory import load_runs
from lantern_bench.storage.schema import frame, write_csv
from tests.helpers.browser import missing, opened
from tests.helpers.made_up_run import AR, LOOSE, STRICT, make_record, write_run
from tests.helpers.page_run import write_page_run

_REASON = missing()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_REASON is not None, reason=f"needs a browser: {_REASON}"),
]


@pytest.fixture(scope="module")
def opening(page_file: Path) -> Iterator[SimpleNamespace]:
    """The page, open, with its errors and its requests."""
    errors: list[str] = []
    requests: list[str] = []
    with opened(viewport={"width": 1280, "height": 900}, color_scheme="light") as context:
        tab = context.new_page()
        tab.on(
            "console",
            lambda message: (
                errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page_file.as_uri())
        tab.wait_for_selector("html[data-ready]")
        yield SimpleNamespace(tab=tab, errors=errors, requests=requests, file=page_file)


@pytest.fixture
def tab(opening: SimpleNamespace) -> Any:
    """The tab with everything shown, as after opening."""
    opening.tab.evaluate("location.hash = 'sort=-speedup'")
    opening.tab.wait_for_function("location.hash === ''")  # the page has read it
    opening.tab.evaluate("document.querySelector('#cells').open = true")
    opening.tab.locator("#search").fill("")
    return opening.tab


def odd_runs(folder: Path, page_run: Path) -> dict[str, list[Path]]:
    """Runs of one cell without ar, of ar alone without images, two runs on one page, and a run that
    verifies an exploration.
    """
    records = [
        make_record(cell=AR, prompt=n, walks=[[]], seconds=1.0, image=None) for n in range(2)
    ]
    explored = write_page_run(folder / "explored" / "verified", prompts=2)
    settings = [{"model": "lanterns", "cell_id": "a", "predicted_speedup": 2.0, "dominated": 0}]
    write_csv(frame("surface", settings), explored.parent / SURFACE)
    (explored.parent / "figures").mkdir()
    Image.new("RGB", (900, 640)).save(explored.parent / "figures" / "map-lanterns.png")
    return {
        "one": [write_page_run(folder / "one", cells=(LOOSE,))],
        "ar": [write_run(folder / "ar", records, [])],
        "two": [page_run, write_page_run(folder / "two", prompts=2)],
        "explored": [explored],
    }


def test_pages_of_odd_runs_open_without_errors(
    opening: SimpleNamespace, page_run: Path, tmp_path: Path
) -> None:
    for name, runs in odd_runs(tmp_path, page_run).items():
        page = write_report(runs, tmp_path / f"{name}.html")
        tab = opening.tab.context.new_page()
        tab.set_viewport_size({"width": 390, "height": 800})
        errors: list[str] = []
        tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        assert errors == []
        assert tab.locator("h1 .verdict").count() == len(runs)
        assert tab.locator("#no-charts").is_hidden()
        hidden = tab.locator(".links a").evaluate_all(
            "links => links.filter((link) => link.hidden).map((link) => link.hash)"
        )
        assert hidden == (["#charts", "#stage", "#pictures"] if name == "ar" else [])
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.locator("text=Predicted settings").count() == (name == "explored")
        assert tab.locator(".mode[open]").count() == 0  # only the modes are listed at first
        tab.close()


def test_of_many_cells_only_those_on_the_front_have_full_curves(
    opening: SimpleNamespace, tmp_path: Path
) -> None:
    """Of 17 cells, those that the fastest lossless cell beats are pale; of 15, none is."""
    shared = {"mode": "lantern++", "tree": "small-7", "neighbours": 10, "cfg_default": 1}
    relaxed = [Decoding(**shared, **{"lambda": bound}) for bound in range(2, 17)]
    cells = (AR, relaxed[0], STRICT, *relaxed[1:])  # all but the first two are equally fast
    page = write_report([write_page_run(tmp_path / "run", cells=cells)], tmp_path / "many.html")
    tab = opening.tab.context.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]")

    def curves() -> dict[str, float]:
        traces = tab.evaluate(
            "document.querySelector('#depth').data.map(({ name, opacity }) => [name, opacity])"
        )
        return dict(traces)

    beaten = [f"lantern++ lambda={bound} (relaxed)" for bound in range(2, 17)]
    assert curves() == {"speculative (lossless)": 1.0} | dict.fromkeys(beaten, 0.2)
    tab.locator(".group", has_text="relaxed").press("Enter")
    assert tab.locator("#shown").inner_text() == "cells: 15 of 17"
    assert curves() == {"speculative (lossless)": 0.1} | dict.fromkeys(beaten, 1.0)
    tab.close()


def columns(tab: Any) -> list[str]:
    return [picture_head(text) for text in tab.locator("#grid thead th").all_inner_texts()]


def picture_head(text: str) -> str:
    """The name in a head, without the badge."""
    return " ".join(text.split()).removesuffix(" lossless").removesuffix(" relaxed")


def maps(tab: Any) -> list[str]:
    return list(
        tab.evaluate("() => document.querySelector('#maps-grid').data.map((trace) => trace.name)")
    )


def first_of_rows(tab: Any) -> list[str]:
    return [picture_head(text) for text in tab.locator("#table tbody th:visible").all_inner_texts()]


def test_page_opens_without_errors_or_requests(opening: SimpleNamespace, capsys: Any) -> None:
    ready = int(opening.tab.evaluate("document.documentElement.dataset.ready"))
    with capsys.disabled():
        print(f"\nreport.html: {opening.file.stat().st_size / 1e6:.1f} MB, opened in {ready} ms")
    assert opening.errors == []
    assert {url for url in opening.requests if not url.startswith(("data:", "blob:"))} == {
        opening.file.as_uri()
    }
    assert opening.tab.locator("#no-charts").is_hidden()
    drawn = opening.tab.locator(".plot .main-svg").count()
    assert drawn >= 4
    assert opening.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_head_sorts_the_table_both_ways(tab: Any) -> None:
    before = first_of_rows(tab)
    head = tab.locator("#table thead th", has_text="MAL")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert first_of_rows(tab) == before == ["lantern++ lambda=2", "speculative", "ar"]
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert first_of_rows(tab) == before[::-1]


def test_a_chip_filters_everything(tab: Any) -> None:
    assert columns(tab) == ["ar", "speculative", "lantern++ lambda=2"]
    assert maps(tab) == ["speculative", "lantern++ lambda=2"]
    # By keyboard: under load a mouse button can come up after the page has moved below it.
    tab.locator(".chip", has_text="lantern++").press("Enter")
    assert columns(tab) == ["lantern++ lambda=2"]
    assert maps(tab) == ["lantern++ lambda=2"]
    assert first_of_rows(tab) == ["lantern++ lambda=2"]
    tab.locator(".chip", has_text="ar").first.press("Enter")
    assert columns(tab) == ["ar", "lantern++ lambda=2"]
    assert tab.locator("#shown").inner_text() == "cells: 2 of 3"
    tab.locator("#all").press("Enter")
    assert len(columns(tab)) == 3


def test_outputs_are_a_filter(tab: Any) -> None:
    tab.locator(".group", has_text="relaxed").press("Enter")
    assert first_of_rows(tab) == columns(tab) == maps(tab) == ["lantern++ lambda=2"]
    tab.locator(".group", has_text="lossless").press("Enter")
    assert first_of_rows(tab) == ["speculative", "ar"]
    assert tab.locator(".group", has_text="lossless").get_attribute("aria-pressed") == "true"
    tab.locator(".group", has_text="lossless").press("Enter")  # once more: everything
    assert len(first_of_rows(tab)) == 3


def test_further_columns_are_shown_on_demand(tab: Any) -> None:
    heads = tab.locator("#table thead th:visible")
    names = heads.evaluate_all("heads => heads.map((head) => head.dataset.name)")
    assert names == ["cell", "speedup", "mean_accepted_length", "emitted_tv"]
    tab.locator("#all-columns").check()
    assert heads.count() > 4
    tab.locator("#all-columns").uncheck()


def saved(tab: Any, button: str) -> str:
    """The content of the file that a button saves."""
    with tab.expect_download() as download:
        tab.locator(button).press("Enter")
    assert download.value.suggested_filename.startswith("run.")
    return Path(download.value.path()).read_text(encoding="utf-8")


def test_files_hold_what_the_table_shows(tab: Any, page_run: Path) -> None:
    tab.locator("#table thead button", has_text="MAL").press("Enter")
    tab.locator("#table thead button", has_text="MAL").press("Enter")
    tab.locator(".group", has_text="lossless").press("Enter")
    csv = pd.read_csv(StringIO(saved(tab, "#csv")))
    assert csv["cell_id"].tolist() == [AR.cell_id, STRICT.cell_id]
    (data,) = load_runs([page_run]).values()
    speed = tables_of(data)["speed"].set_index("cell_id").loc[csv["cell_id"]].reset_index()
    for name in ("output", "speedup", "speedup_low", "speedup_high", "mean_accepted_length"):
        assert csv[name].tolist() == speed[name].tolist()
    assert "clip_score" not in csv
    lines = saved(tab, "#markdown").splitlines()
    assert lines[0] == "| cell | output | speedup | MAL | emitted TV (at most) |"
    assert lines[2].startswith("| ar | lossless | 1.00x [1.00, 1.00] | 1.00 [1.00, 1.00] |")
    assert len(lines) == 4
    tab.locator("#all-columns").check()
    csv = pd.read_csv(StringIO(saved(tab, "#csv")))
    assert {"clip_score", "clip_score_low"} <= {*csv}
    assert not {"acceptance_rate_low", "failed_low"} & {*csv}
    tab.locator("#all-columns").uncheck()


def test_a_copied_link_opens_the_same_view(opening: SimpleNamespace, tab: Any) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator(".group", has_text="lossless").press("Enter")
    tab.locator("#table thead button", has_text="MAL").press("Enter")
    tab.locator("#stage-after").click()
    tab.locator("#link").click()
    tab.locator("#copied", has_text="Link copied").wait_for()
    link = tab.evaluate("navigator.clipboard.readText()")
    other = tab.context.new_page()
    other.goto(link)
    other.wait_for_selector("html[data-ready]")
    for view in (tab, other):
        assert first_of_rows(view) == ["speculative", "ar"]
        assert view.locator("[aria-sort=descending]").inner_text().startswith("MAL")
        assert "red lantern 1" in view.locator("#stage-prompt").inner_text()
        assert view.evaluate("location.href") == link
    # The address of a section leaves the view as it is.
    other.locator(".links a", has_text="Pictures").click()
    assert first_of_rows(other) == ["speculative", "ar"]
    other.wait_for_function(f"location.href === {json.dumps(link)}")
    # A link that names nothing of this page opens everything.
    other.goto(f"{opening.file.as_uri()}#cells=no-such-cell&sort=nothing&prompt=none")
    other.wait_for_selector("html[data-ready]")
    assert len(first_of_rows(other)) == 3
    other.close()


def test_charts_are_never_sent_away(tab: Any) -> None:
    titles = set(
        tab.locator(".modebar-btn").evaluate_all(
            "buttons => buttons.map((button) => button.ariaLabel)"
        )
    )
    assert titles == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
    ground = "groups => groups.map((group) => getComputedStyle(group).backgroundColor)"
    assert set(tab.locator(".modebar-group").evaluate_all(ground)) == {"rgba(0, 0, 0, 0)"}


@pytest.mark.parametrize("width", [1280, 390])
def test_the_fastest_cell_of_the_front_has_its_name(tab: Any, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.wait_for_timeout(600)
    names = tab.locator("#front .scatterlayer text").all_text_contents()
    assert any(name.startswith("lantern++") for name in names)
    tab.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_points_cover_neither_points_nor_names(tab: Any, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.wait_for_timeout(600)
    boxes = tab.evaluate(
        """() => ["text", ".point"]
        .flatMap((kind) => [...document.querySelectorAll(`#front .scatterlayer ${kind}`)])
        .map((shape) => shape.getBoundingClientRect()).filter((box) => box.width)
        .map(({ left, top, right, bottom }) => [left, top, right, bottom])"""
    )
    assert len(boxes) > 4  # three points and at least two names
    for number, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[number + 1 :]:
            assert (
                left >= other[2] - 2
                or right <= other[0] + 2
                or top >= other[3] - 2
                or bottom <= other[1] + 2
            )
    tab.set_viewport_size({"width": 1280, "height": 900})


def test_tab_reaches_the_charts_menu_before_its_buttons(tab: Any) -> None:
    tab.locator("#cells > summary").press("Enter")  # closes the list of cells
    tab.locator("#cells > summary").focus()
    reached = []
    for _ in range(2):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.ariaLabel"))
    assert reached == ["Chart: Speed, and what it costs", "Download plot as a PNG"]
    assert tab.get_by_label("Chart: Speed, and what it costs").is_visible()


def test_links_of_pictures_have_names(tab: Any) -> None:
    links = tab.locator("#grid a, #stage-link")
    names = links.evaluate_all("links => links.map((link) => link.ariaLabel)")
    targets = links.evaluate_all("links => links.map((link) => link.href)")
    assert all(Path(url2pathname(urlsplit(target).path)).is_file() for target in targets)
    assert len(names) == 13
    assert all(name.startswith("Picture file: ") and "lantern" in name for name in names)


def test_a_click_on_the_front_selects_that_cell(tab: Any) -> None:
    point = tab.locator("#front .scatterlayer .trace .points path").last
    for wanted in (
        ["lantern++ lambda=2"],
        ["ar", "speculative", "lantern++ lambda=2"],
    ):
        tab.locator("#front").scroll_into_view_if_needed()
        box = point.bounding_box()
        x = box["x"] + box["width"] / 2
        y = box["y"] + box["height"] / 2
        tab.mouse.move(x, y)
        tab.wait_for_selector("#front .hoverlayer .hovertext")
        assert "lantern++" in tab.locator("#front .hoverlayer").text_content()
        tab.mouse.click(x, y)
        tab.wait_for_timeout(400)
        assert columns(tab) == wanted


def test_a_menu_changes_what_the_front_shows(tab: Any) -> None:
    menu = tab.locator("#front-menu")
    titles = []
    for chart in (2, 5, 4, 1):
        menu.select_option(str(chart))
        titles.append([tab.locator(f"#front .{axis}title").text_content() for axis in "xy"])
    assert ["accuracy" in y for _, y in titles] == [True, True, False, False]
    assert ["speedup" in x for x, _ in titles] == [True, False, False, True]


def test_maps_show_the_mean_or_one_prompt(tab: Any) -> None:
    steps = "() => document.querySelector('#maps-grid').data[1].z.flat()"
    assert tab.evaluate(steps) == [None, *[3.0] * 15]
    tab.locator("#maps-prompt").check()
    assert tab.evaluate(steps) == [None, *[3] * 15]
    assert len(maps(tab)) == 2
    tab.locator("#maps-prompt").uncheck()


def test_the_slider_goes_through_the_modes_by_keyboard(tab: Any) -> None:
    slider = tab.locator("#stage-slider")
    slider.press("Home")
    seen = []
    for _ in range(3):
        picture = tab.locator("#stage-picture").get_attribute("src")
        seen.append((picture_head(tab.locator("#stage-name").inner_text()), picture))
        slider.press("ArrowRight")
    assert [name for name, _ in seen] == [
        "ar",
        "speculative",
        "lantern++ lambda=2",
    ]
    assert len({picture for _, picture in seen}) == 3
    facts = tab.locator("#stage-facts").inner_text()
    assert "3.00" in facts
    assert re.search(r"CLIP score\s+0\.30\s", facts)  # two digits
    assert slider.get_attribute("aria-valuetext") == "lantern++ lambda=2"
    before = tab.locator("#stage-prompt").inner_text()
    tab.locator("#stage-after").click()
    assert tab.locator("#stage-prompt").inner_text() != before


def test_ar_stands_beside_a_cell_and_under_a_swipe(tab: Any) -> None:
    frames = tab.locator("#stage-frames")
    tab.locator("#stage-slider").press("Home")
    assert frames.get_attribute("data-view") == "alone"  # AR itself
    tab.locator("#stage-slider").press("End")
    assert frames.get_attribute("data-view") == "beside"
    captions = tab.locator("#stage-frames figcaption").all_inner_texts()
    assert captions == ["ar", "lantern++ lambda=2"]
    tab.locator("[data-view=swipe]").press("Enter")
    swipe = tab.locator("#stage-swipe")
    clips = []
    for key in ("Home", "End"):
        swipe.press(key)
        clips.append(
            tab.evaluate("getComputedStyle(document.querySelector('#stage-base img')).clipPath")
        )
    assert clips == ["inset(0px 100% 0px 0px)", "inset(0px 0% 0px 0px)"]
    swipe.press("Home")
    handle = tab.locator(".handle")
    picture = tab.locator("#stage-cell img").bounding_box()
    middle = handle.bounding_box()["x"] + handle.bounding_box()["width"] / 2
    assert middle == pytest.approx(picture["x"], abs=2)
    tab.locator("[data-view=beside]").press("Enter")
    assert handle.is_hidden()


def test_ar_can_be_pinned_beside_all_pictures(tab: Any) -> None:
    tab.locator(".group", has_text="relaxed").press("Enter")
    tab.locator("#pin").check()
    assert columns(tab) == ["ar", "lantern++ lambda=2"]
    assert first_of_rows(tab) == ["lantern++ lambda=2"]
    tab.locator("#pin").uncheck()


def test_the_distance_stands_under_each_head(tab: Any, page_file: Path, tmp_path: Path) -> None:
    with_distances = page_file.read_text(encoding="utf-8").replace(
        '"distance":""', '"distance":"0.0123"'
    )
    (tmp_path / "report.html").write_text(with_distances, encoding="utf-8")
    other = tab.context.new_page()
    other.goto((tmp_path / "report.html").as_uri())
    other.wait_for_selector("html[data-ready]")
    heads = other.locator("#grid thead th").all_inner_texts()
    assert [text.split("\n")[-1] for text in heads] == ["distance 0.0123"] * 3
    assert "0.0123" in other.locator("#stage-facts").inner_text()
    other.close()


def test_search_filters_rows_and_a_row_opens_the_stage(tab: Any) -> None:
    tab.locator("#search").fill("RED lantern")
    assert tab.locator("#grid tbody tr").count() == 2
    assert "2 of 2" in tab.locator("#count").inner_text()
    tab.locator("#grid tbody tr button").last.click()
    assert "red lantern 3" in tab.locator("#stage-prompt").inner_text()
    tab.locator("#search").fill("green")
    assert tab.locator("#grid tbody tr").count() == 0


def test_theme_switches_between_light_and_dark(tab: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.locator("#theme").click()
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.evaluate(ground) != light
    tab.locator("#theme").click()
    assert tab.evaluate(ground) == light


def test_groups_of_prompts_are_rows_of_a_chart_with_a_menu(tab: Any) -> None:
    def rows() -> list[str]:
        return tab.locator("#groups .ytick text").evaluate_all(
            "ticks => ticks.map((tick) => tick.textContent)"
        )

    menu = tab.locator("#groups-menu")
    options = menu.locator("option").all_inner_texts()
    assert options == ["speedup by colour", "speedup by shape"]
    assert rows() == ["blue2 prompts", "red2 prompts"]
    menu.select_option("1")
    assert rows() == ["round2 prompts", "square,<b>lit</b> andloud2 prompts"]
    tab.wait_for_timeout(600)  # the page below has moved
    top, bottom = tab.locator("#groups .ytick text").evaluate_all(
        "ticks => ticks.map((tick) => tick.getBoundingClientRect().y)"
    )
    assert top < bottom
    # The two cells of a row stand one below the other.
    heights = tab.locator("#groups .point").evaluate_all(
        "points => points.map((point) => Math.round(point.getBoundingClientRect().y))"
    )
    assert len(set(heights)) == len(heights) == 4
    menu.select_option("0")


@pytest.mark.parametrize("width", [1280, 390])
def test_titles_of_axes_are_whole(tab: Any, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.wait_for_timeout(600)
    for figure in ("front", "depth", "lengths", "position", "groups"):
        menu = tab.locator(f"#{figure}-menu")
        for number in range(menu.locator("option").count()):
            menu.evaluate(
                """(menu, number) => {
                menu.value = number;
                menu.dispatchEvent(new Event("change"));
            }""",
                number,
            )
            tab.wait_for_timeout(100)
            outside = tab.evaluate(
                """(id) => {
                const plot = document.querySelector(`#${id}`), frame = plot.getBoundingClientRect();
                return [...plot.querySelectorAll(".xtitle, .ytitle")].filter((title) => {
                  const box = title.getBoundingClientRect();
                  return box.left < frame.left || box.right > frame.right
                    || box.top < frame.top || box.bottom > frame.bottom;
                }).map((title) => title.textContent);
            }""",
                figure,
            )
            assert outside == []
    tab.locator("#front-menu").select_option("0")
    tab.set_viewport_size({"width": 1280, "height": 900})


def test_page_fits_a_narrow_screen_and_paper(
    opening: SimpleNamespace, tab: Any, tmp_path: Path
) -> None:
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.wait_for_timeout(500)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator(".bar").bounding_box()["height"] <= 64
    row = tab.locator("#table tbody tr").last.locator("th, td").all()
    for cell in row[:3]:
        assert cell.bounding_box()["x"] + cell.bounding_box()["width"] < 390
    tab.evaluate("document.querySelector('#table').parentElement.scrollLeft = 100")
    assert row[0].bounding_box()["x"] >= 0
    wraps = "words => words.map((word) => getComputedStyle(word).whiteSpace)"
    for place in ("#table tbody", "#grid thead"):
        words = tab.locator(f"{place} .word")
        assert set(words.evaluate_all(wraps)) == {"nowrap"}
        assert " ".join(words.all_inner_texts()).count("lantern++ lambda=2") == 1
    menus = tab.locator(".menu").evaluate_all(
        "menus => menus.map((menu) => [menu.querySelectorAll('option').length, menu.offsetHeight])"
    )
    assert all((options > 1) == (height > 0) for options, height in menus if options)
    cut = """() => [...document.querySelectorAll(".menu select")].flatMap((menu) => {
        const pen = document.createElement("canvas").getContext("2d");
        const style = getComputedStyle(menu), arrow = 16;
        pen.font = `${style.fontSize} ${style.fontFamily}`;
        const edges = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) + arrow;
        return [...menu.options].map((option) => option.text).filter((text) =>
          menu.clientWidth && pen.measureText(text).width > menu.clientWidth - edges);
    })"""
    assert tab.evaluate(cut) == []
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(media="print")
    assert tab.locator("#search").is_hidden()
    assert tab.locator("#table").is_visible()
    tab.emulate_media(media="screen")
    printed = tab.pdf(path=str(tmp_path / "report.pdf"))
    assert printed.startswith(b"%PDF")
    assert opening.errors == []
