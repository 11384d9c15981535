"""The certificate and the power of its tests: what is a failure, and what is only weak."""

from __future__ import annotations

import pytest

from lantern_bench.checks.certification import (
    TrialResult,
    failures,
    identity_row,
    power_rows,
    trial_rows,
)
from lantern_bench.storage.schema import frame


def test_greedy_identity_passes_and_fails_at_its_bar() -> None:
    rows = [
        identity_row(
            model="m", setting="static", differences=[*[None] * 7, (5, 2e-5)], tolerance=1e-4
        ),
        identity_row(
            model="m", setting="dynamic", differences=[*[None] * 7, (9, 0.3)], tolerance=1e-4
        ),
    ]
    assert [row["passed"] for row in rows] == ["yes", "NO"]
    assert "near-ties (rounding may choose either): token 5, margin 2.0e-05" in rows[0]["note"]
    assert rows[1]["note"] == "different: token 9, margin 3.0e-01"
    assert rows[0]["measured"] == pytest.approx(7 / 8)
    assert rows[0]["measured_low"] < 7 / 8 < rows[0]["measured_high"]
    assert failures(rows) == ["greedy identity (dynamic)"]
    assert len(frame("certificate", rows)) == 2


def test_all_tests_share_one_error_rate() -> None:
    results = [
        TrialResult(
            setting="static",
            broken=None,
            p_values={"support": 1.0, "surprise": 2e-4},
            images=50,
            tokens=600,
            edge=2,
            impossible=0,
        ),
        TrialResult(
            setting="dynamic",
            broken=None,
            p_values={"support": 0.0, "surprise": 0.5},
            images=50,
            tokens=600,
            edge=0,
            impossible=3,
        ),
        TrialResult(
            setting="static, tables",
            broken=None,
            p_values={"first tokens": 0.1},
            images=500,
            tokens=6000,
            tv=(0.0, 0.1),
        ),
    ]
    checks, tests = trial_rows("m", results)
    assert [row["passed"] for row in checks] == ["NO", "NO", "yes"]
    assert [row["check"].split(" follow")[0] for row in checks] == [
        "whole images",
        "whole images",
        "tables",
    ]
    left_out = "2 tokens left out: rounding may change whether they pass the filter"
    assert checks[0]["note"] == f"surprise: p = 0.0002 | {left_out}"
    assert checks[1]["note"] == "support: p = 0 | 3 tokens that the target cannot give"
    # Holm: the smallest of five is multiplied by five, the next by four.
    assert [row["p_holm"] for row in tests] == pytest.approx([1, 8e-4, 0, 1, 0.3])
    assert len(frame("lossless_tests", tests)) == 5
    assert len(frame("certificate", checks)) == 3


def test_what_is_not_rejected_needs_more_images() -> None:
    results = [
        TrialResult(
            setting="static",
            broken="no residual",
            p_values={"support": 1.0, "surprise": 1e-9},
            images=8,
            tokens=96,
        ),
        TrialResult(
            setting="static, tables",
            broken="hardly wrong",
            p_values={"first tokens": 0.01},
            images=1000,
            tokens=7000,
            tv=(0.0, 0.1),
        ),
        TrialResult(
            setting="static, tables",
            broken="not wrong",
            p_values={"first tokens": 0.3},
            images=1000,
            tokens=7000,
            tv=(0.0, 0.1),
        ),
        # Of nine p-values the smallest is often 0.01 by chance.
        TrialResult(
            setting="static",
            broken="not seen",
            p_values={"surprise": 0.01, **{str(n): 0.5 for n in range(8)}},
            images=1000,
            tokens=7000,
        ),
    ]
    rows = power_rows("m", results, 1e-6)
    assert [row["images"] for row in rows] == [8, None, None, None]
    assert [row["tested_on"] for row in rows] == ["model", "tables", "tables", "model"]
    # z of 1e-6 and of 0.01, two-sided: 4.892 and 2.576.
    assert [row["images_needed"] for row in rows] == [
        None,
        round(1000 * (4.8916 / 2.5758) ** 2),
        None,
        None,
    ]
    assert len(frame("power", rows)) == 4


def test_a_row_that_tests_less_than_half_of_its_tokens_is_weak() -> None:
    several = [
        TrialResult(
            setting=str(edge),
            broken=None,
            p_values={"support": 1.0, "surprise": 0.5},
            images=50,
            tokens=600,
            edge=edge,
            impossible=0,
        )
        for edge in (300, 301)
    ]
    checks, _ = trial_rows("m", several)
    assert [row["passed"] for row in checks] == ["yes", "weak"]
    assert checks[1]["note"].endswith("too few tokens are tested: give --dtype float32")
