"""Prompts from a set of the model, a published set or a file; and pictures with captions in a folder.

The model checks every prompt before any model is loaded, and one error lists all problems. `NAME#100` takes 100
prompts by a hash of their text, so that everybody takes the same ones and a larger part contains the smaller;
`NAME#0-100` takes the first hundred. `config/plan.py` decides which prompt becomes which image. No torch here.

Captions are in a .txt beside each picture, or in one file `captions` or `metadata` with the suffix .jsonl, .csv, .tsv
or .txt (name, tab, caption); its names are relative to the folder.
"""

from __future__ import annotations

import csv
import functools
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

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_CAPTION_SUFFIXES = (".jsonl", ".csv", ".tsv", ".txt")
_CAPTION_FILES = tuple(f"{stem}{suffix}" for stem in ("captions", "metadata") for suffix in _CAPTION_SUFFIXES)
_NAME_KEYS = ("file_name", "file", "image", "path")
_TEXT_KEYS = ("caption", "prompt", "text")
_COLUMNS = ("prompt", "caption")
_IMAGENET_CLASSES = 1000
_SHOWN = 5
# No caption has them. They steer terminals, end strings in C, and cannot be in a page.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Item(NamedTuple):
    """A prompt in a file: its place (`line 3`), its name in the set (`captions.txt:3`), and its text."""

    place: str
    source: str
    text: str


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not blank, with their numbers; a byte order mark is skipped."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if line.strip():
            yield number, line


def _read_json_lines(path: Path, flag: str) -> Iterator[tuple[int, Any]]:
    """Yield the values of a JSON lines file with their line numbers; raises `UserError` for a line that is not JSON."""
    for number, line in _read_lines(path):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{flag} line {number}: not JSON: {error}") from error


def _check_texts(flag: str, noun: str, texts: Iterable[tuple[str, str]], model: Model) -> None:
    """Raise one `UserError` for the texts that the model cannot take; `texts` are (place, text)."""

    @functools.cache
    def problem(text: str) -> UserError | None:
        if found := _CONTROLS.search(text):
            return UserError(f"contains the control character {found[0]!r}", "Remove it.")
        try:
            model.check_prompt(text)
        except UserError as error:
            return error
        return None

    wrong = [(place, error) for place, text in texts if (error := problem(text)) is not None]
    advice = next((error.advice for _, error in wrong if error.advice), None)
    _refuse(flag, noun, [f"{place}: {error.message}" for place, error in wrong], advice)


def _refuse(flag: str, noun: str, wrong: list[str], advice: str | None = None) -> None:
    """Raise one `UserError` with the first problems; do nothing when there are none."""
    if len(wrong) == 1:
        raise UserError(f"{flag} {wrong[0]}", advice)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        listed = "\n  ".join([*wrong[:_SHOWN], *more])
        raise UserError(f"{flag}: {len(wrong)} {noun} cannot be used\n  {listed}", advice)


def _table(path: Path, flag: str, delimiter: str) -> Iterator[tuple[int, str]]:
    """The column `prompt` or `caption` (any case) of a table; the standard reader knows each row's line."""
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


def _json(path: Path, flag: str) -> Iterator[tuple[int, str]]:
    rows = _parsed(path, flag)
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


def _parsed(path: Path, flag: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise UserError(f"{flag}: not JSON: {error}") from error


def _text_of(row: Any, place: str) -> str:
    text = next((row[name] for name in _COLUMNS if name in row), None) if isinstance(row, dict) else None
    if isinstance(text, str):
        return text
    raise UserError(f"{place}: has no text under {' or '.join(_COLUMNS)}")


READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, str]]]] = {
    ".csv": functools.partial(_table, delimiter=","),
    ".json": _json,
    ".jsonl": lambda path, flag: ((at, _text_of(row, f"{flag} line {at}")) for at, row in _read_json_lines(path, flag)),
    ".tsv": functools.partial(_table, delimiter="\t"),
    ".txt": lambda path, _flag: _read_lines(path),
}
"""The reader of each file type, by suffix: from a file and its flag to line numbers and texts."""


def _coco(path: Path, flag: str, longest: bool) -> Iterator[Item]:
    data = _parsed(path, flag)
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise UserError(
            f"{flag}: has no list of annotations",
            "Give the official file, captions_val2017.json or captions_val2014.json.",
        )
    chosen: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        image, caption = (row.get("image_id"), row.get("caption")) if isinstance(row, dict) else (None, None)
        if not isinstance(image, int) or not isinstance(caption, str):
            raise UserError(
                f"{flag} annotation {number}: has no image_id and caption",
                "Give the caption annotations of MS-COCO, not instances or keypoints.",
            )
        # Lengths are compared with the spaces at both ends, as the captions are in the file.
        if image not in chosen or (longest and len(caption) > len(chosen[image])):
            chosen[image] = caption
    for image, caption in chosen.items():
        yield Item(f"image {image}", f"coco:{image}", caption)


def _imagenet(path: Path | None, flag: str) -> Iterator[Item]:
    """The classes, named in order where there is a file: a line each, or JSON, a list or {"0": [wordnet id, name]}."""
    if path is None:
        names = [""] * _IMAGENET_CLASSES
    elif path.suffix.lower() == ".json":
        data = _parsed(path, flag)
        rows = [data.get(str(number)) for number in range(len(data))] if isinstance(data, dict) else data
        names = [row[-1] if isinstance(row, list) and row else row for row in rows] if isinstance(rows, list) else []
    else:
        names = path.read_text(encoding="utf-8-sig").splitlines()
    for number, name in enumerate(names):
        if path is not None and not (isinstance(name, str) and name.strip()):
            raise UserError(f"{flag} line {number + 1}: has no name for class {number}")
    if len(names) != _IMAGENET_CLASSES:
        raise UserError(f"{flag}: names {len(names)} classes, must name {_IMAGENET_CLASSES}")
    for number, name in enumerate(names):
        yield Item(f"class {number}", f"imagenet:{number}", class_prompt(number, name.strip()))


class PublishedSet(NamedTuple):
    """A set: its reader, its file for messages, and whether it needs the file."""

    read: Callable[[Any, str], Iterator[Item]]
    file: str
    needs_file: bool = True


SETS = {
    "coco": PublishedSet(functools.partial(_coco, longest=True), "captions_val2017.json"),
    "coco-longest": PublishedSet(functools.partial(_coco, longest=True), "captions_val2017.json"),
    "coco-first": PublishedSet(functools.partial(_coco, longest=False), "captions_val2017.json"),
    "parti": PublishedSet(
        lambda path, flag: (Item(f"line {at}", f"parti:{at}", text) for at, text in _table(path, flag, "\t")),
        "PartiPrompts.tsv",
    ),
    "imagenet": PublishedSet(_imagenet, "a file with a name a line", needs_file=False),
}
"""The sets by the word before the colon: `coco:captions_val2017.json`."""


def load_prompts(source: str, model: Model) -> list[Prompt]:
    """Read the prompts of a model's set, of a published set (`coco:FILE`, `parti:FILE`, `imagenet`), or of a file.

    Files are `.txt` (a prompt a line), `.csv`, `.tsv` and `.jsonl` (column `prompt` or `caption`) or `.json` (a list).
    Blank prompts are skipped. Raises one `UserError` that names `--prompts` and its value: no such set or file, a file
    that cannot be read, or the first prompts that the model cannot take, with their places.
    """
    name, kind, path, part = _parse(source, model)
    if kind is None and path is None:
        own = enumerate(model.prompt_sets[name], start=1)
        items = [Item(f"prompt {number}", f"{name}:{number}", text) for number, text in own]
    else:
        items = _read(source, kind, path)
    _check_texts(f"--prompts {source}", "prompts", ((item.place, item.text) for item in items), model)
    return _part(source, part, [Prompt(item.text, item.source) for item in items])


def prompt_facts(source: str, model: Model, prompts: list[Prompt]) -> dict[str, Any]:
    """Describe prompts for the manifest: the set, its file's SHA-256, how many, and a hash of their ids."""
    _name, _kind, path, _part = _parse(source, model)
    ids = list(dict.fromkeys(prompt.id for prompt in prompts))
    return {
        "set": source,
        "file_sha256": file_sha256(path) if path is not None else None,
        "prompts": len(ids),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }


def _parse(source: str, model: Model) -> tuple[str, str | None, Path | None, str]:
    """The name in a `--prompts`, its published set, its file, and the part to take; a model's set has neither."""
    sets = model.prompt_sets
    match = re.fullmatch(r"(.*?)#(\d+(?:-\d+)?)", source, flags=re.DOTALL)
    name, part = (match[1], match[2]) if match else (source, "")
    if name in sets:
        return name, None, None, part
    kind, colon, rest = name.partition(":")
    if kind in SETS:
        if not rest and (SETS[kind].needs_file or colon):
            raise UserError(f"--prompts {source}: needs its file", f"For example {kind}:{SETS[kind].file}")
        path = Path(rest) if rest else None
    else:
        kind, path = "", Path(name)
    if path is not None and not path.is_file():
        known = [*sets, *(f"{one}:FILE" if SETS[one].needs_file else one for one in SETS)]
        hint = f" {path}" if kind else f" and no prompt set{did_you_mean(name, [*sets, *SETS])}"
        raise UserError(
            f"--prompts {source}: no such file{hint}",
            f"The sets are {', '.join(known)}; or give a file that ends with {', '.join(READERS)}.",
        )
    return name, kind or None, path, part


def _read(source: str, kind: str | None, path: Path | None) -> list[Item]:
    """All prompts of a file or of a published set, blank ones skipped."""
    flag = f"--prompts {source}"
    try:
        if kind is not None:
            items = list(SETS[kind].read(path, flag))
        elif path is not None and (suffix := path.suffix.lower()) in READERS:
            unit = "entry" if suffix == ".json" else "line"
            texts = READERS[suffix](path, flag)
            items = [Item(f"{unit} {number}", f"{path.name}:{number}", text) for number, text in texts]
        else:
            raise UserError(f"{flag}: unknown file type", f"Give a file that ends with {', '.join(READERS)}.")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{flag}: cannot be read: {error}") from error
    kept = [item._replace(text=item.text.strip()) for item in items if item.text.strip()]
    if not kept:
        raise UserError(f"{flag}: contains no prompt", "Give a file with one prompt a line.")
    return kept


def _part(source: str, part: str, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts a part names: `100` by hash, in the order of the set; `0-100` the first hundred."""
    if not part:
        return prompts
    unique = list(dict.fromkeys(prompts))
    first, dash, last = part.partition("-")
    begin, end = (int(first), int(last)) if dash else (0, int(first))
    if not begin < end <= len(unique):
        raise UserError(f"--prompts {source}: there are {len(unique)} prompts", f"Take at most {len(unique)}.")
    if dash:
        return unique[begin:end]
    taken = set(
        sorted(unique, key=lambda one: hashlib.blake2b(f"part:{one.id}".encode(), digest_size=8).digest())[:end]
    )
    return [prompt for prompt in unique if prompt in taken]


# ---- Pictures with captions in a folder


class Captioned(NamedTuple):
    """A picture's file, its caption, and the place of the caption for messages."""

    path: Path
    caption: str
    place: str


def read_captioned(folder: Path, captions: Path | None, model: Model) -> list[Captioned]:
    """Return the pictures of a folder in the order of their names, or of the captions file.

    Raises `UserError` that names `--data` or `--captions`: no pictures, pictures without a caption, captions of missing
    pictures, captions the model cannot take.
    """
    listed = captions or next((folder / name for name in _CAPTION_FILES if (folder / name).is_file()), None)
    if listed is not None and not listed.is_file():
        raise UserError(f"--captions {listed}: no such file")
    try:
        found = list(_listed(listed, folder) if listed is not None else _beside(folder))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {folder}: cannot be read: {error}") from error
    if not found:
        raise UserError(
            f"--data {folder}: contains no picture ({', '.join(_PICTURES)})",
            "Give a folder of pictures, each with its caption in a .txt beside it; or a file of captions alone.",
        )
    flag = f"--data {folder}"
    missing = [f"{item.place}: no such picture {item.path.name}" for item in found if not item.path.is_file()]
    _refuse(flag, "captions", missing)
    _check_texts(flag, "captions", ((item.place, item.caption) for item in found), model)
    return found


def _beside(folder: Path) -> Iterator[Captioned]:
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


def _listed(path: Path, folder: Path) -> Iterator[Captioned]:
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
    """The rows of a captions file by key, with their line numbers; a malformed row has no keys."""
    suffix = path.suffix.lower()
    if suffix not in _CAPTION_SUFFIXES:
        raise UserError(
            f"--captions {path}: unknown file type", f"Give a file that ends with {', '.join(_CAPTION_SUFFIXES)}."
        )
    if suffix == ".jsonl":
        for number, row in _read_json_lines(path, f"--captions {path}"):
            yield number, row if isinstance(row, dict) else {}
    elif suffix == ".txt":
        for number, line in _read_lines(path):
            name, tab, caption = line.partition("\t")
            yield number, {"file": name.strip(), "caption": caption} if tab else {}
    else:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        table = csv.DictReader(lines, delimiter="," if suffix == ".csv" else "\t")
        for row in table:
            yield table.line_num, {str(key).strip().lower(): value for key, value in row.items()}
