"""Prompts from a set of the model, a published set or a file; and pictures with captions in a folder. Without torch."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.models.model import Model
from lantern_bench.prompts.prompt import Prompt, class_prompt
from lantern_bench.prompts.prompt_files import (
    SUFFIXES,
    _check_texts,
    _parse_json,
    _rows,
    _text_under,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import file_sha256
from lantern_bench.utils.text import did_you_mean

# Published sets, by the word before the colon, and their files; imagenet also stands alone.
SETS = {
    "coco": "captions_val2017.json",
    "coco-first": "captions_val2017.json",
    "parti": "PartiPrompts.tsv",
    "imagenet": "a file with a name a line",
}
_IMAGENET_CLASSES = 1000
_PROMPT_KEYS = ("prompt", "caption")


class Item(NamedTuple):
    """A prompt or caption in a file."""

    location: str  # for messages: `line 3`
    source: str  # what its set calls it: `captions.txt:3`
    text: str


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
