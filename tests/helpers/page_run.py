"""A made-up run with pictures, for the tests of the report page: three cells, a few prompts, 16
tokens an image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.made_up_run import AR, LOOSE, STRICT, make_record, make_scores, write_run

MACHINE = {
    "cpu": {"model": "A processor", "cores": 2, "clock_mhz": 2000},
    "memory_bytes": 8_000_000_000,
    "gpus": [],
}
# 15 tokens after the first: with it, a square of 4 x 4.
STEPS = {AR: [[]] * 15, STRICT: [[0, -1]] * 7 + [[-1]], LOOSE: [[0, 0]] * 5}
PAPER = {
    "title": "A paper, Table 1",
    "columns": ["speedup"],
    "rows": [
        {
            "name": "their method",
            "match": {"mode": "lantern++"},
            "figures": {"speedup": {"value": 2.5, "source": "page 3", "confidence": "paper"}},
        }
    ],
}


def write_page_run(
    folder: Path, prompts: int = 4, side: int = 64, cells: Any = (AR, STRICT, LOOSE)
) -> Path:
    """A run folder with a picture for each record, and a published figure."""
    paces = [1.0, 0.5] + [0.3] * len(cells)  # seconds of an image in each cell
    records = []
    for prompt in range(prompts):
        colour = "red" if prompt % 2 else "blue"
        for number, cell in enumerate(cells):
            record = make_record(
                cell=cell,
                prompt=prompt,
                walks=STEPS.get(cell, [[0, 0]] * 5),
                seconds=paces[number] + 0.01 * prompt,
            )
            record["order_index"] = prompt * len(cells) + number
            record["prompt"] = f"{colour} lantern {prompt}"
            shape = "round" if prompt < 2 else "square, <b>lit</b> and loud"
            record["prompt_metadata"] = {"id": prompt, "colour": colour, "shape": shape}
            records.append(record)
    write_run(
        folder=folder,
        records=records,
        scores=make_scores(records),
        experiment={"name": "made-up", "description": "Made up", "paper": PAPER},
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {
        "machine": MACHINE,
        "device": "cpu",
        "key": {"weights": {"lanterns/target": "12ab"}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    generator = np.random.default_rng(0)
    for record in records:
        path = folder / record["image"]
        path.parent.mkdir(parents=True, exist_ok=True)
        _picture(side, generator).save(path, compress_level=1)
    return folder


def _picture(side: int, generator: np.random.Generator) -> Image.Image:
    """Soft colours with some grain, as hard to pack as a photograph."""
    coarse = Image.fromarray(generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)).resize(
        (side, side)
    )
    grain = generator.normal(0, 8, (side, side, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8))
