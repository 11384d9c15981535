"""The comparison with a paper for eyes: one line a cell and published row, each figure as ours, published, difference.

Made from `reproduction.csv` and nothing else. Columns that would be empty throughout are left out; that a figure was
never published is said once, below, and in every row of the CSV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lantern_bench.report.reading import with_interval

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
    lines: dict[tuple[Any, Any], dict[str, str]] = {}
    for row in table.drop(own.index).to_dict("records"):
        key = tuple("" if pd.isna(row[name]) else row[name] for name in ("cell_id", "paper_row"))
        line = lines.setdefault(key, _about(row))
        line |= _cells(row)
    for row in own.to_dict("records"):
        for key, line in lines.items():
            if key[0] == row["cell_id"]:
                line |= _cells(row)
    shown = pd.DataFrame(list(lines.values())).fillna("")
    figures = [head for name in _FORMS for head in _heads(name) if head in shown]
    front = ["method", "parameters", "residual", "published row"]
    kept = [*front, *figures, "source"]
    return shown[[name for name in kept if name in front or (name in shown and (shown[name] != "").any())]]


def _heads(name: str) -> tuple[str, str, str]:
    head = _FORMS[name][0]
    return head, f"{head} published", f"{head} diff."


def _about(row: dict[str, Any]) -> dict[str, str]:
    import pandas as pd

    text = {name: "" if pd.isna(row[name]) else str(row[name]) for name in ("parameters", "residual")}
    method = _NO_CELL if pd.isna(row["method"]) else str(row["method"])
    return {"method": method, **text, "published row": "" if pd.isna(row["paper_row"]) else str(row["paper_row"])}


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Ours with its interval, the published figure, the difference, and where the published one is from."""
    import pandas as pd

    _, form, unit = _FORMS[row["figure"]]
    heads = _heads(row["figure"])
    line: dict[str, str] = {}
    if not pd.isna(row["ours"]):
        ends = [None if pd.isna(row[f"ours_{end}"]) else row[f"ours_{end}"] for end in ("low", "high")]
        line[heads[0]] = with_interval(row["ours"], *ends, form, unit)
    if not pd.isna(row["published"]):
        line[heads[1]] = form.format(row["published"]) + unit
        line["source"] = f"{row['source']} ({row['confidence']})"
    if not pd.isna(row["difference"]):
        line[heads[2]] = form.replace("{:", "{:+").format(row["difference"]) + unit
    return line
