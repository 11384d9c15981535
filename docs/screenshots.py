"""Pictures of the report page for the documentation: `make screenshots RUN=results/<run>`.

The page is written anew, opened in a headless Chromium without network, and photographed part by part, some of it in
dark. Its size and the time it took to open are printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lantern_bench.report.page import write_report  # noqa: E402
from tests.browser import missing, opened  # noqa: E402

WIDTH, HEIGHT = 1280, 900


def main(runs: list[str], folder: Path) -> None:
    """Photograph the report of these runs into `folder`."""
    if reason := missing():
        sys.exit(f"error: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        page = write_report([Path(run) for run in runs], Path(scratch) / "report.html")
        with opened(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
        ) as context:
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]")
            ready = int(tab.evaluate("document.documentElement.dataset.ready"))
            print(f"{page.stat().st_size / 1e6:.1f} MB, opened in {ready} ms")
            photograph(tab, folder)


def photograph(tab: Any, folder: Path) -> None:
    """Each part in light, the slider at its other end; curves and stage in dark."""
    tab.locator("#stage-slider").press("End")
    for part in ("summary", "charts", "stage", "maps", "pictures"):
        show(tab, part)
        save(tab, folder / f"report-{part}.png")
    tab.locator("#theme").click()
    for part in ("charts", "stage"):
        show(tab, part)
        save(tab, folder / f"report-{part}-dark.png")


def show(tab: Any, part: str) -> None:
    """Scroll a part to the top; the summary has the page's head above it."""
    where = 0 if part == "summary" else tab.evaluate(f"document.querySelector('#{part}').offsetTop - 120")
    tab.evaluate(f"scrollTo(0, {where})")
    tab.wait_for_timeout(300)


def save(tab: Any, path: Path) -> None:
    """Take the picture."""
    tab.screenshot(path=str(path))
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:], ROOT / "docs" / "pictures")
