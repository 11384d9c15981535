"""The tables of `certify`: the certificate, the power of its tests, and the audit. Plain rows in, rows out.

docs/algorithms.md, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import norm

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.statistics import Interval, holm, proportion
from lantern_bench.checks.claims import Claim
from lantern_bench.storage.schema import Row

LEVEL = 1e-3
"""The chance that the certificate of a correct model rejects it: of all its tests together, by Holm's correction."""
BROKEN = 1e-6
"""The p-value that an audit must find, on the tables, for what is broken on purpose."""


@dataclass(frozen=True)
class TrialResult:
    """The p-values of a trial, and how much its tests saw."""

    setting: str
    broken: str | None  # what is broken on purpose
    p_values: Mapping[str, float]  # by test
    images: int
    tokens: int
    # tokens that are not tested, because rounding may change whether they pass the filters
    edge: int = 0
    impossible: int = 0  # tokens that the target cannot give
    # on the tables: how far the tokens are off, two estimates
    tv: tuple[float, float] | None = None

    @property
    def lowest(self) -> str:
        """The test with the smallest p-value."""
        return min(self.p_values, key=lambda test: self.p_values[test])

    @property
    def too_few_tested(self) -> bool:
        """Whether rounding leaves less than half of the tokens to be tested."""
        return self.edge > self.tokens / 2


def trial_rows(
    model: str, results: Sequence[TrialResult]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of `certificate` and of `lossless_tests` of results without a mistake.

    Holm's correction is over all their tests. A row of which rounding leaves too few tokens to be tested is `weak`.
    """
    family = [(result, test) for result in results for test in result.p_values]
    adjusted = holm([result.p_values[test] for result, test in family])
    p_holm = {(result.setting, test): p for (result, test), p in zip(family, adjusted, strict=True)}
    checks = []
    tests = []
    for result in results:
        for test, p in result.p_values.items():
            row = {"model": model, "setting": result.setting, "test": test, "p_value": p}
            row |= {
                "p_holm": p_holm[result.setting, test],
                "images": result.images,
                "tokens": result.tokens,
            }
            tests.append(row | {"edge_tokens": result.edge})
        notes = [f"{result.lowest}: p = {result.p_values[result.lowest]:.2g}"]
        if result.edge:
            notes.append(
                f"{result.edge} tokens left out: rounding may change whether they pass the filter"
            )
        if result.impossible:
            notes.append(f"{result.impossible} tokens that the target cannot give")
        check = (
            "whole images follow the target" if result.tv is None else "tables follow the target"
        )
        p = p_holm[result.setting, result.lowest]
        figure = f"smallest of {len(result.p_values)} p-values, corrected for {len(family)}"
        row = _row(
            model=model,
            check=check,
            setting=result.setting,
            figure=figure,
            measured=p,
            n=result.images,
        ) | _verdict(f"> {LEVEL:g}", p > LEVEL)
        if row["passed"] == "yes" and result.too_few_tested:
            row["passed"] = "weak"
            notes.append("too few tokens are tested: give --dtype float32")
        checks.append({**row, "note": join_notes(notes)})
    return checks, tests


def power_rows(model: str, results: Sequence[TrialResult], level: float) -> list[dict[str, Any]]:
    """Return the rows of `power`: how many images of each broken decoding it took until a p-value fell below `level`.

    z grows with the root of the images: `images_needed` is estimated from the last p-value, where it says something.
    """
    rows = []
    for result in results:
        p = result.p_values[result.lowest]
        row = {
            "model": model,
            "fault": result.broken,
            "setting": result.setting,
            "test": result.lowest,
            "p_value": p,
        }
        # The smallest of several p-values is often below .05 without a reason.
        is_seen = level <= p < 0.05 / len(result.p_values)
        needed = (
            result.images * float(norm.isf(level / 2) / norm.isf(p / 2)) ** 2 if is_seen else None
        )
        row |= {"tested_on": "model" if result.tv is None else "tables", "decoded": result.images}
        rows.append(
            row
            | {
                "images": result.images if p < level else None,
                "images_needed": needed and round(needed),
            }
        )
    return rows


def audit_rows(
    model: str, audited: Sequence[tuple[Claim, Sequence[TrialResult]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of `audit` and of `lossless_tests`.

    The results of a claim begin with that on the tables. A form that is ours must hold its claim.
    """
    tests = []
    for is_lossless in (True, False):
        of_claims = [
            result
            for claim, results in audited
            if claim.is_lossless is is_lossless
            for result in results
        ]
        tests += trial_rows(model, [result for result in of_claims if result.broken is None])[1]
    lowest: dict[str, float] = {}
    for test in tests:
        lowest[test["setting"]] = min(test["p_holm"], lowest.get(test["setting"], 1.0))
    return [_audit_row(claim, results, lowest) for claim, results in audited], tests


_VERDICTS = {
    (True, True): "lossless: no difference found",
    (True, False): "claimed lossless, measured: not",
    (False, False): "relaxed, as claimed",
    (False, True): "relaxed: no difference found",
}


def _audit_row(
    claim: Claim, results: Sequence[TrialResult], lowest: Mapping[str, float]
) -> dict[str, Any]:
    """The row of a claim; `lowest` has the smallest corrected p-value by setting."""
    right = [result for result in results if result.broken is None]
    on_tables = right[0]
    p = min(lowest[result.setting] for result in right)
    follows_target = p > LEVEL
    power = max(
        (min(result.p_values.values()) for result in results if result.broken is not None),
        default=None,
    )
    is_weak = (power or 0.0) >= BROKEN or any(result.too_few_tested for result in right)
    passed = "NO" if not follows_target else "weak" if is_weak else "yes"
    row = {
        **claim.cell.columns(),
        "form": claim.form or None,
        "source": claim.source or None,
        "p_holm": p,
    }
    row |= {"claim": "lossless" if claim.is_lossless else "relaxed"}
    row |= {"verdict": _VERDICTS[claim.is_lossless, follows_target]}
    row |= zip(
        ("p_first", "p_joint", "p_later", "p_batch"), on_tables.p_values.values(), strict=True
    )
    row |= {"table_images": on_tables.images, "power_p": power}
    if right[1:]:
        row |= {"images": right[1].images, "p_images": right[1].p_values[right[1].lowest]}
    row |= {"passed": passed if claim.is_lossless and claim.is_ours else None}
    tv = None if follows_target else on_tables.tv
    return row | (Interval(sum(tv) / 2, *tv) if tv else Interval(None)).columns("table_tv")


def identity_row(
    model: str, setting: str, differences: Sequence[tuple[int, float] | None], tolerance: float
) -> dict[str, Any]:
    """Check that greedy speculation equals greedy decoding, or differs at a margin below `tolerance`, a near-tie."""
    share = proportion(differences.count(None), len(differences))
    row = _row(
        model=model,
        check="greedy identity",
        setting=setting,
        figure="share of prompts with equal tokens",
        measured=share.value,
        n=len(differences),
    )
    near_ties = list[str]()
    others = list[str]()
    for position, margin in filter(None, differences):
        (near_ties if margin < tolerance else others).append(
            f"token {position}, margin {margin:.1e}"
        )
    notes = ["near-ties (rounding may choose either): " + ", ".join(near_ties)] if near_ties else []
    notes += ["different: " + ", ".join(others)] if others else []
    row |= share.columns("measured") | _verdict("equal, or a near-tie", not others)
    return row | {"note": "; ".join(notes) or None}


def failures(rows: Sequence[Row], passed: str = "NO") -> list[str]:
    """Return the checks that do not hold, as text; `weak`: those that show too little."""
    failed = [row for row in rows if row.get("passed") == passed]
    return [
        f"{row['check']} ({row['setting']})" if "check" in row else row["cell_id"] for row in failed
    ]


def _row(
    model: str, check: str, setting: str, figure: str, measured: float | None, n: int
) -> dict[str, Any]:
    return {
        "model": model,
        "check": check,
        "setting": setting,
        "figure": figure,
        "measured": measured,
        "n": n,
    }


def _verdict(wanted: str, holds: bool) -> dict[str, Any]:
    return {"wanted": wanted, "passed": "yes" if holds else "NO"}
