"""Write the keys of docs/experiment-files.md from the settings and the registered parameters.

    python -m scripts.docs.experiment_files

The text above the marker is written by hand; everything below it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lantern_bench.config.settings import Settings
from lantern_bench.methods.catalog import OUTSIDE_PARAMETERS, PARAMETERS, owners_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiment-files.md"
MARKER = "<!-- Below: python -m scripts.docs.experiment_files -->\n"


def render(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    written, _, _ = page.partition(MARKER)
    settings = table(["key", "value", "default", "meaning"], of_settings())
    parameters = table(["key", "value", "belongs to", "meaning"], of_parameters())
    return (
        f"{written}{MARKER}\n## Keys of the run\n\n{settings}\n## Keys of the cells\n\n{parameters}"
    )


def of_settings() -> Iterator[list[str]]:
    """Yield one row a key of the whole run."""
    for key, field in Settings.model_fields.items():
        allowed = str(field.description).removeprefix("must be ")
        default = "required" if field.is_required() else shown(field.default)
        yield [f"`{key}`", allowed, default, field.title or ""]


def of_parameters() -> Iterator[list[str]]:
    """Yield one row a decoding parameter that ships."""
    for key, row in PARAMETERS.items():
        if key in OUTSIDE_PARAMETERS:
            continue
        allowed = row.kind.allowed.removeprefix("must ").removeprefix("be ")
        if allowed == "one of":
            allowed += f" {', '.join(row.kind.choices)}"
        yield [f"`{key}`", allowed, owners_of(key), row.help]


def shown(value: Any) -> str:
    """Return a default as an experiment file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    values = value if isinstance(value, tuple) else [value]
    return ", ".join(str(value) for value in values if value is not None)


def table(head: list[str], rows: Iterator[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(escaped(line))} |\n" for line in lines)


def escaped(cells: list[str]) -> list[str]:
    """Return cells without marks that end one."""
    return [cell.replace("|", "\\|").strip() for cell in cells]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
