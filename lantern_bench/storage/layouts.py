"""Images of a run in the layouts that other programs read: scorers, and decoders of tokens.

GenEval and DPG-Bench leave out what is missing without a word, so an incomplete run is refused.
`official_scores.py` reads their results. docs/quality.md describes the layouts.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench.storage.pictures import read_rgb, read_tokens
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import load_runs, no_pixels
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import check_writable, write_file

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("geneval", "dpg", "folder", "tokens")
_FILES = {"folder": ".png", "tokens": ".safetensors"}  # layouts with a file for every image
PICTURES_PER_PROMPT = 4  # of published scores, by both scorers

DecoderInput: TypeAlias = "Callable[[str, Tensor], Mapping[str, Tensor]]"
"""`Model.decoder_input` of the model with the given name."""


@dataclass(frozen=True)
class ExportedPrompt:
    """A prompt of one cell."""

    number: int  # in the order of the run, from 0, the same in all cells
    text: str
    metadata: Mapping[str, Any]
    records: Sequence[Row]  # of its finished images, in order of their repeats

    def files(self, layout: str, count: int) -> dict[str, Sequence[Row]]:
        """Return the pictures in the folder of the cell, with the records that each shows.

        Args:
            layout: One of `LAYOUTS`.
            count: How many images of a prompt a scorer reads. Other layouts get all.

        Raises:
            UserError: The prompt lacks the id that names its picture.
        """
        if layout == "dpg":
            return {f"{self._item()}.png": self.records[:count]}
        form = "{:05d}/samples/{:04d}.png"
        if layout in _FILES:
            form = "{:05d}-{:04d}" + _FILES[layout]
            count = len(self.records)
        return {
            form.format(self.number, place): [record]
            for place, record in enumerate(self.records[:count])
        }

    def _item(self) -> str:
        """The id of the prompt. The scorer reads names up to the first dot."""
        item = str(self.metadata.get("item_id", self.metadata.get("id", "")))
        if not item or not set("./\\,").isdisjoint(item):
            raise UserError(
                f"--layout dpg: {item!r} is no id of DPG-Bench, of the prompt {self.text[:60]!r}",
                "Decode its prompts: sweep --prompts with its folder or its dpg_bench.csv.",
            )
        return item


def prompts_by_cell(records: Iterable[Row]) -> dict[str, list[ExportedPrompt]]:
    """Return the prompts of each cell. All cells have all prompts, in the order of the run.

    A text that stands twice in the prompt file is two prompts.
    """
    firsts: dict[Any, Row] = {}
    images: dict[Any, list[Row]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record["order_index"]):
        name = (record["prompt_source"], record["prompt_id"])
        firsts.setdefault(name, record)
        of_cell = images[record["cell_id"], name]
        if record["status"] == "ok" and record["image"]:
            of_cell.append(record)
    return {
        cell_id: [
            ExportedPrompt(
                number=number,
                text=first["prompt"],
                metadata=first["prompt_metadata"] or {},
                records=sorted(images[cell_id, name], key=lambda record: record["repeat"]),
            )
            for number, (name, first) in enumerate(firsts.items())
        ]
        for cell_id in dict.fromkeys(cell_id for cell_id, _ in list(images))
    }


def pictures_per_prompt(cells: Mapping[str, Sequence[ExportedPrompt]]) -> int:
    """Return how many pictures of each prompt scorers get: four, or what all prompts have."""
    counts = [min(len(prompt.records) for prompt in prompts) for prompts in cells.values()]
    return min(PICTURES_PER_PROMPT, *counts)


def _tokens_alone(_model: str, tokens: Tensor) -> Mapping[str, Tensor]:
    return {"tokens": tokens}


def export_run(
    folder: Path, out: Path, layout: str, decoder_input: DecoderInput = _tokens_alone
) -> int:
    """Write the images of a run, one folder for each cell.

    Args:
        folder: The run directory.
        out: The folder to write, which must not exist.
        layout: One of `LAYOUTS`.
        decoder_input: Returns the arrays that the layout `tokens` has for an image.

    Returns:
        How many pictures of each prompt a scorer reads.

    Raises:
        UserError: The prompts lack what the layout needs, or `out` exists or cannot be written.
        RefusedError: Images of the run are missing, or their pictures or tokens.
    """
    if out.exists():
        raise UserError(f"DIR {out}: exists already", "Give a new folder.")
    check_writable(out, "DIR")
    (run,) = load_runs([folder]).values()
    if run.incomplete:
        raise RefusedError(f"{folder}: {run.incomplete}", "Scorers do not see what is missing.")
    without_pixels = no_pixels(run.manifest)
    if without_pixels is not None and layout != "tokens":
        raise RefusedError(
            f"{folder}: {without_pixels}",
            "Scorers need pictures. --layout tokens writes the input of the model's own decoder.",
        )
    cells = prompts_by_cell(rows_of(run.records))
    count = pictures_per_prompt(cells)

    export = _Export(run=folder, layout=layout, count=count, decoder_input=decoder_input)
    # Renamed when it is complete: a partial folder would be scored without a word.
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for cell_id, prompts in cells.items():
            for prompt in prompts:
                export.write(prompt, partial / cell_id)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


@dataclass(frozen=True)
class _Export:
    """How the prompts of a run are written."""

    run: Path
    layout: str
    count: int  # images of a prompt that a scorer reads
    decoder_input: DecoderInput

    def write(self, prompt: ExportedPrompt, folder: Path) -> None:
        """Write a prompt into the folder of its cell."""
        if self.layout == "geneval":
            _write_metadata(prompt, folder)
        for name, records in prompt.files(self.layout, self.count).items():
            path = folder / name
            if path.exists():
                raise UserError(
                    f"--layout {self.layout}: two prompts have the id {path.stem}", "Rename one."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            pictures = [self.run / record["image"] for record in records]
            if self.layout == "dpg":
                _write_grid(pictures, path)
            elif self.layout == "tokens":
                self._write_tokens(records[0], path)
            else:
                shutil.copyfile(pictures[0], path)
            if self.layout in _FILES:
                write_file(path.with_suffix(".txt"), prompt.text.encode() + b"\n")

    def _write_tokens(self, record: Row, path: Path) -> None:
        """Write the tokens of an image as a batch of one image."""
        from safetensors.torch import save

        tokens = read_tokens(self.run / record["image"])
        if tokens is None:
            raise RefusedError(
                f"{self.run / record['image']}: is missing, or holds no tokens",
                f"lantern-bench check-run {self.run} names all such files.",
            )
        arrays = self.decoder_input(record["model"], tokens[None].long())
        whole = {name: array.contiguous() for name, array in arrays.items()}
        write_file(path, save(whole))


def _write_metadata(prompt: ExportedPrompt, folder: Path) -> None:
    """Write the line that GenEval reads beside the pictures of a prompt."""
    if not {"tag", "include"} <= prompt.metadata.keys():
        raise UserError(
            f"--layout geneval: the prompt {prompt.text[:60]!r} has no tag and include",
            "Decode the prompts of GenEval: sweep --prompts evaluation_metadata.jsonl",
        )
    line = json.dumps({**prompt.metadata, "prompt": prompt.text})
    write_file(folder / f"{prompt.number:05d}" / "metadata.jsonl", line.encode() + b"\n")


def _write_grid(pictures: Sequence[Path], path: Path) -> None:
    """Write up to four pictures in two rows: the first ones stand above."""
    from PIL import Image

    opened = [read_rgb(picture) for picture in pictures]
    width, height = opened[0].size
    grid = Image.new("RGB", (2 * width, 2 * height))
    for number, picture in enumerate(opened):
        row, column = divmod(number, 2)
        grid.paste(picture, (column * width, row * height))
    grid.save(path)
