"""The comparison with a paper for eyes: one line a cell and published row, each figure as ours, published, difference.

Made from `reproduction.csv` and nothing else. Columns that would be empty throughout are left out; that a figure was
never published is said once, below, and in every row of the CSV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lantern_bench.report.reading import with_interval
from lantern_bench.report.reproduction import rows_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["side_by_side"]

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
        line = lines.setdefault((_word(row["cell_id"]), _word(row["paper_row"])), _about(row))
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


def _about(row: dict[str, Any]) -> dict[str, str]:
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
