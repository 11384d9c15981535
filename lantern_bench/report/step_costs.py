"""What steps cost, drawn: milliseconds by part, and the speedup that each tree reaches as its accepted length grows.

A pure function of the table that `lantern-bench profile` makes; no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lantern_bench.errors import UserError
from lantern_bench.report.tables import write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["PARTS", "write_step_costs"]

PARTS = ("draft_ms", "target_ms", "verify_ms", "other_ms")
_COLOURS = ("#0072B2", "#009E73", "#D55E00", "#999999")
_LINES = ("-", "--", "-.", ":")


def write_step_costs(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write `profile.csv` and `profile.png` into `folder`; raises `UserError` when it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    steps = table[table["what"] == "step"]
    _draw_parts(left, steps)
    _draw_speedups(right, steps)
    figure.tight_layout()
    files = [folder / "profile.csv", folder / "profile.png"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(table, files[0])
        figure.savefig(files[1], dpi=160, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def _draw_parts(axes: Axes, steps: pd.DataFrame) -> None:
    left = steps["milliseconds"] * 0.0
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        axes.barh(steps["name"], steps[part], left=left, color=colour, label=part.removesuffix("_ms"))
        left = left + steps[part]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    axes.legend(frameon=False)


def _draw_speedups(axes: Axes, steps: pd.DataFrame) -> None:
    drafted = steps[steps["break_even_mal"].notna() & (steps["name"] != "ar")]
    longest = max([6.0, *(drafted["mean_accepted_length"].dropna() + 1)])
    for number, row in enumerate(drafted.to_dict("records")):
        colour, lengths = f"C{number}", [1.0, longest]
        speedups = [length / row["break_even_mal"] for length in lengths]
        axes.plot(lengths, speedups, label=row["name"], color=colour, linestyle=_LINES[number % len(_LINES)])
        measured = row["mean_accepted_length"]
        if measured == measured:  # measured: a model of random weights has none
            axes.plot([measured], [measured / row["break_even_mal"]], marker="o", color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("mean accepted length (points: measured)")
    axes.set_ylabel("speedup over ar")
    if len(drafted):
        axes.legend(frameon=False)
