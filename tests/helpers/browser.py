"""The browser that pages are tried in: Chromium, where there is one.

Shared by the tests of the report page and by `make screenshots`. The system's own Chromium is taken
before one that Playwright brought; where there is neither, `missing` says so and what to do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """The program to start, or None where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        brought = playwright.chromium.executable_path
    return brought if brought and Path(brought).is_file() else None


def missing() -> str | None:
    """Why no page can be opened here, or None."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "no Playwright: pip install playwright"
    if executable() is None:
        return f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt install chromium)"
    return None


@contextmanager
def opened(**settings: Any) -> Iterator[Any]:
    """A context of a headless Chromium without network; `settings` are those of Playwright's
    `new_context`.
    """
    from playwright.sync_api import sync_playwright

    program = executable()  # asks Playwright too, which does not run twice at a time
    with sync_playwright() as playwright:
        # Without a sandbox, since containers and root have none to offer.
        arguments = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            context = browser.new_context(offline=True, **settings)
            context.set_default_timeout(600_000)
            yield context
        finally:
            browser.close()
