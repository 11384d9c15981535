"""Draw every picture of docs/pictures from committed runs, and record their sources.

    python -m scripts.docs.pictures [NAME...]          # all: `make screenshots`

`frontier.png` shows the speeds of the run `frontier-h200` against its distances. The other pictures
are made from the page of the reference run: a screenshot of its main chart; `distances.png`, some
captions in cells of growing distance; and `family.png`, rendered scenes, their reconstructions by
the bundled tokenizer, and `ar` pictures of the same captions. sources.json says which files each
picture was made from.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from lantern_bench.methods.catalog import METRICS
from lantern_bench.models.families.lanterns.modules import load_tokenizer
from lantern_bench.report.charts import symlog_ticks
from lantern_bench.report.draw import save_figure
from lantern_bench.utils.files import file_sha256
from scripts.docs.figures import Cell, Figure, cells_of
from scripts.docs.screenshots import photograph
from scripts.train_lanterns.part_tasks import held_out_scenes, reconstruct

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
SOURCES = PICTURES / "sources.json"
REFERENCE = ROOT / "results" / "reference"
PAGE = REFERENCE / "report.html"
TOKENIZER = (
    ROOT
    / "lantern_bench"
    / "models"
    / "families"
    / "lanterns"
    / "weights"
    / "tokenizer.safetensors"
)
_CAPTIONS = 3
_CELLS = (
    "ar",
    "block-scd w32-row-maximal (lossless)",
    "lantern++ jacobi w32-row-maximal lambda=5 (relaxed)",
    "lantern++ chain-7 lambda=5 (relaxed)",
    "lantern static chain-7 k=100 delta=0.1 (relaxed)",
)
_SCENES = 1_000
_COLUMNS = 5  # with more, the words beside the rows are too small on a page
_SIDE = 128
_GAP = 4


Offset: TypeAlias = tuple[float, float]  # of words from their point, in points to the right and up


class Point(NamedTuple):
    """A cell in the picture `frontier.png`, with the words beside it."""

    cell: str
    words: str
    offset: Offset


@dataclass(frozen=True)
class Series:
    """Cells of one method in the picture `frontier.png`, joined by a line."""

    label: str
    colour: str
    offset: Offset  # of the label from the last point
    points: Sequence[Point]


LARGEST = 0.5  # distance of the picture
_WINDOW = "w32-row-maximal"
ABOVE = (0, 13)
SERIES = (
    Series("ar", "black", (-14, 0), [Point("ar", "", ABOVE)]),
    Series(
        "speculative chain-7",
        "#0072B2",
        (-6, 32),
        [
            Point("speculative chain-7", "strict", (-8, 15)),
            Point("speculative block chain-7", "block", (16, 18)),
        ],
    ),
    Series(
        "lantern++ chain-7",
        "#009E73",
        (66, 0),
        [
            Point("lantern++ chain-7 k=100 lambda=2", "lambda=2", (38, -8)),
            Point("lantern++ chain-7 k=100 lambda=3", "lambda=3", (36, 8)),
            Point("lantern++ chain-7 k=100 lambda=5", "lambda=5", (38, 16)),
        ],
    ),
    Series(
        "lantern static chain-7",
        "#D55E00",
        (80, -2),
        [
            Point("lantern static chain-7 k=2 delta=0.01", "k=2 delta=0.01", (-60, -6)),
            Point("lantern static chain-7 k=5 delta=0.2", "k=5 delta=0.2", (-54, -4)),
        ],
    ),
    Series(
        "entropy chain-7",
        "#CC79A7",
        (60, 0),
        [Point("entropy chain-7 k=100 scale=0.1", "", ABOVE)],
    ),
    Series(
        "block-scd",
        "#661100",
        (-12, -36),
        [
            Point("block-scd w16-row-maximal", "w16", (-10, -14)),
            Point("block-scd w32-row-maximal", "w32", (2, -14)),
            Point("block-scd w64-row-maximal", "w64", (10, -24)),
        ],
    ),
    Series(
        "scd",
        "#882255",
        (-60, 34),
        [
            Point("scd w16-row-maximal", "w16", ABOVE),
            Point("scd w32-row-maximal", "w32", ABOVE),
            Point("scd w64-row-maximal", "w64", ABOVE),
        ],
    ),
    Series(
        "lantern++ jacobi w32",
        "#009E73",
        (-16, -34),
        [
            Point(f"lantern++ jacobi {_WINDOW} k=100 lambda=2", "lambda=2", (-6, -17)),
            Point(f"lantern++ jacobi {_WINDOW} k=100 lambda=3", "lambda=3", (-12, 19)),
            Point(f"lantern++ jacobi {_WINDOW} k=100 lambda=5", "lambda=5", (30, -13)),
        ],
    ),
    Series(
        "cool-sd jacobi w32",
        "#2A86BF",
        (4, 62),
        [
            Point(f"cool-sd jacobi {_WINDOW} strength=2 decay=0", "strength=2", (30, 14)),
            Point(f"cool-sd jacobi {_WINDOW} strength=3 decay=0", "strength=3", (-42, -13)),
        ],
    ),
)


def frontier(out: Path) -> list[Path]:
    """Draw speed against distance of every cell of the run on a GPU; return the tables used."""
    cells = cells_of("frontier-h200")
    points = chain.from_iterable(series.points for series in SERIES)
    named = {point.cell for point in points}
    figure, axes = pyplot.subplots(figsize=(8.6, 5.2))
    axes.axhspan(-1, 0, color="#eef3ee")
    for name, cell in cells.items():
        if name not in named and cell["temperature"].value and cell["distance"].value is not None:
            axes.plot(cell["speedup"].value, cell["distance"].value, "o", color="#aaaaaa", ms=4)
    for series in SERIES:
        _draw_series(axes, series, cells)
    # As on the report page: most cells are close to 0, and what is good is on top.
    linear_below = METRICS["distance"].linear_below or 0
    ticks = [tick for tick in symlog_ticks(linear_below) if tick < LARGEST]
    axes.set_yscale("symlog", linthresh=linear_below)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(LARGEST, -0.012)
    seconds = f"{cells['ar']['latency_s'].value:.3f} s per image"
    axes.set_xlabel(f"speedup over ar ({seconds}) on an H200, 95% intervals")
    axes.set_ylabel(f"distance (at least), log above {linear_below:g}")
    axes.text(0.72, -0.0105, "distance 0: lossless", color="#557755", va="top")
    axes.text(3.95, -0.0105, "fast and close  ↗", color="#557755", ha="right", va="top")
    axes.text(3.95, 0.42, "gray: other cells", color="#888888", ha="right")
    axes.set_xlim(0.7, 4)
    save_figure(figure, out, dpi=160, bbox_inches="tight", metadata={"Software": None})
    folder = REFERENCE / "frontier-h200"
    return [folder / "speed.csv", folder / "quality.csv"]


def _draw_series(axes: Axes, series: Series, cells: Mapping[str, Cell]) -> None:
    """Draw the points of a series with their intervals and words."""
    speedups = [cells[point.cell]["speedup"] for point in series.points]
    distances_at = [cells[point.cell]["distance"] for point in series.points]
    x = [figure.value for figure in speedups]
    y = [figure.value for figure in distances_at]
    axes.errorbar(
        x,
        y,
        xerr=_whiskers(speedups),
        yerr=_whiskers(distances_at),
        fmt="o-",
        color=series.colour,
        ecolor=(series.colour, 0.35),
        ms=6,
        lw=1,
    )
    texts = [(point.words, point.offset) for point in series.points]
    place = {"textcoords": "offset points", "ha": "center", "va": "center"}
    for (words, offset), *at in zip(texts, x, y, strict=True):
        axes.annotate(words, at, offset, color=series.colour, fontsize=9, **place)
    axes.annotate(
        series.label, (x[-1], y[-1]), series.offset, color=series.colour, weight="bold", **place
    )


def _whiskers(figures: Sequence[Figure]) -> list[list[float]]:
    """How far the intervals reach below and above the figures."""
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]


def pictures_of(page: Path) -> tuple[list[str], list[str], dict[tuple[int, int], Image.Image]]:
    """Read a report page.

    Returns:
        The names of its cells, its prompts, and the pictures by prompt and cell.
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
    cells = [
        cell["name"] if cell["name"] == "ar" else f"{cell['name']} ({cell['output']})"
        for cell in data["cells"]
    ]
    return cells, data["prompts"], pictures


def distances(out: Path) -> list[Path]:
    """Draw some captions in cells of growing distance: cells in columns, captions in rows."""
    cells, prompts, pictures = pictures_of(PAGE)
    rows = [[pictures[prompt, cells.index(cell)] for cell in _CELLS] for prompt in range(_CAPTIONS)]
    sheet(rows, _CELLS, prompts).save(out)
    return [PAGE]


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
    rows.append([pictures[prompt, cells.index("ar")] for prompt in drawn])
    sheet(rows, [], ["rendered scenes", "through the tokenizer", "sampled by ar"]).save(out)
    return [PAGE, TOKENIZER]


def sheet(
    rows: Sequence[Sequence[Image.Image]], heads: Sequence[str], names: Sequence[str]
) -> Image.Image:
    """Lay pictures out in rows on white, with heads above the columns and names beside the rows."""
    step = _SIDE + _GAP
    head = 72 if heads else 0  # four lines
    font = ImageFont.truetype(findfont("DejaVu Sans"), 13)
    canvas = Image.new("RGB", (step * (len(rows[0]) + 1), head + step * len(rows)), "white")
    draw = ImageDraw.Draw(canvas)
    for column, text in enumerate(heads, start=1):
        draw.multiline_text((column * step, 0), "\n".join(wrap(text, 17)), "black", font)
    for row, (pictures, name) in enumerate(zip(rows, names, strict=False)):
        draw.multiline_text((0, head + row * step), "\n".join(wrap(name, 16)), "black", font)
        for column, picture in enumerate(pictures, start=1):
            canvas.paste(
                picture.resize((_SIDE, _SIDE), Image.Resampling.NEAREST),
                (column * step, head + row * step),
            )
    return canvas


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
