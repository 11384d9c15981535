"""Compare two runs: is the second one better?

Cells are matched by model and cell id, images by prompt and repeat.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    fastest_lossless,
    run_cells,
    timed_images,
)
from lantern_bench.analysis.quality import ProtocolScores, paired, scored_images, sort_scores
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

ACROSS = {
    "weights": "they are different models",
    "protocol": "their quality figures are different figures",
    "machine": "their seconds were measured on different machines",
}
"""Kinds of difference that forbid a comparison unless the caller allows them, and why."""

BETTER = "better"
WORSE = "worse"
SAME = "not distinguishable"
EQUIVALENT = "equivalent"

_LEVEL = 0.05  # of the tests


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
    protocols_a = sort_scores(a.scores)
    protocols_b = sort_scores(b.scores)
    if protocols_a and protocols_b and protocols_a.keys().isdisjoint(protocols_b):
        listed_a = ", ".join(protocols_a)
        listed_b = ", ".join(protocols_b)
        found.append(Difference(kind="protocol", name="protocol", a=listed_a, b=listed_b))
    return found


def check_comparability(unlike: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` for the first kind of difference that is not in `across`."""
    for kind, reason in ACROSS.items():
        against = [str(difference) for difference in unlike if difference.kind == kind]
        if against and kind not in across:
            lines = [f"the runs differ in {kind}: {reason}", *against]
            raise RefusedError("\n  ".join(lines), f"To compare them anyway: --across {kind}")


def _facts(run: RunData) -> dict[tuple[str, str], str]:
    """The weights, scorers, machine and settings of a run, by kind of difference and name."""
    manifest = run.manifest
    key = manifest.get("key") or {}
    experiment = manifest.get("experiment") or {}
    machine = manifest.get("machine") or {}
    cpu = machine.get("cpu") or {}
    gpus = [gpu["name"] for gpu in machine.get("gpus") or ()]

    facts = {}
    for name, digest in (key.get("weights") or {}).items():
        facts["weights", f"weights of {name}"] = digest[:12]
    facts |= _scorers(run.scores)
    for name in ("model", "cores"):
        facts["machine", f"processor, {name}"] = str(cpu.get(name, "not recorded"))
    facts["machine", "GPU"] = ", ".join(gpus) or "none"
    for name in ("device", "threads"):
        facts["machine", name] = str(manifest.get(name, "not recorded"))
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
    named = last.melt("protocol", scorers, "scorer").dropna().groupby(["protocol", "scorer"])
    unique = named["value"].unique().reset_index()
    facts = {}
    for protocol, scorer, names in unique.itertuples(index=False, name=None):
        facts["protocol", f"{scorer} of {protocol}"] = ", ".join(sorted(names))
    return facts


# ---- The comparison


class Comparison(NamedTuple):
    """The comparison of two runs."""

    table: pd.DataFrame  # `comparison` of the schema
    only_a: tuple[str, ...]  # cells that the other run lacks
    only_b: tuple[str, ...]
    notes: tuple[str, ...]  # about the verdicts


class _Cell(NamedTuple):
    """A cell of one run."""

    records: CellRecords
    cells: Sequence[CellRecords]  # all cells of the run
    scores: Mapping[str, ProtocolScores]  # of the run, by protocol
    of_tokens: Row


def _cells(run: RunData) -> dict[tuple[str, str], _Cell]:
    """The cells of a run by model and id."""
    cells = run_cells(run)
    scores = sort_scores(run.scores)
    of_tokens = distance_columns(cells, run.scores)
    return {
        (cell.columns["model"], cell.cell_id): _Cell(cell, cells, scores, of_tokens[cell.cell_id])
        for cell in cells
    }


def compare_runs(a: RunData, b: RunData, margins: Mapping[str, float] | None = None) -> Comparison:
    """Compare two runs that `check_comparability` allows.

    Args:
        a: The first run.
        b: The second run. Better and worse are said of it.
        margins: By quantity, the largest difference that counts as none.

    Raises:
        RefusedError: A margin names a quantity without a tested difference.
    """
    cells_a = _cells(a)
    cells_b = _cells(b)
    rows: list[Row] = []
    only_a = []
    for (model, cell_id), cell in cells_a.items():
        other = cells_b.pop((model, cell_id), None)
        if other is None:
            only_a.append(cell_id)
            continue
        about = {"model": model, "cell_id": cell_id}
        rows += [about | row for row in _cell_rows(cell, other)]

    tested = [row for row in rows if row.get("p_value") is not None]
    corrected = holm([row["p_value"] for row in tested])
    for row, p_value in zip(tested, corrected, strict=True):
        row["p_holm"] = p_value
        row["verdict"] = SAME if p_value >= _LEVEL else _direction(row)
    for quantity, margin in (margins or {}).items():
        _settle_within(tested, quantity, margin)
    return Comparison(
        table=frame("comparison", rows),
        only_a=tuple(only_a),
        only_b=tuple(cell_id for _, cell_id in cells_b),
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
            Interval.read(row, "effect"),
            low=-margin,
            high=margin,
            images=row["pairs"],
            names=(EQUIVALENT, _direction(row)),
        )


def _direction(row: Row) -> str:
    """Whether run b is better or worse, by the effect; a ratio is above 1 if b is faster."""
    metric = METRICS.get(row["quantity"])
    is_more = row["effect"] > (1.0 if row["kind"] == "ratio" else 0.0)
    less_is_better = metric is not None and metric.better == "lower"
    return WORSE if is_more is less_is_better else BETTER


def _cell_rows(a: _Cell, b: _Cell) -> Iterator[Row]:
    """Yield the rows of one cell."""
    yield from _timed_rows(a, b)
    yield from _scored_rows(a, b)
    for name in OF_TOKENS:
        note = "not tested: each run is, by distance_p"
        yield from _untested(name, a.of_tokens, b.of_tokens, note=note)


def _timed_rows(a: _Cell, b: _Cell) -> Iterator[Row]:
    """Yield seconds, speedups and accepted length of one cell."""
    yield from _timed("latency_s", timed_images(a.records), timed_images(b.records))
    if a.records.columns["mode"] == "ar":
        return
    has_several_devices = max(len(side.records.devices) for side in (a, b)) > 1
    for quantity, find_base in (
        ("speedup", baseline_of),
        ("speedup_over_lossless", fastest_lossless),
    ):
        if has_several_devices:
            note = "not compared: a run has several kinds of device"
            yield {"quantity": quantity, "kind": "ratio", "note": note}
            continue
        base_a = find_base(a.records, a.cells)
        base_b = find_base(b.records, b.cells)
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
    shared = [(name, name) for name in a.scores if name in b.scores]
    if not shared and len(a.scores) == len(b.scores) == 1:
        shared = list(zip(a.scores, b.scores, strict=True))
    for name_a, name_b in shared:
        about = {"protocol": name_a if name_a == name_b else f"{name_a} / {name_b}"}
        scores_a = a.scores[name_a]
        scores_b = b.scores[name_b]
        for metric in OF_IMAGES:
            images_a = scored_images(a.records, scores_a, metric)
            images_b = scored_images(b.records, scores_b, metric)
            for row in _tested(metric, images_a, images_b):
                yield row | about
        figures_a = scores_a.cell.get(a.records.cell_id, {})
        figures_b = scores_b.cell.get(b.records.cell_id, {})
        for metric in OF_SETS:
            note = "one value a run: not tested"
            for row in _untested(metric, figures_a, figures_b, note=note):
                yield row | about


def _untested(quantity: str, a: Row, b: Row, *, note: str) -> Iterator[Row]:
    """Yield the row of a quantity that no test compares, if the rows of both runs have it."""
    value_a = a.get(quantity)
    value_b = b.get(quantity)
    if value_a is None or value_b is None:
        return
    row: Row = {"quantity": quantity, "kind": "difference", "a": value_a, "b": value_b}
    yield row | {"effect": value_b - value_a, "note": note}


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
