"""Published figures beside a run's: what `lantern-bench reproduce` prints, cell by cell and figure by figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.labels import parameters
from lantern_bench.analysis.tables import cells_of
from lantern_bench.config.paper import Paper, PaperRow
from lantern_bench.devices.names import device_in_words
from lantern_bench.methods.catalog import IN_SUMMARY, METRICS
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import Row

NOT_HAD = "no published figure could be had"

# Figures of the run alone: published tables of other models have no counterpart, or they say how sure quality is.
_OURS = ("prompt_accuracy", "kid")
_FROM_SPEED = ("speedup", "step_compression", "mean_accepted_length")
# A figure and the column that names its scorer; two figures are of one kind when their scorers begin alike.
_SCORED_BY = {name: METRICS[name].scored_by for name in IN_SUMMARY}


def reproduction_rows(
    tables: Mapping[str, pd.DataFrame], paper: Paper | None
) -> list[dict[str, Any]]:
    """Return the rows of `reproduction.csv`, those of published rows without a cell last."""
    by_cell: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_of(cells_of(tables)):  # each quality figure from the first protocol that has it
        cell = by_cell.setdefault((row["model"], row["cell_id"]), {})
        cell |= {name: value for name, value in row.items() if cell.get(name) is None}
    cells = list(by_cell.values())
    paper_rows = paper.rows if paper else ()
    columns = tuple(paper.columns) if paper else _FROM_SPEED
    rows: list[dict[str, Any]] = []
    matched: set[str] = set()
    for cell in cells:
        about = {name: cell[name] for name in ("cell_id", "model", "images", "failed")}
        about |= {
            "method": cell["mode"],
            "residual": cell.get("residual") if cell.get("temperature") else None,
        }
        about["parameters"] = parameters({**cell, "residual": None}, cells)
        matching: list[PaperRow | None] = [
            row for row in paper_rows if _is_beside(row, cell, cells)
        ]
        matched |= {row.name for row in matching if row}
        for paper_row in matching or [None]:
            rows += [
                about | _figure_row(cell=cell, published=paper_row, name=name, paper=paper)
                for name in columns
            ]
        rows += [
            about | _figure_row(cell=cell, published=None, name=name, paper=None)
            for name in _OURS
            if cell.get(name) is not None
        ]
    for paper_row in (row for row in paper_rows if row.name not in matched):
        reason = (
            "no mode of ours covers"
            if paper_row.match is None
            else "no cell of this run stands for"
        )
        for name in (
            name for name in columns if name in paper_row.figures or not paper_row.figures
        ):
            figure = _published(paper_row, name)
            notes = (
                f"{reason} this row",
                paper_row.note,
                None if "published" in figure else NOT_HAD,
            )
            rows.append(figure | {"note": join_notes(notes)})
    return rows


def comparability(
    tables: Mapping[str, pd.DataFrame], paper: Paper | None, manifest: Mapping[str, Any]
) -> list[str]:
    """Return in sentences what differs between the published figures and the run's."""
    if paper is None:
        return ["This experiment names no published table: only our figures are shown."]
    speed = tables["speed"]
    quality = tables["quality"]
    compared = [
        ("hardware", paper.hardware, device_in_words(manifest), ""),
        ("n", f"{paper.images or 'not stated'} images", f"{_listed(speed['images'])} a cell", ""),
    ]
    if paper.model:
        advice = " Where they differ, compare the shape of the table, not its digits."
        compared.insert(0, ("model", paper.model, _listed(speed["model"]), advice))
    if "fid" in paper.columns:
        advice = (
            " No difference is given between FIDs, precisions or recalls of different features."
        )
        compared.append(
            (
                "extractor",
                paper.fid_features,
                _listed(quality["fid_features"].dropna()) or "none",
                advice,
            )
        )
    if "clip_score" in paper.columns:
        compared.append(
            ("CLIP model", paper.clip_model, _listed(quality["clip_model"].dropna()) or "none", "")
        )
    notes = [
        f"Not comparable, {subject}: published {theirs or 'not stated'}; ours {ours}.{advice}"
        for subject, theirs, ours, advice in compared
    ]
    notes = [f"published: {paper.title}.", *notes, paper.missing or "", *paper.notes]
    return [" ".join(note.split()) for note in notes if note]


def _is_beside(row: PaperRow, cell: Row, cells: Sequence[Row]) -> bool:
    """Whether a published row matches a cell; a best row matches the cell that is best in its first figure."""
    if not row.matches(cell) or not row.best:
        return row.matches(cell)
    name = next(iter(row.figures), "speedup")
    rivals = [
        (other[name], other["cell_id"])
        for other in cells
        if row.matches(other) and other.get(name) is not None
    ]
    return bool(rivals) and max(rivals)[1] == cell["cell_id"]


def _figure_row(
    cell: Row, published: PaperRow | None, name: str, paper: Paper | None
) -> dict[str, Any]:
    """The figure `name` of a cell beside that of a published row."""
    row = _published(published, name)
    ours = cell.get(name)
    scorer = _SCORED_BY.get(name, "")
    notes: list[str | None] = []
    row |= {
        "ours": ours,
        "ours_low": cell.get(f"{name}_low"),
        "ours_high": cell.get(f"{name}_high"),
    }
    row["measured_by"] = cell.get(scorer)
    if "published" in row and ours is not None:
        theirs = str(getattr(paper, scorer, None) or "").split(" ")[0].lower()
        same_kind = not scorer or (
            theirs and str(cell.get(scorer) or "").partition("@")[0].lower().startswith(theirs)
        )
        row["difference"] = ours - row["published"] if same_kind else None
        notes += [] if same_kind else ["no difference: measured by another network"]
    elif "published" not in row and name not in _OURS:
        notes.append(NOT_HAD)
    notes.append(published.note if published else None)
    if name == "kid" and cell.get("kid_std") is not None:
        notes.append(f"standard deviation over subsets {cell['kid_std']:.3g}")
    if ours is None:
        note = str(cell.get("quality_note") or "")
        # A note that begins with a figure's name is about that figure: HPSv2 is not missing for want of images.
        about_another = note.startswith(("fid", "kid")) and not note.startswith(name)
        notes.append("not measured" if about_another or not note else note)
    return row | {"note": join_notes(notes)}


def _published(row: PaperRow | None, name: str) -> dict[str, Any]:
    """The published columns of a figure."""
    columns: dict[str, Any] = {"figure": name, "paper_row": row.name if row else None}
    if row and (figure := row.figures.get(name)):
        columns |= {
            "published": figure.value,
            "source": figure.source,
            "confidence": figure.confidence,
        }
    return columns


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def sources(table: pd.DataFrame) -> list[str]:
    """Return a sentence on where the published figures are from, if there are any."""
    figures = table[table["published"].notna()]
    texts = dict.fromkeys(f"{row['source']} ({row['confidence']})" for row in rows_of(figures))
    return [f"Published figures are from: {'; '.join(texts)}."] if texts else []
