"""Compare two runs, whose cells are matched by model and id, images by prompt and repeat: is the second better?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    fastest_lossless,
    run_cells,
    timed_images,
)
from lantern_bench.analysis.quality import Scores, paired, scored_images, sort_scores
from lantern_bench.analysis.statistics import (
    Interval,
    compare_sums,
    compare_timings,
    fewest_prompts,
    holm,
    settle,
    timing,
)
from lantern_bench.analysis.token_distance import distance_columns, token_rows
from lantern_bench.methods.catalog import METRICS, OF_IMAGES, OF_SETS, OF_TOKENS
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import ENDS, frame
from lantern_bench.utils.errors import RefusedError

ACROSS = ("weights", "protocol", "machine")
"""Kinds of difference that forbid a comparison unless the caller allows them."""

_SCORERS = ("clip_model", "extractor", "reference")
_MEANING = {
    "weights": "they are different models",
    "protocol": "their quality figures are different figures",
    "machine": "their seconds were measured on different machines",
}


class Difference(NamedTuple):
    """A difference between two runs."""

    kind: str  # one of `ACROSS`, or `setting`
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        """`dtype: float32 in the first, bfloat16 in the second`."""
        return f"{self.name}: {self.a} in the first, {self.b} in the second"


def differences(a: RunData, b: RunData) -> list[Difference]:
    """Return the differences between two runs in what both state."""
    made_a = _made_with(a)
    made_b = _made_with(b)
    pairs = [
        Difference(*key, value, made_b[key])
        for key, value in made_a.items()
        if made_b.get(key, value) != value
    ]
    protocols = [
        sorted({str(row["protocol"]) for row in run.scores if row.get("protocol")})
        for run in (a, b)
    ]
    if all(protocols) and set(protocols[0]).isdisjoint(protocols[1]):
        pairs.append(Difference("protocol", "protocol", *map(", ".join, protocols)))
    return pairs


def check_comparability(unlike: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` for the first kind of difference that is not allowed."""
    for kind in ACROSS:
        against = [str(difference) for difference in unlike if difference.kind == kind]
        if against and kind not in across:
            raise RefusedError(
                "\n  ".join([f"the runs differ in {kind}: {_MEANING[kind]}", *against]),
                f"To compare them anyway: --across {kind}",
            )


def _made_with(run: RunData) -> dict[tuple[str, str], str]:
    """Weights, scorers, machine and settings of a run, by kind of difference and name."""
    key, experiment, machine = (
        run.manifest.get(name) or {} for name in ("key", "experiment", "machine")
    )
    cpu = machine.get("cpu") or {}
    of_key = ("dtype", "device_type", "compile", "engine_version", "torch_version")
    gpus = [str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()]
    scores = pd.DataFrame(run.scores, columns=["protocol", "level", "cell_id", *_SCORERS])
    last = scores.drop_duplicates(["protocol", "level", "cell_id"], keep="last")
    scorers = {
        ("protocol", f"{scorer} of {protocol}"): ", ".join(sorted(rows[scorer].dropna().unique()))
        for protocol, rows in last.groupby("protocol")
        for scorer in _SCORERS
    }
    return {
        **{
            ("weights", f"weights of {name}"): str(digest)[:12]
            for name, digest in (key.get("weights") or {}).items()
        },
        **{key: names for key, names in scorers.items() if names},
        (
            "machine",
            "processor",
        ): f"{cpu.get('model', 'not recorded')}, {cpu.get('cores', '?')} cores",
        ("machine", "GPU"): ", ".join(gpus) or "none",
        ("machine", "device"): str(run.manifest.get("device", "not recorded")),
        ("machine", "threads"): str(run.manifest.get("threads", "not recorded")),
        **{("setting", name): str(key.get(name)) for name in of_key},
        **{("setting", name): str(experiment.get(name)) for name in ("prompts", "seed", "batch")},
    }


BETTER = "better"
WORSE = "worse"
SAME = "not distinguishable"
EQUIVALENT = "equivalent"
_LEVEL = 0.05


class Comparison(NamedTuple):
    """The comparison of two runs."""

    table: pd.DataFrame  # `comparison` of the schema
    only_a: tuple[str, ...]  # cells that the other run lacks
    only_b: tuple[str, ...]
    notes: tuple[str, ...]  # on the verdicts


def compare_runs(a: RunData, b: RunData, margins: Mapping[str, float] | None = None) -> Comparison:
    """Compare two runs that `check_comparability` allows.

    `margins`, by quantity: differences up to this count as none. Raises `RefusedError` for a quantity without any.
    """
    runs = [
        {(str(cell.columns["model"]), cell.cell_id): cell for cell in run_cells(run)}
        for run in (a, b)
    ]
    scores = [sort_scores(run.scores) for run in (a, b)]
    of_tokens = [distance_columns(run_cells(run), token_rows(run.scores)) for run in (a, b)]
    rows: list[dict[str, Any]] = []
    for key in (key for key in runs[0] if key in runs[1]):
        cells = [run[key] for run in runs]
        about = {"cell_id": key[1], "model": key[0]}
        rows += [about | row for row in _timed_rows(cells, [list(run.values()) for run in runs])]
        rows += [about | row for row in _scored_rows(cells, scores)]
        for name in OF_TOKENS:
            figures = [of_run[key[1]].get(name) for of_run in of_tokens]
            rows += [
                about | row
                for row in _untested(name, figures, "not tested: each run is, by distance_p")
            ]
    tested = [row for row in rows if row.get("p_value") is not None]
    for row, p in zip(tested, holm([row["p_value"] for row in tested]), strict=True):
        row |= {"p_holm": p, "verdict": SAME if p >= _LEVEL else _direction(row)}
    for quantity, margin in (margins or {}).items():
        bounded = [
            row for row in tested if row["quantity"] == quantity and row["kind"] == "difference"
        ]
        if not bounded:
            names = ", ".join(
                sorted({row["quantity"] for row in tested if row["kind"] == "difference"})
            )
            raise RefusedError(
                f"--margin {quantity}: no tested difference in these runs",
                f"Tested: {names or '-'}.",
            )
        for row in bounded:
            effect = Interval(*(row[f"effect{end}"] for end in ENDS))
            row["verdict"] = settle(
                figure=effect,
                low=-margin,
                high=margin,
                images=row["pairs"],
                names=(EQUIVALENT, _direction(row)),
            )
    only_a, only_b = (
        tuple(key[1] for key in run if key not in other) for run, other in (runs, runs[::-1])
    )
    return Comparison(
        table=frame("comparison", rows), only_a=only_a, only_b=only_b, notes=tuple(_notes(tested))
    )


def _direction(row: Mapping[str, Any]) -> str:
    """Whether run B is better or worse than A, by the effect; times are compared so that more is better."""
    metric = METRICS.get(row["quantity"])
    is_more = row["effect"] > (1.0 if row["kind"] == "ratio" else 0.0)
    return WORSE if is_more is (metric is not None and metric.better == "lower") else BETTER


def _timed_rows(
    cells: Sequence[CellRecords], runs: Sequence[list[CellRecords]]
) -> Iterator[dict[str, Any]]:
    """Seconds, speedup and accepted length of one cell."""
    yield from _timed("latency_s", [timed_images(cell) for cell in cells])
    if cells[0].columns["mode"] == "ar":
        return
    for quantity, find in (("speedup", baseline_of), ("speedup_over_lossless", fastest_lossless)):
        bases = [find(cell, run) for cell, run in zip(cells, runs, strict=True)]
        if any(len(cell.devices) > 1 for cell in cells):
            yield {
                "quantity": quantity,
                "kind": "ratio",
                "note": "not compared: a run has several kinds of device",
            }
        elif all(bases) and (quantity == "speedup" or not cells[0].is_lossless):
            yield from _timed(
                quantity,
                [timed_images(cell, base) for cell, base in zip(cells, bases, strict=True)],
            )
    steps = [cell.images[["committed", "steps"]].query("steps > 0") for cell in cells]
    yield from _tested("mean_accepted_length", *steps)


_UNTESTED = {
    "latency_s": "not tested: seconds of two moments",
    "speedup_over_lossless": "not tested: the fastest lossless cell of each run",
}


def _timed(quantity: str, seconds: Sequence[pd.DataFrame]) -> Iterator[dict[str, Any]]:
    """Yield the row of a quantity of seconds; only speedup over ar can have a verdict."""
    images = seconds[0].index.intersection(seconds[1].index)
    if not len(images):
        return
    a, b = (timing(of_run.loc[images]) for of_run in seconds)
    # Less time is better.
    effect = compare_timings(b, a) if quantity == "latency_s" else compare_timings(a, b)
    if quantity in _UNTESTED:
        effect = effect._replace(p_value=None, note=_UNTESTED[quantity])
    elif effect.p_value is None:
        effect = effect._replace(note="not tested: needs 2 prompts and 3 processes in both runs")
    yield {"quantity": quantity, "kind": "ratio", "a": a.value, "b": b.value} | _effect_columns(
        effect, images
    )


def _tested(quantity: str, a: pd.DataFrame, b: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the row of a quantity, none where the runs share no image that has it."""
    pair = paired(a, b)
    if pair is None:
        return
    (sums_a, sums_b), images = pair
    effect = compare_sums(sums_a, sums_b)
    if effect.p_value is None:
        effect = effect._replace(note="not tested: fewer than 2 prompts")
    row = {"quantity": quantity, "kind": "difference", "a": sums_a.value, "b": sums_b.value}
    yield row | _effect_columns(effect, images)


def _effect_columns(effect: Interval, images: pd.Index) -> dict[str, Any]:
    counts = {"pairs": len(images), "prompts": images.get_level_values("prompt_id").nunique()}
    return effect.columns("effect") | counts | {"p_value": effect.p_value, "note": effect.note}


def _scored_rows(
    cells: Sequence[CellRecords], scores: Sequence[Mapping[str, Scores]]
) -> Iterator[dict[str, Any]]:
    """Quality under each protocol that both runs have, or under each run's only one."""
    protocols = [(name, name) for name in scores[0] if name in scores[1]]
    if not protocols and len(scores[0]) == len(scores[1]) == 1:
        protocols = [(next(iter(scores[0])), next(iter(scores[1])))]
    for names in protocols:
        scored = [
            (cell, by_protocol[name])
            for cell, by_protocol, name in zip(cells, scores, names, strict=True)
        ]
        about = {"protocol": " / ".join(dict.fromkeys(names))}
        for metric in OF_IMAGES:
            yield from (
                row | about
                for row in _tested(metric, *(scored_images(*side, metric) for side in scored))
            )
        for metric in OF_SETS:
            figures = [of_run.cells.get(cell.cell_id, {}).get(metric) for cell, of_run in scored]
            yield from (
                row | about for row in _untested(metric, figures, "one value a run: not tested")
            )


def _untested(quantity: str, figures: Sequence[Any], note: str) -> Iterator[dict[str, Any]]:
    """Yield the row of a quantity that no test compares, if both runs have it."""
    a, b = figures
    if a is not None and b is not None:
        yield {
            "quantity": quantity,
            "a": a,
            "b": b,
            "kind": "difference",
            "effect": b - a,
            "note": note,
        }


def _notes(tested: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not tested:
        return
    alone = sum(row["p_value"] < _LEVEL for row in tested)
    together = sum(row["p_holm"] < _LEVEL for row in tested)
    yield (
        f"{len(tested)} comparisons are made at once: verdicts hold after Holm's correction at 5 %; "
        f"{alone} would pass alone, {together} pass together. Intervals are for each comparison alone."
    )
    prompts = min(
        (row["prompts"] for row in tested if row["kind"] == "difference"), default=math.inf
    )
    if prompts < (needed := fewest_prompts(len(tested))):
        yield f"{prompts} prompts cannot tell {len(tested)} comparisons apart, however large: it takes {needed}."
