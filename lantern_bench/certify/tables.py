"""The tables of `certify`: emitted TV, the certificate and the audit. Plain rows in, rows out.

docs/algorithms.md, section 6. A figure without a bar is only reported: relaxation that costs much is no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lantern_bench.certify.plan import Claim
from lantern_bench.report.labels import BOUNDS, parameters
from lantern_bench.report.records import Row, join_notes
from lantern_bench.report.stats import Interval, holm, mean_over_prompts, proportion
from lantern_bench.schema import CELL_COLUMNS

_MORE_DRAWS = "more draws narrow the interval: its ends come from estimates that err downwards and upwards"


def cost_rows(places: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `emitted_tv` from those of `emitted_tv_places`, cells in the order they come.

    Draws give two estimates of a place that err upwards and downwards: the figure lies midway, and its interval holds
    the bias.
    """
    cells: dict[tuple[str, str], list[Row]] = {}
    for place in places:
        cells.setdefault((place["model"], place["cell_id"]), []).append(place)
    for rows in cells.values():
        prompts = [str(row["prompt_id"]) for row in rows]
        above = [float(row["emitted_tv"]) for row in rows]
        is_exact = any(row.get("emitted_tv_crossed") is None for row in rows)
        below = above if is_exact else [float(row["emitted_tv_crossed"]) for row in rows]
        middle = [(high + low) / 2 for high, low in zip(above, below, strict=True)]
        mean = _between(below, middle, above, prompts)
        moved = [float(row["moved_mass"]) for row in rows if row.get("moved_mass") is not None]
        cell: dict[str, Any] = {column.name: rows[0].get(column.name) for column in CELL_COLUMNS}
        cell |= {"places": len(rows), "prompts": len(set(prompts)), **mean.columns("emitted_tv")}
        cell |= {"emitted_tv_median": median(middle), "emitted_tv_max": max(middle)}
        cell["emitted_tv_crossed"] = None if is_exact else fmean(below)
        cell["moved_mass"] = fmean(moved) if moved else None
        delta = cell["delta"]
        if delta is not None:
            low, share, high = ([float(tv > delta) for tv in values] for values in (below, middle, above))
            cell |= _between(low, share, high, prompts).columns("above_delta")
            cell["times_delta"] = mean.value / delta if mean.value is not None else None
        # Two estimates of one mean that differ by more than a tenth of it come from too few draws.
        apart = sum(above) - sum(below) > 0.1 * sum(middle)
        yield {**cell, "note": join_notes(note for note in (mean.note, _MORE_DRAWS if apart else None) if note)}


def _between(
    below: Sequence[float], middle: Sequence[float], above: Sequence[float], prompts: Sequence[str]
) -> Interval:
    """The mean of `middle`; its interval begins as that of the mean of `below` and ends as that of `above`."""
    low, mean, high = (mean_over_prompts(values, prompts) for values in (below, middle, above))
    return mean._replace(low=None if low.low is None else max(0.0, low.low), high=high.high)


LEVEL = 1e-3
"""The chance that the certificate of a correct model rejects it: of all its tests together, by Holm's correction."""
BROKEN = 1e-6
"""The p-value that an audit must find, on the tables, for what is broken on purpose."""
_ROUNDING = 1e-5


@dataclass(frozen=True)
class TrialResult:
    """The p-values of a trial, and how much its tests saw."""

    setting: str
    broken: str | None  # what is broken on purpose
    p_values: Mapping[str, float]  # by test
    images: int
    tokens: int
    edge: int = 0  # tokens that are not tested, because rounding may change whether they pass the filters
    impossible: int = 0  # tokens that the target cannot give
    tv: tuple[float, float] | None = None  # on the tables: how far the tokens are off, two estimates

    @property
    def too_few_tested(self) -> bool:
        """Whether rounding leaves less than half of the tokens to be tested."""
        return self.edge > self.tokens / 2


def whole_image_rows(model: str, results: Sequence[TrialResult]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the checks of whole images and of broken rules, and the rows of `lossless_tests`.

    Holm's correction is over all tests of all rules that are not broken. A broken rule must be rejected by one test at
    its strictest level, else it is `weak`, as is a right rule of which rounding leaves too few tokens to be tested.
    """
    family = [(result, test) for result in results if result.broken is None for test in result.p_values]
    adjusted = holm([result.p_values[test] for result, test in family])
    p_holm = {(result.setting, test): p for (result, test), p in zip(family, adjusted, strict=True)}
    checks, tests = [], []
    for result in results:
        corrected = {
            test: p_holm[result.setting, test] if result.broken is None else min(1.0, p * len(family))
            for test, p in result.p_values.items()
        }
        for test, p in result.p_values.items():
            row = {"model": model, "setting": result.setting, "broken": result.broken, "test": test, "p_value": p}
            row |= {"p_holm": corrected[test], "images": result.images, "tokens": result.tokens}
            tests.append(row | {"edge_tokens": result.edge})
        lowest = min(result.p_values, key=lambda test: result.p_values[test])
        checks.append(_whole_image_check(model, result, lowest, corrected[lowest], len(family)))
    return checks, tests


def _whole_image_check(model: str, result: TrialResult, lowest: str, p: float, count: int) -> dict[str, Any]:
    """The row of a trial, by its test `lowest`, whose p-value is corrected for `count` tests."""
    notes = [f"{lowest}: p = {result.p_values[lowest]:.2g}"]
    if result.edge:
        notes.append(f"{result.edge} tokens left out: rounding may change whether they pass the filter")
    if result.impossible:
        notes.append(f"{result.impossible} tokens that the target cannot give")
    if result.broken is None:
        figure = f"smallest of {len(result.p_values)} p-values, corrected for {count}"
        row = _row(model, "whole images follow the target", result.setting, figure, p, result.images)
        row |= _verdict(f"> {LEVEL:g}", p > LEVEL)
        if row["passed"] == "yes" and result.too_few_tested:
            row["passed"] = "weak"
            notes.append("too few tokens are tested: give --dtype float32")
    else:
        setting = f"{result.setting}: {result.broken}"
        row = _row(model, "broken rule rejected", setting, "the same", p, result.images)
        row |= {"wanted": f"< {LEVEL:g}", "passed": "yes" if p < LEVEL else "weak"}
        notes += [] if p < LEVEL else ["the tests are too weak to see it: give more --samples"]
    return {**row, "note": join_notes(notes)}


def audit_rows(
    model: str, audited: Sequence[tuple[Claim, Sequence[TrialResult]]], costs: Sequence[Row]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of `audit` and of `lossless_tests`; `costs` are rows of `emitted_tv`.

    The results of a claim begin with that on the tables. A form that is ours must hold its claim.
    """
    tests = []
    for is_lossless in (True, False):
        alike = [result for claim, results in audited if claim.is_lossless is is_lossless for result in results]
        tests += whole_image_rows(model, alike)[1]
    lowest: dict[str, float] = {}
    for test in tests:
        if test["broken"] is None:
            lowest[test["setting"]] = min(test["p_holm"], lowest.get(test["setting"], 1.0))
    cost_of = {row["cell_id"]: row for row in costs}
    rows = []
    for claim, results in audited:
        cost = cost_of.get(claim.cell.cell_id, {})
        copied = ("emitted_tv", "emitted_tv_low", "emitted_tv_high", "note")
        rows.append(_audit_row(claim, results, lowest, model) | {name: cost.get(name) for name in copied})
    return rows, tests


_VERDICTS = {
    (True, True): "lossless: no difference found",
    (True, False): "claimed lossless, measured: not",
    (False, False): "relaxed, as claimed",
    (False, True): "relaxed: no difference found",
}


def _audit_row(claim: Claim, results: Sequence[TrialResult], lowest: Mapping[str, float], model: str) -> dict[str, Any]:
    """The row of a claim; `lowest` has the smallest corrected p-value by setting."""
    right = [result for result in results if result.broken is None]
    broken = [(result, min(result.p_values.values())) for result in results if result.broken is not None]
    on_tables, p = right[0], min(lowest[result.setting] for result in right)
    follows_target = p > LEVEL
    power = max((smallest for result, smallest in broken if result.tv), default=None)
    is_weak = (power or 0.0) >= BROKEN or any(result.too_few_tested for result in right)
    passed = "NO" if not follows_target else "weak" if is_weak else "yes"
    row = {**claim.cell.columns(), "form": claim.form or None, "source": claim.source or None, "p_holm": p}
    row |= {"claim": "lossless" if claim.is_lossless else "relaxed"}
    row |= {"verdict": _VERDICTS[claim.is_lossless, follows_target]}
    row |= zip(("p_first", "p_joint", "p_later"), on_tables.p_values.values(), strict=True)
    row |= {"table_images": on_tables.images, "power_p": power}
    row |= {"images": right[1].images, "p_images": min(right[1].p_values.values())} if right[1:] else {}
    row |= {"passed": passed if claim.is_lossless and claim.is_ours else None}
    tv = None if follows_target else on_tables.tv
    row |= (Interval(sum(tv) / 2, *tv) if tv else Interval(None)).columns("table_tv")
    shown = [f"{result.broken} {smallest:.1g}" + ("" if result.tv else f" ({model})") for result, smallest in broken]
    return row | {"broken": "; ".join(shown) or None}


def identity_row(
    model: str, setting: str, differences: Sequence[tuple[int, float] | None], tolerance: float
) -> dict[str, Any]:
    """Check that greedy speculation equals greedy decoding, or differs at a margin below `tolerance`, a near-tie."""
    share = proportion(differences.count(None), len(differences))
    row = _row(model, "greedy identity", setting, "share of prompts with equal tokens", share.value, len(differences))
    near_ties, others = list[str](), list[str]()
    for position, margin in filter(None, differences):
        (near_ties if margin < tolerance else others).append(f"token {position}, margin {margin:.1e}")
    notes = ["near-ties (rounding may choose either): " + ", ".join(near_ties)] if near_ties else []
    notes += ["different: " + ", ".join(others)] if others else []
    row |= share.columns("measured") | _verdict("equal, or a near-tie", not others)
    return row | {"note": "; ".join(notes) or None}


def strict_row(model: str, setting: str, places: Sequence[Row]) -> dict[str, Any]:
    """Check that the strict rule emits exactly the target's distribution at places of real images."""
    worst = max(float(place["emitted_tv"]) for place in places)
    row = _row(model, "strict rule emits the target", setting, "largest emitted TV", worst, len(places))
    return row | _verdict(f"<= {_ROUNDING:g}", worst <= _ROUNDING)


def cost_check_rows(means: Sequence[Row], places: Sequence[Row]) -> list[dict[str, Any]]:
    """Report the emitted TV of each relaxed cell; check the bound for deterministic drafts under `exact`.

    The bound: at each place the emitted TV is at most the mass that the children move. Others have no such bound.
    """
    rows = []
    for mean in means:
        residual = mean["residual"] or "exact"
        setting = f"{mean['mode']} {parameters({**mean, 'residual': None}, [mean])} {residual} residual"
        row = _row(mean["model"], "emitted TV", setting, "mean", mean["emitted_tv"], mean["places"])
        row |= {"measured_low": mean["emitted_tv_low"], "measured_high": mean["emitted_tv_high"]}
        notes = [f"{name} {mean[name]:g}" for name in BOUNDS if mean.get(name) is not None]
        if mean.get("times_delta") is not None:
            share = f"above it at {mean['above_delta']:.0%} of places"
            notes = [f"{mean['times_delta']:.2g} times delta {mean['delta']:g}, {share}"]
        row["note"] = join_notes([*notes, *([mean["note"]] if mean["note"] else [])])
        if mean["moved_mass"] is not None and residual == "exact":
            of_cell = [place for place in places if place["cell_id"] == mean["cell_id"]]
            excess = max(float(place["emitted_tv"]) - float(place["moved_mass"]) for place in of_cell)
            row |= _verdict("<= mass moved, at each place", excess <= _ROUNDING)
        rows.append(row)
    return rows


def failures(rows: Sequence[Row], passed: str = "NO") -> list[str]:
    """Return the checks that do not hold, as text; `weak`: those that show too little."""
    failed = [row for row in rows if row.get("passed") == passed]
    return [f"{row['check']} ({row['setting']})" if "check" in row else row["cell_id"] for row in failed]


def _row(model: str, check: str, setting: str, figure: str, measured: float | None, n: int) -> dict[str, Any]:
    return {"model": model, "check": check, "setting": setting, "figure": figure, "measured": measured, "n": n}


def _verdict(wanted: str, holds: bool) -> dict[str, Any]:
    return {"wanted": wanted, "passed": "yes" if holds else "NO"}
