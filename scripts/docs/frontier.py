"""Write the tables of docs/frontier.md. Each table is made from one run of results/reference.

    python -m scripts.docs.frontier

The text outside the markers is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from lantern_bench.methods.catalog import output_of
from scripts.docs.prediction_tables import REFERENCE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frontier.md"
SIGNIFICANT = 0.001  # of `distance_p`, which is corrected for the number of cells


def speed_table(run: str) -> str:
    """Speed and distance of every cell of a run, from the slowest to the fastest."""
    lines = ["| cell | output | MAL | speedup | distance x 1000 |", "|---|---|---|---|---|"]
    for row in rows_of(run, "speedup"):
        speedup = "{speedup:.2f} [{speedup_low:.2f}, {speedup_high:.2f}]".format_map(row)
        cells = [
            name_of(row),
            str(output_of(row["drafting"], row["rule"])),
            f"{row['mean_accepted_length']:.2f}",
            speedup,
            distance_of(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fid_table(run: str) -> str:
    """MAL and FID of every cell of a run, from few tokens a step to many."""
    lines = ["| cell | output | MAL | FID |", "|---|---|---|---|"]
    for row in rows_of(run, "mean_accepted_length"):
        if row["seed_set"] != 0:
            continue
        fid = f"{row['fid']:.1f}"
        cells = [
            name_of(row),
            str(output_of(row["drafting"], row["rule"])),
            f"{row['mean_accepted_length']:.2f}",
            f"**{fid}**" if row["fid_verdict"] == "outside" else fid,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {
    "frontier-h200": speed_table,
    "frontier": speed_table,
    "quality": fid_table,
}


def rows_of(run: str, order: str) -> list[dict[str, Any]]:
    """The cells of a run with the columns of all its tables, sorted by one of them."""
    table = pd.read_csv(REFERENCE / run / "speed.csv")
    for name in ("summary", "quality"):
        path = REFERENCE / run / f"{name}.csv"
        if path.exists():
            other = pd.read_csv(path)
            new = [column for column in other if column not in table]
            table = table.merge(other[["cell_id", *new]], on="cell_id", how="left")
    rows: list[dict[str, Any]] = table.sort_values(order, kind="stable").to_dict("records")
    return rows


def name_of(row: dict[str, Any]) -> str:
    """The name of a cell: method and parameters."""
    parameters = "" if pd.isna(row["parameters"]) else row["parameters"]
    return f"{row['method']} {parameters}".strip()


def distance_of(row: dict[str, Any]) -> str:
    """The distance of a cell and its interval, in thousandths; empty where it was not measured."""
    if pd.isna(row.get("distance")):
        return ""
    estimate = f"{1000 * row['distance']:z.1f}"
    if row["distance_p"] < SIGNIFICANT:
        estimate = f"**{estimate}**"
    low = 1000 * row["distance_low"]
    high = 1000 * row["distance_high"]
    return f"{estimate} [{low:z.1f}, {high:z.1f}]"


def render(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    for run, table in TABLES.items():
        between = re.compile(
            rf"(<!-- {run}: python -m scripts.docs.frontier -->\n).*?(<!-- end -->)", re.DOTALL
        )
        text = table(run)
        page = between.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
