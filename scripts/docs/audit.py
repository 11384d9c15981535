"""Write the tables of docs/audit.md: lossless claims, and the images needed to reject a mistake.

    python -m scripts.docs.audit

The tables are made from results/reference/audit/audit.csv, with the row of audit-pathspec, and
results/reference/certify/power.csv. The text outside the markers is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from lantern_bench.report.format_tables import readable

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "audit.md"
REFERENCE = ROOT / "results" / "reference"


def claims() -> pd.DataFrame:
    """One row a claim that says lossless."""
    audits = [
        pd.read_csv(REFERENCE / name / "audit.csv", dtype={"form": "string"})
        for name in ("audit", "audit-pathspec")
    ]
    audit = pd.concat(audits, ignore_index=True)
    audit = audit[audit["claim"] == "lossless"]
    audit["found"] = audit["verdict"].map(
        lambda verdict: "**differs**" if verdict.endswith("not") else "no difference"
    )
    return readable(audit[["mode", "form", "p_holm", "found"]].reset_index(drop=True)).frame


def power() -> pd.DataFrame:
    """One row a mistake: the images until it is rejected, in the decoding that shows it first."""
    power = pd.read_csv(REFERENCE / "certify" / "power.csv")
    rows = []
    for fault, of_fault in power.groupby("fault", sort=False):
        row = {"mistake": fault}
        for source in ("tables", "model"):
            here = of_fault[of_fault["tested_on"] == source]
            needed = here["images_needed"].min()
            least = here["images"].min()
            row[source] = f"about {needed:,.0f}" if pd.notna(needed) else ""
            if pd.notna(least):
                row[source] = f"{least:,.0f}"
            if len(here) and not row[source]:
                row[source] = f"more than {here['decoded'].max():,.0f}"
        rows.append(row)
    return pd.DataFrame(rows)


def render(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    for name, table in (("claims", claims()), ("power", power())):
        rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
        text = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
        between = re.compile(
            rf"(<!-- {name}: python -m scripts.docs.audit -->\n).*?(<!-- end -->)", re.DOTALL
        )
        page = between.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
