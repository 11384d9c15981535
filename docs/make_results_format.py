"""Write the column tables of docs/results-format.md from lantern_bench/schema.py.

    python -m docs.make_results_format

The text above the marker is written by hand; everything below it is replaced.
"""

from __future__ import annotations

from pathlib import Path

from lantern_bench.schema import CELL_COLUMNS, to_markdown

PAGE = Path(__file__).with_name("results-format.md")
MARKER = "<!-- Below: python -m docs.make_results_format -->\n"
HEAD = "| column | type | unit | meaning |\n| --- | --- | --- | --- |\n"


def render(page: str) -> str:
    """Return the text of the page with its column tables made anew; the columns of a cell are listed once."""
    written, _, _ = page.partition(MARKER)
    cell = "".join(f"| `{c.name}` | {c.dtype} | {c.unit} | {c.meaning} |\n" for c in CELL_COLUMNS)
    version, tables = to_markdown().split("\n", 1)
    tables = tables.replace(cell, "| (the columns of a cell) |  |  |  |\n")
    return f"{written}{MARKER}\n{version}\n\n## The columns of a cell\n\n{HEAD}{cell}{tables}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
