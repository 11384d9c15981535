"""The summary: the papers' shape, one row a cell, with the published figure beside ours where there is one.

It takes its figures from the speed and quality rows and computes none, except for the difference to a published one. A
cell scored under two protocols has two rows, since an FID without its features is no figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lantern_bench.report.cells import NEIGHBOUR_METRIC, SAMPLING_DEFAULTS, Row, joined
from lantern_bench.spec.modes import MODES

__all__ = ["PUBLISHED", "parameters", "summary_rows"]

PUBLISHED = ("speedup", "mean_accepted_length", "fid", "clip_score", "precision", "recall")
"""Figures that a paper's table may stand beside."""

_FROM_SPEED = ("speedup", "mean_accepted_length")
_FROM_QUALITY = ("fid", "fid_features", "clip_score", "clip_score_low", "clip_score_high", "clip_model")
_FROM_MANIFOLD = ("precision", "recall")
# Sampling settings are named where cells of the run differ in them, and by the cells that depart from the default.
_SAMPLING = {
    "temperature": "T={:g}", "cfg_scale": "cfg={:g}", "top_k": "top_k={:g}", "top_p": "top_p={:g}",
    "batch": "batch={:g}",
}  # fmt: skip


def summary_rows(
    speed: Sequence[Row],
    quality: Sequence[Row],
    published: Mapping[str, Mapping[str, float]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `summary.csv` from those of `speed.csv` and `quality.csv`, in the order of the latter.

    `published` holds, by cell id, the figures (names of `PUBLISHED`) of the paper's table that the experiment names.
    """
    by_cell = {row["cell_id"]: row for row in speed}
    for scored in quality:
        timed = by_cell[scored["cell_id"]]
        row: dict[str, Any] = {name: timed[name] for name in ("cell_id", "model", "images", "failed")}
        row |= {"method": timed["mode"], "parameters": parameters(timed, speed)}
        for name in _FROM_SPEED:
            row |= {key: timed[key] for key in (name, f"{name}_low", f"{name}_high")}
        row |= {name: scored.get(name) for name in (*_FROM_QUALITY, *_FROM_MANIFOLD)}
        row |= _beside(row, (published or {}).get(str(row["cell_id"]), {}))
        notes = [str(part["note"]) for part in (timed, scored) if part.get("note")]
        yield {**row, "note": joined(notes)}


def parameters(cell: Row, cells: Sequence[Row]) -> str:
    """Return what is set beyond the mode, for reading: `small-7 k=10 lambda=2 T=0`."""
    preset = MODES.get(str(cell["mode"]))
    parts = [str(cell[name]) for name in ("drafting", "rule") if preset and cell[name] != getattr(preset, name)]
    parts += [str(cell["tree"])] if cell["tree"] else []
    for name, text in (("neighbours", "k"), ("delta", "delta"), ("lambda", "lambda"), ("bound", "bound")):
        parts += [f"{text}={cell[name]:g}"] if cell.get(name) is not None else []
    metric = cell.get("neighbour_metric")
    parts += [f"{metric} neighbours"] if metric and metric != NEIGHBOUR_METRIC else []
    parts += ["official residual"] if cell["residual"] == "official" else []
    for name, text in _SAMPLING.items():
        if len({other[name] for other in cells}) > 1 and cell[name] is not None:
            parts += [text.format(cell[name])] if cell[name] != SAMPLING_DEFAULTS.get(name) else []
    return " ".join(parts)


def _beside(row: Row, figures: Mapping[str, float]) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for name in PUBLISHED:
        theirs, ours = figures.get(name), row[name]
        columns[f"{name}_published"] = theirs
        columns[f"{name}_difference"] = None if theirs is None or ours is None else ours - theirs
    return columns
