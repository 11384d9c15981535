"""Rows of the tables of `certify`: the certificate, the power of its tests, and the audit.

docs/algorithms.md, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from scipy.stats import norm

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.statistics import Interval, holm, proportion
from lantern_bench.checks.claims import Claim
from lantern_bench.storage.schema import Row

Rows: TypeAlias = list[dict[str, Any]]

LEVEL = 1e-3
"""Largest probability that the certificate of a correct model fails, over all its tests."""
BROKEN = 1e-6
"""P-value below which an audit must reject a broken rule on the tables."""
_SEEN = 0.05  # p-value above which a mistake is not seen at all


@dataclass(frozen=True)
class TrialResult:
    """The p-values of a trial, and how much its tests saw."""

    setting: str
    broken: str | None  # name of the planted mistake
    p_values: Mapping[str, float]  # by test
    images: int
    tokens: int
    edge: int = 0  # tokens left out, because rounding may change whether they pass the filters
    impossible: int = 0  # tokens that the target cannot give
    # On the tables: the distance from the target as two estimates, one too low and one too high.
    tv: tuple[float, float] | None = None

    @property
    def lowest(self) -> str:
        """The test with the smallest p-value."""
        return min(self.p_values, key=lambda test: self.p_values[test])

    @property
    def lowest_p(self) -> float:
        """The smallest p-value."""
        return min(self.p_values.values())

    @property
    def too_few_tested(self) -> bool:
        """Whether rounding leaves fewer than half of the tokens to be tested."""
        return self.edge > self.tokens / 2


def trial_rows(model: str, results: Sequence[TrialResult]) -> tuple[Rows, Rows]:
    """Return the rows of `certificate` and of `lossless_tests` for trials without a mistake.

    Holm's correction is over all tests of all trials. A trial is `weak` if too few of its tokens
    can be tested.
    """
    tests = _test_rows(model, results)
    smallest = _smallest_by_setting(tests)
    checks = []
    for result in results:
        p = smallest[result.setting]
        row = dict[str, Any](
            model=model,
            check=f"{'whole images' if result.tv is None else 'tables'} follow the target",
            setting=result.setting,
            figure=f"smallest of {len(result.p_values)} p-values, corrected for {len(tests)}",
            measured=p,
            n=result.images,
            wanted=f"> {LEVEL:g}",
            passed=_verdict(holds=p > LEVEL),
        )
        notes = [f"{result.lowest}: p = {result.lowest_p:.2g}"]
        if result.edge:
            reason = "rounding may change whether they pass the filter"
            notes.append(f"{result.edge} tokens left out: {reason}")
        if result.impossible:
            notes.append(f"{result.impossible} tokens that the target cannot give")
        if row["passed"] == "yes" and result.too_few_tested:
            row["passed"] = "weak"
            notes.append("too few tokens are tested: give --dtype float32")
        checks.append(row | {"note": join_notes(notes)})
    return checks, tests


def _test_rows(model: str, results: Sequence[TrialResult]) -> Rows:
    """The rows of `lossless_tests`, corrected for all tests."""
    rows = []
    for result in results:
        for test, p in result.p_values.items():
            row = dict[str, Any](
                model=model,
                setting=result.setting,
                test=test,
                p_value=p,
                images=result.images,
                tokens=result.tokens,
                edge_tokens=result.edge,
            )
            rows.append(row)
    corrected = holm([row["p_value"] for row in rows])
    return [row | {"p_holm": p} for row, p in zip(rows, corrected, strict=True)]


def _smallest_by_setting(tests: Rows) -> dict[str, float]:
    """The smallest corrected p-value of each setting."""
    smallest: dict[str, float] = {}
    for test in tests:
        smallest[test["setting"]] = min(test["p_holm"], smallest.get(test["setting"], 1.0))
    return smallest


def power_rows(model: str, results: Sequence[TrialResult], level: float) -> Rows:
    """Return the rows of `power`: the images of each broken decoding until it was rejected.

    The z-score of a mistake grows with the square root of the images. For a mistake that was seen
    but not rejected, `images_needed` is extrapolated from the last p-value.

    Args:
        model: Name of the model.
        results: Results of trials with a mistake.
        level: P-value below which a mistake is rejected.
    """
    rows = []
    for result in results:
        p = result.lowest_p
        needed = None
        # The smallest of several p-values is often below 0.05 by chance.
        if level <= p < _SEEN / len(result.p_values):
            z_ratio = float(norm.isf(level / 2) / norm.isf(p / 2))
            needed = round(result.images * z_ratio**2)
        row = dict[str, Any](
            model=model,
            fault=result.broken,
            setting=result.setting,
            tested_on="model" if result.tv is None else "tables",
            test=result.lowest,
            p_value=p,
            decoded=result.images,
            images=result.images if p < level else None,
            images_needed=needed,
        )
        rows.append(row)
    return rows


def audit_rows(
    model: str, audited: Sequence[tuple[Claim, Sequence[TrialResult]]]
) -> tuple[Rows, Rows]:
    """Return the rows of `audit` and of `lossless_tests`.

    Holm's correction is over the tests of all lossless claims, and separately over the tests of all
    relaxed claims. Only a lossless claim that this package makes can fail.

    Args:
        model: Name of the model.
        audited: Each claim with its results, of which the first is on the tables.
    """
    tests = []
    for is_lossless in (True, False):
        right = []
        for claim, results in audited:
            if claim.is_lossless is is_lossless:
                right += [result for result in results if result.broken is None]
        tests += _test_rows(model, right)
    smallest = _smallest_by_setting(tests)
    return [_audit_row(claim, results, smallest) for claim, results in audited], tests


_VERDICTS = {
    (True, True): "lossless: no difference found",
    (True, False): "claimed lossless, measured: not",
    (False, False): "relaxed, as claimed",
    (False, True): "relaxed: no difference found",
}


def _audit_row(
    claim: Claim, results: Sequence[TrialResult], smallest: Mapping[str, float]
) -> dict[str, Any]:
    """The row of a claim; `smallest` has the smallest corrected p-value of each setting."""
    on_tables, *on_model = [result for result in results if result.broken is None]
    right = [on_tables, *on_model]
    p = min(smallest[result.setting] for result in right)
    follows_target = p > LEVEL
    broken_p = [result.lowest_p for result in results if result.broken is not None]
    power = max(broken_p, default=None)

    passed = None
    if claim.is_lossless and claim.is_ours:
        has_power = power is None or power < BROKEN
        is_weak = not has_power or any(result.too_few_tested for result in right)
        passed = _verdict(holds=follows_target)
        if follows_target and is_weak:
            passed = "weak"
    distance = Interval(None)
    if on_tables.tv is not None and not follows_target:
        low, high = on_tables.tv
        distance = Interval((low + high) / 2, low, high)
    row = {
        **claim.cell.columns(),
        "form": claim.form or None,
        "source": claim.source or None,
        "claim": "lossless" if claim.is_lossless else "relaxed",
        "verdict": _VERDICTS[claim.is_lossless, follows_target],
        "p_holm": p,
        "table_images": on_tables.images,
        "power_p": power,
        "passed": passed,
        **distance.columns("table_tv"),
    }
    columns = ("p_first", "p_joint", "p_later", "p_batch")
    row |= zip(columns, on_tables.p_values.values(), strict=True)
    for result in on_model:
        row |= {"images": result.images, "p_images": result.lowest_p}
    return row


def identity_row(
    model: str,
    setting: str,
    differences: Sequence[tuple[int, float] | None],
    *,
    tolerance: float,
) -> dict[str, Any]:
    """Return the check that greedy speculation equals greedy decoding.

    Args:
        model: Name of the model.
        setting: Name of the decoding.
        differences: Of each prompt, the first different token and its margin, or None.
        tolerance: Margin below which a difference is a near-tie, which does not fail the check.
    """
    share = proportion(differences.count(None), len(differences))
    near_ties = list[str]()
    others = list[str]()
    for difference in differences:
        if difference is not None:
            position, margin = difference
            group = near_ties if margin < tolerance else others
            group.append(f"token {position}, margin {margin:.1e}")
    notes = []
    if near_ties:
        notes.append("near-ties (rounding may choose either): " + ", ".join(near_ties))
    if others:
        notes.append("different: " + ", ".join(others))
    row = dict[str, Any](
        model=model,
        check="greedy identity",
        setting=setting,
        figure="share of prompts with equal tokens",
        measured=share.value,
        n=len(differences),
        wanted="equal, or a near-tie",
        passed=_verdict(holds=not others),
        note="; ".join(notes) or None,
    )
    return row | share.columns("measured")


def failures(rows: Sequence[Row], passed: str = "NO") -> list[str]:
    """Return the names of the checks with this verdict: `NO`, or `weak` if they show too little."""
    names = []
    for row in rows:
        if row.get("passed") == passed:
            name = f"{row['check']} ({row['setting']})" if "check" in row else row["cell_id"]
            names.append(name)
    return names


def _verdict(*, holds: bool) -> str:
    return "yes" if holds else "NO"
