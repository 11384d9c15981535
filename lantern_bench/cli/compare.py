"""`lantern-bench compare`: is the second run faster or better than the first?

The statistics are `report/compare.py`; what may not be compared is refused by `report/likeness.py`. What differs
between the runs is told before the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.places import RUN_HELP, locate
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import CheckFailedError, RefusedError, UserError

if TYPE_CHECKING:
    from lantern_bench.report.compare import Comparison
    from lantern_bench.runs.store import RunData

__all__ = ["compare"]

_FAIL_IF = ("worse", "different")


def compare(
    ctx: typer.Context,
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help=RUN_HELP)],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run that is judged.")],
    across: Annotated[
        list[str] | None,
        typer.Option(help="Compare although these differ: weights, protocol, machine."),
    ] = None,
    fail_if: Annotated[
        str | None, typer.Option(help="Exit with 5 when a verdict is worse, or when any is different.")
    ] = None,
    format: Annotated[str | None, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Compare two runs cell by cell, paired by prompt: ratio or difference, 95 % interval, verdict."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    allowed = _checked_across(across or [])
    if fail_if is not None and fail_if not in _FAIL_IF:
        raise UserError(f"--fail-if {fail_if}: unknown", f"One of {', '.join(_FAIL_IF)}.")
    folders = (locate(run_a), locate(run_b))

    from lantern_bench.report.compare import compare_runs
    from lantern_bench.report.named_runs import read_named

    if folders[0].resolve() == folders[1].resolve():
        raise UserError(f"{run_b}: is the same run as {run_a}", "Give two runs.")
    names, (a, b) = zip(*read_named(folders).items(), strict=True)
    _tell_differences(a, b, allowed, console)
    found = compare_runs(a, b)
    if not len(found.table):
        raise RefusedError("the runs have no cell and prompt in common", "lantern-bench show RUN lists a run's cells.")
    _tell_unmatched(found, console)
    console.table(found.table, "comparison", title=f"a: {names[0]}   b: {names[1]}", format=chosen)
    for note in found.notes:
        console.say(note)
    _check(found, fail_if)


def _checked_across(typed: list[str]) -> list[str]:
    from lantern_bench.report.likeness import ACROSS

    kinds = [kind.strip() for text in typed for kind in text.split(",")]
    for kind in kinds:
        if kind not in ACROSS:
            raise UserError(f"--across {kind}: unknown", f"One of {', '.join(ACROSS)}.")
    return kinds


def _tell_differences(a: RunData, b: RunData, allowed: list[str], console: Console) -> None:
    from lantern_bench.report.likeness import check_likeness, differences

    found = differences(a, b)
    check_likeness(found, allowed)
    for one in found:
        console.warn(f"the runs differ in {one}")


def _tell_unmatched(found: Comparison, console: Console) -> None:
    for side, cells in (("first", found.only_a), ("second", found.only_b)):
        if cells:
            console.say(f"only in the {side} run, left out: {', '.join(cells)}")


def _check(found: Comparison, fail_if: str | None) -> None:
    from lantern_bench.report.compare import SAME, WORSE

    verdicts = found.table["verdict"].dropna()
    wrong = verdicts == WORSE if fail_if == "worse" else verdicts != SAME
    if fail_if is not None and wrong.any():
        raise CheckFailedError(f"--fail-if {fail_if}: {int(wrong.sum())} of {len(verdicts)} verdicts are")
