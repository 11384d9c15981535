"""Prompts to measure with: a set the family brings, a published set, or a file of one's own, and a part of any of them.

Every prompt is checked by the family before any model is loaded, and all that is wrong is said at once. `NAME#100`
takes 100 prompts by a hash of their text, so that everybody takes the same ones and a larger part holds the smaller;
`NAME#0-100` takes the first hundred. Which prompt becomes which image is decided in `config/plan.py`. No torch here.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.config.plan import Prompt
from lantern_bench.errors import UserError, did_you_mean
from lantern_bench.models.default_prompts import class_prompt
from lantern_bench.models.io.files import file_sha256
from lantern_bench.models.registry import Family

# ---- Reading prompts from files of one's own: text, CSV, TSV, JSON lines, a JSON list


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


# ---- Published prompt sets, read from the files their authors publish: MS-COCO captions, PartiPrompts, ImageNet cl

_CLASSES = 1000


class PublishedSet(NamedTuple):
    """A set: how it is read, whether it needs a file, and which file that is (for messages)."""

    read: Callable[[Path | None, str], Iterator[Item]]
    needs_file: bool
    file: str


def _coco(path: Path | None, shown: str, *, longest: bool) -> Iterator[Item]:
    chosen: dict[int, str] = {}
    for image, caption in _annotations(path, shown):
        # Lengths are compared as the captions stand in the file, spaces at their ends included.
        if image not in chosen or (longest and len(caption) > len(chosen[image])):
            chosen[image] = caption
    for image, caption in chosen.items():
        yield Item(f"image {image}", f"coco:{image}", caption)


def _annotations(path: Path | None, shown: str) -> Iterator[tuple[int, str]]:
    data: Any = parsed_json(path, shown) if path is not None else None
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise UserError(
            f"--prompts {shown}: has no list of annotations",
            "Give the official file, captions_val2017.json or captions_val2014.json.",
        )
    for number, row in enumerate(rows, start=1):
        image, caption = (row.get("image_id"), row.get("caption")) if isinstance(row, dict) else (None, None)
        if not isinstance(image, int) or not isinstance(caption, str):
            raise UserError(
                f"--prompts {shown} annotation {number}: has no image_id and caption",
                "Of MS-COCO's annotations the files of captions are needed, not instances or keypoints.",
            )
        yield image, caption


def _coco_longest(path: Path | None, shown: str) -> Iterator[Item]:
    yield from _coco(path, shown, longest=True)


def _coco_first(path: Path | None, shown: str) -> Iterator[Item]:
    yield from _coco(path, shown, longest=False)


def _parti(path: Path | None, shown: str) -> Iterator[Item]:
    if path is not None:
        for item in read_columns(path, "\t", shown):
            yield item._replace(source=f"parti:{item.place.removeprefix('line ')}")


def _imagenet(path: Path | None, shown: str) -> Iterator[Item]:
    names = [""] * _CLASSES if path is None else _class_names(path, shown)
    for number, name in enumerate(names):
        yield Item(f"class {number}", f"imagenet:{number}", class_prompt(number, name))


def _class_names(path: Path, shown: str) -> list[str]:
    """The names of the classes in order: a line each, or JSON as a list or as {"0": [wordnet id, name]}."""
    if path.suffix.lower() == ".json":
        data = parsed_json(path, shown)
        rows = [data.get(str(number)) for number in range(len(data))] if isinstance(data, dict) else data
        names = [row[-1] if isinstance(row, list) and row else row for row in rows] if isinstance(rows, list) else []
    else:
        names = path.read_text(encoding="utf-8-sig").splitlines()
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise UserError(f"--prompts {shown} line {number + 1}: has no name for class {number}")
    if len(names) != _CLASSES:
        raise UserError(f"--prompts {shown}: names {len(names)} classes, and there are {_CLASSES}")
    return [str(name).strip() for name in names]


SETS: dict[str, PublishedSet] = {
    "coco": PublishedSet(_coco_longest, True, "captions_val2017.json"),
    "coco-longest": PublishedSet(_coco_longest, True, "captions_val2017.json"),
    "coco-first": PublishedSet(_coco_first, True, "captions_val2017.json"),
    "parti": PublishedSet(_parti, True, "PartiPrompts.tsv"),
    "imagenet": PublishedSet(_imagenet, False, "a file with a name a line"),
}
"""The sets by the word before the colon: `coco:captions_val2017.json`."""


# ----

_SHOWN = 5


class _Asked(NamedTuple):
    """What `--prompts` says: a name or file, the published set it belongs to, and the part to take."""

    name: str
    kind: str | None
    path: Path | None
    part: str


def load_prompts(source: str, family: Family) -> list[Prompt]:
    """Read the prompts of a family's set, of a published set (`coco:FILE`, `parti:FILE`, `imagenet`), or of a file.

    Files are `.txt` with one a line, `.csv`, `.tsv` and `.jsonl` by prompt or caption, `.json` as a list. Empty ones
    are left out. Raises one `UserError` that names `--prompts` and its value: no such set or file, a file that cannot
    be read, or the first prompts the family cannot take, with their places.
    """
    asked = _asked(source, family)
    sets = family.prompt_sets()
    if asked.name in sets and asked.kind is None:
        own = enumerate(sets[asked.name], start=1)
        items = [Item(f"prompt {number}", f"{asked.name}:{number}", text) for number, text in own]
    else:
        items = _read(source, asked)
    _check(source, items, family)
    return _part(source, asked.part, [Prompt(item.text, item.source) for item in items])


def prompt_facts(source: str, family: Family, prompts: list[Prompt]) -> dict[str, Any]:
    """What a manifest says of the prompts: the set as typed, its file's SHA-256, how many, and a hash of their ids."""
    asked = _asked(source, family)
    ids = list(dict.fromkeys(prompt.id for prompt in prompts))
    return {
        "set": source,
        "file_sha256": file_sha256(asked.path) if asked.path is not None else None,
        "prompts": len(ids),
        "ids_sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest(),
    }


def _asked(source: str, family: Family) -> _Asked:
    sets = family.prompt_sets()
    match = re.fullmatch(r"(.*?)#(\d+(?:-\d+)?)", source, flags=re.DOTALL)
    name, part = (match[1], match[2]) if match else (source, "")
    if name in sets:
        return _Asked(name, None, None, part)
    kind, colon, rest = name.partition(":")
    if kind in SETS:
        known = SETS[kind]
        if not rest and (known.needs_file or colon):
            raise UserError(f"--prompts {source}: needs its file", f"For example {kind}:{known.file}")
        path = Path(rest) if rest else None
    else:
        kind, path = "", Path(name)
    if path is not None and not path.is_file():
        known_names = [*sets, *(f"{one}:FILE" if SETS[one].needs_file else one for one in SETS)]
        raise UserError(
            f"--prompts {source}: no such file" + (f" {path}" if kind else f" and no prompt set{_near(name, sets)}"),
            f"The sets are {', '.join(known_names)}; or give a file that ends with {', '.join(READERS)}.",
        )
    return _Asked(name, kind or None, path, part)


def _near(name: str, sets: Any) -> str:
    return did_you_mean(name, [*sets, *SETS])


def _read(source: str, asked: _Asked) -> list[Item]:
    """All prompts of a file or of a published set, empty ones left out."""
    try:
        if asked.kind is not None:
            items = list(SETS[asked.kind].read(asked.path, source))
        else:
            path = asked.path or Path(asked.name)
            reader = READERS.get(path.suffix.lower())
            if reader is None:
                raise UserError(f"--prompts {source}: unknown kind of file", f"The kinds are {', '.join(READERS)}.")
            items = list(reader(path, source))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--prompts {source}: cannot be read: {error}") from error
    kept = [item._replace(text=item.text.strip()) for item in items if item.text.strip()]
    if not kept:
        raise UserError(f"--prompts {source}: holds no prompt", "Give a file with one prompt a line.")
    return kept


def _part(source: str, part: str, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts a part names: `100` by hash, in the order of the set; `0-100` the first hundred."""
    if not part:
        return prompts
    unique = list(dict.fromkeys(prompts))
    first, dash, last = part.partition("-")
    begin, end = (int(first), int(last)) if dash else (0, int(first))
    if not begin < end <= len(unique):
        raise UserError(f"--prompts {source}: there are {len(unique)} prompts", "Take fewer, or other ones.")
    if dash:
        return unique[begin:end]
    taken = set(sorted(unique, key=_lot)[:end])
    return [prompt for prompt in unique if prompt in taken]


def _lot(prompt: Prompt) -> str:
    return hashlib.blake2b(f"part:{prompt.id}".encode(), digest_size=8).hexdigest()


def _check(source: str, items: list[Item], family: Family) -> None:
    wrong: list[str] = []
    advice: str | None = None
    for item in items:
        try:
            family.check_prompt(item.text)
        except UserError as error:
            wrong.append(f"{item.place}: {error.message}")
            advice = advice or error.advice
    if len(wrong) == 1:
        raise UserError(f"--prompts {source} {wrong[0]}", advice)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        listed = "\n  ".join([*wrong[:_SHOWN], *more])
        raise UserError(f"--prompts {source}: {len(wrong)} prompts cannot be used\n  {listed}", advice)
