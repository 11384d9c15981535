"""Two runs, cell by cell: is the second faster or better than the first, or can nobody tell?

Cells are matched by model and id, images by prompt and repeat; what only one run has is counted and left out. Seconds,
speedup over each run's own `ar`, accepted length, CLIP score and prompt accuracy are tested over prompts
(`paired.py`); distances such as FID have one value a cell and are set side by side without a verdict. What must not be
compared is `likeness.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.errors import RefusedError
from lantern_bench.report.records import CellRecords, Row, baseline_of, group
from lantern_bench.report.stats import Kind, Sums, compare_sums, fewest_prompts, holm, sums_per_prompt
from lantern_bench.report.tables import Scores, frame, sort_scores
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd


# ---- Are two runs the same thing measured twice? What differs between them, and what of it forbids a comparison


ACROSS = ("weights", "protocol", "machine")
"""What a comparison may be allowed to reach across."""

_KEY_FIELDS = ("dtype", "device_type", "compile", "engine_version", "torch_version")
_JUDGES = ("clip_model", "extractor", "reference")
_MEANING = {
    "weights": "they are different models",
    "protocol": "their quality figures are different figures",
    "machine": "their seconds were measured on different machines",
}


class Difference(NamedTuple):
    """One thing that differs: of which kind (one of `ACROSS`, or `setting`), its name, and both values."""

    kind: str
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        """`dtype: float32 in the first, bfloat16 in the second`."""
        return f"{self.name}: {self.a} in the first, {self.b} in the second"


def differences(a: RunData, b: RunData) -> list[Difference]:
    """Return what differs between two runs, what forbids a comparison first."""
    found = [*_weights(a, b), *_protocols(a, b), *_machine(a, b), *_settings(a, b)]
    return sorted(found, key=lambda one: ACROSS.index(one.kind) if one.kind in ACROSS else len(ACROSS))


def check_likeness(found: Collection[Difference], across: Collection[str]) -> None:
    """Raise `RefusedError` naming the first difference that forbids the comparison and is not in `across`."""
    for kind in ACROSS:
        against = [one for one in found if one.kind == kind]
        if against and kind not in across:
            listed = "\n  ".join(str(one) for one in against)
            raise RefusedError(
                f"the runs differ in {kind}: {_MEANING[kind]}\n  {listed}",
                f"If that is what you want to compare: --across {kind}",
            )


def _weights(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = ((run.manifest.get("key") or {}).get("weights") or {} for run in (a, b))
    # A model that only one run has takes no part in the comparison.
    shared = {name.split("/")[0] for name in first} & {name.split("/")[0] for name in second}
    for name in sorted({*first, *second}):
        if name.split("/")[0] in shared and first.get(name) != second.get(name):
            yield Difference("weights", f"weights of {name}", _short(first.get(name)), _short(second.get(name)))


def _protocols(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = (_judges(run.scores) for run in (a, b))
    if first and second and not set(first) & set(second):
        yield Difference("protocol", "protocol", ", ".join(sorted(first)), ", ".join(sorted(second)))
    for name in sorted(set(first) & set(second)):
        for judge in _JUDGES:
            ours, theirs = first[name].get(judge), second[name].get(judge)
            if ours and theirs and ours != theirs:
                yield Difference("protocol", f"{judge} of {name}", ", ".join(sorted(ours)), ", ".join(sorted(theirs)))


def _judges(scores: Collection[Row]) -> dict[str, dict[str, set[str]]]:
    """By protocol and column, what measured: the last word on each cell."""
    found: dict[str, dict[str, set[str]]] = {}
    last = {(row["protocol"], row["level"], row["cell_id"]): row for row in scores}
    for row in last.values():
        judges = found.setdefault(str(row["protocol"]), {})
        for name in _JUDGES:
            if row.get(name):
                judges.setdefault(name, set()).add(str(row[name]))
    return found


def _machine(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = (_machine_facts(run.manifest) for run in (a, b))
    for name in first:
        if first[name] != second[name]:
            yield Difference("machine", name, first[name], second[name])


def _machine_facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    machine = manifest.get("machine") or {}
    cpu = machine.get("cpu") or {}
    gpus = [str(gpu.get("name", gpu)) for gpu in machine.get("gpus") or ()]
    return {
        "processor": f"{cpu.get('model', 'not recorded')}, {cpu.get('cores', '?')} cores",
        "GPU": ", ".join(gpus) or "none",
        "device": str(manifest.get("device", "not recorded")),
        "threads": str(manifest.get("threads", "not recorded")),
    }


def _settings(a: RunData, b: RunData) -> Iterator[Difference]:
    first, second = ((run.manifest.get("key") or {}) for run in (a, b))
    for name in _KEY_FIELDS:
        if first.get(name) != second.get(name):
            yield Difference("setting", name, str(first.get(name)), str(second.get(name)))
    ours, theirs = ((run.manifest.get("experiment") or {}) for run in (a, b))
    for name in ("prompts", "seed", "batch"):
        if ours.get(name) != theirs.get(name):
            yield Difference("setting", name, str(ours.get(name)), str(theirs.get(name)))


def _short(digest: object) -> str:
    return str(digest)[:12] if digest else "none"


# ----

BETTER, WORSE, SAME = "better", "worse", "not distinguishable"
_LEVEL = 0.05

Reader: TypeAlias = Callable[[Row], float | None]
Pair: TypeAlias = tuple[str, int]


class Comparison(NamedTuple):
    """The table `comparison`, the cells only one run has, and what to know of the verdicts."""

    table: pd.DataFrame
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


class _Measured(NamedTuple):
    """A figure of a cell in one run: numerator and denominator of each image, by prompt and repeat."""

    over: Mapping[Pair, float]
    under: Mapping[Pair, float]


def compare_runs(a: RunData, b: RunData) -> Comparison:
    """Compare two runs; which of them may be compared is checked before (`likeness.check_likeness`)."""
    sides = [{(str(cell.columns["model"]), cell.cell_id): cell for cell in group(run.records)} for run in (a, b)]
    scores = [sort_scores(run.scores) for run in (a, b)]
    rows: list[dict[str, Any]] = []
    for key, cell in sides[0].items():
        if key in sides[1]:
            rows += _timed_rows((cell, sides[1][key]), [list(side.values()) for side in sides])
            rows += _scored_rows((cell, sides[1][key]), scores)
    _judge(rows)
    only_a, only_b = (tuple(key[1] for key in one if key not in other) for one, other in (sides, sides[::-1]))
    return Comparison(frame("comparison", rows), only_a, only_b, tuple(_notes(rows)))


def _timed_rows(cells: tuple[CellRecords, CellRecords], sides: Sequence[list[CellRecords]]) -> Iterator[dict[str, Any]]:
    """Seconds, speedup and accepted length of one cell."""
    seconds = [_measured(cell.good, _value("seconds"), _one) for cell in cells]
    yield from _row(cells[0], "latency_s", "ratio", seconds[::-1], shown=seconds)
    if cells[0].columns["mode"] == "ar":
        return
    speedups = [_speedup(cell, side) for cell, side in zip(cells, sides, strict=True)]
    yield from _row(cells[0], "speedup", "ratio", speedups)
    lengths = [_measured(cell.good, _sum("committed_per_step"), _steps) for cell in cells]
    yield from _row(cells[0], "mean_accepted_length", "difference", lengths)


def _scored_rows(
    cells: tuple[CellRecords, CellRecords], scores: Sequence[Mapping[str, Scores]]
) -> Iterator[dict[str, Any]]:
    """Quality under each protocol both runs have; where they share none, each run's only one."""
    pairs = [(name, name) for name in scores[0] if name in scores[1]]
    if not pairs and len(scores[0]) == len(scores[1]) == 1:
        pairs = [(next(iter(scores[0])), next(iter(scores[1])))]
    for names in pairs:
        judged = [side[name] for side, name in zip(scores, names, strict=True)]
        protocol = " / ".join(dict.fromkeys(names))
        for figure in ("clip_score", "prompt_accuracy"):
            values = [_measured(cell.good, _score(one, figure), _one) for cell, one in zip(cells, judged, strict=True)]
            yield from _row(cells[0], figure, "difference", values, protocol=protocol)
        for figure in ("fid", "kid", "precision", "recall"):
            a, b = (one.cells.get(cell.cell_id, {}).get(figure) for cell, one in zip(cells, judged, strict=True))
            if a is not None and b is not None:
                yield _untested(cells[0], figure, protocol, a, b)


def _row(
    cell: CellRecords,
    quantity: str,
    kind: Kind,
    compared: Sequence[_Measured],
    *,
    shown: Sequence[_Measured] | None = None,
    protocol: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the row of one quantity, none where the runs share no pair that has it.

    `shown` are the figures to print where they are not in the order compared: less time is better.
    """
    pairs = sorted(set(compared[0].over) & set(compared[1].over))
    if not pairs:
        return
    prompts = [prompt for prompt, _ in pairs]
    sums = [Sums(*sums_per_prompt([m.over[p] for p in pairs], [m.under[p] for p in pairs], prompts)) for m in compared]
    values = [one.value for one in (sums if shown is None else sums[::-1])]
    if kind == "ratio" and min(values) <= 0:
        return
    effect = compare_sums(sums[0], sums[1], kind)
    note = "not tested: fewer than 2 prompts" if effect.p_value is None else None
    yield {
        "cell_id": cell.cell_id, "model": cell.columns["model"], "quantity": quantity, "protocol": protocol,
        "a": values[0], "b": values[1], "kind": kind, "effect": effect.value, "effect_low": effect.low,
        "effect_high": effect.high, "p_value": effect.p_value, "pairs": len(pairs), "prompts": len(set(prompts)),
        "note": note,
    }  # fmt: skip


def _untested(cell: CellRecords, figure: str, protocol: str, a: float, b: float) -> dict[str, Any]:
    row = {"cell_id": cell.cell_id, "model": cell.columns["model"], "quantity": figure, "protocol": protocol}
    return {**row, "a": a, "b": b, "kind": "difference", "effect": b - a, "note": "one value a run: not tested"}


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in Holm's p-values and the verdicts. Every tested effect is written so that more is better."""
    for row, p in zip(rows, holm([row.get("p_value") for row in rows]), strict=True):
        if p is None:
            continue
        even = 1.0 if row["kind"] == "ratio" else 0.0
        row["p_holm"] = p
        row["verdict"] = SAME if p >= _LEVEL else (BETTER if row["effect"] > even else WORSE)


def _notes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    tested = [row for row in rows if row.get("p_value") is not None]
    if not tested:
        return
    alone = sum(row["p_value"] < _LEVEL for row in tested)
    kept = sum(row["verdict"] != SAME for row in tested)
    yield (
        f"{len(tested)} comparisons are made at once: verdicts hold after Holm's correction at 5 %; "
        f"{alone} would pass alone, {kept} pass together. Intervals are for each comparison alone."
    )
    prompts = min(row["prompts"] for row in tested)
    if prompts < (needed := fewest_prompts(len(tested))):
        yield f"{prompts} prompts cannot tell {len(tested)} comparisons apart, however large: it takes {needed}."


def _speedup(cell: CellRecords, cells: Sequence[CellRecords]) -> _Measured:
    """Seconds of the run's own `ar` over those of the cell, image by image."""
    base = baseline_of(cell, cells)
    before = _measured(base.good if base else (), _value("seconds"), _one).over
    after = _measured(cell.good, _value("seconds"), _one).over
    shared = before.keys() & after.keys()
    return _Measured({pair: before[pair] for pair in shared}, {pair: after[pair] for pair in shared})


def _measured(rows: Sequence[Row], over: Reader, under: Reader) -> _Measured:
    read = {(str(row["prompt_id"]), int(row["repeat"])): (over(row), under(row)) for row in rows}
    known = {pair: (a, b) for pair, (a, b) in read.items() if a is not None and b}
    return _Measured({pair: a for pair, (a, _) in known.items()}, {pair: b for pair, (_, b) in known.items()})


def _one(_row: Row) -> float:
    return 1.0


def _steps(row: Row) -> float:
    return float(len(row.get("committed_per_step") or ()))


def _value(name: str) -> Reader:
    return lambda row: row.get(name)


def _sum(name: str) -> Reader:
    return lambda row: float(sum(row.get(name) or ()))


def _score(scores: Scores, name: str) -> Reader:
    return lambda row: scores.images.get(str(row["record_key"]), {}).get(name)
