"""Photograph parts of a run's report page, at two widths and in dark mode.

    python -m scripts.docs.screenshots RUN FOLDER

The page is opened in a headless Chromium without network. Its size and the time it took to open are
printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from lantern_bench.api import write_report
from tests.helpers.browser import missing, opened

PARTS = ("summary", "charts", "stage", "maps", "pictures")
WIDTHS = {"": 1280, "-phone": 390}


def photograph(
    page: Path, pictures: Mapping[str, Path], width: int = 1280, theme: str = "light"
) -> None:
    """Photograph parts of a page, each with its top at the top of the window, into files."""
    if reason := missing():
        sys.exit(f"error: {reason}")
    window = {"width": width, "height": 900}
    with opened(viewport=window, color_scheme=theme, reduced_motion="reduce") as context:
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        ready = tab.evaluate("document.documentElement.dataset.ready")
        print(f"{page.name}: {page.stat().st_size / 1e6:.1f} MB, opened in {ready} ms")
        # The slider at its other end: what relaxed decoding paints.
        tab.locator("#stage-slider").press("End")
        for part, path in pictures.items():
            bar = "document.querySelector('.bar').offsetHeight"
            tab.evaluate(f"scrollTo(0, document.querySelector('#{part}').offsetTop - {bar})")
            tab.wait_for_timeout(300)
            tab.screenshot(path=str(path))
            print(path)


def main(run: Path, folder: Path) -> None:
    """Photograph all parts of a run's page in light, at both widths, and in dark."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        page = write_report([run], Path(scratch) / "report.html")
        for ending, width in WIDTHS.items():
            photograph(page, {part: folder / f"report-{part}{ending}.png" for part in PARTS}, width)
        photograph(page, {part: folder / f"report-{part}-dark.png" for part in PARTS}, theme="dark")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
