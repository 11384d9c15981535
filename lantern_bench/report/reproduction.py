"""Published figures beside a run's: what `lantern-bench reproduce` prints, cell by cell and figure by figure.

Every published figure is shown with its source, also where no cell of ours stands for its row; what could not be had is
empty and says so. A difference is given only between figures of one kind: an FID of other features has none. What
stands in the way of comparing is written out by `comparability`; `trends` says whether acceptance rises with the bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lantern_bench.config.paper import Figure, Paper, PaperRow
from lantern_bench.report.format_tables import with_interval
from lantern_bench.report.labels import BOUNDS
from lantern_bench.report.records import Row, joined
from lantern_bench.report.tables import parameters

if TYPE_CHECKING:
    import pandas as pd

NOT_HAD = "no published figure could be had"
_UNSTATED = "not stated"

# Ours alone: what a published table of other models cannot hold, and what says how sure quality is.
_OURS = ("prompt_accuracy", "kid")
_FROM_SPEED = ("speedup", "step_compression", "mean_accepted_length")
# A figure and the column that says what measured it; two of them are of one kind when that begins alike.
_MEASURED_BY = {"clip_score": "clip_model"} | dict.fromkeys(("fid", "precision", "recall"), "fid_features")
_SERIES = ("model", "mode", "drafting", "tree", "rule", "neighbours", "neighbour_metric", "residual", "temperature")


def reproduction_rows(tables: Mapping[str, pd.DataFrame], paper: Paper | None) -> list[dict[str, Any]]:
    """Return the rows of `reproduction.csv`: by cell, by published row that stands beside it, by figure.

    Cells without a published row have rows of their own figures; published rows without a cell come last.
    """
    ours = [_ours(speed, tables["quality"]) for speed in rows_of(tables["speed"])]
    columns = tuple(paper.columns) if paper else _FROM_SPEED
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for cell in ours:
        beside = [row for row in (paper.rows if paper else ()) if _stands_beside(row, cell, ours)]
        seen |= {row.name for row in beside}
        about = _about(cell, ours)
        alone: list[PaperRow | None] = [None]
        for published in beside or alone:
            rows += [_figure_row(cell, about, published, name, paper) for name in columns]
        rows += [_figure_row(cell, about, None, name, None) for name in _OURS if cell.get(name) is not None]
    for row in paper.rows if paper else ():
        if row.name not in seen:
            rows += [_uncovered(row, name) for name in columns if name in row.figures or not row.figures]
    return rows


def trends(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return a sentence on each relaxed rule: in how many series of cells MAL rises (or stays) with the bound."""
    sentences = []
    rows = rows_of(tables["speed"])
    for bound in BOUNDS:
        series: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        for row in rows:
            if row.get(bound) is not None and row["mean_accepted_length"] is not None:
                key = (*(row.get(name) for name in _SERIES), row.get("cfg_scale"))
                series.setdefault(key, []).append((row[bound], row["mean_accepted_length"]))
        runs = [[length for _, length in sorted(points)] for points in series.values() if len(points) > 1]
        rising = sum(all(b >= a for a, b in itertools.pairwise(run)) for run in runs)
        ends = sum(run[-1] > run[0] for run in runs)
        if runs:
            sentences.append(
                f"MAL rises with every step of {bound} in {rising} of {len(runs)} series, "
                f"and from the smallest {bound} to the largest in {ends} of {len(runs)}."
            )
    return sentences


def comparability(tables: Mapping[str, pd.DataFrame], paper: Paper | None, manifest: Mapping[str, Any]) -> list[str]:
    """Return in plain sentences what stands between the published figures and ours."""
    if paper is None:
        return ["This experiment names no published table: only our figures are shown."]
    speed, quality = rows_of(tables["speed"]), rows_of(tables["quality"])
    models = sorted({str(row["model"]) for row in speed})
    counts = sorted({int(row["images"]) for row in speed})
    features = sorted({str(row["fid_features"]) for row in quality if row.get("fid_features")})
    clips = sorted({str(row["clip_model"]) for row in quality if row.get("clip_model")})
    notes = [f"published: {paper.title}."]
    if paper.model:
        notes.append(
            f"Not comparable, model: published {paper.model}; ours {_listed(models)}. "
            "Where they differ, compare the shape of the table, not its digits."
        )
    notes.append(f"Not comparable, hardware: published {paper.hardware or _UNSTATED}; ours {_device(manifest)}.")
    notes.append(f"Not comparable, n: published {paper.images or _UNSTATED} images; ours {_listed(counts)} a cell.")
    if "fid" in paper.columns:
        theirs = paper.fid_features or _UNSTATED
        notes.append(
            f"Not comparable, extractor: published {theirs}; ours {_listed(features) or 'none'}. "
            "No difference is given between FIDs, precisions or recalls of different features."
        )
    if "clip_score" in paper.columns:
        theirs = paper.clip_model or _UNSTATED
        notes.append(f"Not comparable, CLIP model: published {theirs}; ours {_listed(clips) or 'none'}.")
    notes += [paper.missing] if paper.missing else []
    return [" ".join(note.split()) for note in (*notes, *paper.notes)]


def _stands_beside(row: PaperRow, cell: Row, cells: Sequence[Row]) -> bool:
    """Whether a published row belongs to a cell; a best row belongs to the cell that is best in its first figure."""
    if not row.matches(cell):
        return False
    if not row.best:
        return True
    name = next(iter(row.figures), "speedup")
    rivals = [(other[name], other["cell_id"]) for other in cells if row.matches(other) and other.get(name) is not None]
    return bool(rivals) and max(rivals)[1] == cell["cell_id"]


def _figure_row(cell: Row, about: Row, published: PaperRow | None, name: str, paper: Paper | None) -> dict[str, Any]:
    figure = _published(published, name) if published else None
    notes: list[str] = []
    row = {**about, "figure": name, "ours": cell.get(name), "paper_row": published.name if published else None}
    row |= {"ours_low": cell.get(f"{name}_low"), "ours_high": cell.get(f"{name}_high")}
    row["measured_by"] = cell.get(_MEASURED_BY.get(name, ""))
    if figure is not None:
        row |= {"published": figure.value, "source": figure.source, "confidence": figure.confidence}
        if row["ours"] is not None and _one_kind(name, cell, paper):
            row["difference"] = row["ours"] - figure.value
        elif row["ours"] is not None:
            notes.append("no difference: measured by another network")
    elif name not in _OURS:
        notes.append(NOT_HAD)
    if published and published.note:
        notes.append(published.note)
    if name == "kid" and cell.get("kid_std") is not None:
        notes.append(f"standard deviation over subsets {cell['kid_std']:.3g}")
    if row["ours"] is None:
        notes.append(_why_missing(cell, name))
    return row | {"note": joined(notes)}


def _why_missing(cell: Row, name: str) -> str:
    note = str(cell.get("quality_note") or "")
    # A note that begins with a figure's name is about that one: HPSv2 is not missing for want of images.
    about_another = note.startswith(("fid", "kid")) and not note.startswith(name)
    return "not measured" if about_another or not note else note


def _one_kind(name: str, cell: Row, paper: Paper | None) -> bool:
    judge = _MEASURED_BY.get(name)
    if judge is None:
        return True
    theirs, mine = (getattr(paper, judge) if paper else None), str(cell.get(judge) or "")
    return theirs is not None and mine.partition("@")[0].lower().startswith(str(theirs).split(" ")[0].lower())


def _published(row: PaperRow, name: str) -> Figure | None:
    return next((figure for key, figure in row.figures.items() if key == name), None)


def _uncovered(row: PaperRow, name: str) -> dict[str, Any]:
    figure = _published(row, name)
    published: dict[str, Any] = {"figure": name, "paper_row": row.name}
    if figure is not None:
        published |= {"published": figure.value, "source": figure.source, "confidence": figure.confidence}
    why = "no cell of this run stands for this row" if row.match is not None else "no mode of ours covers this row"
    notes = [why, *([row.note] if row.note else []), *([] if figure is not None else [NOT_HAD])]
    return published | {"note": joined(notes)}


def _ours(speed: Row, quality: pd.DataFrame) -> dict[str, Any]:
    """A cell's figures: its speed, and of its quality under each protocol what the first that has it says."""
    cell = dict(speed)
    for scored in rows_of(quality[quality["cell_id"] == speed["cell_id"]]):
        for name, value in scored.items():
            if name == "note":
                cell["quality_note"] = cell.get("quality_note") or value
            elif cell.get(name) is None:
                cell[name] = value
    return cell


def _about(cell: Row, cells: Sequence[Row]) -> dict[str, Any]:
    relaxed = cell.get("residual") if cell.get("temperature") else None
    about = {"cell_id": cell["cell_id"], "model": cell["model"], "method": cell["mode"], "residual": relaxed}
    text = parameters({**cell, "residual": None}, cells)
    return about | {"parameters": text, "images": cell["images"], "failed": cell["failed"]}


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table with None for what is missing."""
    import pandas as pd

    rows = table.to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in rows]


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _device(manifest: Mapping[str, Any]) -> str:
    machine = manifest.get("machine") or {}
    name = machine.get("cpu", {}).get("model") if isinstance(machine.get("cpu"), Mapping) else machine.get("cpu")
    device = manifest.get("device")
    if device in (None, "cpu"):
        return f"{name or 'a CPU'}, {manifest.get('threads', '?')} threads"
    return str(device)


# ---- The comparison with a paper for eyes: one line a cell and published row, each figure as ours, published, diff

_FORMS = {
    "speedup": ("speedup", "{:.2f}", "x"),
    "step_compression": ("step compr.", "{:.2f}", "x"),
    "mean_accepted_length": ("MAL", "{:.2f}", ""),
    "fid": ("FID", "{:.2f}", ""),
    "clip_score": ("CLIP", "{:.4f}", ""),
    "prompt_accuracy": ("accuracy", "{:.2f}", ""),
    "kid": ("KID", "{:.4f}", ""),
    "precision": ("prec.", "{:.3f}", ""),
    "recall": ("recall", "{:.3f}", ""),
    "hpsv2": ("HPSv2", "{:.4f}", ""),
}
_NO_CELL = "(not ours)"


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `reproduction.csv` as text, in their order."""
    import pandas as pd

    own = table[table["paper_row"].isna() & table["figure"].isin(["prompt_accuracy", "kid"])]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of(table.drop(own.index)):
        line = lines.setdefault((_word(row["cell_id"]), _word(row["paper_row"])), _heading(row))
        cells = _cells(row)
        sources = [line.get("source"), cells.get("source")]
        line |= cells
        line["source"] = "; ".join(dict.fromkeys(source for source in sources if source))
    for row in rows_of(own):
        for (cell_id, _), line in lines.items():
            if cell_id == row["cell_id"]:
                line |= _cells(row)
    shown = pd.DataFrame(list(lines.values())).fillna("")
    figures = [head for name in _FORMS for head in _heads(name) if head in shown]
    front = ["method", "parameters", "residual", "published row"]
    kept = [*front, *figures, "source"]
    return shown[[name for name in kept if name in front or (name in shown and (shown[name] != "").any())]]


def _heads(name: str) -> tuple[str, str, str]:
    head = _FORMS[name][0]
    return head, f"{head} published", f"{head} diff."


def _word(value: object) -> str:
    return "" if value is None else str(value)


def _heading(row: dict[str, Any]) -> dict[str, str]:
    about = {"method": row["method"] or _NO_CELL, "parameters": row["parameters"], "residual": row["residual"]}
    return {name: _word(value) for name, value in (about | {"published row": row["paper_row"]}).items()}


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Ours with its interval, the published figure, the difference, and where the published one is from."""
    _, form, unit = _FORMS[row["figure"]]
    heads = _heads(row["figure"])
    line: dict[str, str] = {}
    if row["ours"] is not None:
        line[heads[0]] = with_interval(row["ours"], row["ours_low"], row["ours_high"], form, unit)
    if row["published"] is not None:
        line[heads[1]] = form.format(row["published"]) + unit
        line["source"] = f"{row['source']} ({row['confidence']})"
    if row["difference"] is not None:
        line[heads[2]] = form.replace("{:", "{:+").format(row["difference"]) + unit
    return line
