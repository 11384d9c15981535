"""Prompt files: rows of text files, and folders of captioned pictures."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.models.model import Model
from lantern_bench.utils.errors import UserError

SUFFIXES = (".csv", ".json", ".jsonl", ".tsv", ".txt")  # of the files that prompts are read from
_PROBLEMS_SHOWN = 5
# No caption has them. They steer terminals, end strings in C, and cannot be in a page.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def _rows(path: Path, suffix: str, flag: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers: a line of .txt, a dict of .csv and .tsv, any value of JSON."""
    if suffix not in SUFFIXES:
        raise UserError(
            f"{flag}: unknown file type", f"Give a file that ends with {', '.join(SUFFIXES)}."
        )
    if suffix == ".json":
        rows = _parse_json(path.read_text(encoding="utf-8-sig"), flag)
        if not isinstance(rows, list):
            raise UserError(
                f"{flag}: must be a JSON list of prompts",
                "Write coco:FILE for MS-COCO annotations.",
            )
        yield from enumerate(rows, start=1)
    elif suffix in (".csv", ".tsv"):
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, delimiter="," if suffix == ".csv" else "\t", restval="")
            for row in table:
                if None in row:
                    message = f"{flag} line {table.line_num}: has more fields than the first line"
                    raise UserError(message, "Put text that contains the separator in quotes.")
                yield table.line_num, {name.strip().lower(): value for name, value in row.items()}
    else:
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
            if line.strip():
                yield (
                    number,
                    line if suffix == ".txt" else _parse_json(line, f"{flag} line {number}"),
                )


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    # also for numbers of thousands of digits, thousands of brackets
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not JSON: {error}") from error


def _text_under(row: Any, keys: tuple[str, ...]) -> str | None:
    return (
        next((row[key] for key in keys if isinstance(row.get(key), str)), None)
        if isinstance(row, dict)
        else None
    )


def _check_texts(flag: str, noun: str, texts: Iterable[tuple[str, str]], model: Model) -> None:
    """Raise one `UserError` for the texts, each after its location, that the model cannot take."""
    problems = []
    advice = None
    for location, text in texts:
        try:
            if match := _CONTROLS.search(text):
                raise UserError(f"contains the control character {match[0]!r}", "Remove it.")
            model.check_prompt(text)
        except UserError as error:
            problems.append(f"{location}: {error.message}")
            advice = advice or error.advice
    if len(problems) == 1:
        raise UserError(f"{flag} {problems[0]}", advice)
    if problems:
        more = (
            [f"and {len(problems) - _PROBLEMS_SHOWN} more"]
            if len(problems) > _PROBLEMS_SHOWN
            else []
        )
        lines = "\n  ".join([*problems[:_PROBLEMS_SHOWN], *more])
        raise UserError(f"{flag}: {len(problems)} {noun} cannot be used\n  {lines}", advice)


# ---- Pictures with captions in a folder

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_CAPTION_SUFFIXES = (".jsonl", ".csv", ".tsv", ".txt")  # .txt: name, tab, caption
_CAPTION_FILES = tuple(
    f"{stem}{suffix}" for stem in ("captions", "metadata") for suffix in _CAPTION_SUFFIXES
)
_NAME_KEYS = ("file_name", "file", "image", "path")
_CAPTION_KEYS = ("caption", "prompt", "text")


class Captioned(NamedTuple):
    """A picture and its caption."""

    path: Path
    caption: str
    location: str  # of the caption, for messages


def read_captioned(folder: Path, captions: Path | None, model: Model) -> list[Captioned]:
    """Return the pictures of a folder, by name or as in the captions file; raises `UserError` without a caption."""
    flag = f"--data {folder}"
    file = captions or next(
        (folder / name for name in _CAPTION_FILES if (folder / name).is_file()), None
    )
    try:
        pictures = list(
            _captioned_in_file(file, folder) if file is not None else _captioned_beside(folder)
        )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not pictures:
        advice = "Give a folder of pictures, each with its caption in a .txt beside it; or a file of captions alone."
        raise UserError(f"{flag}: contains no picture ({', '.join(_PICTURES)})", advice)
    _check_texts(
        flag=flag,
        noun="captions",
        texts=((picture.location, picture.caption) for picture in pictures),
        model=model,
    )
    return pictures


def _captioned_beside(folder: Path) -> Iterator[Captioned]:
    pictures = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    missing = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
    if missing:
        counts = (
            f"{len(missing)} of {len(pictures)} pictures have no caption, the first {missing[0]}"
        )
        advice = (
            "Put NAME.txt beside NAME.png, or give --captions FILE with file names and captions."
        )
        raise UserError(f"--data {folder}: {counts}", advice)
    for path in pictures:
        text = path.with_suffix(".txt")
        yield Captioned(path, text.read_text(encoding="utf-8-sig").strip(), text.name)


def _captioned_in_file(path: Path, folder: Path) -> Iterator[Captioned]:
    flag = f"--captions {path}"
    if not path.is_file():
        raise UserError(f"{flag}: no such file")
    for number, row in _rows(path, path.suffix.lower(), flag):
        if isinstance(row, str) and "\t" in row:
            row = dict(zip(("file", "caption"), row.split("\t", maxsplit=1), strict=True))
        name = _text_under(row, _NAME_KEYS)
        caption = _text_under(row, _CAPTION_KEYS)
        if name is None or caption is None:
            advice = f"Name the picture under {', '.join(_NAME_KEYS)} and the caption under {', '.join(_CAPTION_KEYS)}."
            raise UserError(f"{flag} line {number}: has no picture and caption", advice)
        picture = folder / name.strip()
        if not picture.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{flag} line {number}: {name} is outside {folder}", "Name pictures inside it."
            )
        if not picture.is_file():
            raise UserError(f"{flag} line {number}: no such picture {picture.name}")
        yield Captioned(picture, caption.strip(), f"{path.name} line {number}")
