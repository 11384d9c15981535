"""Prompts from a set of the model, a published set or a file; and pictures with captions in a folder. Without torch.

The model checks every prompt before it is loaded, and one error lists all problems. `NAME#100` takes 100 prompts by a
hash of their text, so that everybody takes the same ones and a larger part contains the smaller; `NAME#0-100` takes the
first hundred. `config/plan.py` decides which prompt becomes which image.

Captions of pictures are in a .txt beside each picture, or in one file `captions` or `metadata` with the suffix .jsonl,
.csv, .tsv or .txt (name, tab, caption); its names are relative to the folder.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.config.plan import Prompt
from lantern_bench.errors import UserError, did_you_mean
from lantern_bench.models.io.files import file_sha256
from lantern_bench.models.model import Model, class_prompt

_COLUMNS = ("prompt", "caption")
_IMAGENET_CLASSES = 1000
_PROBLEMS_SHOWN = 5
# No caption has them. They steer terminals, end strings in C, and cannot be in a page.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Item(NamedTuple):
    """A prompt or caption in a file."""

    location: str  # for messages: `line 3`
    source: str  # what its set calls it: `captions.txt:3`
    text: str


# ---- Files: from a path, and the flag for messages, to line numbers and texts


def _read_text(path: Path, _flag: str = "") -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank; a byte order mark is skipped."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if line.strip():
            yield number, line


def _read_json_lines(path: Path, flag: str) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSON lines file; raises `UserError` for a line that is not JSON."""
    for number, line in _read_text(path):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{flag} line {number}: not JSON: {error}") from error


def _read_table(path: Path, flag: str, delimiter: str) -> Iterator[tuple[int, str]]:
    """Yield the column `prompt` or `caption` (any case) of a table, with each row's line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        column = next((name for name in rows.fieldnames or () if name.strip().lower() in _COLUMNS), None)
        if column is None:
            raise UserError(f"{flag} line 1: has no column {' or '.join(_COLUMNS)}", "Name it in the first line.")
        for row in rows:
            if None in row:
                raise UserError(
                    f"{flag} line {rows.line_num}: has more fields than the first line",
                    "Put text that contains the separator in quotes.",
                )
            yield rows.line_num, row[column] or ""


def _read_json_list(path: Path, flag: str) -> Iterator[tuple[int, str]]:
    rows = _parse_json(path, flag)
    if isinstance(rows, dict) and "annotations" in rows:
        source = flag.partition(" ")[2]
        raise UserError(
            f"{flag}: contains MS-COCO annotations, several captions an image",
            f"Choose which to take: coco:{source} (the longest) or coco-first:{source}.",
        )
    if not isinstance(rows, list):
        raise UserError(f"{flag}: must be a JSON list of prompts")
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, str) else _text_of(row, f"{flag} entry {number}")


def _parse_json(path: Path, flag: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise UserError(f"{flag}: not JSON: {error}") from error


def _text_of(row: Any, location: str) -> str:
    text = next((row[name] for name in _COLUMNS if name in row), None) if isinstance(row, dict) else None
    if isinstance(text, str):
        return text
    raise UserError(f"{location}: has no text under {' or '.join(_COLUMNS)}")


# By suffix.
READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, str]]]] = {
    ".csv": lambda path, flag: _read_table(path, flag, ","),
    ".json": _read_json_list,
    ".jsonl": lambda path, flag: ((n, _text_of(row, f"{flag} line {n}")) for n, row in _read_json_lines(path, flag)),
    ".tsv": lambda path, flag: _read_table(path, flag, "\t"),
    ".txt": _read_text,
}


def _read_file(path: Any, flag: str) -> Iterator[Item]:
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(f"{flag}: unknown file type", f"Give a file that ends with {', '.join(READERS)}.")
    unit = "entry" if suffix == ".json" else "line"
    for number, text in READERS[suffix](path, flag):
        yield Item(f"{unit} {number}", f"{path.name}:{number}", text)


# ---- Published sets


def _read_coco(path: Path, flag: str, longest: bool) -> Iterator[Item]:
    """Yield a caption for each image of MS-COCO's annotations: the longest, or the first."""
    data = _parse_json(path, flag)
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise UserError(
            f"{flag}: has no list of annotations",
            "Give the official file, captions_val2017.json or captions_val2014.json.",
        )
    captions: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        image, caption = (row.get("image_id"), row.get("caption")) if isinstance(row, dict) else (None, None)
        if not isinstance(image, int) or not isinstance(caption, str):
            raise UserError(
                f"{flag} annotation {number}: has no image_id and caption",
                "Give the caption annotations of MS-COCO, not instances or keypoints.",
            )
        # Lengths are compared with the spaces at both ends, as the captions are in the file.
        if image not in captions or (longest and len(caption) > len(captions[image])):
            captions[image] = caption
    for image, caption in captions.items():
        yield Item(f"image {image}", f"coco:{image}", caption)


def _read_parti(path: Path, flag: str) -> Iterator[Item]:
    for number, text in _read_table(path, flag, "\t"):
        yield Item(f"line {number}", f"parti:{number}", text)


def _read_imagenet(path: Path | None, flag: str) -> Iterator[Item]:
    """Yield the classes, named in order where there is a file: a line each, or JSON, a list or {"0": [id, name]}."""
    if path is None:
        names = [""] * _IMAGENET_CLASSES
    elif path.suffix.lower() == ".json":
        data = _parse_json(path, flag)
        rows = [data.get(str(number)) for number in range(len(data))] if isinstance(data, dict) else data
        last = [row[-1] if isinstance(row, list) and row else row for row in rows] if isinstance(rows, list) else []
        names = [name if isinstance(name, str) else "" for name in last]
    else:
        names = path.read_text(encoding="utf-8-sig").splitlines()
    for number, name in enumerate(names):
        if path is not None and not name.strip():
            raise UserError(f"{flag} line {number + 1}: has no name for class {number}")
    if len(names) != _IMAGENET_CLASSES:
        raise UserError(f"{flag}: names {len(names)} classes, must name {_IMAGENET_CLASSES}")
    for number, name in enumerate(names):
        yield Item(f"class {number}", f"imagenet:{number}", class_prompt(number, name.strip()))


class PublishedSet(NamedTuple):
    """A published set of prompts."""

    read: Callable[[Any, str], Iterator[Item]]
    file: str  # its name, for messages
    needs_file: bool = True


# By the word before the colon: `coco:captions_val2017.json`.
SETS = {
    "coco": PublishedSet(lambda path, flag: _read_coco(path, flag, longest=True), "captions_val2017.json"),
    "coco-longest": PublishedSet(lambda path, flag: _read_coco(path, flag, longest=True), "captions_val2017.json"),
    "coco-first": PublishedSet(lambda path, flag: _read_coco(path, flag, longest=False), "captions_val2017.json"),
    "parti": PublishedSet(_read_parti, "PartiPrompts.tsv"),
    "imagenet": PublishedSet(_read_imagenet, "a file with a name a line", needs_file=False),
}

# ---- The value of --prompts


class Request(NamedTuple):
    """What a value of `--prompts` asks for."""

    name: str  # of a set of the model, or as typed
    published: PublishedSet | None
    path: Path | None  # None for a set of the model, and for a published set that needs no file
    subset: str  # `100` or `0-100`; empty: all


def load_prompts(source: str, model: Model) -> list[Prompt]:
    """Read the prompts of a model's set, of a published set (`coco:FILE`, `parti:FILE`, `imagenet`), or of a file.

    Files are `.txt` (a prompt a line), `.csv`, `.tsv` and `.jsonl` (column `prompt` or `caption`) or `.json` (a list).
    Blank prompts are skipped. Raises one `UserError` that names `--prompts` and its value: no such set or file, a file
    that cannot be read, or the first prompts that the model cannot take, with their locations.
    """
    flag, request = f"--prompts {source}", _parse(source, model)
    if request.published is None and request.path is None:
        texts = enumerate(model.prompt_sets[request.name], start=1)
        items = [Item(f"prompt {number}", f"{request.name}:{number}", text) for number, text in texts]
    else:
        items = _read(request, flag)
    _check_texts(flag, "prompts", items, model)
    return _subset(flag, request.subset, [Prompt(item.text, item.source) for item in items])


def describe_prompts(source: str, model: Model, prompts: list[Prompt]) -> dict[str, Any]:
    """Describe prompts for the manifest: the set, its file's SHA-256, how many, and a hash of their ids."""
    path = _parse(source, model).path
    ids = list(dict.fromkeys(prompt.id for prompt in prompts))
    return {
        "set": source,
        "file_sha256": file_sha256(path) if path is not None else None,
        "prompts": len(ids),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }


def _parse(source: str, model: Model) -> Request:
    match = re.fullmatch(r"(.*?)#(\d+(?:-\d+)?)", source, flags=re.DOTALL)
    name, subset = (match[1], match[2]) if match else (source, "")
    if name in model.prompt_sets:
        return Request(name, None, None, subset)
    word, colon, file = name.partition(":")
    published = SETS.get(word)
    if published is not None and not file and (published.needs_file or colon):
        raise UserError(f"--prompts {source}: needs its file", f"For example {word}:{published.file}")
    path = Path(file if published is not None else name) if published is None or file else None
    if path is not None and not path.is_file():
        sets = [*model.prompt_sets, *(f"{key}:FILE" if row.needs_file else key for key, row in SETS.items())]
        hint = did_you_mean(name, [*model.prompt_sets, *SETS])
        missing = f" {path}" if published is not None else f" and no prompt set{hint}"
        raise UserError(
            f"--prompts {source}: no such file{missing}",
            f"The sets are {', '.join(sets)}; or give a file that ends with {', '.join(READERS)}.",
        )
    return Request(name, published, path, subset)


def _read(request: Request, flag: str) -> list[Item]:
    """Return all prompts of a file or of a published set but blank ones."""
    read = _read_file if request.published is None else request.published.read
    try:
        items = list(read(request.path, flag))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not any(item.text.strip() for item in items):
        raise UserError(f"{flag}: contains no prompt", "Give a file with one prompt a line.")
    return [item._replace(text=item.text.strip()) for item in items if item.text.strip()]


def _subset(flag: str, subset: str, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts that a subset names: `100` by hash, in the order of the set; `0-100` the first hundred."""
    if not subset:
        return prompts
    unique = list(dict.fromkeys(prompts))
    first, dash, last = subset.partition("-")
    begin, end = (int(first), int(last)) if dash else (0, int(first))
    if not begin < end <= len(unique):
        raise UserError(f"{flag}: there are {len(unique)} prompts", f"Take at most {len(unique)}.")
    if dash:
        return unique[begin:end]
    by_hash = sorted(unique, key=lambda prompt: hashlib.blake2b(f"part:{prompt.id}".encode(), digest_size=8).digest())
    chosen = set(by_hash[:end])
    return [prompt for prompt in unique if prompt in chosen]


def _check_texts(flag: str, noun: str, items: Iterable[Item], model: Model) -> None:
    """Raise one `UserError` for the texts that the model cannot take; equal texts are checked once."""
    errors: dict[str, UserError | None] = {}
    problems, advice = [], None
    for item in items:
        if item.text not in errors:
            errors[item.text] = _problem(item.text, model)
        if (error := errors[item.text]) is not None:
            problems.append(f"{item.location}: {error.message}")
            advice = advice or error.advice
    _refuse(flag, noun, problems, advice)


def _problem(text: str, model: Model) -> UserError | None:
    if match := _CONTROLS.search(text):
        return UserError(f"contains the control character {match[0]!r}", "Remove it.")
    try:
        model.check_prompt(text)
    except UserError as error:
        return error
    return None


def _refuse(flag: str, noun: str, problems: list[str], advice: str | None = None) -> None:
    """Raise one `UserError` with the first problems; do nothing when there are none."""
    if len(problems) == 1:
        raise UserError(f"{flag} {problems[0]}", advice)
    if problems:
        more = [f"and {len(problems) - _PROBLEMS_SHOWN} more"] if len(problems) > _PROBLEMS_SHOWN else []
        lines = "\n  ".join([*problems[:_PROBLEMS_SHOWN], *more])
        raise UserError(f"{flag}: {len(problems)} {noun} cannot be used\n  {lines}", advice)


# ---- Pictures with captions in a folder

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_CAPTION_SUFFIXES = (".jsonl", ".csv", ".tsv", ".txt")
_CAPTION_FILES = tuple(f"{stem}{suffix}" for stem in ("captions", "metadata") for suffix in _CAPTION_SUFFIXES)
_NAME_KEYS = ("file_name", "file", "image", "path")
_TEXT_KEYS = ("caption", "prompt", "text")


class Captioned(NamedTuple):
    """A picture and its caption."""

    path: Path
    caption: str
    location: str  # of the caption, for messages


def read_captioned(folder: Path, captions: Path | None, model: Model) -> list[Captioned]:
    """Return the pictures of a folder in the order of their names, or of the captions file.

    Raises `UserError` that names `--data` or `--captions`: no pictures, pictures without a caption, captions of missing
    pictures, captions the model cannot take.
    """
    flag = f"--data {folder}"
    file = captions or next((folder / name for name in _CAPTION_FILES if (folder / name).is_file()), None)
    if file is not None and not file.is_file():
        raise UserError(f"--captions {file}: no such file")
    try:
        pictures = list(_captioned_in_file(file, folder) if file is not None else _captioned_beside(folder))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    if not pictures:
        raise UserError(
            f"{flag}: contains no picture ({', '.join(_PICTURES)})",
            "Give a folder of pictures, each with its caption in a .txt beside it; or a file of captions alone.",
        )
    missing = [picture for picture in pictures if not picture.path.is_file()]
    _refuse(flag, "captions", [f"{picture.location}: no such picture {picture.path.name}" for picture in missing])
    _check_texts(flag, "captions", [Item(picture.location, "", picture.caption) for picture in pictures], model)
    return pictures


def _captioned_beside(folder: Path) -> Iterator[Captioned]:
    pictures = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    missing = [path.name for path in pictures if not path.with_suffix(".txt").is_file()]
    if missing:
        raise UserError(
            f"--data {folder}: {len(missing)} of {len(pictures)} pictures have no caption, the first {missing[0]}",
            "Put NAME.txt beside NAME.png, or give --captions FILE with file names and captions.",
        )
    for path in pictures:
        text = path.with_suffix(".txt")
        yield Captioned(path, text.read_text(encoding="utf-8-sig").strip(), text.name)


def _captioned_in_file(path: Path, folder: Path) -> Iterator[Captioned]:
    for number, row in _caption_rows(path):
        name, text = (
            next((row[key] for key in keys if isinstance(row.get(key), str)), None) for keys in (_NAME_KEYS, _TEXT_KEYS)
        )
        if name is None or text is None:
            raise UserError(
                f"--captions {path} line {number}: has no picture and caption",
                f"Name the picture under {', '.join(_NAME_KEYS)} and the caption under {', '.join(_TEXT_KEYS)}.",
            )
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--captions {path} line {number}: {name} is outside {folder}", "Name pictures inside it.")
        yield Captioned(folder / name, text.strip(), f"{path.name} line {number}")


def _caption_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a captions file by key, with their line numbers; a malformed row has no keys."""
    match path.suffix.lower():
        case ".jsonl":
            for number, row in _read_json_lines(path, f"--captions {path}"):
                yield number, row if isinstance(row, dict) else {}
        case ".txt":
            for number, line in _read_text(path):
                name, tab, caption = line.partition("\t")
                yield number, {"file": name.strip(), "caption": caption} if tab else {}
        case ".csv" | ".tsv" as suffix:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            table = csv.DictReader(lines, delimiter="," if suffix == ".csv" else "\t")
            for row in table:
                yield table.line_num, {str(key).strip().lower(): value for key, value in row.items()}
        case _:
            allowed = ", ".join(_CAPTION_SUFFIXES)
            raise UserError(f"--captions {path}: unknown file type", f"Give a file that ends with {allowed}.")
