"""The report page in a real browser: it opens without an error or a request, and what can be moved
moves the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.browser import missing, opened

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
    if opening.tab.locator("#all").is_enabled():
        opening.tab.locator("#all").press("Enter")
    opening.tab.locator("#search").fill("")
    return opening.tab


def columns(tab: Any) -> list[str]:
    return [text.strip() for text in tab.locator("#grid thead th").all_inner_texts()]


def maps(tab: Any) -> list[str]:
    return list(
        tab.evaluate("() => document.querySelector('#maps-grid').data.map((trace) => trace.name)")
    )


def first_of_rows(tab: Any) -> list[str]:
    return [text.strip() for text in tab.locator("#table tbody th").all_inner_texts()]


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
    assert (
        first_of_rows(tab)
        == before[::-1]
        == ["LANTERN++ λ=2 (relaxed)", "speculative (strict) (lossless)", "AR"]
    )
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert first_of_rows(tab) == before


def test_a_chip_filters_everything(tab: Any) -> None:
    assert columns(tab) == ["AR", "speculative (strict) (lossless)", "LANTERN++ λ=2 (relaxed)"]
    assert maps(tab) == ["speculative (strict) (lossless)", "LANTERN++ λ=2 (relaxed)"]
    # By keyboard: under load a mouse button can come up after the page has moved below it.
    tab.locator(".chip", has_text="LANTERN++").press("Enter")
    assert columns(tab) == ["LANTERN++ λ=2 (relaxed)"]
    assert maps(tab) == ["LANTERN++ λ=2 (relaxed)"]
    assert tab.locator("#table tr.off").count() == 2
    tab.locator(".chip", has_text="AR").first.press("Enter")
    assert columns(tab) == ["AR", "LANTERN++ λ=2 (relaxed)"]
    tab.locator("#all").press("Enter")
    assert len(columns(tab)) == 3


def test_charts_are_never_sent_away(tab: Any) -> None:
    titles = set(
        tab.locator(".modebar-btn").evaluate_all(
            "buttons => buttons.map((button) => button.ariaLabel)"
        )
    )
    assert titles == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}


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
    tab.locator("#table tbody button").last.focus()
    reached = []
    for _ in range(2):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.ariaLabel"))
    assert reached == ["Chart: Speed, and what it costs", "Download plot as a PNG"]
    assert tab.get_by_label("Chart: Speed, and what it costs").is_visible()


def test_links_of_pictures_have_names(tab: Any) -> None:
    links = tab.locator("#grid a, #stage-link")
    names = links.evaluate_all("links => links.map((link) => link.ariaLabel)")
    assert len(names) == 13
    assert all(name.startswith("Picture file: ") and "lantern" in name for name in names)


def test_a_click_on_the_front_selects_that_cell(tab: Any) -> None:
    point = tab.locator("#front .scatterlayer .trace .points path").last
    for wanted in (
        ["LANTERN++ λ=2 (relaxed)"],
        ["AR", "speculative (strict) (lossless)", "LANTERN++ λ=2 (relaxed)"],
    ):
        tab.locator("#front").scroll_into_view_if_needed()
        box = point.bounding_box()
        x = box["x"] + box["width"] / 2
        y = box["y"] + box["height"] / 2
        tab.mouse.move(x, y)
        tab.wait_for_selector("#front .hoverlayer .hovertext")
        assert "LANTERN++" in tab.locator("#front .hoverlayer").text_content()
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
        seen.append((tab.locator("#stage-name").inner_text().strip(), picture))
        slider.press("ArrowRight")
    assert [name for name, _ in seen] == [
        "AR",
        "speculative (strict) (lossless)",
        "LANTERN++ λ=2 (relaxed)",
    ]
    assert len({picture for _, picture in seen}) == 3
    assert "3.00" in tab.locator("#stage-facts").inner_text()
    assert slider.get_attribute("aria-valuetext") == "LANTERN++ λ=2 (relaxed)"
    before = tab.locator("#stage-prompt").inner_text()
    tab.locator("#stage-after").click()
    assert tab.locator("#stage-prompt").inner_text() != before


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


def test_page_fits_a_narrow_screen_and_paper(
    opening: SimpleNamespace, tab: Any, tmp_path: Path
) -> None:
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.wait_for_timeout(500)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    first, speedup = tab.locator("#table tbody tr").last.locator("th, td").all()[:2]
    # so that a figure fits beside it, also when scrolled
    assert first.bounding_box()["width"] < 160
    assert speedup.bounding_box()["x"] + speedup.bounding_box()["width"] < 390
    tab.evaluate("document.querySelector('#table').parentElement.scrollLeft = 100")
    assert first.bounding_box()["x"] >= 0
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(media="print")
    assert tab.locator("#search").is_hidden()
    assert tab.locator("#table").is_visible()
    tab.emulate_media(media="screen")
    printed = tab.pdf(path=str(tmp_path / "report.pdf"))
    assert printed.startswith(b"%PDF")
    assert opening.errors == []
