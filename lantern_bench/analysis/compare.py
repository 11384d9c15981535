"""Compare two runs: is the second one better?

Cells are matched by model and cell id, images by prompt and repeat.
"""

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
from lantern_bench.analysis.quality import RunScores, paired, scored_images, sort_scores
from lantern_bench.analysis.statistics import (
    Interval,
    compare_sums,
    compare_timings,
    fewest_prompts,
    holm,
    settle,
    timing,
)
from lantern_bench.analysis.token_distance import distance_columns
from lantern_bench.methods.catalog import METRICS, OF_IMAGES, OF_SETS, OF_TOKENS
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import Row, frame
from lantern_bench.utils.errors import RefusedError

ACROSS = ("weights", "protocol", "machine")
"""Kinds of difference that forbid a comparison unless the caller allows them."""

BETTER = "better"
WORSE = "worse"
SAME = "not distinguishable"
EQUIVALENT = "equivalent"

_LEVEL = 0.05  # of the tests

_MEANING = {
    "weights": "they are different models",
    "protocol": "their quality figures are different figures",
    "machine": "their seconds were measured on different machines",
}


# ---- Facts recorded by both runs


class Difference(NamedTuple):
    """A fact that both runs record with different values."""

    kind: str  # one of `ACROSS`, or `setting`
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        """`dtype: float32 in the first, bfloat16 in the second`."""
        return f"{self.name}: {self.a} in the first, {self.b} in the second"


def differences(a: RunData, b: RunData) -> list[Difference]:
    """Return the facts recorded by both runs whose values differ."""
    facts_a = _facts(a)
    facts_b = _facts(b)
    found = []
    for (kind, name), value in facts_a.items():
        other = facts_b.get((kind, name), value)
        if other != value:
            found.append(Difference(kind=kind, name=name, a=value, b=other))
    protocols_a = _protocols(a)
    protocols_b = _protocols(b)
    if protocols_a and protocols_b and protocols_a.isdisjoint(protocols_b):
        listed_a = ", ".join(sorted(protocols_a))
        listed_b = ", ".join(sorted(protocols_b))
        found.append(Difference(kind="protocol", name="protocol", a=listed_a, b=listed_b))
    return found


def _protocols(run: RunData) -> set[str]:
    return {str(row["protocol"]) for row in run.scores if row.get("protocol")}


def check_comparability(unlike: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` for the first kind of difference that is not in `across`."""
    for kind in ACROSS:
        against = [str(difference) for difference in unlike if difference.kind == kind]
        if against and kind not in across:
            lines = [f"the runs differ in {kind}: {_MEANING[kind]}", *against]
            raise RefusedError("\n  ".join(lines), f"To compare them anyway: --across {kind}")


def _facts(run: RunData) -> dict[tuple[str, str], str]:
    """The weights, scorers, machine and settings of a run, by kind of difference and name."""
    manifest = run.manifest
    key = manifest.get("key") or {}
    experiment = manifest.get("experiment") or {}
    machine = manifest.get("machine") or {}
    cpu = machine.get("cpu") or {}
    processor = f"{cpu.get('model', 'not recorded')}, {cpu.get('cores', '?')} cores"
    gpus = [str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()]

    facts: dict[tuple[str, str], str] = {}
    for name, digest in (key.get("weights") or {}).items():
        facts["weights", f"weights of {name}"] = str(digest)[:12]
    facts |= _scorers(run.scores)
    facts["machine", "processor"] = processor
    facts["machine", "GPU"] = ", ".join(gpus) or "none"
    facts["machine", "device"] = str(manifest.get("device", "not recorded"))
    facts["machine", "threads"] = str(manifest.get("threads", "not recorded"))
    for name in ("dtype", "device_type", "compile", "engine_version", "torch_version"):
        facts["setting", name] = str(key.get(name))
    for name in ("prompts", "seed", "batch"):
        facts["setting", name] = str(experiment.get(name))
    return facts


def _scorers(scores: Sequence[Row]) -> dict[tuple[str, str], str]:
    """The networks and references behind the scores, by kind of difference and name."""
    scorers = ["clip_model", "extractor", "reference"]
    of_rows = ["protocol", "level", "cell_id"]
    last = pd.DataFrame(scores, columns=[*of_rows, *scorers]).drop_duplicates(of_rows, keep="last")
    facts = {}
    for protocol, rows in last.groupby("protocol"):
        for scorer in scorers:
            names = sorted(rows[scorer].dropna().unique())
            if names:
                facts["protocol", f"{scorer} of {protocol}"] = ", ".join(names)
    return facts


# ---- The comparison


class Comparison(NamedTuple):
    """The comparison of two runs."""

    table: pd.DataFrame  # `comparison` of the schema
    only_a: tuple[str, ...]  # cells that the other run lacks
    only_b: tuple[str, ...]
    notes: tuple[str, ...]  # about the verdicts


class _Side:
    """The cells and scores of one run."""

    def __init__(self, run: RunData) -> None:
        cells = run_cells(run)
        self.cells = {(str(cell.columns["model"]), cell.cell_id): cell for cell in cells}
        self.scores: RunScores = sort_scores(run.scores)
        self.of_tokens = distance_columns(cells, self.scores.tokens)

    def missing(self, other: _Side) -> tuple[str, ...]:
        """The ids of cells that the other run lacks."""
        return tuple(key[1] for key in self.cells if key not in other.cells)


class _Cell(NamedTuple):
    """A cell of one run."""

    records: CellRecords
    side: _Side

    def base(self, quantity: str) -> CellRecords | None:
        """The cell that a speedup is measured against."""
        cells = list(self.side.cells.values())
        if quantity == "speedup":
            return baseline_of(self.records, cells)
        return fastest_lossless(self.records, cells)

    def of_set(self, protocol: str, metric: str) -> Any:
        """The figure of a metric of sets."""
        cells = self.side.scores.protocols[protocol].cells
        return cells.get(self.records.cell_id, {}).get(metric)

    def of_images(self, protocol: str, metric: str) -> pd.DataFrame:
        """The scores of a metric of images."""
        return scored_images(self.records, self.side.scores.protocols[protocol], metric)


def compare_runs(a: RunData, b: RunData, margins: Mapping[str, float] | None = None) -> Comparison:
    """Compare two runs that `check_comparability` allows.

    Args:
        a: The first run.
        b: The second run. Better and worse are said of it.
        margins: By quantity, the largest difference that counts as none.

    Raises:
        RefusedError: A margin names a quantity without a tested difference.
    """
    side_a = _Side(a)
    side_b = _Side(b)
    rows: list[Row] = []
    for key, cell in side_a.cells.items():
        if key not in side_b.cells:
            continue
        about = {"model": key[0], "cell_id": key[1]}
        of_cell = _cell_rows(_Cell(cell, side_a), _Cell(side_b.cells[key], side_b))
        rows += [about | row for row in of_cell]

    tested = [row for row in rows if row.get("p_value") is not None]
    corrected = holm([row["p_value"] for row in tested])
    for row, p_value in zip(tested, corrected, strict=True):
        row["p_holm"] = p_value
        row["verdict"] = SAME if p_value >= _LEVEL else _direction(row)
    for quantity, margin in (margins or {}).items():
        _settle_within(tested, quantity, margin)
    return Comparison(
        table=frame("comparison", rows),
        only_a=side_a.missing(side_b),
        only_b=side_b.missing(side_a),
        notes=tuple(_notes(tested)),
    )


def _settle_within(tested: Sequence[Row], quantity: str, margin: float) -> None:
    """Replace the verdicts on differences of a quantity by an equivalence test."""
    of_differences = [row for row in tested if row["kind"] == "difference"]
    bounded = [row for row in of_differences if row["quantity"] == quantity]
    if not bounded:
        names = ", ".join(sorted({row["quantity"] for row in of_differences}))
        raise RefusedError(
            f"--margin {quantity}: no tested difference in these runs", f"Tested: {names or '-'}."
        )
    for row in bounded:
        row["verdict"] = settle(
            Interval(row["effect"], row["effect_low"], row["effect_high"]),
            low=-margin,
            high=margin,
            images=row["pairs"],
            names=(EQUIVALENT, _direction(row)),
        )


def _direction(row: Row) -> str:
    """Whether run b is better or worse, by the effect; a ratio is above 1 if b is faster."""
    metric = METRICS.get(row["quantity"])
    neutral = 1.0 if row["kind"] == "ratio" else 0.0
    is_more = row["effect"] > neutral
    less_is_better = metric is not None and metric.better == "lower"
    return WORSE if is_more is less_is_better else BETTER


def _cell_rows(a: _Cell, b: _Cell) -> Iterator[Row]:
    """Yield the rows of one cell."""
    yield from _timed_rows(a, b)
    yield from _scored_rows(a, b)
    for name in OF_TOKENS:
        value_a = a.side.of_tokens[a.records.cell_id].get(name)
        value_b = b.side.of_tokens[b.records.cell_id].get(name)
        note = "not tested: each run is, by distance_p"
        yield from _untested(name, value_a, value_b, note=note)


def _timed_rows(a: _Cell, b: _Cell) -> Iterator[Row]:
    """Yield seconds, speedups and accepted length of one cell."""
    yield from _timed("latency_s", timed_images(a.records), timed_images(b.records))
    if a.records.columns["mode"] == "ar":
        return
    has_several_devices = len(a.records.devices) > 1 or len(b.records.devices) > 1
    for quantity in ("speedup", "speedup_over_lossless"):
        if has_several_devices:
            note = "not compared: a run has several kinds of device"
            yield {"quantity": quantity, "kind": "ratio", "note": note}
            continue
        base_a = a.base(quantity)
        base_b = b.base(quantity)
        if base_a is None or base_b is None:
            continue
        if quantity == "speedup" or not a.records.is_lossless:
            images_a = timed_images(a.records, base_a)
            images_b = timed_images(b.records, base_b)
            yield from _timed(quantity, images_a, images_b)
    yield from _tested("mean_accepted_length", _steps(a.records), _steps(b.records))


def _steps(cell: CellRecords) -> pd.DataFrame:
    images = cell.images[["committed", "steps"]]
    return images[images["steps"] > 0]


_UNTESTED = {
    "latency_s": "not tested: seconds of two moments",
    "speedup_over_lossless": "not tested: the fastest lossless cell of each run",
}


def _timed(quantity: str, a: pd.DataFrame, b: pd.DataFrame) -> Iterator[Row]:
    """Yield the row of a quantity of seconds; only speedup over ar can have a verdict."""
    images = a.index.intersection(b.index)
    if images.empty:
        return
    timing_a = timing(a.loc[images])
    timing_b = timing(b.loc[images])
    if quantity == "latency_s":  # less time is better
        effect = compare_timings(timing_b, timing_a)
    else:
        effect = compare_timings(timing_a, timing_b)
    if quantity in _UNTESTED:
        effect = effect._replace(p_value=None, note=_UNTESTED[quantity])
    elif effect.p_value is None:
        effect = effect._replace(note="not tested: needs 2 prompts and 3 processes in both runs")
    row: Row = {"quantity": quantity, "kind": "ratio", "a": timing_a.value, "b": timing_b.value}
    yield row | _effect_columns(effect, images)


def _tested(quantity: str, a: pd.DataFrame, b: pd.DataFrame) -> Iterator[Row]:
    """Yield the row of a quantity; none where the runs share no image that has it."""
    pair = paired(a, b)
    if pair is None:
        return
    effect = compare_sums(pair.a, pair.b)
    if effect.p_value is None:
        effect = effect._replace(note="not tested: fewer than 2 prompts")
    row: Row = {"quantity": quantity, "kind": "difference", "a": pair.a.value, "b": pair.b.value}
    yield row | _effect_columns(effect, pair.images)


def _effect_columns(effect: Interval, images: pd.Index) -> Row:
    return {
        **effect.columns("effect"),
        "pairs": len(images),
        "prompts": images.get_level_values("prompt_id").nunique(),
        "p_value": effect.p_value,
        "note": effect.note,
    }


def _scored_rows(a: _Cell, b: _Cell) -> Iterator[Row]:
    """Yield quality under each protocol that both runs have, or under each run's only one."""
    protocols_a = list(a.side.scores.protocols)
    protocols_b = list(b.side.scores.protocols)
    shared = [(name, name) for name in protocols_a if name in protocols_b]
    if not shared and len(protocols_a) == len(protocols_b) == 1:
        shared = [(protocols_a[0], protocols_b[0])]
    for name_a, name_b in shared:
        about = {"protocol": name_a if name_a == name_b else f"{name_a} / {name_b}"}
        for metric in OF_IMAGES:
            scores_a = a.of_images(name_a, metric)
            scores_b = b.of_images(name_b, metric)
            for row in _tested(metric, scores_a, scores_b):
                yield row | about
        for metric in OF_SETS:
            figure_a = a.of_set(name_a, metric)
            figure_b = b.of_set(name_b, metric)
            note = "one value a run: not tested"
            for row in _untested(metric, figure_a, figure_b, note=note):
                yield row | about


def _untested(quantity: str, a: Any, b: Any, *, note: str) -> Iterator[Row]:
    """Yield the row of a quantity that no test compares, if both runs have it."""
    if a is None or b is None:
        return
    row: Row = {"quantity": quantity, "kind": "difference", "a": a, "b": b}
    yield row | {"effect": b - a, "note": note}


def _notes(tested: Sequence[Row]) -> Iterator[str]:
    if not tested:
        return
    count = len(tested)
    alone = sum(row["p_value"] < _LEVEL for row in tested)
    together = sum(row["p_holm"] < _LEVEL for row in tested)
    yield (
        f"{count} comparisons are made at once: verdicts hold after Holm's correction at 5%; "
        f"{alone} would pass alone, {together} pass together. "
        "Intervals are for each comparison alone."
    )
    prompts = [row["prompts"] for row in tested if row["kind"] == "difference"]
    fewest = min(prompts, default=math.inf)
    needed = fewest_prompts(count)
    if fewest < needed:
        yield (
            f"{fewest} prompts cannot tell {count} comparisons apart, however large the "
            f"differences are: at least {needed} prompts are needed."
        )
