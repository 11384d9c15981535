"""Write docs/commands.md: every command with its arguments and flags, as `--help-all` prints them.

    python -m scripts.docs.commands

The text above the marker is written by hand; everything below it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lantern_bench.cli.main import build_program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "commands.md"
MARKER = "<!-- Below: python -m scripts.docs.commands -->\n"
WIDTH = 110


def render(page: str) -> str:
    """Return the text of the page with its commands made anew."""
    written, _, _ = page.partition(MARKER)
    group: Any = build_program(all_flags=True)
    context = group.make_context("lantern-bench", [], resilient_parsing=True)
    sections = [f"\n## {name}\n\n{text}" for name, text in helps(group, context)]
    return f"{written}{MARKER}{''.join(sections)}"


def helps(group: Any, parent: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each command of a group, and its help as an indented block."""
    for name, command in group.commands.items():
        context = type(parent)(
            command,
            parent=parent,
            info_name=name,
            terminal_width=WIDTH,
            max_content_width=WIDTH,
        )
        if hasattr(command, "commands"):
            for inner, text in helps(command, context):
                yield f"{name} {inner}", text
            continue
        lines = command.get_help(context).splitlines()
        yield name, "".join(f"    {line}".rstrip() + "\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
