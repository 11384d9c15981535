"""Write the tables of docs/frontier.md: speed on two devices and quality of every mode.

    python -m scripts.docs.frontier

The tables are made from the runs in results/reference: `frontier` (a CPU), `frontier-h100` (a GPU),
`quality` (512 pictures per cell) and `distance`, where it was run. The text outside the markers is
written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from lantern_bench.methods.catalog import RULES
from scripts.docs.prediction_tables import REFERENCE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frontier.md"
DISTANCE = ["distance", "distance_low", "distance_high", "distance_p"]
SIGNIFICANT = 0.001
_HEAD = ["cell", "MAL", "one core", "H100", "distance x 1000", "FID"]


def cells() -> pd.DataFrame:
    """Return one row per timed cell with the figures of all runs.

    MAL is taken from the run with most images.
    """
    runs = {name: _table(name, "speed") for name in ("quality", "frontier", "frontier-h100")}
    names = pd.concat(_table(name, "summary")[["method", "parameters"]] for name in runs)
    rows = pd.concat(runs.values())
    table = rows[~rows.index.duplicated()].join(names[~names.index.duplicated()])
    for name in ("frontier", "frontier-h100"):
        table = table.join(runs[name]["speedup"].rename(f"speedup {name}"))
    table = table.join(
        _table("quality", "quality")[["fid", "fid_verdict", "precision", "precision_verdict"]]
    )
    if (REFERENCE / "distance" / "summary.csv").exists():
        table = table.join(_table("distance", "summary")[DISTANCE])
    else:
        table[DISTANCE] = float("nan")
    timed = table[["speedup frontier", "speedup frontier-h100"]].notna().any(axis=1)
    return table[timed & (table["seed_set"] == 0)]


def _table(run: str, kind: str) -> pd.DataFrame:
    return pd.read_csv(REFERENCE / run / f"{kind}.csv").set_index("cell_id")


def rendered(table: pd.DataFrame) -> str:
    """The rows of a table of the page, from few tokens a step to many."""
    lines = [_HEAD]
    for row in table.sort_values("mean_accepted_length").to_dict("records"):
        parameters = "" if pd.isna(row["parameters"]) else row["parameters"].replace(" k=100", "")
        speedups = [_figure(row[f"speedup {run}"], ".2f") for run in ("frontier", "frontier-h100")]
        distance = _figure(1000 * row["distance"], "z.1f", bold=row["distance_p"] < SIGNIFICANT)
        fid = _figure(row["fid"], ".1f", bold=row["fid_verdict"] == "outside")
        cell = f"{row['method']} {parameters}".strip()
        lines.append([cell, f"{row['mean_accepted_length']:.2f}", *speedups, distance, fid])
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return f"{head}{'|---' * len(_HEAD)}|\n{''.join(body)}"


def _figure(value: float, form: str, *, bold: bool = False) -> str:
    text = "" if pd.isna(value) else f"{value:{form}}"
    return f"**{text}**" if text and bold else text


def render(page: str) -> str:
    """Return the text of the page with its two tables made anew."""
    table = cells()
    lossless = table["rule"].map(lambda rule: RULES[rule].lossless)
    for name, rows in (("lossless", table[lossless]), ("relaxed", table[~lossless])):
        between = re.compile(
            rf"(<!-- {name}: python -m scripts.docs.frontier -->\n).*?(<!-- end -->)", re.DOTALL
        )
        page = between.sub(
            lambda match, rows=rows: f"{match[1]}\n{rendered(rows)}\n{match[2]}", page
        )  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
