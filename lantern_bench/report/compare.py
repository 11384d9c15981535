"""Compare two runs cell by cell: is the second faster or better than the first, or are they not distinguishable?

Cells are matched by model and id, images by prompt and repeat; what only one run has is counted and left out. Accepted
length, CLIP score and prompt accuracy are tested over prompts, speedup over each run's own `ar` over processes
(`stats.py`). Seconds of two runs, measured at two moments, get no verdict; nor do distances such as FID, which have one
value a cell. Runs that differ in weights, quality protocol or machine
are refused unless the caller allows it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.errors import RefusedError
from lantern_bench.methods.tables import OF_IMAGES, OF_SETS
from lantern_bench.report.records import (
    CellRecords,
    Row,
    baseline_of,
    fastest_lossless,
    run_cells,
    timed_images,
)
from lantern_bench.report.stats import (
    Interval,
    compare_sums,
    compare_timings,
    fewest_prompts,
    holm,
    timing,
)
from lantern_bench.report.tables import Scores, frame, paired, scored_images, sort_scores
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd


ACROSS = ("weights", "protocol", "machine")
"""Kinds of difference that forbid a comparison unless the caller allows them."""

_SCORERS = ("clip_model", "extractor", "reference")
_MEANING = {
    "weights": "they are different models",
    "protocol": "their quality figures are different figures",
    "machine": "their seconds were measured on different machines",
}


class Difference(NamedTuple):
    """One difference: its kind (one of `ACROSS`, or `setting`), its name, and both values."""

    kind: str
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        """`dtype: float32 in the first, bfloat16 in the second`."""
        return f"{self.name}: {self.a} in the first, {self.b} in the second"


def differences(a: RunData, b: RunData) -> list[Difference]:
    """Return the differences between two runs; those that forbid a comparison come first, in the order of `ACROSS`."""
    ours, theirs = ((run.manifest.get("key") or {}).get("weights") or {} for run in (a, b))
    # A model that only one run has takes no part in the comparison.
    shared = {name.split("/")[0] for name in ours} & {name.split("/")[0] for name in theirs}
    found = [
        Difference("weights", f"weights of {name}", *(str(one.get(name) or "none")[:12] for one in (ours, theirs)))
        for name in sorted({*ours, *theirs})
        if name.split("/")[0] in shared
    ]
    mine, other = _scorers(a.scores), _scorers(b.scores)
    if mine and other and not mine.keys() & other.keys():
        found.append(Difference("protocol", "protocol", *(", ".join(sorted(one)) for one in (mine, other))))
    for name, scorer in itertools.product(sorted(mine.keys() & other.keys()), _SCORERS):
        used = mine[name][scorer], other[name][scorer]
        if all(used):
            found.append(Difference("protocol", f"{scorer} of {name}", *(", ".join(sorted(one)) for one in used)))
    first, second = _facts(a.manifest), _facts(b.manifest)
    found += [Difference(*key, value, second[key]) for key, value in first.items()]
    return [one for one in found if one.a != one.b]


def check_comparability(found: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` naming the first kind of difference that forbids the comparison and is not in `across`."""
    for kind in ACROSS:
        against = [str(one) for one in found if one.kind == kind]
        if against and kind not in across:
            raise RefusedError(
                "\n  ".join([f"the runs differ in {kind}: {_MEANING[kind]}", *against]),
                f"To compare them anyway: --across {kind}",
            )


def _facts(manifest: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """What a manifest says of machine and settings, by kind of difference and name."""
    key, experiment, machine = (manifest.get(name) or {} for name in ("key", "experiment", "machine"))
    cpu, of_key = machine.get("cpu") or {}, ("dtype", "device_type", "compile", "engine_version", "torch_version")
    gpus = [str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()]
    return {
        ("machine", "processor"): f"{cpu.get('model', 'not recorded')}, {cpu.get('cores', '?')} cores",
        ("machine", "GPU"): ", ".join(gpus) or "none",
        ("machine", "device"): str(manifest.get("device", "not recorded")),
        ("machine", "threads"): str(manifest.get("threads", "not recorded")),
        **{("setting", name): str(key.get(name)) for name in of_key},
        **{("setting", name): str(experiment.get(name)) for name in ("prompts", "seed", "batch")},
    }


def _scorers(scores: Collection[Row]) -> dict[str, dict[str, set[str]]]:
    """The models and references that scored a run, by protocol and column; the last score of each cell counts."""
    found: dict[str, dict[str, set[str]]] = {}
    for row in {(row["protocol"], row["level"], row["cell_id"]): row for row in scores}.values():
        scorers = found.setdefault(str(row["protocol"]), {name: set() for name in _SCORERS})
        for name in _SCORERS:
            scorers[name] |= {str(row[name])} if row.get(name) else set()
    return found


BETTER, WORSE, SAME = "better", "worse", "not distinguishable"
_LEVEL = 0.05


class Comparison(NamedTuple):
    """The table `comparison`, the cells only one run has, and notes on the verdicts."""

    table: pd.DataFrame
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


def compare_runs(a: RunData, b: RunData) -> Comparison:
    """Compare two runs; `check_comparability` decides beforehand whether they may be compared."""
    sides = [{(str(one.columns["model"]), one.cell_id): one for one in run_cells(run)} for run in (a, b)]
    scores = [sort_scores(run.scores) for run in (a, b)]
    rows: list[dict[str, Any]] = []
    for key in (key for key in sides[0] if key in sides[1]):
        cells = [side[key] for side in sides]
        about = {"cell_id": key[1], "model": cells[0].columns["model"]}
        found = [*_timed_rows(cells, [list(side.values()) for side in sides]), *_scored_rows(cells, scores)]
        rows += [about | row for row in found]
    # Every tested effect is computed so that more is better.
    tested = [row for row in rows if row.get("p_value") is not None]
    for row, p in zip(tested, holm([row["p_value"] for row in tested]), strict=True):
        better = row["effect"] > (1.0 if row["kind"] == "ratio" else 0.0)
        row |= {"p_holm": p, "verdict": SAME if p >= _LEVEL else BETTER if better else WORSE}
    only_a, only_b = (tuple(key[1] for key in one if key not in other) for one, other in (sides, sides[::-1]))
    return Comparison(frame("comparison", rows), only_a, only_b, tuple(_notes(tested)))


def _timed_rows(cells: Sequence[CellRecords], sides: Sequence[list[CellRecords]]) -> Iterator[dict[str, Any]]:
    """Seconds, speedup and accepted length of one cell."""
    yield from _timed("latency_s", [timed_images(cell) for cell in cells])
    if cells[0].columns["mode"] == "ar":
        return
    for quantity, find in (("speedup", baseline_of), ("speedup_over_lossless", fastest_lossless)):
        bases = [find(cell, side) for cell, side in zip(cells, sides, strict=True)]
        if any(len(cell.devices) > 1 for cell in cells):
            yield {"quantity": quantity, "kind": "ratio", "note": "not compared: a run has several kinds of device"}
        elif all(bases) and (quantity == "speedup" or not cells[0].is_lossless):
            yield from _timed(quantity, [timed_images(cell, base) for cell, base in zip(cells, bases, strict=True)])
    yield from _tested("mean_accepted_length", *(_measured(cell, "committed", "steps") for cell in cells))


def _timed(quantity: str, compared: Sequence[pd.DataFrame]) -> Iterator[dict[str, Any]]:
    """Yield the row of a quantity of seconds as `_tested` does; only speedup over ar can have a verdict."""
    pairs = compared[0].index.intersection(compared[1].index)
    if not len(pairs):
        return
    a, b = (timing(one.loc[pairs]) for one in compared)
    # Less time is better.
    effect = compare_timings(b, a) if quantity == "latency_s" else compare_timings(a, b)
    note = "not tested: fewer than 2 prompts or one process in a run" if effect.p_value is None else None
    if quantity != "speedup":
        moments = quantity == "latency_s"
        note = f"not tested: {'seconds of two moments' if moments else 'the fastest lossless cell of each run'}"
        effect = effect._replace(p_value=None)
    row = {"quantity": quantity, "kind": "ratio", "a": a.value, "b": b.value, "note": note}
    yield row | _effect_columns(effect, pairs)


def _effect_columns(effect: Interval, pairs: pd.Index) -> dict[str, Any]:
    counts = {"pairs": len(pairs), "prompts": pairs.get_level_values("prompt_id").nunique()}
    return effect.columns("effect") | counts | {"p_value": effect.p_value}


def _scored_rows(cells: Sequence[CellRecords], scores: Sequence[Mapping[str, Scores]]) -> Iterator[dict[str, Any]]:
    """Quality under each protocol that both runs have; where they share none, under each run's only one."""
    pairs = [(name, name) for name in scores[0] if name in scores[1]]
    if not pairs and len(scores[0]) == len(scores[1]) == 1:
        pairs = [(next(iter(scores[0])), next(iter(scores[1])))]
    for names in pairs:
        scored = [(cell, side[name]) for cell, side, name in zip(cells, scores, names, strict=True)]
        protocol = {"protocol": " / ".join(dict.fromkeys(names))}
        for name in OF_IMAGES:
            values = [scored_images(cell, scores, name) for cell, scores in scored]
            yield from (row | protocol for row in _tested(name, *values))
        for name in OF_SETS:
            a, b = (scores.cells.get(cell.cell_id, {}).get(name) for cell, scores in scored)
            if a is not None and b is not None:
                row = {"quantity": name, "a": a, "b": b, "kind": "difference", "effect": b - a}
                yield row | protocol | {"note": "one value a run: not tested"}


def _measured(cell: CellRecords, over: str, under: str) -> pd.DataFrame:
    """Numerator and denominator of each image that has both."""
    known = cell.images[[over, under]].dropna()
    return known[known[under] != 0]


def _tested(quantity: str, a: pd.DataFrame, b: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the row of one quantity, none where the runs share no image that has it; arguments as `paired`."""
    pair = paired(a, b)
    if pair is None:
        return
    sums_a, sums_b, images = pair
    effect = compare_sums(sums_a, sums_b)
    note = "not tested: fewer than 2 prompts" if effect.p_value is None else None
    row = {"quantity": quantity, "kind": "difference", "a": sums_a.value, "b": sums_b.value, "note": note}
    yield row | _effect_columns(effect, images)


def _notes(tested: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not tested:
        return
    alone = sum(row["p_value"] < _LEVEL for row in tested)
    kept = sum(row["verdict"] != SAME for row in tested)
    yield (
        f"{len(tested)} comparisons are made at once: verdicts hold after Holm's correction at 5 %; "
        f"{alone} would pass alone, {kept} pass together. Intervals are for each comparison alone."
    )
    prompts = min((row["prompts"] for row in tested if row["kind"] == "difference"), default=math.inf)
    if prompts < (needed := fewest_prompts(len(tested))):
        yield f"{prompts} prompts cannot tell {len(tested)} comparisons apart, however large: it takes {needed}."
