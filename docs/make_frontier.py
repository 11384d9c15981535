"""Write the tables of docs/frontier.md: every mode on one model, its speed on two devices, and its quality.

    python -m docs.make_frontier

They are made of results/reference: `frontier` (a CPU), `frontier-h100` (a GPU) and `quality` (512 pictures a cell). The
text outside the markers is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from docs.make_prediction import REFERENCE, of_a_cell
from lantern_bench.methods.tables import RULES
from lantern_bench.models.registry import model_of
from lantern_bench.report.cost_model import devices

PAGE = Path(__file__).with_name("frontier.md")
LARGE = "llamagen-t2i-stage1"
_HEAD = ["method", "parameters", "tokens a step", "one core", "H100", "LlamaGen, H100, predicted", "FID", "precision"]


def cells() -> pd.DataFrame:
    """One row a cell: the figures of the three runs side by side; tokens a step are those of the most images."""
    runs = {name: _table(name, "speed") for name in ("quality", "frontier", "frontier-h100")}
    names = pd.concat(_table(name, "summary")[["method", "parameters"]] for name in runs)
    whole = pd.concat(runs.values())
    table = whole[~whole.index.duplicated()].join(names[~names.index.duplicated()])
    for name in ("frontier", "frontier-h100"):
        ends = ["speedup", "speedup_low", "speedup_high"]
        table = table.drop(columns=ends, errors="ignore").join(runs[name][ends].add_suffix(f" {name}"))
    quality = _table("quality", "quality")[["fid", "fid_verdict", "precision", "precision_verdict"]]
    return table.join(quality)[lambda found: found["seed_set"] == 0]


def _table(run: str, kind: str) -> pd.DataFrame:
    return pd.read_csv(REFERENCE / run / f"{kind}.csv").set_index("cell_id")


def rendered(table: pd.DataFrame) -> str:
    """The rows of a table of the page, from few tokens a step to many."""
    device, sizes, lines = devices()["h100"], model_of(LARGE).sizes, [_HEAD, ["---"] * len(_HEAD)]
    for row in table.sort_values("mean_accepted_length").to_dict("records"):
        made = "1.0x" if row["drafting"] == "none" else f"{of_a_cell(SimpleNamespace(**row), device, sizes):.1f}x"
        known = [row["method"], "" if pd.isna(row["parameters"]) else row["parameters"]]
        known += [f"{row['mean_accepted_length']:.2f}"]
        known += [_with_ends(row, "speedup", f" {run}", "x") for run in ("frontier", "frontier-h100")]
        lines.append([*known, made, _judged(row, "fid", ".1f"), _judged(row, "precision", ".2f")])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _with_ends(row: dict[Any, Any], figure: str, run: str, unit: str) -> str:
    """A figure with its interval, or nothing."""
    value, low, high = (row[f"{figure}{end}{run}"] for end in ("", "_low", "_high"))
    return "" if pd.isna(value) else f"{value:.2f}{unit} [{low:.2f}, {high:.2f}]"


def _judged(row: dict[Any, Any], figure: str, form: str) -> str:
    """A figure, bold where it lies outside the spread of ar."""
    if pd.isna(row[figure]):
        return ""
    return f"**{row[figure]:{form}}**" if row[f"{figure}_verdict"] == "outside" else f"{row[figure]:{form}}"


def render(page: str) -> str:
    """Return the text of the page with its two tables made anew."""
    table = cells()
    lossless = table["rule"].map(lambda rule: RULES[rule].lossless)
    for name, rows in (("lossless", table[lossless]), ("relaxed", table[~lossless])):
        between = re.compile(rf"(<!-- {name}: python -m docs.make_frontier -->\n).*?(<!-- end -->)", re.DOTALL)
        page = between.sub(lambda found, rows=rows: f"{found[1]}\n{rendered(rows)}\n{found[2]}", page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
