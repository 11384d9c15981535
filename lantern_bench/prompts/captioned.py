"""Pictures with captions in a folder: a .txt beside each picture, or one file that lists pictures and captions.

That file is `captions` or `metadata` with the suffix .jsonl, .csv, .tsv or .txt (name, tab, caption), in the folder or
given; names are relative to the folder. The family checks the captions before any model is loaded.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.errors import UserError
from lantern_bench.models.registry import Family
from lantern_bench.prompts.sets import check_texts, read_json_lines, read_lines, refuse

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_SUFFIXES = (".jsonl", ".csv", ".tsv", ".txt")
_FILES = tuple(f"{stem}{suffix}" for stem in ("captions", "metadata") for suffix in _SUFFIXES)
_NAME_KEYS = ("file_name", "file", "image", "path")
_TEXT_KEYS = ("caption", "prompt", "text")


class Captioned(NamedTuple):
    """A picture's file, its caption, and the place of the caption for messages."""

    path: Path
    caption: str
    place: str


def read_captioned(folder: Path, captions: Path | None, family: Family) -> list[Captioned]:
    """Return the pictures of a folder in the order of their names, or of the captions file.

    Raises `UserError` that names `--data` or `--captions`: no pictures, pictures without a caption, captions of missing
    pictures, captions the family cannot take.
    """
    listed = captions or next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if listed is not None and not listed.is_file():
        raise UserError(f"--captions {listed}: no such file")
    try:
        found = list(_listed(listed, folder) if listed is not None else _beside(folder))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {folder}: cannot be read: {error}") from error
    if not found:
        raise UserError(
            f"--data {folder}: contains no picture ({', '.join(PICTURES)})",
            "Give a folder of pictures, each with its caption in a .txt beside it; or a file of captions alone.",
        )
    flag = f"--data {folder}"
    missing = [f"{item.place}: no such picture {item.path.name}" for item in found if not item.path.is_file()]
    refuse(flag, "captions", missing)
    check_texts(flag, "captions", ((item.place, item.caption) for item in found), family)
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
        yield Captioned(path, text.read_text(encoding="utf-8-sig").strip(), text.name)


def _listed(path: Path, folder: Path) -> Iterator[Captioned]:
    for number, row in _rows(path):
        name, text = (
            next((row[key] for key in keys if isinstance(row.get(key), str)), None) for keys in (_NAME_KEYS, _TEXT_KEYS)
        )
        if name is None or text is None:
            raise UserError(
                f"--captions {path} line {number}: has no picture and caption",
                f"Name the picture under {', '.join(_NAME_KEYS)} and the caption under {', '.join(_TEXT_KEYS)}.",
            )
        yield Captioned(folder / name, text.strip(), f"{path.name} line {number}")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a captions file by key, with their line numbers; a malformed row has no keys."""
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise UserError(f"--captions {path}: unknown file type", f"Give a file that ends with {', '.join(_SUFFIXES)}.")
    if suffix == ".jsonl":
        for number, row in read_json_lines(path, f"--captions {path}"):
            yield number, row if isinstance(row, dict) else {}
    elif suffix == ".txt":
        for number, line in read_lines(path):
            name, tab, caption = line.partition("\t")
            yield number, {"file": name.strip(), "caption": caption} if tab else {}
    else:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        table = csv.DictReader(lines, delimiter="," if suffix == ".csv" else "\t")
        for row in table:
            yield table.line_num, {str(key).strip().lower(): value for key, value in row.items()}
