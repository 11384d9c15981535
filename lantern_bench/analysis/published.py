"""Published figures beside the figures of a run: the table of `lantern-bench reproduce`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.labels import parameters
from lantern_bench.analysis.statistics import Interval
from lantern_bench.analysis.tables import one_row_per_cell
from lantern_bench.config.paper import Paper, PaperRow
from lantern_bench.devices.environment import device_in_words
from lantern_bench.methods.catalog import IN_SUMMARY, METRICS
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import Row

NOT_HAD = "no published figure could be had"

# Shown for the run alone: published tables lack them, or measure them with other models.
_OURS = ("prompt_accuracy", "kid")

FROM_SPEED = ("speedup", "step_compression", "mean_accepted_length")
"""Figures of the table `speed` that a published table may have."""

# The column that names the scorer of a figure. Two figures are comparable when their scorers begin
# alike.
_SCORED_BY = {name: METRICS[name].scored_by for name in IN_SUMMARY}


def reproduction_rows(tables: Mapping[str, pd.DataFrame], paper: Paper | None) -> Iterator[Row]:
    """Yield the rows of `reproduction.csv`; published rows without a cell come last."""
    cells = rows_of(one_row_per_cell(tables))
    paper_rows = paper.rows if paper else ()
    figures = tuple(paper.columns) if paper else FROM_SPEED
    matched: set[str] = set()
    for cell in cells:
        about = _about(cell, cells)
        matching = [row for row in paper_rows if _is_beside(row, cell, cells)]
        matched.update(row.name for row in matching)
        beside: Sequence[PaperRow | None] = matching or [None]
        for paper_row in beside:
            for name in figures:
                yield about | _figure_row(cell, paper_row, name=name, paper=paper)
        for name in _OURS:
            if cell[name] is not None:
                yield about | _figure_row(cell, None, name=name, paper=None)

    for paper_row in paper_rows:
        if paper_row.name not in matched:
            yield from _rows_without_cell(paper_row, figures)


def _about(cell: Row, cells: Sequence[Row]) -> Row:
    return {
        "cell_id": cell["cell_id"],
        "model": cell["model"],
        "images": cell["images"],
        "failed": cell["failed"],
        "method": cell["mode"],
        # At temperature 0 a rejection leaves no choice, so the residual has no effect.
        "residual": cell["residual"] if cell["temperature"] else None,
        "parameters": parameters({**cell, "residual": None}, cells),
    }


def _is_beside(row: PaperRow, cell: Row, cells: Sequence[Row]) -> bool:
    """Whether a published row matches a cell.

    A row of best figures matches the cell that is best in the first of them.
    """
    if not row.matches(cell):
        return False
    if not row.best:
        return True
    name = next(iter(row.figures), "speedup")
    rivals = [other for other in cells if row.matches(other) and other[name] is not None]
    return cell is max(rivals, key=lambda other: (other[name], other["cell_id"]), default=None)


def _figure_row(cell: Row, published: PaperRow | None, *, name: str, paper: Paper | None) -> Row:
    """The figure `name` of a cell beside the figure of a published row."""
    ours = cell.get(name)
    row = _published_columns(published, name) | Interval.read(cell, name).columns("ours")
    row["measured_by"] = cell.get(_SCORED_BY.get(name, ""))

    notes: list[str | None] = []
    if "published" not in row:
        notes.append(None if name in _OURS else NOT_HAD)
    elif ours is not None and _is_comparable(cell, name, paper):
        row["difference"] = ours - row["published"]
    elif ours is not None:
        notes.append("no difference: measured by another network")
    if published is not None:
        notes.append(published.note)
        if name == "mean_accepted_length" and "published" in row and cell["mal_uncut"] is not None:
            notes.append(
                f"ours with last steps uncut, as published code counts: {cell['mal_uncut']:.2f}"
            )
    if name == "kid" and cell["kid_std"] is not None:
        notes.append(f"standard deviation over subsets {cell['kid_std']:.3g}")
    if ours is None:
        why = str(cell["quality_note"] or "not measured")
        # A note that begins with "fid" or "kid" explains that figure alone: another figure, such as
        # HPSv2, is not missing for the same reason.
        is_about_another = why.startswith(("fid", "kid")) and not why.startswith(name)
        notes.append("not measured" if is_about_another else why)
    row["note"] = join_notes(notes)
    return row


def _is_comparable(cell: Row, name: str, paper: Paper | None) -> bool:
    """Whether the published figure and the figure of the cell are measured by the same network."""
    scorer = _SCORED_BY.get(name)
    if not scorer:
        return True
    theirs = str(getattr(paper, scorer, None) or "").split(" ")[0].lower()
    ours = str(cell.get(scorer) or "").partition("@")[0].lower()
    return theirs != "" and ours.startswith(theirs)


def _rows_without_cell(paper_row: PaperRow, figures: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a published row without a cell."""
    if paper_row.match is None:
        reason = "no mode of ours covers this row"
    else:
        reason = "no cell of this run stands for this row"
    for name in figures:
        if name in paper_row.figures or not paper_row.figures:
            row = _published_columns(paper_row, name)
            missing = None if "published" in row else NOT_HAD
            row["note"] = join_notes([reason, paper_row.note, missing])
            yield row


def _published_columns(row: PaperRow | None, name: str) -> Row:
    """The published columns of a figure."""
    columns: Row = {"figure": name, "paper_row": row.name if row else None}
    figure = row.figures.get(name) if row else None
    if figure is not None:
        columns |= {
            "published": figure.value,
            "source": figure.source,
            "confidence": figure.confidence,
        }
    return columns


def comparability(
    tables: Mapping[str, pd.DataFrame], paper: Paper | None, manifest: Mapping[str, Any]
) -> list[str]:
    """Return sentences about what differs between the published figures and the figures of a run.

    Args:
        tables: The tables of the run.
        paper: The `paper` block of its experiment.
        manifest: The manifest of the run, which names its device.
    """
    if paper is None:
        return ["This experiment names no published table: only our figures are shown."]
    speed = tables["speed"]
    quality = tables["quality"]
    notes = [f"published: {paper.title}."]
    if paper.model is not None:
        note = _not_comparable("model", paper.model, ours=speed["model"])
        notes.append(f"{note} Where they differ, compare the shape of the table, not its digits.")
    notes.append(_not_comparable("hardware", paper.hardware, ours=[device_in_words(manifest)]))
    images = f"{paper.images or 'not stated'} images"
    notes.append(_not_comparable("n", images, ours=speed["images"], end=" a cell"))
    if "fid" in paper.columns:
        note = _not_comparable("extractor", paper.fid_features, ours=quality["fid_features"])
        notes.append(
            f"{note} No difference is given between FIDs, precisions or recalls of different "
            "features."
        )
    if "clip_score" in paper.columns:
        notes.append(_not_comparable("CLIP model", paper.clip_model, ours=quality["clip_model"]))
    if "mean_accepted_length" in paper.columns:
        notes.append(
            "MAL of ours counts the bonus token, and not the prefill. A published figure of "
            "accepted drafts alone is smaller by 1."
        )
    notes += [paper.missing or "", *paper.notes]
    return [" ".join(note.split()) for note in notes if note]


def _not_comparable(name: str, theirs: str | None, *, ours: Iterable[Any], end: str = "") -> str:
    """The sentence about a setting in which a paper and the cells of a run may differ."""
    values = ", ".join(str(value) for value in sorted({*pd.Series(ours).dropna()})) or "none"
    return f"Not comparable, {name}: published {theirs or 'not stated'}; ours {values}{end}."


def sources(table: pd.DataFrame) -> list[str]:
    """Return a sentence that names the sources of the published figures, if there are any."""
    texts = (table["source"] + " (" + table["confidence"] + ")").dropna().unique()
    return [f"Published figures are from: {'; '.join(texts)}."] if len(texts) else []
