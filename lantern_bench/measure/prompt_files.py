"""Reading prompts from files of one's own: text, CSV, TSV, JSON lines, a JSON list.

A reader yields every prompt with the place it stands at, as a person would look for it, and raises `UserError` with
that place for what is malformed. Published sets have readers of their own in `prompt_sets`; which prompts are taken is
decided in `prompts`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.errors import UserError

__all__ = ["READERS", "Item", "parsed_json", "read_columns"]

_COLUMNS = ("prompt", "caption")


class Item(NamedTuple):
    """A prompt in a file: where it stands (`line 3`), what the set calls it (`captions.txt:3`), and its text."""

    place: str
    source: str
    text: str


def read_columns(path: Path, delimiter: str, shown: str) -> Iterator[Item]:
    """Yield a table's column `prompt` or `caption` (any case); `shown` is what was typed, for the messages."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        column = next((name for name in rows.fieldnames or () if name.strip().lower() in _COLUMNS), None)
        if column is None:
            raise UserError(
                f"--prompts {shown} line 1: has no column {' or '.join(_COLUMNS)}", "Name it in the first line."
            )
        for row in rows:
            if None in row:
                raise UserError(
                    f"--prompts {shown} line {rows.line_num}: has more fields than the first line",
                    "Put text that holds the separator in quotes.",
                )
            yield Item(f"line {rows.line_num}", f"{path.name}:{rows.line_num}", row[column] or "")


def parsed_json(path: Path, shown: str) -> Any:
    """The value of a JSON file; raises `UserError` with the line where it is malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"--prompts {shown} line {error.lineno}: not JSON: {error.msg}") from error


def _txt(path: Path, _shown: str) -> Iterator[Item]:
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        yield Item(f"line {number}", f"{path.name}:{number}", text)


def _csv(path: Path, shown: str) -> Iterator[Item]:
    yield from read_columns(path, ",", shown)


def _tsv(path: Path, shown: str) -> Iterator[Item]:
    yield from read_columns(path, "\t", shown)


def _jsonl(path: Path, shown: str) -> Iterator[Item]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"--prompts {shown} line {number}: not JSON: {error}") from error
        yield Item(f"line {number}", f"{path.name}:{number}", _text_of(row, f"--prompts {shown} line {number}"))


def _json(path: Path, shown: str) -> Iterator[Item]:
    rows = parsed_json(path, shown)
    if isinstance(rows, dict) and "annotations" in rows:
        raise UserError(
            f"--prompts {shown}: holds MS-COCO annotations, several captions an image",
            f"Say which to take: coco:{shown} (the longest) or coco-first:{shown}.",
        )
    if not isinstance(rows, list):
        raise UserError(f"--prompts {shown}: must be a JSON list of prompts")
    for number, row in enumerate(rows, start=1):
        text = row if isinstance(row, str) else _text_of(row, f"--prompts {shown} entry {number}")
        yield Item(f"entry {number}", f"{path.name}:{number}", text)


def _text_of(row: Any, place: str) -> str:
    text = next((row[name] for name in _COLUMNS if name in row), None) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place}: has no text under {' or '.join(_COLUMNS)}")
    return text


READERS: dict[str, Callable[[Path, str], Iterator[Item]]] = {
    ".csv": _csv,
    ".json": _json,
    ".jsonl": _jsonl,
    ".tsv": _tsv,
    ".txt": _txt,
}
"""The reader of each kind of file, by the ending of its name."""
