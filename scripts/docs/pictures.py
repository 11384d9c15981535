"""Draw every picture of docs/pictures from committed runs, and record their sources.

    python -m scripts.docs.pictures [NAME...]          # all: `make screenshots`

`frontier.png` shows the speeds of the run `frontier-h200` against its distances. The other pictures
are made from the page of the reference run: a screenshot of its charts; `all-cells.png`, some
captions in all cells; and `family.png`, rendered scenes, their reconstructions by the bundled
tokenizer, and `ar` pictures of the same captions. sources.json says which files each picture was
made from.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from lantern_bench.models.families.lanterns.modules import load_tokenizer
from lantern_bench.report.charts import curve_tables, fronts, run_styles
from lantern_bench.report.draw import save_figure, to_matplotlib
from lantern_bench.storage.run_directory import load_runs
from lantern_bench.utils.files import file_sha256
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
_CAPTIONS = 6
_SCENES = 1_000
_COLUMNS = 10
_SIDE = 128
_GAP = 4


def frontier(out: Path) -> list[Path]:
    """Draw speed against distance of every cell of the run on a GPU; return the tables used."""
    folder = REFERENCE / "frontier-h200"
    (run,) = load_runs([folder]).values()
    tables = {"": curve_tables(run)}
    chart = next(chart for chart in fronts(tables) if chart.name == "speed-quality-distance")
    points = chart.points
    chart = replace(chart, x_title="speedup over AR on an H200")
    picture = to_matplotlib(chart, run_styles(tables))
    axes = picture.axes[0]
    axes.set_yscale("symlog", linthresh=0.02)  # most cells are below: they get half of the height
    axes.set_ylim(-0.005, 0.5)
    axes.set_yticks([0, 0.01, 0.1, 0.3], ["0", "0.01", "0.1", "0.3"])
    speed = tables[""]["speed"]
    fastest = speed.loc[speed["speedup"].idxmax()]
    named = points["cell_id"].isin(["ar-t1", fastest["cell_id"], fastest["lossless_cell"]])
    for point in points[named].itertuples():
        axes.annotate(
            point.label,
            (point.speedup, point.distance),
            (0, 9),
            textcoords="offset points",
            ha="right",
        )
    save_figure(picture, out, dpi=160, bbox_inches="tight", metadata={"Software": None})
    return [folder / "speed.csv", folder / "quality.csv"]


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
    return [cell["name"] for cell in data["cells"]], data["prompts"], pictures


def all_cells(out: Path) -> list[Path]:
    """Draw some captions in all cells: cells in columns, captions in rows."""
    cells, prompts, pictures = pictures_of(PAGE)
    rows = [
        [pictures[prompt, cell] for cell in range(len(cells))]
        for prompt in range(min(_CAPTIONS, len(prompts)))
    ]
    sheet(rows, cells, prompts).save(out)
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
    """Photograph the charts of the report page."""
    photograph(PAGE, {"charts": out})
    return [PAGE]


DRAWN = {
    "frontier.png": frontier,
    "all-cells.png": all_cells,
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
