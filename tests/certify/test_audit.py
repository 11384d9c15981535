"""The audit: its claims follow from the rows, its tests hold and have power, verdicts and exit codes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, power_divergence

from lantern_bench.certify import plan, run, tabular
from lantern_bench.certify.plan import Claim, audited_cells, claim_of
from lantern_bench.certify.run import strict_without_residual
from lantern_bench.certify.tables import BROKEN, LEVEL, TrialResult, audit_rows
from lantern_bench.certify.tabular import g_tests
from lantern_bench.cli import main as cli
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.decoding.acceptance import walk
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.methods import tables as method_tables
from lantern_bench.methods.tables import Mode
from lantern_bench.models import registry
from tests.tiny_model import TinyModel

STATIC = Decoding(mode="speculative", tree="small-7")
SMALL = ["--dtype", "float32", "--neighbours", "3", "--positions", "6", "--draws", "8"]


def test_every_mode_and_every_rule_is_audited() -> None:
    cells, modes = audited_cells(), method_tables.MODES
    assert {cell["mode"] for cell in cells} == set(modes)
    assert {cell.get("rule", modes[cell["mode"]].rule) for cell in cells} == set(method_tables.RULES)
    for mode in modes.values():
        of_mode = [cell for cell in cells if cell["mode"] == mode.name and cell.get("rule", mode.rule) == mode.rule]
        assert len(of_mode) == 1 + len(mode.variants) + len(mode.published)


def test_shipped_modes_and_rules_name_their_source() -> None:
    rules_of_modes = {mode.rule for mode in method_tables.SHIPPED_MODES}
    for mode in method_tables.SHIPPED_MODES:
        assert mode.source or method_tables.RULES[mode.rule].source or mode.name in ("ar", "entropy", "hybrid")
    assert all(rule.source for rule in method_tables.SHIPPED_RULES if rule.name not in rules_of_modes)


def test_a_new_row_is_audited_with_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Mode("new", "static", "strict", "new", None, source="2601.00001", published=({"tree": "chain-3"},))
    monkeypatch.setitem(method_tables.MODES, "new", row)
    assert [cell for cell in audited_cells() if cell["mode"] == "new"] == [
        {"mode": "new"},
        {"mode": "new", "tree": "chain-3"},
    ]
    ours, theirs = (claim_of(Cell("tiny", Decoding(mode="new", tree=tree))) for tree in ("small-7", "chain-3"))
    assert (ours.form, ours.is_lossless, ours.source, ours.is_ours) == ("", True, "2601.00001", True)
    assert (theirs.form, theirs.is_ours) == ("tree chain-3", False)


def test_g_test_equals_scipys_and_pools_rare_cells() -> None:
    expected = np.array([0.4, 0.35, 0.25])
    counts = np.array([430, 330, 240])
    plain = power_divergence(counts, expected * 1000, lambda_="log-likelihood").pvalue
    assert tabular._g_test(counts, expected) == pytest.approx(plain)
    rare = np.array([0.4, 0.35, 0.244, 0.002, 0.004])
    pooled = power_divergence([430, 330, 233, 7], [400, 350, 244, 6], lambda_="log-likelihood").pvalue
    assert tabular._g_test(np.array([430, 330, 233, 5, 2]), rare) == pytest.approx(pooled)


def test_p_values_of_a_lossless_decoding_are_uniform() -> None:
    several = [g_tests(STATIC, 1000, seed=seed)[0] for seed in range(30)]
    for name in ("first tokens", "joint of the first tokens"):
        p_values = [tests[name] for tests in several]
        ks = float(kstest(p_values, "uniform").pvalue)
        print(f"{name}: KS p = {ks:.3f}, below .05: {np.mean(np.array(p_values) < 0.05):.3f}")
        assert ks > 1e-3
    below = np.mean([tests["later windows"] < 0.05 for tests in several])
    assert below < 0.05 + 4 * (0.05 * 0.95 / len(several)) ** 0.5


def test_a_missing_residual_is_rejected_and_its_tv_estimated() -> None:
    right, (_, right_high) = g_tests(STATIC, 10_000)
    broken, (broken_low, _) = g_tests(STATIC, 10_000, AcceptanceRule(accept=strict_without_residual))
    print(f"right {right}, broken {broken}")
    assert min(right.values()) > LEVEL
    assert max(broken.values()) < BROKEN
    assert broken_low > 3 * right_high / 2 > 0


def test_estimates_of_tv_enclose_the_truth() -> None:
    """Tokens drawn from a distribution whose TV is known."""
    sizes = [tabular.VOCABULARY] * tabular.TOKENS
    joint = torch.rand(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    joint /= joint.sum()
    other = joint.clone()
    other[0] *= 1.4
    other /= other.sum()
    drawn = torch.multinomial(other.flatten(), 40_000, replacement=True, generator=torch.Generator().manual_seed(1))
    tests, (low, high) = tabular._tested(joint, torch.stack(torch.unravel_index(drawn, sizes), dim=1))
    first = (joint - other).sum(dim=[1, 2, 3, 4, 5, 6]).abs().sum().item() / 2
    assert low - 0.005 < first < high + 0.005  # each also has the noise of its images
    assert tests["first tokens"] < BROKEN


# ---- verdicts


def audited(claim: str, is_ours: bool, p: float, broken: float | None = None) -> tuple[Claim, list[TrialResult]]:
    relaxed = {"mode": "lantern++", "lambda": 2}
    values: dict[str, Any] = {"mode": "speculative"} if claim == "lossless" else relaxed
    cell = Cell("tiny", Decoding(tree="small-7", temperature=1 + p, **values))
    results = [TrialResult(str(p), None, {"a": p, "b": 0.5, "c": 0.5}, 100, 700, tv=(0.1, 0.2))]
    if broken is not None:
        results.append(TrialResult(str(p), "mistake", {"a": broken}, 100, 700, tv=(0.1, 0.2)))
    return Claim(cell, is_ours=is_ours), results


def test_verdicts() -> None:
    several = [
        audited("lossless", True, 0.4, 1e-9),
        audited("lossless", True, 0.41, 1e-3),
        audited("lossless", True, 1e-9),
        audited("lossless", False, 1e-8),
        audited("relaxed", True, 1e-7),
        audited("relaxed", True, 0.3),
    ]
    relaxed = several[5][0].cell.cell_id
    costs = [{"cell_id": relaxed, "emitted_tv": 0.2, "emitted_tv_low": 0.1, "emitted_tv_high": 0.3}]
    rows, tests = audit_rows("tiny", several, costs)
    assert [row["verdict"] for row in rows] == [
        "lossless: no difference found",
        "lossless: no difference found",
        "claimed lossless, measured: not",
        "claimed lossless, measured: not",
        "relaxed, as claimed",
        "relaxed: no difference found",
    ]
    assert [row["passed"] for row in rows] == ["yes", "weak", "NO", None, None, None]
    assert [row["table_tv"] is None for row in rows] == [True, True, False, False, False, True]
    assert rows[5]["emitted_tv"] == 0.2
    assert rows[0]["power_p"] == 1e-9
    assert len(tests) == 3 * 6 + 2
    # Holm over the twelve tests of lossless claims.
    assert rows[2]["p_holm"] == pytest.approx(12e-9)


# ---- the command


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    monkeypatch.chdir(tmp_path)
    return model


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_audit_is_written_and_shown(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "TABLE_IMAGES", 40)
    assert cli.main(["certify", "tiny", "--modes", "all", *SMALL, "--samples", "8", "--format", "table"]) == 0
    rows = rows_of("results/audit-tiny/audit.csv")
    assert {row["mode"] for row in rows} == set(method_tables.MODES)
    for row in rows:
        assert row["table_images"] == "320"
        is_ours = row["claim"] == "lossless" and not str(row["form"]).endswith("-published")
        assert row["passed"] in (("yes", "weak") if is_ours else ("",))
        assert (row["images"] != "") == (row["claim"] == "lossless")
        assert (row["power_p"] != "") == (is_ours and row["mode"] != "ar")
    shown = capsys.readouterr().out
    assert "no difference found" in shown and "relaxed, as claimed" in shown
    tests = rows_of("results/audit-tiny/lossless_tests.csv")
    assert {"first tokens", "joint of the first tokens", "later windows", "surprise"} <= {row["test"] for row in tests}


def test_a_lossless_claim_that_fails_exits_with_5(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "TABLE_IMAGES", 100)
    monkeypatch.setattr(walk, "accept_children", strict_without_residual)
    monkeypatch.setattr(plan, "audited_cells", lambda: [{"mode": name} for name in ("ar", "speculative", "lantern++")])
    assert cli.main(["certify", "tiny", "--modes", "all", *SMALL, "--samples", "20"]) == 5
    assert "checks do not hold: speculative-static" in capsys.readouterr().err
    verdicts = {(row["mode"], row["rule"]): row["verdict"] for row in rows_of("results/audit-tiny/audit.csv")}
    assert verdicts["speculative", "strict"] == "claimed lossless, measured: not"
    assert verdicts["ar", "none"] == "lossless: no difference found"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--temperature", "0"], "at temperature 0 there is no distribution to test"),
        (["--emitted-tv"], "--emitted-tv: is not for the audit of all modes"),
        (["--experiment", "certify"], "--experiment: is not for the audit"),
        (["--delta", "2"], "--delta 2: must lie strictly between 0 and 1"),
        (["--out", "file/there"], "is a file, not a folder"),
    ],
)
def test_errors_come_before_any_measurement(
    typed: list[str], message: str, tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert cli.main(["certify", "tiny", "--modes", "all", "--neighbours", "3", *typed]) == 2
    assert message in capsys.readouterr().err
    assert tiny.loads == 0
