"""Write the results of docs/audit.md from results/reference/audit/audit.csv.

    python -m docs.make_audit

The text outside the two markers is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from lantern_bench.report.format_tables import readable
from lantern_bench.schema import columns

PAGE = Path(__file__).with_name("audit.md")
RUN = Path(__file__).parents[1] / "results" / "reference" / "audit" / "audit.csv"
SHOWN = ["mode", "form", "claim", "source", "table_images", "p_first", "p_joint", "p_later", "images", "p_images"]
SHOWN += ["p_holm", "power_p", "table_tv", "table_tv_low", "table_tv_high"]
SHOWN += ["emitted_tv", "emitted_tv_low", "emitted_tv_high", "verdict"]
BETWEEN = re.compile(r"(<!-- Below: python -m docs.make_audit -->\n).*?(<!-- End -->)", re.DOTALL)


def render(page: str) -> str:
    """Return the text of the page with its table made anew."""
    kinds = {
        column.name: {"string": "string", "int": "Int64"}.get(column.dtype, "float64") for column in columns("audit")
    }
    shown = readable(pd.read_csv(RUN, dtype=kinds)[SHOWN]).frame
    rows = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    table = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return BETWEEN.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
