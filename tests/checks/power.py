"""Measure how many images it takes to reject each planted mistake.

    python -m tests.checks.power [--model-images 192] [--only MISTAKE...] [--out FOLDER]

The table is power.csv in FOLDER, by default results/reference/certify.

On the tables every mistake is decoded until a test rejects it, at most 1,048,576 images. With the
bundled model it is at most `--model-images`. The bar is the certificate's, 0.001 / number of its
tests. Rows of other mistakes stay as they are, and so do all rows on tables or model if the limit
of their images is 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lantern_bench.checks.certification import load_by_dtype, power_rows, rejection_level, run_trial
from lantern_bench.checks.claims import CertificationPlan, plan_certification
from lantern_bench.checks.tabular_model import table_model
from lantern_bench.checks.trials import Trial, plan_trials
from lantern_bench.cli.options import resolve_cells
from lantern_bench.decoding.engine import Engine
from lantern_bench.devices.compute import choose_compute
from lantern_bench.storage.schema import frame, write_csv
from lantern_bench.utils.progress import ignore_events
from tests.helpers.mistakes import Mistake, mistakes_of

FOLDER = Path("results/reference/certify")
TABLES = 1_048_576
# One decoding for each kind of mistake: a branching tree, siblings, filters, and each coupling.
SETTINGS = {
    "tables": [
        "static small-7",
        "static own-3-af3235",
        "static small-7, filtered and guided",
        "jacobi w4-row",
        "jacobi w4-row-maximal",
        "jacobi w4-row-gumbel",
        "pac w4x2x2-row-maximal",
        "hybrid w4d2-row-maximal",
        "dynamic 10n2d5b",
        "static chain-5, block",
        "static small-7, traversal",
    ],
    "model": [
        "static small-7",
        "jacobi w4-row",
        "hybrid w4d2-row-maximal",
        "dynamic 10n2d5b",
        "static chain-4, block",
    ],
}
# Mistakes that are the same everywhere are made once.
ONCE = (
    "two images of a batch share bits",
    "every two images of a batch share bits",
    "q of the step before",
)
# The tables have no cache, and two equal images among 5,000 are not seen.
OF_MODEL = ("cache ", "two images of a batch share bits")


def planted(
    trials: list[Trial], model: Any, most: int, *, on_tables: bool
) -> Iterator[tuple[Trial, Mistake]]:
    """Yield every mistake that can be made in the chosen trials."""
    chosen = SETTINGS["tables" if on_tables else "model"]
    seen = set[str]()
    for trial in trials:
        is_on_tables = not trial.dtype
        if trial.setting.removesuffix(", tables") not in chosen or is_on_tables != on_tables:
            continue
        for mistake in mistakes_of(trial.decoding, model):
            if (on_tables and mistake.name.startswith(OF_MODEL)) or mistake.name in seen:
                continue
            if mistake.name.startswith(ONCE):
                seen.add(mistake.name)
            broken = replace(
                trial,
                images=most,
                broken=mistake.name,
                rule=mistake.acceptance_rule(),
            )
            yield broken, mistake


def plan() -> CertificationPlan:
    """The plan of `certify lanterns`."""
    flags = {"model": ["lanterns"], "prompts": "held-out"}
    resolved = resolve_cells(name="certify", flags=flags, cells=[{"mode": "ar"}], settings=[])
    return plan_certification(resolved, is_audit=False, samples=8)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-images", type=int, default=192)
    parser.add_argument("--table-images", type=int, default=TABLES)
    parser.add_argument("--only", nargs="+", help="mistakes")
    parser.add_argument("--out", type=Path, default=FOLDER)
    typed = parser.parse_args()

    certificate = plan()
    settings = certificate.resolved.settings
    compute = choose_compute(settings.device, settings.dtype, fast=True)
    trials = plan_trials(certificate, compute.dtype_name)
    models = load_by_dtype(certificate, compute, trials)
    loaded = models[compute.dtype_name]
    chosen: list[tuple[Trial, Mistake]] = []
    if typed.table_images:
        chosen += planted(trials, table_model(), typed.table_images, on_tables=True)
    if typed.model_images:
        chosen += planted(trials, loaded, typed.model_images, on_tables=False)

    level = rejection_level(trials)
    path = typed.out / "power.csv"
    key = ["tested_on", "setting", "fault"]
    shown = [*key, "images", "decoded", "p_value"]
    table = pd.read_csv(path) if path.exists() else frame("power", [])
    for trial, mistake in chosen:
        if typed.only and mistake.name not in typed.only:
            continue
        fresh = {name: replace(model, engine=Engine()) for name, model in models.items()}
        with mistake.planted():
            result = run_trial(trial, certificate, fresh, level=level, emit=ignore_events)
        row = frame("power", power_rows("lanterns", [result], level))
        print(row[shown].to_string(header=False, index=False), flush=True)
        table = pd.concat([table, row]).drop_duplicates(key, keep="last")
        write_csv(table, path)


if __name__ == "__main__":
    main()
