"""The report page in a real browser: it opens without an error or a request, and what can be moved moves the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_bench.report.page import write_report
from tests.browser import missing, opened
from tests.report.page_run import write_page_run

_REASON = missing()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_REASON is not None, reason=f"needs a browser: {_REASON}"),
]


@pytest.fixture(scope="module")
def opening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The page, open, with what went wrong and what was asked for on the way."""
    folder = write_page_run(tmp_path_factory.mktemp("page") / "run")
    file = write_report([folder], folder / "report.html")
    wrong: list[str] = []
    asked: list[str] = []
    with opened(viewport={"width": 1280, "height": 900}, color_scheme="light") as context:
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-ready]")
        yield SimpleNamespace(tab=tab, wrong=wrong, asked=asked, file=file)


@pytest.fixture
def tab(opening: SimpleNamespace) -> Any:
    """The tab with everything shown, as after opening."""
    if opening.tab.locator("#all").is_enabled():
        opening.tab.locator("#all").press("Enter")
    opening.tab.locator("#search").fill("")
    return opening.tab


def columns(tab: Any) -> list[str]:
    return [text.strip() for text in tab.locator("#grid thead th").all_inner_texts()]


def first_of_rows(tab: Any) -> list[str]:
    return [text.strip() for text in tab.locator("#table tbody th").all_inner_texts()]


def test_page_opens_without_errors_or_requests(opening: SimpleNamespace, capsys: Any) -> None:
    ready = int(opening.tab.evaluate("document.documentElement.dataset.ready"))
    with capsys.disabled():
        print(f"\nreport.html: {opening.file.stat().st_size / 1e6:.1f} MB, opened in {ready} ms")
    assert opening.wrong == []
    assert {url for url in opening.asked if not url.startswith(("data:", "blob:"))} == {opening.file.as_uri()}
    assert opening.tab.locator("#no-charts").is_hidden()
    drawn = opening.tab.locator(".plot .main-svg").count()
    assert drawn >= 4
    assert opening.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_head_sorts_the_table_both_ways(tab: Any) -> None:
    before = first_of_rows(tab)
    head = tab.locator("#table thead th", has_text="MAL")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert first_of_rows(tab) == before[::-1] == ["LANTERN++ λ=2", "speculative (strict)", "AR"]
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and first_of_rows(tab) == before


def test_a_chip_filters_everything(tab: Any) -> None:
    assert columns(tab) == ["AR", "speculative (strict)", "LANTERN++ λ=2"]
    assert tab.locator("#maps-grid canvas").count() == 2
    # By keyboard: under load a mouse button can come up after the page has moved below it.
    tab.locator(".chip", has_text="LANTERN++").press("Enter")
    assert columns(tab) == ["LANTERN++ λ=2"]
    assert tab.locator("#maps-grid canvas").count() == 1 and tab.locator("#table tr.off").count() == 2
    tab.locator(".chip", has_text="AR").first.press("Enter")
    assert columns(tab) == ["AR", "LANTERN++ λ=2"]
    tab.locator("#all").press("Enter")
    assert len(columns(tab)) == 3


def test_a_click_on_the_front_selects_that_cell(tab: Any) -> None:
    point = tab.locator("#front .scatterlayer .trace .points path").last
    for wanted in (["LANTERN++ λ=2"], ["AR", "speculative (strict)", "LANTERN++ λ=2"]):
        tab.locator("#front").scroll_into_view_if_needed()
        box = point.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        tab.mouse.move(x, y)
        tab.wait_for_selector("#front .hoverlayer .hovertext")
        assert "LANTERN++" in tab.locator("#front .hoverlayer").text_content()
        tab.mouse.click(x, y)
        tab.wait_for_timeout(400)
        assert columns(tab) == wanted


def test_a_menu_changes_what_the_front_shows(tab: Any) -> None:
    tab.locator("#front").scroll_into_view_if_needed()
    titles = []
    for menu, button in ((1, -1), (0, -1), (1, 0), (0, 0)):
        tab.locator("#front .updatemenu-header").nth(menu).click()
        tab.locator("#front .updatemenu-dropdown-button").nth(button).click()
        tab.wait_for_timeout(500)
        titles.append([tab.locator(f"#front .{axis}title").text_content() for axis in "xy"])
    assert ["accuracy" in y for _, y in titles] == [True, True, False, False]
    assert ["speedup" in x for x, _ in titles] == [True, False, False, True]


def test_a_device_redraws_the_front_with_predicted_speedups(tab: Any, opening: SimpleNamespace) -> None:
    tab.locator("#front").scroll_into_view_if_needed()

    def shown(device: int) -> tuple[str, list[float]]:
        tab.locator("#front .updatemenu-header").nth(2).click()
        tab.locator("#front .updatemenu-dropdown-button").nth(device).click()
        tab.wait_for_timeout(500)
        points = tab.evaluate("document.querySelector('#front').data.slice(1).map((trace) => trace.x[0])")
        return tab.locator("#front .xtitle").text_content(), points

    data = tab.evaluate("JSON.parse(document.querySelector('#data').textContent)")
    measured = [point["x"][0] for point in data["fronts"][0]["points"]]
    title, points = shown(1)
    assert "predicted for" in title and "not measured" in title
    assert points == [data["devices"][0]["speedups"][point["cell"]] for point in data["fronts"][0]["points"]]
    title, points = shown(0)
    assert "predicted" not in title and points == measured
    assert not opening.wrong


def test_the_slider_goes_through_the_modes_by_keyboard(tab: Any) -> None:
    slider = tab.locator("#stage-slider")
    slider.press("Home")
    seen = []
    for _ in range(3):
        picture = tab.locator("#stage-picture").get_attribute("src")
        seen.append((tab.locator("#stage-name").inner_text().strip(), picture))
        slider.press("ArrowRight")
    assert [name for name, _ in seen] == ["AR", "speculative (strict)", "LANTERN++ λ=2"]
    assert len({picture for _, picture in seen}) == 3
    assert "3.00" in tab.locator("#stage-facts").inner_text()
    assert slider.get_attribute("aria-valuetext") == "LANTERN++ λ=2"
    tab.locator("#stage-overlay").check()
    assert tab.locator("#stage-map").is_visible()
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
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark" and tab.evaluate(ground) != light
    tab.locator("#theme").click()
    assert tab.evaluate(ground) == light


def test_page_fits_a_narrow_screen_and_paper(opening: SimpleNamespace, tab: Any, tmp_path: Path) -> None:
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.wait_for_timeout(500)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(media="print")
    assert tab.locator("#search").is_hidden() and tab.locator("#table").is_visible()
    tab.emulate_media(media="screen")
    printed = tab.pdf(path=str(tmp_path / "report.pdf"))
    assert printed.startswith(b"%PDF")
    assert opening.wrong == []
