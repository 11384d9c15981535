"""Draw every picture of docs/pictures from committed runs, and record their sources.

    python -m scripts.docs.pictures [NAME...]          # all: `make screenshots`

`frontier.png` shows speed against distance (scripts/docs/frontier_picture.py). The other pictures
are made from the page of the reference run: a screenshot of its main chart; `distances.png`, some
captions in cells of growing distance, with their FIDs; and `family.png`, rendered scenes, their
reconstructions by the bundled tokenizer, and `ar` pictures of the same captions. sources.json says
which files each picture was made from.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from lantern_bench.models.families.lanterns.modules import load_tokenizer
from lantern_bench.utils.files import file_sha256
from scripts.docs.figures import REFERENCE, ROOT, WEIGHTS, Cell, cells_of, output
from scripts.docs.frontier_picture import frontier
from scripts.docs.screenshots import photograph
from scripts.train_lanterns.part_tasks import held_out_scenes, reconstruct

PICTURES = ROOT / "docs" / "pictures"
SOURCES = PICTURES / "sources.json"
PAGE = REFERENCE / "report.html"
TOKENIZER = WEIGHTS / "tokenizer.safetensors"
_CAPTIONS = 2
# Cells of the reference run, which has pictures. Another run has enough of them for FID.
_CELLS = (
    "ar",
    "lantern++ chain-7 k=100 lambda=2",
    "lantern++ chain-7 k=100 lambda=5",
    "lantern static chain-7 k=100 delta=0.1",
)
_FID = "quality"
_SCENES = 1_000
_COLUMNS = 5  # with more, the words beside the rows are too small on a page
# Pixels. Pages show a sheet of five columns at half its size, 860 pixels wide.
_SIDE = 280
_GAP = 8
_FONT = 26
_LINE = 34


def pictures_of(page: Path) -> tuple[list[str], list[str], dict[tuple[int, int], Image.Image]]:
    """Read a report page.

    Returns:
        The ids of its cells, its prompts, and the pictures by prompt and cell.
    """
    text = re.search(
        r'<script type="application/json" id="data">(.*?)</script>',
        page.read_text("utf-8"),
        re.DOTALL,
    )
    if text is None:
        raise ValueError(f"{page} is no report page")
    data = json.loads(text[1])
    thumbs = [
        Image.open(io.BytesIO(base64.b64decode(thumb))).convert("RGB") for thumb in data["thumbs"]
    ]
    pictures = {
        (row["prompt"], row["cell"]): thumbs[row["thumb"]]
        for row in data["pictures"]
        if not row["repeat"]
    }
    cells = [cell["cell"] for cell in data["cells"]]
    return cells, data["prompts"], pictures


def distances(out: Path) -> list[Path]:
    """Draw some captions in cells of growing distance: cells in columns, captions in rows."""
    ids, prompts, pictures = pictures_of(PAGE)
    cells = {name: cells_of("reference")[name] for name in _CELLS}
    columns = [ids.index(cell["cell_id"].value) for cell in cells.values()]
    rows = [[pictures[prompt, column] for column in columns] for prompt in range(_CAPTIONS)]
    heads = [head_of(name, cell) for name, cell in cells.items()]
    title = "Single images look alike; FID over 512 images finds the last two"
    sheet(rows, heads, prompts, title=title).save(out)
    summaries = [folder / "summary.csv" for folder in (REFERENCE, REFERENCE / _FID)]
    return [PAGE, REFERENCE / "speed.csv", *summaries]


def head_of(name: str, cell: Cell) -> str:
    """The words above the pictures of a cell: name, output, distance, FID, the range for `ar`."""
    words = f"{name}\n{output(cell)}\ndistance {cell['distance'].value:.3f}"
    scored = cells_of(_FID)[name]
    if name == "ar":
        low, high = (scored[f"fid_ar_spread_{end}"].value for end in ("low", "high"))
        beside = f"range\n{low:.1f} to {high:.1f}"
    else:
        beside = {"within": "in range", "outside": "outside"}[scored["fid_verdict"].value]
    return f"{words}\nFID {scored['fid'].value:.1f}, {beside}"


def family(out: Path) -> list[Path]:
    """Three rows: scenes, reconstructions, `ar` pictures of the captions that the run has."""
    cells, prompts, pictures = pictures_of(PAGE)
    scenes, attributes = held_out_scenes(_SCENES)
    numbers = {item.caption(): number for number, item in reversed(list(enumerate(attributes)))}
    drawn = [prompt for prompt, caption in enumerate(prompts) if caption in numbers][:_COLUMNS]
    scenes = scenes[[numbers[prompts[prompt]] for prompt in drawn]]
    painted = [
        rows.permute(0, 2, 3, 1).numpy() for rows in (scenes, reconstruct(load_tokenizer(), scenes))
    ]
    rows = [[Image.fromarray(np.asarray(picture)) for picture in row] for row in painted]
    rows.append([pictures[prompt, cells.index("ar-t1")] for prompt in drawn])
    sheet(rows, [], ["rendered scenes", "through the tokenizer", "sampled by ar"]).save(out)
    return [PAGE, TOKENIZER]


def sheet(
    rows: Sequence[Sequence[Image.Image]],
    heads: Sequence[str],
    names: Sequence[str],
    *,
    title: str = "",
) -> Image.Image:
    """Lay pictures out in rows on white, with heads above the columns and names beside the rows."""
    step = _SIDE + _GAP
    heads = [wrap_lines(head, 19) for head in heads]
    above = 2 * _LINE if title else 0
    head = above + _GAP + _LINE * max((text.count("\n") + 1 for text in heads), default=0)
    font = ImageFont.truetype(findfont("DejaVu Sans"), _FONT)
    canvas = Image.new("RGB", (step * (len(rows[0]) + 1), head + step * len(rows)), "white")
    draw = ImageDraw.Draw(canvas)
    words: dict[str, Any] = {"fill": "black", "font": font, "spacing": _LINE - _FONT}
    bold = ImageFont.truetype(findfont("DejaVu Sans:bold"), _FONT + 4)
    draw.text((_GAP, 0), title, fill="black", font=bold)
    for column, text in enumerate(heads, start=1):
        draw.multiline_text((column * step, above), text, **words)
    for row, (pictures, name) in enumerate(zip(rows, names, strict=False)):
        draw.multiline_text((_GAP, head + row * step), wrap_lines(name, 16), **words)
        for column, picture in enumerate(pictures, start=1):
            canvas.paste(
                picture.resize((_SIDE, _SIDE), Image.Resampling.NEAREST),
                (column * step, head + row * step),
            )
    return canvas


def wrap_lines(text: str, width: int) -> str:
    """Wrap every line of a text."""
    lines: list[str] = []
    for line in text.splitlines():
        lines += wrap(line, width, break_on_hyphens=False)
    return "\n".join(lines)


def charts(out: Path) -> list[Path]:
    """Photograph the main chart of the report page."""
    photograph(PAGE, {"summary": out}, width=900)
    return [PAGE]


DRAWN = {
    "frontier.png": frontier,
    "distances.png": distances,
    "family.png": family,
    "report-charts.png": charts,
}


def main(names: Sequence[str]) -> None:
    """Draw these pictures, and write the hashes of their sources beside those of the others."""
    sources: dict[str, Any] = (
        json.loads(SOURCES.read_text(encoding="utf-8")) if SOURCES.is_file() else {}
    )
    for name in names:
        files = DRAWN[name](PICTURES / name)
        sources[name] = {file.relative_to(ROOT).as_posix(): file_sha256(file) for file in files}
        print(PICTURES / name)
    SOURCES.write_text(json.dumps(sources, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(DRAWN))
