"""Prompt files: rows of text files, and folders of captioned pictures."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.prompts.prompt import PromptedModel
from lantern_bench.utils.errors import UserError

SUFFIXES = (".csv", ".json", ".jsonl", ".tsv", ".txt")
"""File types that prompts are read from."""

_PROBLEMS_SHOWN = 5
# Control characters steer terminals, end strings in C, and are not allowed in HTML.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def read_rows(path: Path, suffix: str, flag: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers, from 1.

    A row is a line of .txt, a dict of .csv and .tsv, or any JSON value of .json and .jsonl. Empty
    lines are skipped.

    Args:
        path: The file.
        suffix: The file type, one of `SUFFIXES`.
        flag: The flag and its value, for messages.
    """
    if suffix not in SUFFIXES:
        advice = f"Give a file that ends with {', '.join(SUFFIXES)}."
        raise UserError(f"{flag}: unknown file type", advice)
    if suffix in (".csv", ".tsv"):
        yield from _table_rows(path, "," if suffix == ".csv" else "\t", flag)
        return
    text = path.read_text(encoding="utf-8-sig")
    if suffix == ".json":
        rows = parse_json(text, flag)
        if not isinstance(rows, list):
            advice = "Write coco:FILE for MS-COCO annotations."
            raise UserError(f"{flag}: must be a JSON list of prompts", advice)
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        row = line if suffix == ".txt" else parse_json(line, f"{flag} line {number}")
        yield number, row


def _table_rows(path: Path, delimiter: str, flag: str) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter=delimiter, restval="")
        for row in table:
            if None in row:
                message = f"{flag} line {table.line_num}: has more fields than the first line"
                raise UserError(message, "Put text that contains the separator in quotes.")
            yield table.line_num, {name.strip().lower(): value for name, value in row.items()}


def parse_json(text: str, location: str) -> Any:
    """Return the value of a JSON text; raises `UserError` that begins with `location`."""
    try:
        return json.loads(text)
    # Numbers of thousands of digits and thousands of brackets raise these errors too.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not JSON: {error}") from error


def text_under(row: Any, keys: tuple[str, ...]) -> str | None:
    """Return the first text of a row under one of the keys, None if there is none."""
    if not isinstance(row, dict):
        return None
    texts = (row[key] for key in keys if isinstance(row.get(key), str))
    return next(texts, None)


def check_texts(
    texts: Iterable[tuple[str, str]], model: PromptedModel, *, flag: str, noun: str
) -> None:
    """Raise one `UserError` that lists the texts that the model cannot take.

    Args:
        texts: Pairs of a location for the message and a text.
        model: The model that is given the texts.
        flag: The flag and its value, for the message.
        noun: What the texts are, for the message.
    """
    problems = []
    advice = None
    for location, text in texts:
        try:
            match = _CONTROLS.search(text)
            if match is not None:
                raise UserError(f"contains the control character {match[0]!r}", "Remove it.")
            model.check_prompt(text)
        except UserError as error:
            problems.append(f"{location}: {error.message}")
            advice = advice or error.advice
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(f"{flag} {problems[0]}", advice)
    shown = problems[:_PROBLEMS_SHOWN]
    if len(problems) > _PROBLEMS_SHOWN:
        shown.append(f"and {len(problems) - _PROBLEMS_SHOWN} more")
    lines = "\n  ".join(shown)
    raise UserError(f"{flag}: {len(problems)} {noun} cannot be used\n  {lines}", advice)


# ---- Pictures with captions in a folder

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# A caption file of a folder; in .txt a tab separates the name and the caption.
_CAPTION_FILES = (
    "captions.jsonl",
    "captions.csv",
    "captions.tsv",
    "captions.txt",
    "metadata.jsonl",
    "metadata.csv",
    "metadata.tsv",
    "metadata.txt",
)
_NAME_KEYS = ("file_name", "file", "image", "path")
_CAPTION_KEYS = ("caption", "prompt", "text")


class Captioned(NamedTuple):
    """A picture and its caption."""

    path: Path
    caption: str
    location: str  # where the caption is written, for messages


def read_captioned(folder: Path, captions: Path | None, model: PromptedModel) -> list[Captioned]:
    """Return the captioned pictures of a folder.

    Args:
        folder: The folder of `--data`.
        captions: A file of names and captions. With None, a caption file of the folder is used,
            such as metadata.jsonl, or a .txt file beside each picture.
        model: The model that is given the captions.

    Returns:
        The pictures in the order of the caption file, or by name.

    Raises:
        UserError: A picture or a caption is missing, or the model cannot take a caption.
    """
    flag = f"--data {folder}"
    if captions is None:
        files = (folder / name for name in _CAPTION_FILES)
        captions = next((file for file in files if file.is_file()), None)
    try:
        if captions is None:
            pictures = list(_captioned_beside(folder))
        else:
            pictures = list(_captioned_in_file(captions, folder))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not pictures:
        raise UserError(
            f"{flag}: contains no picture ({', '.join(_PICTURES)})",
            "Give a folder of pictures, each with its caption in a .txt beside it; "
            "or a file of captions alone.",
        )
    texts = ((picture.location, picture.caption) for picture in pictures)
    check_texts(texts, model, flag=flag, noun="captions")
    return pictures


def _captioned_beside(folder: Path) -> Iterator[Captioned]:
    """Yield the pictures of a folder and below it, each with the .txt file of its name."""
    pictures = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    missing = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
    if missing:
        raise UserError(
            f"--data {folder}: {len(missing)} of {len(pictures)} pictures have no caption, "
            f"the first {missing[0]}",
            "Put NAME.txt beside NAME.png, or give --captions FILE with file names and captions.",
        )
    for path in pictures:
        text = path.with_suffix(".txt")
        yield Captioned(path, text.read_text(encoding="utf-8-sig").strip(), text.name)


def _captioned_in_file(path: Path, folder: Path) -> Iterator[Captioned]:
    flag = f"--captions {path}"
    if not path.is_file():
        raise UserError(f"{flag}: no such file")
    for number, row in read_rows(path, path.suffix.lower(), flag):
        place = f"{flag} line {number}"
        name: str | None
        caption: str | None
        if isinstance(row, str) and "\t" in row:
            name, caption = row.split("\t", maxsplit=1)
        else:
            name = text_under(row, _NAME_KEYS)
            caption = text_under(row, _CAPTION_KEYS)
        if name is None or caption is None:
            raise UserError(
                f"{place}: has no picture and caption",
                f"Name the picture under {', '.join(_NAME_KEYS)} "
                f"and the caption under {', '.join(_CAPTION_KEYS)}.",
            )
        picture = folder / name.strip()
        if not picture.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{place}: {name} is outside {folder}", "Name pictures inside it.")
        if not picture.is_file():
            raise UserError(f"{place}: no such picture {picture.name}")
        yield Captioned(picture, caption.strip(), f"{path.name} line {number}")
