"""Write the column tables of docs/results-format.md from lantern_bench/schema.py.

    python -m docs.make_results_format

The text above the marker is written by hand; everything below it is replaced.
"""

from __future__ import annotations

from pathlib import Path

from lantern_bench.schema import to_markdown

PAGE = Path(__file__).with_name("results-format.md")
MARKER = "<!-- Below: python -m docs.make_results_format -->\n"


def render(page: str) -> str:
    """Return the text of the page with its column tables made anew."""
    written, _, _ = page.partition(MARKER)
    return f"{written}{MARKER}\n{to_markdown()}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
