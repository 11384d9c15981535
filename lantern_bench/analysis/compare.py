"""Compare two runs: is the second one better?

Cells are matched by model and cell id, images by prompt and repeat.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    fastest_lossless,
    run_cells,
    timed_images,
)
from lantern_bench.analysis.quality import ProtocolScores, scored_images, sort_scores
from lantern_bench.analysis.statistics import (
    Interval,
    add_holm_p_values,
    compare_sums,
    compare_timings,
    fewest_prompts,
    settle,
    sums_of_images,
    timing,
)
from lantern_bench.analysis.token_distance import distance_columns, distance_version
from lantern_bench.methods.catalog import METRICS, OF_DRAFTS, OF_IMAGES, OF_SETS, OF_TOKENS
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

_WEIGHTS = "key.weights."

# Where a manifest has the facts, by kind of difference and name.
_FACTS = {
    ("machine", "processor, model"): "machine.cpu.model",
    ("machine", "processor, cores"): "machine.cpu.cores",
    ("machine", "device"): "device",
    ("machine", "threads"): "threads",
    ("setting", "dtype"): "key.dtype",
    ("setting", "device_type"): "key.device_type",
    ("setting", "compile"): "key.compile",
    ("setting", "engine_version"): "key.engine_version",
    ("setting", "torch_version"): "key.torch_version",
    ("setting", "prompts"): "experiment.prompts",
    ("setting", "seed"): "experiment.seed",
    ("setting", "batch"): "experiment.batch",
}
_PROMPTS = "hash of the prompts"
_DISTANCE = "version of the distance"


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
    """Return the facts that both runs record with different values."""
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
        found.append(
            Difference(
                kind="protocol",
                name="protocol",
                a=", ".join(protocols_a),
                b=", ".join(protocols_b),
            )
        )
    return found


def check_comparability(unlike: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` for the first kind of difference that is not in `across`."""
    for kind, reason in ACROSS.items():
        against = [str(difference) for difference in unlike if difference.kind == kind]
        if against and kind not in across:
            lines = [f"the runs differ in {kind}: {reason}", *against]
            raise RefusedError("\n  ".join(lines), f"To compare them anyway: --across {kind}")


def stated_differences(runs: Mapping[str, RunData]) -> list[str]:
    """Return a sentence for each run after the first: in what it differs from the first one."""
    (first, a), *others = runs.items()
    sentences = []
    for run, b in others:
        facts: dict[str, list[str]] = {}
        for kind, name, of_a, of_b in differences(a, b):
            facts.setdefault(kind, []).append(f"{name} ({of_b} instead of {of_a})")
        kinds = [f"{kind}: {', '.join(unlike)}" for kind, unlike in facts.items()]
        text = "; ".join(kinds) or "nothing that both record"
        sentences.append(f"{run} differs from {first} in {text}")
    return sentences


def warn_of_unlike(runs: Mapping[str, RunData]) -> None:
    """Warn of runs, drawn together, whose prompts or whose kinds of distance differ."""
    (first, a), *others = runs.items()
    for name, b in others:
        for difference in differences(a, b):
            if difference.name in (_PROMPTS, _DISTANCE):
                warnings.warn(f"{first} and {name} differ in {difference}", stacklevel=2)


def _facts(run: RunData) -> dict[tuple[str, str], str]:
    """The weights, scorers, machine and settings of a run, by kind of difference and name."""
    manifest = pd.json_normalize(run.manifest).astype(object).iloc[0].dropna()
    weights = manifest.filter(like=_WEIGHTS).str[:12]
    facts = {
        ("weights", f"weights of {str(name).removeprefix(_WEIGHTS)}"): digest
        for name, digest in weights.items()
    }
    facts |= _scorers(run.scores)
    gpus = [gpu["name"] for gpu in manifest.get("machine.gpus", ())]
    facts["machine", "GPU"] = ", ".join(gpus) or "none"
    for fact, place in _FACTS.items():
        facts[fact] = str(manifest.get(place, "not recorded"))
    prompts = manifest.get("prompts.ids_sha256")
    if prompts is not None:
        facts["setting", _PROMPTS] = prompts[:12]
    version = distance_version(run.scores)
    if version is not None:
        facts["setting", _DISTANCE] = version
    return facts


def _scorers(scores: Sequence[Row]) -> dict[tuple[str, str], str]:
    """The networks and references behind the scores, by kind of difference and name."""
    scorers = ["clip_model", "extractor", "reference"]
    of_rows = ["protocol", "level", "cell_id"]
    last = pd.DataFrame(scores, columns=[*of_rows, *scorers]).drop_duplicates(of_rows, keep="last")
    named = last.melt("protocol", scorers, "scorer").dropna().groupby(["protocol", "scorer"])
    facts = {}
    for (protocol, scorer), names in named["value"]:
        facts["protocol", f"{scorer} of {protocol}"] = ", ".join(sorted(names.unique()))
    return facts


# ---- The comparison


class Comparison(NamedTuple):
    """The comparison of two runs."""

    table: pd.DataFrame  # `comparison` of the schema
    only_a: tuple[str, ...]  # cells that the other run lacks
    only_b: tuple[str, ...]
    notes: tuple[str, ...]  # about the verdicts

    @property
    def summary(self) -> str:
        """How often each verdict was given, and the cells that only one run has."""
        verdicts = self.table["verdict"].dropna()
        counts = [f"{count} {verdict}" for verdict, count in verdicts.value_counts().items()]
        lines = [f"B against A: {', '.join(counts) or 'nothing tested'}"]
        for side, cells in (("A", self.only_a), ("B", self.only_b)):
            if cells:
                lines.append(f"cells only in {side}: {len(cells)} ({', '.join(cells)})")
        return "\n".join(lines)


_SEVERAL_DEVICES = "not compared: a run has several kinds of device"

_UNTESTED = {
    "latency_s": "not tested: seconds of two moments",
    "speedup_over_lossless": "not tested: the fastest lossless cell of each run",
    **dict.fromkeys(OF_SETS, "one value a run: not tested"),
    **dict.fromkeys(OF_TOKENS, "not tested: each run is, by distance_p"),
    **dict.fromkeys(OF_DRAFTS, "not tested: each run has an interval"),
}
"""Quantities without a test, and why."""

# What a run measured, by model, cell id, protocol ("" without one) and quantity. A figure of images
# is a frame, as from `timed_images` or `scored_images`. Other figures are numbers, None if missing.
_Measured: TypeAlias = dict[tuple[str, str, str, str], Any]


def _measured(run: RunData, scores: Mapping[str, ProtocolScores]) -> _Measured:
    cells = run_cells(run)
    of_tokens = distance_columns(cells, run.scores)
    measured: _Measured = {}
    for cell in cells:
        about = (cell.columns["model"], cell.cell_id)
        measured[*about, "", "latency_s"] = timed_images(cell)
        if cell.columns["mode"] != "ar":
            for name, figure in _speedups(cell, cells).items():
                measured[*about, "", name] = figure
            steps = cell.images[["committed", "steps"]]
            measured[*about, "", "mean_accepted_length"] = steps[steps["steps"] > 0]
            measured[*about, "", "emitted_tv"] = cell.images[["emitted_tv", "tokens"]].dropna()
        for protocol, of_protocol in scores.items():
            for name in OF_IMAGES:
                measured[*about, protocol, name] = scored_images(cell, of_protocol, name)
            of_cell = of_protocol.cell.get(cell.cell_id, {})
            for name in OF_SETS:
                measured[*about, protocol, name] = of_cell.get(name)
        for name in OF_TOKENS:
            measured[*about, "", name] = of_tokens[cell.cell_id].get(name)
    return measured


def _speedups(cell: CellRecords, cells: Sequence[CellRecords]) -> dict[str, Any]:
    bases = {"speedup": baseline_of(cell, cells)}
    if not cell.is_lossless:
        bases["speedup_over_lossless"] = fastest_lossless(cell, cells)
    if len(cell.devices) > 1:
        return dict.fromkeys(bases, _SEVERAL_DEVICES)
    return {name: timed_images(cell, base) for name, base in bases.items() if base is not None}


def compare_runs(a: RunData, b: RunData, margins: Mapping[str, float] | None = None) -> Comparison:
    """Compare two runs that `check_comparability` allows.

    Args:
        a: The first run.
        b: The second run. Better and worse are said of it.
        margins: By quantity, the largest difference that counts as none.

    Raises:
        RefusedError: A margin names a quantity without a tested difference.
    """
    scores_a = sort_scores(a.scores)
    scores_b = sort_scores(b.scores)
    if len(scores_a) == len(scores_b) == 1:  # also two different protocols
        both = " / ".join(dict.fromkeys([*scores_a, *scores_b]))
        scores_a = dict.fromkeys([both], *scores_a.values())
        scores_b = dict.fromkeys([both], *scores_b.values())
    untimed = [
        f"the {side} run is not timed (metrics without speed): its seconds are not compared"
        for side, run in {"first": a, "second": b}.items()
        if not run.is_timed
    ]
    measured_a = _measured(a, scores_a)
    measured_b = _measured(b, scores_b)
    rows: list[Row] = []
    for key, of_a in measured_a.items():
        model, cell_id, protocol, quantity = key
        row = _compared(quantity, of_a, measured_b.get(key))
        if row is None:
            continue
        if quantity == "distance" and distance_version(a.scores) != distance_version(b.scores):
            row |= {"effect": None, "note": "not compared: distances of two versions"}
        rows.append(row | {"model": model, "cell_id": cell_id, "protocol": protocol or None})

    tested = add_holm_p_values(rows, "p_value", into="p_holm")
    for row in tested:
        row["verdict"] = SAME if row["p_holm"] >= _LEVEL else _direction(row)
    for quantity, margin in (margins or {}).items():
        _settle_within(tested, quantity, margin)
    cells_a = dict.fromkeys(key[:2] for key in measured_a)
    cells_b = dict.fromkeys(key[:2] for key in measured_b)
    return Comparison(
        table=frame("comparison", rows),
        only_a=tuple(key[1] for key in cells_a if key not in cells_b),
        only_b=tuple(key[1] for key in cells_b if key not in cells_a),
        notes=(*untimed, *_notes(tested)),
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


def _compared(quantity: str, a: Any, b: Any) -> Row | None:
    """The row of a quantity; None where a run lacks it, or they share no image that has it."""
    if a is None or b is None:
        return None
    row: Row = {"quantity": quantity, "kind": "difference", "note": _UNTESTED.get(quantity)}
    if isinstance(a, str) or isinstance(b, str):
        return row | {"kind": "ratio", "note": _SEVERAL_DEVICES}
    if not isinstance(a, pd.DataFrame):
        return row | {"a": a, "b": b, "effect": b - a}

    images = a.index.intersection(b.index)
    if images.empty:
        return None
    sides: list[Any]
    if "process" in a:
        sides = [timing(side.loc[images]) for side in (a, b)]
        # Less time is better: the first run stands above the line.
        effect = compare_timings(*(sides[::-1] if quantity == "latency_s" else sides))
        needed = "needs 4 prompts and 3 processes in both runs"
        row["kind"] = "ratio"
    else:
        sides = [sums_of_images(side.loc[images]) for side in (a, b)]
        effect = compare_sums(*sides)
        needed = "fewer than 2 prompts"
    row |= effect.columns("effect")
    row |= {
        "a": sides[0].value,
        "b": sides[1].value,
        "pairs": len(images),
        "prompts": images.get_level_values("prompt_id").nunique(),
    }
    if quantity not in _UNTESTED:
        row |= {
            "p_value": effect.p_value,
            "note": f"not tested: {needed}" if effect.p_value is None else None,
        }
    return row


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
