"""A small made-up run: records and scores as a sweep leaves them, with walks that can be counted by
hand.

Shared by the tests of tables, curves and commands; nothing is decoded.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from lantern_bench.analysis.tables import tables_of
from lantern_bench.config.decoding import Decoding
from lantern_bench.storage.records import line_of, read_frame
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import SCHEMA_VERSION

Row = dict[str, Any]


def make_record(
    cell: Decoding, prompt: int, walks: list[list[int]], seconds: float | None, **changes: Any
) -> Row:
    """One image: `walks` are the child ranks of its steps. An ar image has empty walks."""
    accepted = [sum(rank >= 0 for rank in walk) for walk in walks]
    committed = [count + 1 for count in accepted]
    starts = [1 + sum(committed[:step]) for step in range(len(walks))]
    tokens = 1 + sum(committed)
    row: Row = {
        "schema_version": SCHEMA_VERSION,
        "record_key": f"{cell.cell_id}/{prompt}/0",
        **cell.columns(),
        "model": "lanterns",
        "prompt_id": f"p{prompt:03d}",
        "prompt": f"prompt {prompt}",
        "repeat": 0,
        "seed": prompt,
        "order_index": prompt,
        "status": "ok",
        "error": None,
        "tokens": tokens,
        "target_forwards": 1 + len(walks),
        "drafter_forwards": 0 if cell.mode == "ar" else 2 * len(walks),
        "start_per_step": starts,
        "committed_per_step": committed,
        "accepted_per_step": accepted,
        "offered_depth_per_step": [len(walk) for walk in walks],
        "child_rank_per_step": walks,
        "mal_uncut": sum(committed) / len(committed),
        "seconds": seconds,
        "draft_seconds": None if seconds is None else 0.2 * seconds,
        "target_seconds": None if seconds is None else 0.5 * seconds,
        "verify_seconds": None if seconds is None else 0.2 * seconds,
        "other_seconds": None if seconds is None else 0.1 * seconds,
        "peak_memory_bytes": None,
        "neighbour_mass": 0.0 if cell.mode in ("ar", "speculative") else 0.01 * sum(accepted),
        "emitted_tv": 0.0 if cell.mode in ("ar", "speculative") else 0.1 * tokens,
        "process": prompt % 3,
        "image": f"images/{cell.cell_id}/{prompt:06d}.png",
    }
    return row | changes


AR = Decoding(mode="ar", cfg_scale=2, cfg_default=2)
STRICT = Decoding(mode="speculative", tree="small-7", cfg_scale=2, cfg_default=2)
LOOSE = Decoding(
    **{
        "mode": "lantern++",
        "tree": "small-7",
        "neighbours": 10,
        "lambda": 2,
        "cfg_scale": 2,
        "cfg_default": 2,
    }
)
# Steps of an image: two drafts taken and the third node without children; one taken, then all
# rejected; all rejected.
WALKS = [[0, 1], [0, -1], [-1]]


def make_records() -> list[Row]:
    """Three cells over four prompts; one image of the last cell failed."""
    rows = []
    for prompt in range(4):
        rows.append(make_record(cell=AR, prompt=prompt, walks=[[]] * 6, seconds=1.2 + 0.1 * prompt))
        rows.append(
            make_record(cell=STRICT, prompt=prompt, walks=WALKS, seconds=0.6 + 0.03 * prompt)
        )
        rows.append(make_record(cell=LOOSE, prompt=prompt, walks=[[0, 0], [0, 1]], seconds=0.4))
    rows[-1] |= {"status": "failed", "error": "out of memory", "seconds": None}
    return rows


def make_scores(records: list[Row]) -> list[Row]:
    rows: list[Row] = []
    for row in records:
        if row["status"] == "ok":
            value = {
                "clip_score": 0.3 + 0.001 * row["seed"],
                "prompt_accuracy": float(row["seed"] != 1),
            }
            key = {
                "level": "image",
                "protocol": "embedded",
                "protocol_version": 1,
                "cell_id": row["cell_id"],
                "clip_model": "tiny-clip@1234",
            }
            rows.append({**key, "record_key": row["record_key"], **value})
    figures = {"fid": None, "kid": 0.01, "kid_std": 0.001, "precision": 0.5, "recall": 0.25}
    note = "fid needs 128 images, twice its features; there are 4"
    for cell in (AR, STRICT, LOOSE):
        row = {
            "level": "cell",
            "protocol": "embedded",
            "protocol_version": 1,
            "cell_id": cell.cell_id,
            **figures,
            "note": note,
        }
        rows.append(
            {
                **row,
                "n": 3 if cell is LOOSE else 4,
                "extractor": "lanterns-features-64@abcd",
                "reference": "r",
            }
        )
    return rows


def token_scores(record: Row, **changes: Any) -> Row:
    """The sums of two features of the tokens of an image, by version 1."""
    row = {
        "level": "tokens",
        "cell_id": record["cell_id"],
        "record_key": record["record_key"],
        "tokens": 256,
        "impossible_tokens": 0,
        "mismatched_tokens": None,
        "edge_tokens": 0,
        "entropy": 3.0,
        "largest_p": 0.2,
        "ten_largest_p": 0.5,
        "features": "surprise squared_surprise",
        "feature_sums": [(-1.0) ** record["order_index"], 0.0, 256.0, 0.0, 256.0],
        "feature_ranges": None,
    }
    return row | changes


def with_checksum(line: bytes) -> bytes:
    """A line of a file with the right checksum, whatever its content."""
    head = line.removesuffix(b"}")
    digest = hashlib.sha256(head).hexdigest()[:16]
    return head + b', "checksum": "' + digest.encode() + b'"}\n'


def frame_of(records: Iterable[Row]) -> pd.DataFrame:
    """Records as they are read back."""
    with tempfile.NamedTemporaryFile() as file:
        file.writelines(map(line_of, records))
        file.flush()
        return read_frame(Path(file.name), "records")


def write_run(
    folder: Path, records: list[Row], scores: list[Row], experiment: Row | None = None
) -> Path:
    """The same as a run's folder."""
    folder.mkdir(parents=True)
    for name, rows in (("records", records), ("scores", scores)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(map(line_of, rows)))
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "run": folder.name,
        "experiment": experiment or {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def run_of(records: Iterable[Row], scores: Iterable[Row] = (), **experiment: Any) -> RunData:
    """The same as a loaded run."""
    return RunData(
        folder=Path("run"),
        manifest={"experiment": experiment},
        records=frame_of(records),
        scores=list(scores),
    )


def build_tables(
    records: Iterable[Row], scores: Iterable[Row] = (), **experiment: Any
) -> dict[str, pd.DataFrame]:
    """The tables of such a run."""
    return tables_of(run_of(records, scores, **experiment))
