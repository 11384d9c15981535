"""Prompts to measure with: a set the family brings, or a file of one's own.

Every prompt is checked by the family before any model is loaded, and all that is wrong is said at once. Which prompt
becomes which image is decided in `spec/plan.py`. No torch here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from lantern_bench.errors import UserError
from lantern_bench.models.registry import Family
from lantern_bench.spec.plan import Prompt
from lantern_bench.spec.values import did_you_mean

__all__ = ["load_prompts"]

_COLUMNS = ("prompt", "caption")
_SHOWN = 5


def load_prompts(source: str, family: Family) -> list[Prompt]:
    """Read the prompts of a family's set, or of a file: `.txt` one a line, `.csv` and `.jsonl` by prompt or caption.

    Empty lines are left out. Raises one `UserError` that names `--prompts` and its value: no such set or file, a file
    that cannot be read, or the first prompts the family cannot take, with their lines.
    """
    sets = family.prompt_sets()
    if source in sets:
        return [Prompt(text) for text in sets[source]]
    path = Path(source)
    if not path.is_file():
        raise UserError(
            f"--prompts {source}: no such file and no prompt set{did_you_mean(source, sets)}",
            f"The sets are {', '.join(sets) or 'none'}; or give a .txt, .csv or .jsonl file.",
        )
    try:
        numbered = list(_read(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--prompts {source}: cannot be read: {error}") from error
    if not numbered:
        raise UserError(f"--prompts {source}: holds no prompt", "Give a file with one prompt a line.")
    _check(source, numbered, family)
    return [Prompt(text) for _, text in numbered]


def _read(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, prompt) of a file; the ending says what it holds."""
    readers = {".csv": _csv, ".jsonl": _jsonl, ".txt": _txt}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"--prompts {path}: unknown kind of file", f"The kinds are {', '.join(readers)}.")
    for number, text in reader(path):
        if text.strip():
            yield number, text.strip()


def _txt(path: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1)


def _csv(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        column = next((name for name in _COLUMNS if name in (rows.fieldnames or ())), None)
        if column is None:
            raise UserError(f"--prompts {path}: has no column {' or '.join(_COLUMNS)}", "Name it in the first line.")
        for row in rows:
            yield rows.line_num, row[column] or ""


def _jsonl(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"--prompts {path} line {number}: not JSON: {error}") from error
        text = next((row[name] for name in _COLUMNS if name in row), None) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(f"--prompts {path} line {number}: has no text under {' or '.join(_COLUMNS)}")
        yield number, text


def _check(source: str, numbered: list[tuple[int, str]], family: Family) -> None:
    wrong: list[str] = []
    advice: str | None = None
    for number, text in numbered:
        try:
            family.check_prompt(text)
        except UserError as error:
            wrong.append(f"line {number}: {error.message}")
            advice = advice or error.advice
    if len(wrong) == 1:
        raise UserError(f"--prompts {source} {wrong[0]}", advice)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        listed = "\n  ".join([*wrong[:_SHOWN], *more])
        raise UserError(f"--prompts {source}: {len(wrong)} prompts cannot be used\n  {listed}", advice)
