"""Draw the pictures of docs/embedded-family.md from the bundled model and one of its runs.

    python docs/make_pictures.py RUN

`family.png`: rendered scenes, the same through the tokenizer, and the run's autoregressive pictures of these captions.
`all-cells.png`: pictures of the run side by side, one row per caption and one column per cell.
`race.gif` was painted once, from the times of the steps (docs/embedded-family.md, "A race").
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from experiments.train_lanterns.tasks import held_out_scenes, reconstruct
from lantern_bench.methods.tables import MODES
from lantern_bench.models.lanterns.modules import load_tokenizer
from lantern_bench.runs.store import read_run

PICTURES = Path(__file__).parent / "pictures"
_COLUMNS = 10
_ROWS = 6
_SCALE = 2
_GAP = 2


def family(run: Path, records: pd.DataFrame) -> None:
    """Three rows: scenes, reconstructions, samples."""
    scenes, attributes = held_out_scenes(_COLUMNS)
    again = reconstruct(load_tokenizer(), scenes)
    sampled = records[(records["mode"] == "ar") & (records["status"] == "ok")].drop_duplicates("prompt")
    by_caption = sampled.set_index("prompt")["image"]
    painted = [list(rows.permute(0, 2, 3, 1).numpy()) for rows in (scenes, again)]
    samples = [_read(run / by_caption[item.caption()]) for item in attributes]
    _write("family.png", [*painted, samples])


def modes(run: Path, records: pd.DataFrame) -> None:
    """One row per caption, one column per cell."""
    good = records[records["status"] == "ok"]
    cells = sorted(set(good["cell_id"]), key=lambda cell: (list(MODES).index(cell.split("-")[0]), cell))
    captions = list(dict.fromkeys(good["prompt"]))[:_ROWS]
    first = good.drop_duplicates(["prompt", "cell_id"]).set_index(["prompt", "cell_id"])["image"]
    _write("all-cells.png", [[_read(run / first[caption, cell]) for cell in cells] for caption in captions])
    sys.stdout.write("columns of all-cells.png:\n" + "".join(f"  {cell}\n" for cell in cells))


def _read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def _write(name: str, rows: list[list[np.ndarray]]) -> None:
    """Lay pictures out in rows on white."""
    height, width = rows[0][0].shape[:2]
    sheet = np.full((len(rows) * (height + _GAP) - _GAP, len(rows[0]) * (width + _GAP) - _GAP, 3), 255, dtype=np.uint8)
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            top, left = row * (height + _GAP), column * (width + _GAP)
            sheet[top : top + height, left : left + width] = picture
    image = Image.fromarray(sheet)
    PICTURES.mkdir(exist_ok=True)
    image.resize((image.width * _SCALE, image.height * _SCALE), Image.Resampling.NEAREST).save(PICTURES / name)


def main() -> None:
    """Draw both from the run named on the command line."""
    run = Path(sys.argv[1])
    records = read_run(run).records
    family(run, records)
    modes(run, records)


if __name__ == "__main__":
    main()
