"""Prompt sets: sets of a model, published sets, and files."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from lantern_bench.prompts.prompt import Prompt, PromptedModel, class_prompt
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import file_sha256
from lantern_bench.utils.text import did_you_mean

# Published sets, by the word before the colon, with an example of their file. `imagenet` needs no
# file.
SETS = {
    "coco": "captions_val2017.json",
    "coco-first": "captions_val2017.json",
    "parti": "PartiPrompts.tsv",
    "imagenet": "a file with a name a line",
}
SUFFIXES = (".csv", ".json", ".jsonl", ".tsv", ".txt")
"""File types that prompts are read from."""

_IMAGENET_CLASSES = 1000
_PROMPT_KEYS = ("prompt", "caption")
_PROBLEMS_SHOWN = 5
# Control characters steer terminals, end strings in C, and are not allowed in HTML.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


# A prompt of a file, after its location for messages, such as `line 3`.
_Located: TypeAlias = tuple[str, Prompt]


class _Source(NamedTuple):
    """The parts of a value of `--prompts`."""

    name: str  # a prompt set; empty for a file alone
    path: Path | None
    subset: str  # `100` or `0-100`; empty for all prompts


def load_prompts(source: str, model: PromptedModel, flag: str = "--prompts") -> list[Prompt]:
    """Read prompts.

    Args:
        source: The value of the flag: a set of the model, a published set (`coco:FILE`) or a
            file, with `#100` for 100 of its prompts.
        model: The model that is given the prompts.
        flag: The flag, for messages.

    Raises:
        UserError: The file cannot be read, or the model cannot take a prompt. All problems of a
            file are listed.
    """
    flag = f"{flag} {source}"
    parts = _parse(source, model, flag)
    try:
        located = [item for item in _read(parts, flag, model) if item[1].text]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not located:
        raise UserError(f"{flag}: contains no prompt", "Give a file with one prompt a line.")
    texts = ((location, prompt.text) for location, prompt in located)
    check_texts(texts, model, flag=flag, noun="prompts")
    return _subset([prompt for _, prompt in located], parts.subset, flag)


def describe_prompts(source: str, model: PromptedModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Describe prompts for the manifest of a run.

    Args:
        source: The value of `--prompts`.
        model: The model that the prompts were read for.
        prompts: What `load_prompts` returned.
    """
    path = _parse(source, model, flag="").path
    ids = list(dict.fromkeys(prompt.id for prompt in prompts))
    return {
        "set": source,
        "file_sha256": file_sha256(path) if path is not None else None,
        "prompts": len(ids),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }


def _parse(source: str, model: PromptedModel, flag: str) -> _Source:
    match = re.fullmatch(r"(.*?)(?:#(\d+(?:-\d+)?))?", source, flags=re.DOTALL)
    assert match is not None
    name, subset = match.groups(default="")
    if name in model.prompt_sets or name == "imagenet":
        return _Source(name, None, subset)
    word, _, file = name.partition(":")
    if word not in SETS:
        word = ""
        file = name
    elif not file:
        raise UserError(f"{flag}: needs its file", f"For example {word}:{SETS[word]}")
    path = Path(file)
    if not path.is_file():
        sets = [*model.prompt_sets, "coco:FILE", "coco-first:FILE", "parti:FILE", "imagenet"]
        hint = did_you_mean(name, [*model.prompt_sets, *SETS])
        missing = f" {path}" if word else f" and no prompt set{hint}"
        raise UserError(
            f"{flag}: no such file{missing}",
            f"The sets are {', '.join(sets)}; or give a file that ends with {', '.join(SUFFIXES)}.",
        )
    return _Source(word, path, subset)


def _read(parts: _Source, flag: str, model: PromptedModel) -> Iterable[_Located]:
    name = parts.name
    path = parts.path
    if name in model.prompt_sets:
        texts = enumerate(model.prompt_sets[name], start=1)
        return [_located("prompt", number, text=text, of=name) for number, text in texts]
    if name == "imagenet" or path is None:
        return _read_imagenet(path, flag)
    if name.startswith("coco"):
        return _read_coco(path, flag, longest=name == "coco")
    return _read_file(path, flag, name=name or path.name)


def _located(unit: str, number: int, *, text: str, of: str) -> _Located:
    return f"{unit} {number}", Prompt(text.strip(), f"{of}:{number}")


def _read_file(path: Path, flag: str, *, name: str) -> Iterator[_Located]:
    """Yield the prompts of a file; `name` is the name of its set."""
    unit = "entry" if path.suffix.lower() == ".json" else "line"
    for number, row in read_rows(path, flag):
        text = row if isinstance(row, str) else text_under(row, _PROMPT_KEYS)
        if text is None:
            keys = " or ".join(_PROMPT_KEYS)
            problem = f"{flag} {unit} {number}: has no text under {keys}"
            raise UserError(problem, f"Name the column or key {keys}.")
        yield _located(unit, number, text=text, of=name)


def _read_coco(path: Path, flag: str, *, longest: bool) -> Iterator[_Located]:
    """Yield one caption for each image of MS-COCO's annotations: the longest, or the first."""
    data = _parse_json(path.read_text(encoding="utf-8-sig"), flag)
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        advice = "Give the official file, captions_val2017.json or captions_val2014.json."
        raise UserError(f"{flag}: has no list of annotations", advice)
    captions: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        image = row.get("image_id") if isinstance(row, dict) else None
        caption = text_under(row, ("caption",))
        if not isinstance(image, int) or caption is None:
            advice = "Give the caption annotations of MS-COCO, not instances or keypoints."
            raise UserError(f"{flag} annotation {number}: has no image_id and caption", advice)
        # Lengths include the spaces at both ends, as in the file.
        if image not in captions or (longest and len(caption) > len(captions[image])):
            captions[image] = caption
    for image, caption in captions.items():
        yield _located("image", image, text=caption, of="coco")


def _read_imagenet(path: Path | None, flag: str) -> Iterator[_Located]:
    """Yield the 1000 classes, with the names of a file if one is given.

    The file has lines, a JSON list, or JSON such as {"0": [id, name]}.
    """
    names = [""] * _IMAGENET_CLASSES
    if path is not None:
        text = path.read_text(encoding="utf-8-sig")
        rows: Any = text.splitlines()
        if path.suffix.lower() == ".json":
            rows = _parse_json(text, flag)
        if isinstance(rows, dict):
            rows = [rows.get(str(number)) for number in range(len(rows))]
        names = []
        for row in rows if isinstance(rows, list) else ():
            name = row[-1] if isinstance(row, list) and row else row
            if isinstance(name, str) and name.strip():
                names.append(name.strip())
        if len(names) != _IMAGENET_CLASSES:
            raise UserError(f"{flag}: names {len(names)} classes, must name {_IMAGENET_CLASSES}")
    for number, name in enumerate(names):
        yield _located("class", number, text=class_prompt(number, name), of="imagenet")


def _subset(prompts: list[Prompt], subset: str, flag: str) -> list[Prompt]:
    """Return some of the prompts, in their order: `0-100` by position, `100` by hash.

    A choice by hash is spread over the whole set, and a larger one contains a smaller one.
    """
    if not subset:
        return prompts
    unique = list(dict.fromkeys(prompts))
    first, dash, last = subset.partition("-")
    begin = int(first) if dash else 0
    end = int(last or first)
    if not begin < end <= len(unique):
        raise UserError(f"{flag}: there are {len(unique)} prompts", f"Take at most {len(unique)}.")
    if dash:
        return unique[begin:end]
    chosen = set(sorted(unique, key=_hash_of)[:end])
    return [prompt for prompt in unique if prompt in chosen]


def _hash_of(prompt: Prompt) -> bytes:
    return hashlib.blake2b(f"part:{prompt.id}".encode(), digest_size=8).digest()


# ---- Rows of text files, which captions of pictures are read from as well


def read_rows(path: Path, flag: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers, from 1.

    A row is a line of .txt, a dict of .csv and .tsv, or any JSON value of .json and .jsonl. Empty
    lines are skipped. `flag` is the flag with its value, for messages.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        advice = f"Give a file that ends with {', '.join(SUFFIXES)}."
        raise UserError(f"{flag}: unknown file type", advice)
    if suffix in (".csv", ".tsv"):
        yield from _table_rows(path, "," if suffix == ".csv" else "\t", flag)
        return
    text = path.read_text(encoding="utf-8-sig")
    if suffix == ".json":
        rows = _parse_json(text, flag)
        if not isinstance(rows, list):
            advice = "Write coco:FILE for MS-COCO annotations."
            raise UserError(f"{flag}: must be a JSON list of prompts", advice)
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line if suffix == ".txt" else _parse_json(line, f"{flag} line {number}")


def _table_rows(path: Path, delimiter: str, flag: str) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter=delimiter, restval="")
        for row in table:
            if None in row:
                message = f"{flag} line {table.line_num}: has more fields than the first line"
                raise UserError(message, "Put text that contains the separator in quotes.")
            yield table.line_num, {name.strip().lower(): value for name, value in row.items()}


def _parse_json(text: str, location: str) -> Any:
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
    count = len(problems)
    if count == 1:
        raise UserError(f"{flag} {problems[0]}", advice)
    if count > _PROBLEMS_SHOWN:
        problems[_PROBLEMS_SHOWN:] = [f"and {count - _PROBLEMS_SHOWN} more"]
    if problems:
        lines = "\n  ".join(problems)
        raise UserError(f"{flag}: {count} {noun} cannot be used\n  {lines}", advice)
