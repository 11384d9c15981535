"""The audit: claims, tests on the tables and their power, verdicts and exit codes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, power_divergence

from lantern_bench.checks import tabular_model, trials
from lantern_bench.checks.certification import BROKEN, LEVEL, TrialResult, audit_rows
from lantern_bench.checks.claims import Claim, audited_cells, claim_of
from lantern_bench.checks.tabular_model import (
    TOKENS,
    VOCABULARY,
    TabularModel,
    g_tests,
    table_images,
)
from lantern_bench.cli import main as cli
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import Cell
from lantern_bench.decoding.acceptance import configured_rule
from lantern_bench.methods import catalog
from lantern_bench.methods.draftings import SHIPPED_MODES, Mode
from lantern_bench.methods.rules import SHIPPED_RULES
from lantern_bench.models import registry
from tests.helpers.mistakes import strict_without_residual
from tests.helpers.rules import broken
from tests.helpers.tiny_model import TinyModel

STATIC = Decoding(mode="speculative", tree="small-7")
SMALL = ["--dtype", "float32", "--neighbours", "3"]
# ZipAR verifies nothing and so makes no claim.
AUDITED = set(catalog.MODES) - {"zipar"}


def test_every_mode_and_every_rule_is_audited() -> None:
    cells = audited_cells(["all"])
    modes = catalog.MODES
    assert {cell["mode"] for cell in cells} == AUDITED
    assert {cell.get("rule", modes[cell["mode"]].rule) for cell in cells} == set(catalog.RULES)
    for name in AUDITED:
        mode = modes[name]
        of_mode = [{"mode": mode.name, **values} for values in ({}, *mode.variants)]
        assert all(cell in cells for cell in of_mode)
        assert audited_cells([mode.name]) == of_mode


def test_shipped_modes_and_rules_name_their_source() -> None:
    rules_of_modes = {mode.rule for mode in SHIPPED_MODES}
    for mode in SHIPPED_MODES:
        assert (
            mode.source
            or catalog.RULES[mode.rule].source
            or mode.name in ("ar", "entropy", "hybrid")
        )
    assert all(rule.source for rule in SHIPPED_RULES if rule.name not in rules_of_modes)


def test_a_new_row_is_audited_with_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Mode(
        name="new",
        drafting="static",
        rule="strict",
        colour=None,
        source="2601.00001",
        variants=({"tree": "chain-3"},),
    )
    monkeypatch.setitem(catalog.MODES, "new", row)
    assert audited_cells(["new"]) == [
        {"mode": "new"},
        {"mode": "new", "tree": "chain-3"},
    ]
    plain, variant = (
        claim_of(Cell("tiny", Decoding(mode="new", tree=tree))) for tree in ("small-7", "chain-3")
    )
    assert (plain.form, plain.is_lossless, plain.source, plain.is_ours) == (
        "",
        True,
        "2601.00001",
        True,
    )
    assert (variant.form, variant.is_ours) == ("tree chain-3", True)


@pytest.mark.usefixtures("published_forms")
def test_the_claim_of_a_form_that_is_not_lossless_is_its_authors() -> None:
    claim = claim_of(Cell("tiny", Decoding(mode="scd-published")))
    assert claim.is_lossless
    assert not claim.is_ours


def test_g_test_equals_scipys_and_pools_rare_cells() -> None:
    expected = np.array([0.4, 0.35, 0.25])
    counts = np.array([430, 330, 240])
    plain = power_divergence(counts, expected * 1000, lambda_="log-likelihood").pvalue
    assert tabular_model._g_test(counts, expected) == pytest.approx(plain)
    rare = np.array([0.4, 0.35, 0.244, 0.002, 0.004])
    pooled = power_divergence(
        [430, 330, 233, 7], [400, 350, 244, 6], lambda_="log-likelihood"
    ).pvalue
    assert tabular_model._g_test(np.array([430, 330, 233, 5, 2]), rare) == pytest.approx(pooled)


def test_p_values_of_a_lossless_decoding_are_uniform() -> None:
    several = [
        g_tests(STATIC, table_images(STATIC, range(1000), seed=seed))[0] for seed in range(30)
    ]
    for name in ("first tokens", "joint of the first tokens"):
        p_values = [tests[name] for tests in several]
        ks = float(kstest(p_values, "uniform").pvalue)
        print(f"{name}: KS p = {ks:.3f}, below 0.05: {np.mean(np.array(p_values) < 0.05):.3f}")
        assert ks > 1e-3
    below = np.mean([tests["later windows"] < 0.05 for tests in several])
    assert below < 0.05 + 4 * (0.05 * 0.95 / len(several)) ** 0.5


def test_a_missing_residual_is_rejected_and_its_tv_estimated() -> None:
    right, (_, right_high) = g_tests(STATIC, table_images(STATIC, range(10_000)))
    rule = broken("broken", strict_without_residual)
    wrong, (wrong_low, _) = g_tests(STATIC, table_images(STATIC, range(10_000), rule=rule))
    print(f"right {right}, wrong {wrong}")
    assert min(right.values()) > LEVEL
    wrong.pop("images of a batch")
    assert max(wrong.values()) < BROKEN
    assert wrong_low > 3 * right_high / 2 > 0


def test_estimates_of_tv_enclose_the_truth() -> None:
    """Tokens drawn from a distribution whose TV is known."""
    joint = tabular_model.table_model().target.joint(
        lambda cond, _uncond: cond.softmax(dim=-1), TOKENS
    )
    other = joint.view(VOCABULARY, -1).clone()
    other[0] *= 1.4
    other /= other.sum()
    first = float((joint.view(VOCABULARY, -1).sum(dim=1) - other.sum(dim=1)).abs().sum()) / 2
    drawn = torch.multinomial(
        other.flatten(), 40_000, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    tokens = torch.stack(torch.unravel_index(drawn, [VOCABULARY] * TOKENS), dim=1)
    tests, (low, high) = g_tests(STATIC, tokens)
    assert low - 0.005 < first < high + 0.005  # each also has the noise of its images
    assert tests["first tokens"] < BROKEN


def test_the_distribution_of_later_tokens_is_that_of_all_tokens() -> None:
    """A table that remembers three tokens, against the sum over everything in front of them."""
    short, long = (TabularModel(3, 6, seed=4, memory=memory) for memory in (None, 3))
    for model in (short, long):
        whole = model.joint(lambda cond, _uncond: cond.softmax(dim=-1), 6).view([3] * 6)
        later = model.joint(lambda cond, _uncond: cond.softmax(dim=-1), 2, skipped=3)
        torch.testing.assert_close(later.view(3, 3), whole.sum(dim=(0, 1, 2, 5)))
    assert len(long.p[0]) < len(short.p[0])


# ---- verdicts


def audited(
    claim: str, p: float, *, is_ours: bool = True, broken: float | None = None
) -> tuple[Claim, list[TrialResult]]:
    values: dict[str, Any] = {"mode": "speculative", "tree": "small-7"}
    if claim == "relaxed":
        values = {"mode": "lantern++", "lambda": 2, "tree": "small-7"}
    if not is_ours:
        values = {"mode": "scd-published"}
    cell = Cell("tiny", Decoding(temperature=1 + p, **values))
    results = [
        TrialResult(
            setting=str(p),
            broken=None,
            p_values={"a": p, "b": 0.5, "c": 0.5, "d": 0.5},
            images=100,
            tokens=700,
            tv=(0.1, 0.2),
        )
    ]
    if broken is not None:
        results.append(
            TrialResult(
                setting=str(p),
                broken="mistake",
                p_values={"a": broken},
                images=100,
                tokens=700,
                tv=(0.1, 0.2),
            )
        )
    return Claim(cell), results


@pytest.mark.usefixtures("published_forms")
def test_verdicts() -> None:
    several = [
        audited("lossless", 0.4, broken=1e-9),
        audited("lossless", 0.41, broken=1e-3),
        audited("lossless", 1e-9),
        audited("lossless", 1e-8, is_ours=False),
        audited("relaxed", 1e-7),
        audited("relaxed", 0.3),
    ]
    rows, tests = audit_rows("tiny", several)
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
    assert rows[0]["power_p"] == 1e-9
    assert len(tests) == 4 * 6
    # Holm over the sixteen tests of lossless claims.
    assert rows[2]["p_holm"] == pytest.approx(16e-9)


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
    monkeypatch.setattr(trials, "AUDIT_TABLES", 40)
    assert (
        cli.main(
            ["certify", "tiny", "--modes", "all", *SMALL, "--samples", "8", "--format", "table"]
        )
        == 0
    )
    rows = rows_of("results/audit-tiny/audit.csv")
    assert {row["mode"] for row in rows} == AUDITED
    for row in rows:
        assert row["table_images"] == "320"
        is_lossless = row["claim"] == "lossless"
        assert row["passed"] in (("yes", "weak") if is_lossless else ("",))
        assert (row["images"] != "") == (row["claim"] == "lossless")
        assert (row["power_p"] != "") == (is_lossless and row["mode"] != "ar")
    shown = capsys.readouterr().out
    assert "no difference found" in shown
    assert "relaxed, as claimed" in shown
    tests = rows_of("results/audit-tiny/lossless_tests.csv")
    assert {"first tokens", "joint of the first tokens", "later windows", "surprise"} <= {
        row["test"] for row in tests
    }


def test_a_lossless_claim_that_fails_exits_with_5(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "AUDIT_TABLES", 100)
    monkeypatch.setattr(configured_rule, "accept_children", strict_without_residual)
    modes = ["--modes", "ar,speculative,lantern++"]
    assert cli.main(["certify", "tiny", *modes, *SMALL, "--samples", "20"]) == 5
    assert "checks do not hold: speculative-static" in capsys.readouterr().err
    verdicts = {
        (row["mode"], row["rule"]): row["verdict"]
        for row in rows_of("results/audit-tiny/audit.csv")
    }
    assert verdicts["speculative", "strict"] == "claimed lossless, measured: not"
    assert verdicts["ar", "none"] == "lossless: no difference found"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--temperature", "0"], "at temperature 0 there is no distribution to test"),
        (["--thorough"], "--thorough: is not for the audit of --modes"),
        (["--power"], "--power: is not for the audit of --modes"),
        (["--modes", "speculativ"], "--modes speculativ: unknown mode"),
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
