"""Pictures of the report page for the documentation: `make screenshots RUN=results/<run>`.

The page is written anew, opened in a headless Chromium without network, and photographed in light and dark, part by
part. The time it took to open is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lantern_bench.report.html import write_report  # noqa: E402
from tests.browser import missing, opened  # noqa: E402

WIDTH, HEIGHT = 1280, 900


def main(runs: list[str], folder: Path) -> None:
    """Photograph the report of these runs into `folder`."""
    if reason := missing():
        sys.exit(f"error: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        page = write_report([Path(run) for run in runs], Path(scratch) / "report.html")
        print(f"{page.stat().st_size / 1e6:.2f} MB")
        for theme in ("light", "dark"):
            photograph(page, folder, theme)


def photograph(page: Path, folder: Path, theme: str) -> None:
    """Light: every part; dark: the top and the pictures."""
    settings = {"viewport": {"width": WIDTH, "height": HEIGHT}, "color_scheme": theme, "device_scale_factor": 1}
    with opened(**settings) as context:
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        print(f"{theme}: opened in {tab.evaluate('document.documentElement.dataset.ready')} ms")
        tab.evaluate("document.querySelector('.bar').style.position = 'static'")
        save(tab, folder / f"report-{theme}.png")
        for part in ("charts", "stage", "maps", "pictures") if theme == "light" else ("stage", "charts"):
            if part == "stage":
                to_last(tab)
            save(tab.locator(f"#{part}"), folder / f"report-{part}-{theme}.png")


def to_last(tab: Any) -> None:
    """Move the slider to its last cell, with the map over the picture."""
    tab.locator("#stage-slider").press("End")


def save(what: Any, path: Path) -> None:
    """Take the picture and make it small: 128 colours are enough for a page of text and lines."""
    from PIL import Image

    what.screenshot(path=str(path))
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(192, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:], ROOT / "docs" / "pictures")
