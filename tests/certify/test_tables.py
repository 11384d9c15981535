"""The certificate and the tables of emitted TV: what is a failure, what is a finding, and the means behind them."""

from __future__ import annotations

from typing import Any

import pytest

from lantern_bench.certify.tables import (
    TrialResult,
    cost_check_rows,
    cost_rows,
    failures,
    identity_row,
    strict_row,
    whole_image_rows,
)
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.report.tables import frame


def places(
    mode: str, figures: list[tuple[str, float, float | None, float | None]], **values: Any
) -> list[dict[str, Any]]:
    cell = Cell("m", Decoding(**{"mode": mode, **values}))
    rows = []
    for position, (prompt, tv, crossed, moved) in enumerate(figures):
        row = {**cell.columns(), "prompt_id": prompt, "repeat": 0, "position": position, "emitted_tv": tv}
        rows.append(row | {"emitted_tv_crossed": crossed, "moved_mass": moved})
    return rows


def test_each_check_passes_and_fails_at_its_bar() -> None:
    rows = [
        identity_row("m", "static", [*[None] * 7, (5, 2e-5)], 1e-4),
        identity_row("m", "dynamic", [*[None] * 7, (9, 0.3)], 1e-4),
        strict_row("m", "dynamic", [{"emitted_tv": 1e-7}, {"emitted_tv": 3e-6}]),
        strict_row("m", "dynamic x", [{"emitted_tv": 1e-2}]),
    ]
    assert [row["passed"] for row in rows] == ["yes", "NO", "yes", "NO"]
    assert "near-ties (rounding may choose either): token 5, margin 2.0e-05" in rows[0]["note"]
    assert rows[1]["note"] == "different: token 9, margin 3.0e-01"
    assert rows[0]["measured"] == pytest.approx(7 / 8)
    assert rows[0]["measured_low"] < 7 / 8 < rows[0]["measured_high"]
    assert failures(rows) == ["greedy identity (dynamic)", "strict rule emits the target (dynamic x)"]
    assert len(frame("certificate", rows)) == 4


def test_whole_image_tests_share_one_error_rate() -> None:
    results = [
        TrialResult("static", None, {"support": 1.0, "surprise": 3e-4}, 50, 600, 2, 0),
        TrialResult("dynamic", None, {"support": 0.0, "surprise": 0.5}, 50, 600, 0, 3),
        TrialResult("dynamic", "no residual", {"support": 1.0, "surprise": 1e-9}, 8, 96, 0, 0),
        TrialResult("dynamic", "hardly wrong", {"support": 1.0, "surprise": 3e-4}, 50, 600, 0, 0),
    ]
    checks, tests = whole_image_rows("m", results)
    assert [row["passed"] for row in checks] == ["NO", "NO", "yes", "weak"]
    assert [row["measured"] for row in checks] == pytest.approx([9e-4, 0.0, 4e-9, 1.2e-3])
    left_out = "2 tokens left out: rounding may change whether they pass the filter"
    assert checks[0]["note"] == f"surprise: p = 0.0003 | {left_out}"
    assert checks[1]["note"] == "support: p = 0 | 3 tokens that the target cannot give"
    assert checks[2]["setting"] == "dynamic: no residual"
    assert checks[3]["note"].endswith("give more --samples")
    assert failures(checks, "weak") == ["broken rule rejected (dynamic: hardly wrong)"]
    # Holm: the smallest of four is multiplied by four, the next by three; broken rules always by four.
    assert [row["p_holm"] for row in tests] == pytest.approx([1, 9e-4, 0, 1, 1, 4e-9, 1, 1.2e-3])
    assert len(frame("lossless_tests", tests)) == 8
    assert len(frame("certificate", checks)) == 4


def test_a_row_that_tests_less_than_half_of_its_tokens_is_weak() -> None:
    several = [TrialResult(str(edge), None, {"support": 1.0, "surprise": 0.5}, 50, 600, edge, 0) for edge in (300, 301)]
    checks, _ = whole_image_rows("m", several)
    assert [row["passed"] for row in checks] == ["yes", "weak"]
    assert checks[1]["note"].endswith("too few tokens are tested: give --dtype float32")


def test_mean_emitted_tv_is_compared_with_delta() -> None:
    figures = [("a", 0.3, None, 0.31), ("a", 0.1, None, 0.1), ("b", 0.5, None, 0.6), ("c", 0.1, None, 0.2)]
    (mean,) = cost_rows(places("lantern", figures, delta=0.2, tree=None))
    assert (mean["places"], mean["prompts"]) == (4, 3)
    assert mean["emitted_tv"] == pytest.approx(0.25)
    assert mean["emitted_tv_low"] < 0.25 < mean["emitted_tv_high"]
    assert mean["emitted_tv_max"] == 0.5
    assert mean["times_delta"] == pytest.approx(1.25)
    assert mean["above_delta"] == 0.5
    assert mean["moved_mass"] == pytest.approx(0.3025)
    assert mean["note"] is None
    frame("emitted_tv", [mean])


def test_note_says_when_more_draws_are_needed() -> None:
    near = places("lantern++", [("a", 0.2, 0.19, None), ("b", 0.3, 0.29, None)], **{"lambda": 2})
    assert next(cost_rows(near))["emitted_tv"] == pytest.approx(0.245), "midway of both estimates"
    apart = places("lantern++", [("a", 0.2, 0.1, None), ("b", 0.3, 0.2, None)], **{"lambda": 2})
    assert next(cost_rows(near))["note"] is None
    assert "more draws narrow the interval" in next(cost_rows(apart))["note"]


def test_only_breaking_the_proved_bound_fails() -> None:
    bounded = places("lantern", [("a", 0.3, None, 0.31), ("b", 0.38, None, 0.4)], delta=0.2)
    broken = places("lantern", [("a", 0.3, None, 0.1), ("b", 0.4, None, 0.6)], delta=0.3)
    official = places("lantern", [("a", 0.9, None, 0.1), ("b", 0.4, None, 0.6)], delta=0.3, residual="official")
    sampled = places("lantern++", [("a", 0.9, 0.9, None), ("b", 0.4, 0.4, None)], **{"lambda": 2})
    everything = [*bounded, *broken, *official, *sampled]
    rows = cost_check_rows(list(cost_rows(everything)), everything)
    assert [row.get("passed") for row in rows] == ["yes", "NO", None, None]
    assert rows[0]["note"] == "1.7 times delta 0.2, above it at 100% of places"
    assert rows[3]["note"] == "lambda 2"
    assert rows[0]["setting"] == "lantern 58n5d10b k=20 delta=0.2 exact residual"
    assert rows[2]["setting"] == "lantern 58n5d10b k=20 delta=0.3 official residual"
