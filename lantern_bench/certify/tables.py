"""The tables of `certify`: emitted TV, the certificate and the audit. Plain rows in, rows out.

Each check and its bar are defined here and nowhere else (docs/algorithms.md, section 6). A figure without a bar is only
reported: relaxation that costs more than its bound is a finding, not an error of the model or of the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from lantern_bench.report.labels import BOUNDS
from lantern_bench.report.records import Row, join_notes
from lantern_bench.report.stats import Interval, holm, mean_over_prompts, proportion
from lantern_bench.report.tables import parameters
from lantern_bench.schema import CELL_COLUMNS

_MORE_DRAWS = "more draws narrow the interval: its ends come from estimates that err downwards and upwards"


def cost_rows(places: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `emitted_tv` from those of `emitted_tv_places`, cells in the order they come.

    Draws give two estimates of a place, one that errs upwards and one that errs downwards. The figure lies midway; its
    interval reaches from the lower end of the second to the upper end of the first, so it holds the estimate's bias.
    """
    cells: dict[tuple[str, str], list[Row]] = {}
    for place in places:
        cells.setdefault((place["model"], place["cell_id"]), []).append(place)
    for here in cells.values():
        prompts = [str(place["prompt_id"]) for place in here]
        above = [float(place["emitted_tv"]) for place in here]
        crossed = [place.get("emitted_tv_crossed") for place in here]
        below = [tv if other is None else float(other) for tv, other in zip(above, crossed, strict=True)]
        middle = [(one + other) / 2 for one, other in zip(above, below, strict=True)]
        mean = _between(below, middle, above, prompts)
        row: dict[str, Any] = {column.name: here[0].get(column.name) for column in CELL_COLUMNS}
        row |= {"places": len(here), "prompts": len(set(prompts)), **mean.columns("emitted_tv")}
        row |= {"emitted_tv_median": median(middle), "emitted_tv_max": max(middle)}
        row["emitted_tv_crossed"] = None if None in crossed else sum(below) / len(below)
        moved = [float(place["moved_mass"]) for place in here if place.get("moved_mass") is not None]
        row["moved_mass"] = sum(moved) / len(moved) if moved else None
        delta = row["delta"]
        if delta is not None:
            low, share, high = ([float(tv > delta) for tv in values] for values in (below, middle, above))
            row |= _between(low, share, high, prompts).columns("above_delta")
            row["times_delta"] = mean.value / delta if mean.value is not None else None
        # Two estimates of one mean that differ by more than a tenth of it come from too few draws.
        apart = sum(above) - sum(below) > 0.1 * sum(middle)
        yield {**row, "note": join_notes(note for note in (mean.note, _MORE_DRAWS if apart else None) if note)}


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
_EDGE, _OUTSIDE = "left out: rounding may change whether they pass the filter", "that the target cannot give"


class ImageTests(NamedTuple):
    """The tests of one decoding: p-value by test, how much they saw; `broken` names what is broken on purpose.

    tv: of the tables, two estimates of how far the tokens are off (`GTests`).
    """

    setting: str
    broken: str | None
    p_values: Mapping[str, float]
    images: int
    tokens: int
    edge: int
    impossible: int
    tv: tuple[float, float] | None = None

    @property
    def hollow(self) -> bool:
        """Whether rounding leaves less than half of the tokens to be tested."""
        return self.edge > self.tokens / 2


def whole_image_rows(model: str, tested: Sequence[ImageTests]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the checks of whole images and of broken rules, and the rows of `lossless_tests`.

    Holm's correction is over all tests of all rules that are not broken. A broken rule must be rejected by one test at
    the strictest level of that correction; one that is not is `weak`, and says nothing against the model. So is a right
    rule of which rounding leaves less than half of the tokens to be tested.
    """
    family = [(one, name) for one in tested if one.broken is None for name in one.p_values]
    keys = [(one.setting, name) for one, name in family]
    held = dict(zip(keys, holm([one.p_values[name] for one, name in family]), strict=True))
    checks, tests = [], []
    for one in tested:
        corrected = {
            name: held[one.setting, name] if one.broken is None else min(1.0, p * len(family))
            for name, p in one.p_values.items()
        }
        for name, p in one.p_values.items():
            row = {"model": model, "setting": one.setting, "broken": one.broken, "test": name, "p_value": p}
            row |= {"p_holm": corrected[name], "images": one.images, "tokens": one.tokens, "edge_tokens": one.edge}
            tests.append(row)
        lowest = min(corrected, key=lambda name: one.p_values[name])
        notes = [f"{lowest}: p = {one.p_values[lowest]:.2g}"]
        notes += [f"{count} tokens {what}" for count, what in ((one.edge, _EDGE), (one.impossible, _OUTSIDE)) if count]
        if one.broken is None:
            figure = f"smallest of {len(one.p_values)} p-values, corrected for {len(family)}"
            row = _row(model, "whole images follow the target", one.setting, figure, corrected[lowest], one.images)
            row |= _verdict(f"> {LEVEL:g}", corrected[lowest] > LEVEL)
            if row["passed"] == "yes" and one.hollow:
                row["passed"] = "weak"
                notes.append("too few tokens are tested: give --dtype float32")
        else:
            setting, rejected = f"{one.setting}: {one.broken}", corrected[lowest] < LEVEL
            row = _row(model, "broken rule rejected", setting, "the same", corrected[lowest], one.images)
            row |= {"wanted": f"< {LEVEL:g}", "passed": "yes" if rejected else "weak"}
            notes += [] if rejected else ["the tests are too weak to see it: give more --samples"]
        checks.append({**row, "note": join_notes(notes)})
    return checks, tests


class Audited(NamedTuple):
    """The tests of one claim: on the tables first, then, where it says lossless, with the model; and broken ones.

    columns: those of `audit` that no test decides. ours: whether this is a form of the package's own.
    """

    columns: Mapping[str, Any]
    lossless: bool
    ours: bool
    tests: Sequence[ImageTests]


def audit_rows(
    model: str, audited: Sequence[Audited], costs: Sequence[Row]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of `audit` and of `lossless_tests`; `costs` are rows of `emitted_tv`.

    Holm's correction is over all tests of all claims that say lossless. A form that is ours must hold its claim.
    """
    rows, tests = [], []
    for lossless in (True, False):
        several = [test for one in audited if one.lossless is lossless for test in one.tests]
        tests += whole_image_rows(model, several)[1] if several else []
    lowest: dict[str, float] = {}
    for test in tests:
        if test["broken"] is None:
            lowest[test["setting"]] = min(test["p_holm"], lowest.get(test["setting"], 1.0))
    cost = {row["cell_id"]: row for row in costs}
    for one in audited:
        right = [test for test in one.tests if test.broken is None]
        broken = [(test, min(test.p_values.values())) for test in one.tests if test.broken]
        corrected = min(lowest[test.setting] for test in right)
        held, on_tables, weak = corrected > LEVEL, right[0], max((p for test, p in broken if test.tv), default=None)
        tv = None if held else on_tables.tv
        row = {**one.columns, "verdict": _VERDICTS[one.lossless, held], "p_holm": corrected}
        row |= {f"p_{name}": p for name, p in zip(_ON_TABLES, on_tables.p_values.values(), strict=True)}
        row |= {"table_images": on_tables.images, "power_p": weak}
        row |= {"images": right[1].images, "p_images": min(right[1].p_values.values())} if right[1:] else {}
        shown = "weak" if (weak or 0.0) >= BROKEN or any(test.hollow for test in right) else "yes"
        row |= {"passed": (shown if held else "NO") if one.lossless and one.ours else None}
        row |= (Interval(sum(tv) / 2, *tv) if tv else Interval(None)).columns("table_tv")
        measured = cost.get(row["cell_id"], {})
        row |= {name: measured.get(name) for name in ("emitted_tv", "emitted_tv_low", "emitted_tv_high")}
        found = "; ".join(f"{test.broken} {p:.1g}" + ("" if test.tv else f" ({model})") for test, p in broken)
        row |= {"broken": found or None, "note": measured.get("note")}
        rows.append(row)
    return rows, tests


_ON_TABLES = ("first", "joint", "later")
_VERDICTS = {
    (True, True): "lossless: no difference found",
    (True, False): "claimed lossless, measured: not",
    (False, False): "relaxed, as claimed",
    (False, True): "relaxed: no difference found",
}


def identity_row(
    model: str, setting: str, same: int, near_ties: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Check that greedy speculation equals greedy decoding; differences are pairs of a position and its margin."""
    n = same + len(near_ties) + len(others)
    share = proportion(same, n)
    row = _row(model, "greedy identity", setting, "share of prompts with equal tokens", share.value, n)
    notes = [
        words + ", ".join(f"token {position}, margin {margin:.1e}" for position, margin in listed)
        for words, listed in (("near-ties (rounding may choose either): ", near_ties), ("different: ", others))
        if listed
    ]
    row |= share.columns("measured") | _verdict("equal, or a near-tie", not others)
    return row | {"note": "; ".join(notes) or None}


def strict_row(model: str, setting: str, places: Sequence[Row]) -> dict[str, Any]:
    """Check that the strict rule emits exactly the target's distribution at places of real images."""
    worst = max(float(place["emitted_tv"]) for place in places)
    row = _row(model, "strict rule emits the target", setting, "largest emitted TV", worst, len(places))
    return row | _verdict(f"<= {_ROUNDING:g}", worst <= _ROUNDING)


def cost_check_rows(means: Sequence[Row], places: Sequence[Row]) -> list[dict[str, Any]]:
    """Report the emitted TV of each relaxed cell; check the bound for deterministic drafts under `exact`.

    The bound: at each place the emitted TV is at most the mass that the children move, each weighted by the probability
    that it is tried. Sampled drafts and `official` have no such bound.
    """
    rows = []
    for mean in means:
        residual = mean["residual"] or "exact"
        setting = f"{mean['mode']} {parameters({**mean, 'residual': None}, [mean])} {residual} residual"
        row = _row(mean["model"], "emitted TV", setting, "mean", mean["emitted_tv"], mean["places"])
        row |= {"measured_low": mean["emitted_tv_low"], "measured_high": mean["emitted_tv_high"]}
        notes = [str(mean["note"])] if mean.get("note") else []
        if mean.get("times_delta") is not None:
            share = f"above it at {mean['above_delta']:.0%} of places"
            notes.insert(0, f"{mean['times_delta']:.2g} times delta {mean['delta']:g}, {share}")
        else:
            notes[:0] = [f"{name} {mean[name]:g}" for name in BOUNDS if mean.get(name) is not None]
        row["note"] = join_notes(notes)
        if mean["moved_mass"] is not None and residual == "exact":
            here = [place for place in places if place["cell_id"] == mean["cell_id"]]
            excess = max(float(place["emitted_tv"]) - float(place["moved_mass"]) for place in here)
            row |= _verdict("<= mass moved, at each place", excess <= _ROUNDING)
        rows.append(row)
    return rows


def failures(rows: Sequence[Row], passed: str = "NO") -> list[str]:
    """Return the checks that do not hold, as text; `weak`: those that show too little."""
    failed = [row for row in rows if row.get("passed") == passed]
    return [f"{row['check']} ({row['setting']})" if "check" in row else row["cell_id"] for row in failed]


def _row(model: str, check: str, setting: str, figure: str, measured: float | None, n: int) -> dict[str, Any]:
    return {"model": model, "check": check, "setting": setting, "figure": figure, "measured": measured, "n": n}


def _verdict(wanted: str, held: bool) -> dict[str, Any]:
    return {"wanted": wanted, "passed": "yes" if held else "NO"}
