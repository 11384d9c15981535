"""Pictures with captions in a folder: a .txt beside each picture, or one file that names pictures and captions.

That file is `captions` or `metadata` with the ending .jsonl, .csv, .tsv or .txt (name, tab, caption), found in the
folder or named; names are relative to the folder. Captions are checked by the family before any model is loaded.
Nothing is opened but text.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.errors import UserError
from lantern_bench.models.registry import Family

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_FILES = tuple(f"{stem}{ending}" for stem in ("captions", "metadata") for ending in (".jsonl", ".csv", ".tsv", ".txt"))
_NAME_KEYS = ("file_name", "file", "image", "path")
_TEXT_KEYS = ("caption", "prompt", "text")
_SHOWN = 5


class Captioned(NamedTuple):
    """A picture's file, its caption, and where that stands, for messages."""

    path: Path
    caption: str
    place: str


def read_captioned(folder: Path, captions: Path | None, family: Family) -> list[Captioned]:
    """The pictures of a folder in the order of their names, or of the captions' file.

    Raises `UserError` that names `--data` or `--captions`: no pictures, pictures without caption, captions of pictures
    that are not there, captions the family cannot take.
    """
    listed = captions or next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if listed is not None and not listed.is_file():
        raise UserError(f"--captions {listed}: no such file")
    found = list(_listed(listed, folder) if listed is not None else _beside(folder))
    if not found:
        raise UserError(
            f"--data {folder}: holds no picture ({', '.join(PICTURES)})",
            "Give a folder of pictures, each with its caption in a .txt beside it; or a file of captions alone.",
        )
    _check([f"{item.place}: no such picture {item.path.name}" for item in found if not item.path.is_file()], folder)
    _check_captions(found, folder, family)
    return found


def _beside(folder: Path) -> Iterator[Captioned]:
    pictures = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    missing = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
    if missing:
        raise UserError(
            f"--data {folder}: {len(missing)} of {len(pictures)} pictures have no caption, the first {missing[0]}",
            "Put NAME.txt beside NAME.png, or give --captions FILE with file names and captions.",
        )
    for path in pictures:
        text = path.with_suffix(".txt")
        yield Captioned(path, _text(text).strip(), text.name)


def _listed(path: Path, folder: Path) -> Iterator[Captioned]:
    rows = {".jsonl": _jsonl, ".csv": _table, ".tsv": _table, ".txt": _tabbed}.get(path.suffix.lower())
    if rows is None:
        raise UserError(f"--captions {path}: unknown kind of file", "The kinds are .jsonl, .csv, .tsv and .txt.")
    for number, row in rows(path):
        name = next((row[key] for key in _NAME_KEYS if isinstance(row.get(key), str)), None)
        text = next((row[key] for key in _TEXT_KEYS if isinstance(row.get(key), str)), None)
        if name is None or text is None:
            raise UserError(
                f"--captions {path} line {number}: names no picture and caption",
                f"The name goes by {', '.join(_NAME_KEYS)}; the caption by {', '.join(_TEXT_KEYS)}.",
            )
        yield Captioned(folder / name, text.strip(), f"{path.name} line {number}")


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"--captions {path} line {number}: not JSON: {error}") from error
        yield number, row if isinstance(row, dict) else {}


def _table(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = csv.DictReader(_text(path).splitlines(), delimiter="," if path.suffix.lower() == ".csv" else "\t")
    for row in lines:
        yield lines.line_num, {str(key).strip().lower(): value for key, value in row.items()}


def _tabbed(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            name, tab, caption = line.partition("\t")
            yield number, {"file": name.strip(), "caption": caption} if tab else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data: {path}: cannot be read: {error}") from error


def _check_captions(found: Sequence[Captioned], folder: Path, family: Family) -> None:
    wrong: list[str] = []
    advice: str | None = None
    checked: dict[str, str | None] = {}
    for item in found:
        if item.caption not in checked:
            try:
                family.check_prompt(item.caption)
                checked[item.caption] = None
            except UserError as error:
                checked[item.caption] = error.message
                advice = advice or error.advice
        problem = checked[item.caption]
        if problem is not None:
            wrong.append(f"{item.place}: {problem}")
    _check(wrong, folder, advice)


def _check(wrong: Sequence[str], folder: Path, advice: str | None = None) -> None:
    """Raise one `UserError` with the first problems there are."""
    if len(wrong) == 1:
        raise UserError(f"--data {folder}: {wrong[0]}", advice)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise UserError(
            f"--data {folder}: {len(wrong)} captions cannot be used\n  " + "\n  ".join([*wrong[:_SHOWN], *more]), advice
        )
