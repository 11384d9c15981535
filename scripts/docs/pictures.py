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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from lantern_bench.models.families.lanterns.modules import load_tokenizer
from lantern_bench.report.draw import save_figure
from lantern_bench.utils.files import file_sha256
from scripts.docs.figures import Figure, cells_of
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
    "AR",
    "block SCD w32-row-maximal (lossless)",
    "LANTERN++ λ=5 jacobi w32-row-maximal (relaxed)",
    "LANTERN++ λ=5 static chain-7 (relaxed)",
    "LANTERN δ=0.1 static chain-7 k=100 (relaxed)",
)
_SCENES = 1_000
_COLUMNS = 10
_SIDE = 128
_GAP = 4


@dataclass(frozen=True)
class Series:
    """Cells of one method in the picture `frontier.png`, joined by a line."""

    label: str
    cells: tuple[str, ...]
    colour: str
    # of the label, in points from the last cell
    offset: tuple[float, float]
    side: str = "left"


_WINDOW = "w32-row-maximal"
_WINDOWS = ("w16-row-maximal", _WINDOW, "w64-row-maximal")
SERIES = (
    Series("ar", ("ar",), "black", (0, 12), "center"),
    Series(
        "speculative: strict, block",
        ("speculative chain-7", "speculative block chain-7"),
        "#0072B2",
        (-8, -26),
        "center",
    ),
    Series(
        "lantern++ on a chain, λ = 2, 3, 5",
        tuple(f"lantern++ chain-7 k=100 lambda={bound}" for bound in (2, 3, 5)),
        "#009E73",
        (10, -4),
    ),
    Series(
        "lantern on a chain, k = 2, 5",
        ("lantern static chain-7 k=2 delta=0.01", "lantern static chain-7 k=5 delta=0.2"),
        "#D55E00",
        (14, 0),
    ),
    Series("entropy on a chain", ("entropy chain-7 k=100 scale=0.1",), "#CC79A7", (14, 0)),
    Series(
        "scd, window 16, 32, 64",
        tuple(f"scd {window}" for window in _WINDOWS),
        "#882255",
        (0, -26),
        "center",
    ),
    Series(
        "block-scd, window 16, 32, 64",
        tuple(f"block-scd {window}" for window in _WINDOWS),
        "#661100",
        (0, -44),
        "center",
    ),
    Series(
        "lantern++ on a window, λ = 2, 3, 5",
        tuple(f"lantern++ jacobi {_WINDOW} k=100 lambda={bound}" for bound in (2, 3, 5)),
        "#009E73",
        (16, 26),
        "right",
    ),
    Series(
        "cool-sd on a window",
        tuple(f"cool-sd jacobi {_WINDOW} strength={strength} decay=0" for strength in (2, 3)),
        "#56B4E9",
        (40, -52),
        "center",
    ),
)


def frontier(out: Path) -> list[Path]:
    """Draw speed against distance of every cell of the run on a GPU; return the tables used."""
    cells = cells_of("frontier-h200")
    named = set(chain.from_iterable(series.cells for series in SERIES))
    figure, axes = pyplot.subplots(figsize=(8.6, 4.6))
    axes.axhspan(-1, 0, color="#eef3ee")
    for name, cell in cells.items():
        if name not in named and cell["temperature"].value and cell["distance"].value is not None:
            axes.plot(cell["speedup"].value, cell["distance"].value, "o", color="#aaaaaa", ms=4)
    for series in SERIES:
        speedups = [cells[name]["speedup"] for name in series.cells]
        distances_at = [cells[name]["distance"] for name in series.cells]
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
        axes.annotate(
            series.label,
            (x[-1], y[-1]),
            series.offset,
            textcoords="offset points",
            ha=series.side,
            va="center",
            color=series.colour,
        )
    axes.set_yscale("symlog", linthresh=0.02)  # most cells are below: they get half of the height
    axes.set_ylim(-0.012, 0.5)
    axes.set_yticks([0, 0.01, 0.1, 0.3], ["0", "0.01", "0.1", "0.3"])
    axes.set_xlabel("speedup over ar on an H200, 95% intervals")
    axes.set_ylabel("distance, at least (symlog)")
    axes.text(0.72, -0.0105, "lossless: 0", color="#557755")
    axes.text(3.95, -0.0105, "fast and close  ↘", color="#557755", ha="right")
    axes.text(3.95, 0.36, "gray: other cells", color="#888888", ha="right")
    axes.set_xlim(0.7, 4)
    save_figure(figure, out, dpi=160, bbox_inches="tight", metadata={"Software": None})
    folder = REFERENCE / "frontier-h200"
    return [folder / "speed.csv", folder / "quality.csv"]


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
        cell["name"] if cell["name"] == "AR" else f"{cell['name']} ({cell['output']})"
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
    rows.append([pictures[prompt, cells.index("AR")] for prompt in drawn])
    sheet(rows, [], ["rendered scenes", "through the tokenizer", "sampled by AR"]).save(out)
    return [PAGE, TOKENIZER]


def sheet(
    rows: Sequence[Sequence[Image.Image]], heads: Sequence[str], names: Sequence[str]
) -> Image.Image:
    """Lay pictures out in rows on white, with heads above the columns and names beside the rows."""
    step = _SIDE + _GAP
    head = 56 if heads else 0
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
    photograph(PAGE, {"summary": out})
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
