"""Prompts from a set of the model, a published set or a file; and pictures with captions in a folder. Without torch."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.config.plan import Prompt
from lantern_bench.models.model import Model, class_prompt
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import file_sha256
from lantern_bench.utils.text import did_you_mean

SUFFIXES = (".csv", ".json", ".jsonl", ".tsv", ".txt")  # of the files that prompts are read from

# Published sets, by the word before the colon, and their files; imagenet also stands alone.
SETS = {
    "coco": "captions_val2017.json",
    "coco-first": "captions_val2017.json",
    "parti": "PartiPrompts.tsv",
    "imagenet": "a file with a name a line",
}
_IMAGENET_CLASSES = 1000
_PROMPT_KEYS = ("prompt", "caption")
_PROBLEMS_SHOWN = 5
# No caption has them. They steer terminals, end strings in C, and cannot be in a page.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Item(NamedTuple):
    """A prompt or caption in a file."""

    location: str  # for messages: `line 3`
    source: str  # what its set calls it: `captions.txt:3`
    text: str


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


def _read_file(path: Path, suffix: str, flag: str, name: str) -> Iterator[Item]:
    """Yield the prompts of a file; `name` is the name of its set."""
    unit = "entry" if suffix == ".json" else "line"
    for number, row in _rows(path, suffix, flag):
        text = row if isinstance(row, str) else _text_under(row, _PROMPT_KEYS)
        if text is None:
            keys = " or ".join(_PROMPT_KEYS)
            raise UserError(
                f"{flag} {unit} {number}: has no text under {keys}",
                f"Name the column or key {keys}.",
            )
        yield Item(f"{unit} {number}", f"{name}:{number}", text)


def _read_coco(path: Path, flag: str, longest: bool) -> Iterator[Item]:
    """Yield a caption for each image of MS-COCO's annotations: the longest, or the first."""
    data = _parse_json(path.read_text(encoding="utf-8-sig"), flag)
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        advice = "Give the official file, captions_val2017.json or captions_val2014.json."
        raise UserError(f"{flag}: has no list of annotations", advice)
    captions: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        image, caption = (
            (row.get("image_id"), row.get("caption")) if isinstance(row, dict) else (None, None)
        )
        if not isinstance(image, int) or not isinstance(caption, str):
            advice = "Give the caption annotations of MS-COCO, not instances or keypoints."
            raise UserError(f"{flag} annotation {number}: has no image_id and caption", advice)
        # Lengths are compared with the spaces at both ends, as the captions are in the file.
        if image not in captions or (longest and len(caption) > len(captions[image])):
            captions[image] = caption
    for image, caption in captions.items():
        yield Item(f"image {image}", f"coco:{image}", caption)


def _read_imagenet(path: Path | None, flag: str) -> Iterator[Item]:
    """Yield the classes, named where there is a file: lines, or JSON, a list or {"0": [id, name]}."""
    names: list[Any] = [""] * _IMAGENET_CLASSES
    if path is not None:
        text = path.read_text(encoding="utf-8-sig")
        names = text.splitlines()
        if path.suffix.lower() == ".json":
            data = _parse_json(text, flag)
            rows = (
                [data.get(str(number)) for number in range(len(data))]
                if isinstance(data, dict)
                else data
            )
            rows = rows if isinstance(rows, list) else []
            names = [row[-1] if isinstance(row, list) and row else row for row in rows]
        names = [name.strip() for name in names if isinstance(name, str) and name.strip()]
        if len(names) != _IMAGENET_CLASSES:
            raise UserError(f"{flag}: names {len(names)} classes, must name {_IMAGENET_CLASSES}")
    for number, name in enumerate(names):
        yield Item(f"class {number}", f"imagenet:{number}", class_prompt(number, name))


# ---- The value of --prompts


def load_prompts(source: str, model: Model) -> list[Prompt]:
    """Read the prompts of a model's set, of a published set (`coco:FILE`), or of a file; raises one `UserError`."""
    flag = f"--prompts {source}"
    name, path, subset = _parse(source, model)
    try:
        items = [
            item._replace(text=item.text.strip())
            for item in _read(name=name, path=path, flag=flag, model=model)
            if item.text.strip()
        ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not items:
        raise UserError(f"{flag}: contains no prompt", "Give a file with one prompt a line.")
    _check_texts(
        flag=flag, noun="prompts", texts=((item.location, item.text) for item in items), model=model
    )
    return _subset(flag, subset, [Prompt(item.text, item.source) for item in items])


def describe_prompts(source: str, model: Model, prompts: list[Prompt]) -> dict[str, Any]:
    """Describe prompts for the manifest."""
    _, path, _ = _parse(source, model)
    ids = list(dict.fromkeys(prompt.id for prompt in prompts))
    return {
        "set": source,
        "file_sha256": file_sha256(path) if path is not None else None,
        "prompts": len(ids),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }


def _parse(source: str, model: Model) -> tuple[str, Path | None, str]:
    """Return the set, empty for a file alone; the file, if any; and the subset: `100`, `0-100`, or empty for all."""
    match = re.fullmatch(r"(.*?)#(\d+(?:-\d+)?)", source, flags=re.DOTALL)
    name, subset = (match[1], match[2]) if match else (source, "")
    if name in model.prompt_sets or name == "imagenet":
        return name, None, subset
    word, _, file = name.partition(":")
    if word not in SETS:
        word = ""
        file = name
    elif not file:
        raise UserError(f"--prompts {source}: needs its file", f"For example {word}:{SETS[word]}")
    path = Path(file)
    if not path.is_file():
        sets = [*model.prompt_sets, *(key if key == "imagenet" else f"{key}:FILE" for key in SETS)]
        hint = did_you_mean(name, [*model.prompt_sets, *SETS])
        missing = f" {path}" if word else f" and no prompt set{hint}"
        advice = (
            f"The sets are {', '.join(sets)}; or give a file that ends with {', '.join(SUFFIXES)}."
        )
        raise UserError(f"--prompts {source}: no such file{missing}", advice)
    return word, path, subset


def _read(name: str, path: Path | None, flag: str, model: Model) -> Iterable[Item]:
    if name in model.prompt_sets:
        texts = enumerate(model.prompt_sets[name], start=1)
        return [Item(f"prompt {number}", f"{name}:{number}", text) for number, text in texts]
    if name == "imagenet" or path is None:
        return _read_imagenet(path, flag)
    if name == "parti":
        return _read_file(path=path, suffix=".tsv", flag=flag, name="parti")
    if name:
        return _read_coco(path, flag, longest=name == "coco")
    return _read_file(path=path, suffix=path.suffix.lower(), flag=flag, name=path.name)


def _subset(flag: str, subset: str, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts of a subset: `100` by hash, in the order of the set; `0-100` the first hundred."""
    if not subset:
        return prompts
    unique = list(dict.fromkeys(prompts))
    first, dash, last = subset.partition("-")
    begin, end = (int(first), int(last)) if dash else (0, int(first))
    if not begin < end <= len(unique):
        raise UserError(f"{flag}: there are {len(unique)} prompts", f"Take at most {len(unique)}.")
    if dash:
        return unique[begin:end]
    by_hash = sorted(
        unique,
        key=lambda prompt: hashlib.blake2b(f"part:{prompt.id}".encode(), digest_size=8).digest(),
    )
    chosen = set(by_hash[:end])
    return [prompt for prompt in unique if prompt in chosen]


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
