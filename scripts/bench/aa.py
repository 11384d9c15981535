"""`make aa`: test intervals of speedup and verdicts of `compare` on pairs of equal runs.

The bars are that an interval of speedup covers the other run's figure in at least 90% of cells,
and that `compare` gives a false verdict on at most 5% of the pairs. Other methods are computed
beside the package's, so that the choice can be checked again. Methods without an interval get one
from processes, as in `repeat_interval`. Finished runs are not made again. Use an otherwise idle
machine.

All runs are back to back, so intervals are tested in one state of the machine. The cells of a run
share `ar`, and each pair counts in both directions. Hence 20 pairs of three cells are 120 cases,
and far fewer independent ones. An effect that a whole run has, such as the state of the machine, is
in no interval.

In a simulation, 12 images ran in three processes. The logarithm of speed had a standard deviation
of 0.03 between processes and 0.04 between prompts. Coverage was 98% if runs had no effect, 92% if
runs varied as much as processes, 83% at three times the variance of processes, and 65% at three
times their standard deviation. With one process coverage was 74%; one process now has no interval.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t, trim_mean

from lantern_bench.analysis.cells import CellRecords, baseline_of, run_cells, timed_images
from lantern_bench.analysis.compare import SAME, compare_runs
from lantern_bench.analysis.statistics import Interval, ratio_of_sums, repeat_interval, timing
from lantern_bench.cli.console import Console
from lantern_bench.storage.run_directory import RunData, read_run
from lantern_bench.utils.clock import now
from lantern_bench.utils.text import duration

Array = NDArray[np.float64]

EXPERIMENT = """\
name: aa
description: An A/A pair - a fast chain, a relaxed chain and a slow tree beside ar
model: lanterns
metrics: [speed]
compile: true
cells:
  - {mode: ar}
  - {mode: speculative, drafting: static, rule: block, tree: chain-5}
  - {mode: lantern++, tree: chain-7, neighbours: 100, lambda: 10}
  - {mode: speculative, drafting: static, tree: eagle1-25}
"""
COVERED = 0.90
FALSE = 0.05
CHOSEN = "cut sums, processes"
OVER_PROMPTS = "sums, prompts"


def hodges_lehmann(values: Array) -> float:
    """Return the median of the means of all pairs of values."""
    first, second = np.triu_indices(len(values))
    return float(np.median((values[first] + values[second]) / 2))


def by_median_pace(images: pd.DataFrame) -> float:
    """Return the log speedup of steps times median seconds per step."""
    ar = images["numerator_steps"].sum() * np.median(
        images["numerator"] / images["numerator_steps"]
    )
    cell = images["denominator_steps"].sum() * np.median(
        images["denominator"] / images["denominator_steps"]
    )
    return math.log(ar / cell)


def log_ratios(images: pd.DataFrame) -> Array:
    """Return the log speedup of each image."""
    return np.log((images["numerator"] / images["denominator"]).to_numpy())


# Logarithm of a speedup from the columns of `timed_images`: seconds of `ar` are `numerator`,
# seconds of the cell are `denominator`.
ESTIMATORS: dict[str, Callable[[pd.DataFrame], float]] = {
    "sums": lambda images: math.log(images["numerator"].sum() / images["denominator"].sum()),
    "medians": lambda images: math.log(
        images["numerator"].median() / images["denominator"].median()
    ),
    "mean of log ratios": lambda images: float(log_ratios(images).mean()),
    "trimmed mean of log ratios": lambda images: float(trim_mean(log_ratios(images), 0.2)),
    "Hodges-Lehmann": lambda images: hodges_lehmann(log_ratios(images)),
    "steps x median pace": by_median_pace,
}


def run_pairs(
    chosen: argparse.Namespace, folder: Path, console: Console
) -> list[tuple[RunData, RunData]]:
    """Run the pairs that are missing and return all of them."""
    experiment = folder / "aa.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    command = [sys.executable, "-m", "lantern_bench", "--quiet", "sweep"]
    command += [chosen.experiment or str(experiment), "--metrics", "speed"]
    command += ["--images", str(chosen.images), "--processes", str(chosen.processes)]
    if chosen.eager:
        command.append("--no-compile")
    if chosen.modes:
        command += ["--modes", chosen.modes]
    if chosen.threads:
        command += ["--threads", chosen.threads]

    pairs = []
    for number in range(1, chosen.pairs + 1):
        pair = [folder / f"pair-{number:02d}{side}" for side in "ab"]
        for run in pair:
            if (run / "speed.csv").exists():
                continue
            # A run that was cut off is made anew: resumed, it would have more processes than its
            # pair.
            shutil.rmtree(run, ignore_errors=True)
            began = now()
            subprocess.run([*command, "--out", str(run)], check=True, stdout=subprocess.DEVNULL)
            console.say(f"{run.name}: {duration(now() - began)}")
        pairs.append((read_run(pair[0]), read_run(pair[1])))
    return pairs


def figures(run: RunData) -> Iterator[tuple[str, str, Interval]]:
    """Yield cell, method and speedup with its interval, for every cell with a baseline."""
    cells = run_cells(run)
    for cell in cells:
        base = baseline_of(cell, cells)
        if base is None or base is cell:
            continue
        yield cell.cell_id, CHOSEN, repeat_interval(timing(timed_images(cell, base)))
        raw = timed_images(_uncut(cell), _uncut(base))
        prompts = raw.index.get_level_values("prompt_id")
        yield (
            cell.cell_id,
            OVER_PROMPTS,
            ratio_of_sums(raw["numerator"], raw["denominator"], prompts),
        )
        for name, estimate in ESTIMATORS.items():
            logs = [estimate(images) for _, images in raw.groupby("process")]
            middle = estimate(raw)
            count = len(logs)
            half = math.inf
            if count > 1:
                half = float(t.ppf(0.975, count - 1) * np.std(logs, ddof=1) * math.sqrt(2 / count))
            low = math.exp(middle - half)
            high = math.exp(middle + half)
            yield cell.cell_id, f"{name}, processes", Interval(math.exp(middle), low, high)


def _uncut(cell: CellRecords) -> CellRecords:
    """Return the cell with the seconds of its records."""
    images = cell.images
    return replace(cell, images=images.assign(seconds=images["seconds"] / images["kept_fraction"]))


def paired_figures(pairs: list[tuple[RunData, RunData]]) -> pd.DataFrame:
    """Return a row for each pair, cell and method.

    It holds both figures, their intervals, and whether each interval covers the other figure.
    """
    rows = []
    for number, (first, second) in enumerate(pairs, start=1):
        for (cell, method, a), (_, _, b) in zip(figures(first), figures(second), strict=True):
            row = {
                "pair": number,
                "cell_id": cell,
                "method": method,
                **a.columns("a"),
                **b.columns("b"),
                "a_covers": covers(a, b.value),
                "b_covers": covers(b, a.value),
            }
            rows.append(row)
    return pd.DataFrame(rows)


def covers(interval: Interval, value: float) -> bool:
    """Return whether a figure has an interval and the value lies in it.

    With fewer than three processes there is no interval.
    """
    return interval.low is not None and interval.low <= value <= interval.high


def summary(paired: pd.DataFrame) -> pd.DataFrame:
    """Return coverage, half-width of intervals and difference of two runs, for each method."""
    logs = paired[["a", "b", "a_low", "a_high"]].transform(np.log)
    paired = paired.assign(
        covered=paired[["a_covers", "b_covers"]].mean(axis=1),
        half_width=(logs["a_high"] - logs["a_low"]) / 2,
        squared=(logs["a"] - logs["b"]) ** 2 / 2,
        apart=(logs["a"] - logs["b"]).abs(),
    )
    by = paired.groupby("method", sort=False)
    table = pd.DataFrame(
        {"covered": by["covered"].mean(), "half_width_median": by["half_width"].median()}
    )
    table["sd_of_a_run"] = np.sqrt(by["squared"].mean())
    return table.assign(apart_max=by["apart"].max()).reset_index()


def verdicts(pairs: list[tuple[RunData, RunData]]) -> pd.DataFrame:
    """Return the number of comparisons tested and of verdicts, for each pair."""
    rows = []
    for number, (a, b) in enumerate(pairs, start=1):
        compared = compare_runs(a, b).table.dropna(subset="verdict")
        speedups = compared[compared["quantity"] == "speedup"]
        row = {
            "pair": number,
            "tested": len(compared),
            "false": int(compared["verdict"].ne(SAME).sum()),
            "speedups": len(speedups),
            "alone": int((speedups["p_value"] < 0.05).sum()),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def main(words: list[str] | None = None) -> None:
    """Run the pairs, print the tables, and exit with 1 if a bar is missed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=20)
    arguments.add_argument("--images", type=int, default=12, help="images of a cell in a run")
    arguments.add_argument("--processes", type=int, default=3)
    arguments.add_argument("--threads", help="as in sweep")
    arguments.add_argument(
        "--experiment", help="a file or a shipped experiment in place of the four cells"
    )
    arguments.add_argument("--modes", help="as in sweep")
    arguments.add_argument("--eager", action="store_true", help="compile nothing")
    arguments.add_argument("--out", type=Path, default=Path("build/aa"))
    chosen = arguments.parse_args(words)
    console = Console()
    kind = f"{chosen.images}-images-{chosen.processes}-processes{'-eager' if chosen.eager else ''}"
    pairs = run_pairs(chosen, chosen.out / kind, console)
    paired = paired_figures(pairs)
    compared = verdicts(pairs)
    paired.to_csv(chosen.out / kind / "figures.csv", index=False)
    compared.to_csv(chosen.out / kind / "verdicts.csv", index=False)
    table = summary(paired)
    title = f"{len(pairs)} pairs of {kind}: fraction covered; half-width and standard deviation "
    title += "of a run, of the logarithm"
    console.table(table.round(3), title=title)
    cases = int((paired["method"] == CHOSEN).sum())
    cells = paired["cell_id"].nunique()
    console.say(
        f"design: pairs run back to back on one machine; {2 * cases} cases are {len(pairs)} pairs "
        f"x {cells} cells that share ar, in both directions; the state of the machine, an effect "
        "of the whole run, is not tested"
    )
    covered = float(table.loc[table["method"] == CHOSEN, "covered"].iloc[0])
    false = float((compared["false"] > 0).mean())
    console.say(f"speedup, {CHOSEN}: {covered:.1%} covered (bar: at least {COVERED:.0%})")
    console.say(
        f"compare: a false verdict on {false:.1%} of the pairs (bar: at most {FALSE:.0%}); "
        f"{compared['alone'].sum()} of {compared['speedups'].sum()} speedups have p < 0.05 before "
        "Holm's correction"
    )
    sys.exit(covered < COVERED or false > FALSE)


if __name__ == "__main__":
    main()
