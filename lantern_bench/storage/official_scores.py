"""Read result files of official scorers, GenEval and DPG-Bench, into the scores of a run.

The scorers leave out pictures that they do not find, so the pictures in a file are counted against
those that `layouts.py` exports.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from lantern_bench.storage.layouts import ExportedPrompt, pictures_per_prompt, prompts_by_cell
from lantern_bench.storage.run_directory import first_of, read_records
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.files import file_sha256, read_text

_VERSION = 1  # of both protocols


class ImportedScores(NamedTuple):
    """What `import_scores` read."""

    protocol: str
    images: Counter[str]  # images with a score, by cell
    missing: dict[str, str]  # which prompts lack scores, by cell


class _GenEvalLine(msgspec.Struct):
    """A line of GenEval's results."""

    filename: str
    tag: str
    prompt: str
    correct: bool


class _Scored(NamedTuple):
    """A scored picture file."""

    location: str  # for messages
    path: str
    scores: list[float]  # of the images that it shows
    prompt: str | None = None  # as the scorer read it
    category: str | None = None


def import_scores(folder: Path, file: Path, cell: str | None = None) -> ImportedScores:
    """Add the results of an official scorer to the scores of a run.

    Args:
        folder: The run directory.
        file: The results: JSON lines of GenEval, or the text of DPG-Bench.
        cell: The cell of pictures whose path names the folder of no cell.

    Raises:
        UserError: The file is damaged, or has pictures that are not of the run.
        RefusedError: The run is in use, or has no images.
    """
    text = read_text(file)
    cells = prompts_by_cell(read_records(folder))
    protocol = "geneval" if text.startswith("{") else "dpg"
    count = pictures_per_prompt(cells)
    waiting = _exported(cells, protocol, count)

    # 1. The rows of images.
    rows: list[Row] = []
    images: Counter[str] = Counter()
    for scored in _READERS[protocol](text, file):
        cell_id, name = _place(scored.path, protocol)
        if cell is not None and cell_id not in cells:
            cell_id = cell
        records = waiting.pop((cell_id, name), [])
        if len(records) != len(scored.scores) or scored.prompt not in (None, records[0]["prompt"]):
            raise UserError(
                f"{scored.location}: {scored.path} with {len(scored.scores)} scores is no picture "
                "that `export` writes of this run, or stands twice",
                f"Score the exported folder of a cell, or give --cell, one of {', '.join(cells)}; "
                f"with {count} pictures a prompt.",
            )
        images[cell_id] += len(records)
        for record, score in zip(records, scored.scores, strict=True):
            row = {"level": "image", "cell_id": cell_id, "record_key": record["record_key"]}
            rows.append(row | {"category": scored.category, protocol: score})

    # 2. The rows of cells, with what is missing, and of categories without scores of images.
    left: dict[str, dict[str, None]] = defaultdict(dict)
    for (cell_id, _), records in waiting.items():
        left[cell_id][records[0]["prompt"]] = None
    missing = {cell_id: _in_words(list(left[cell_id]), len(cells[cell_id])) for cell_id in left}
    for cell_id, number in images.items():
        row = {"level": "cell", "cell_id": cell_id, "n": number}
        rows.append(row | {"note": missing.get(cell_id)})
        for category, share in _categories(text).items():
            rows.append(row | {"level": "category", "category": category, protocol: share})

    about = {"name": protocol, "version": _VERSION, "file_sha256": file_sha256(file)}
    with RunStore.to_score(folder) as store:
        protocols = store.manifest.get("protocols", {})
        store.update_manifest(protocols={**protocols, protocol: about})
        for row in rows:
            store.append_score(row | {"protocol": protocol, "protocol_version": _VERSION})
    return ImportedScores(protocol, images, missing)


def _exported(
    cells: Mapping[str, Sequence[ExportedPrompt]], protocol: str, count: int
) -> dict[tuple[str, str], Sequence[Row]]:
    """Return the records in each exported picture, by cell and path below the cell's folder."""
    records: dict[tuple[str, str], Sequence[Row]] = {}
    for cell_id, prompts in cells.items():
        for prompt in prompts:
            for name, shown in prompt.files(protocol, count).items():
                records[cell_id, name] = shown
    return records


def _place(path: str, protocol: str) -> tuple[str, str]:
    """Return the folder of the cell in the path of a picture, and the path below this folder."""
    parts = ("", *PurePosixPath(path.replace("\\", "/")).parts)
    if protocol == "geneval":
        return parts[-4] if len(parts) > 3 else "", "/".join(parts[-3:])
    # The scorer reads names up to the first dot.
    return parts[-2], f"{parts[-1].partition('.')[0]}.png"


def _in_words(missing: list[str], count: int) -> str:
    named = first_of([repr(text[:40]) for text in missing])
    return f"incomplete: {len(missing)} of {count} prompts lack scores: {named}"


def _geneval(text: str, file: Path) -> Iterator[_Scored]:
    """Yield the pictures of GenEval's results, a JSON object each."""
    decode = msgspec.json.Decoder(_GenEvalLine).decode
    for number, content in enumerate(text.strip("\n").split("\n"), start=1):
        location = f"{file} line {number}"
        try:
            line = decode(content)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{location}: no result of GenEval: {error}",
                "Give the file that evaluate_images.py wrote.",
            ) from error
        yield _Scored(location, line.filename, [float(line.correct)], line.prompt, line.tag)


# ---- DPG-Bench: a line of text for each grid, then the percent of each category

_PART = re.compile(r"L(\d) category scores:")
_CATEGORY = re.compile(r"\t(.+): ([\d.]+)")


def _dpg(text: str, file: Path) -> Iterator[_Scored]:
    """Yield the pictures of DPG-Bench's results: path, scores and their mean."""
    pictures = _PART.split(text)[0].partition("DPG-Bench score:")[0]
    for number, content in enumerate(pictures.split("\n"), start=1):
        if not content:
            continue
        path, *numbers = content.split(", ")
        try:
            *scores, mean = map(float, numbers)
            is_mean = abs(sum(scores) / len(scores) - mean) < 1e-3
        except (ValueError, ZeroDivisionError):
            is_mean = False
        if not is_mean:
            raise UserError(
                f"{file} line {number}: {content[:80]!r} is no path, its scores and their mean",
                "Give the file that compute_dpg_bench.py wrote, of one run.",
            )
        yield _Scored(f"{file} line {number}", path, scores)


def _categories(text: str) -> dict[str, float]:
    """Return the shares of the categories: `entity` of level 1, `L2 color` of level 2."""
    shares = {}
    _, *parts = _PART.split(text)
    for level, content in zip(parts[::2], parts[1::2], strict=True):
        for name, percent in _CATEGORY.findall(content):
            shares[name if level == "1" else f"L{level} {name}"] = float(percent) / 100
    return shares


_READERS: dict[str, Callable[[str, Path], Iterator[_Scored]]] = {"geneval": _geneval, "dpg": _dpg}
