"""Published prompt sets, read from the files their authors publish: MS-COCO captions, PartiPrompts, ImageNet classes.

MS-COCO has several captions an image: the LANTERN authors took the longest of each, images in the order in which the
annotations name them, and so does `coco`; `coco-first` takes the first. Nothing is downloaded here, and which prompts
of a set are taken is decided in `prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lantern_bench.errors import UserError
from lantern_bench.measure.prompt_files import Item, parsed_json, read_columns
from lantern_bench.models.classes import class_prompt

__all__ = ["SETS", "PublishedSet"]

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
