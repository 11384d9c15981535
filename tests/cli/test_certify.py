"""`lantern-bench certify` on a model of tables: certificate, files, exit codes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lantern_bench.checks import trials
from lantern_bench.checks.image_tests import TESTS
from lantern_bench.cli import main as cli
from lantern_bench.decoding.acceptance import configured_rule
from tests.helpers.mistakes import strict_without_residual
from tests.helpers.tiny_model import TinyModel

pytestmark = pytest.mark.usefixtures("tiny")
SMALL = ["--dtype", "float32", "--no-compile", "--threads", "1"]


@pytest.fixture(autouse=True)
def few_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few decodings of the tables, and few images of each."""
    few = dict(list(trials.table_decodings().items())[:2])
    monkeypatch.setattr(trials, "table_decodings", lambda: few)
    monkeypatch.setattr(trials, "TABLE_IMAGES", 2000)


def rows(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


DRAFTS = ["jacobi w4-row", "pac w4x2x2-row-maximal", "hybrid w4d2-row-maximal", "dynamic 10n2d5b"]
COUPLED = ["jacobi w4-row-maximal, block", "hybrid w4d2-row-maximal, block"]
CHAINS = ["static chain-5, block", "jacobi w4-row, block", *COUPLED]
PAC = "pac w4x2x1-row-maximal, traversal"
CELLS = ["static small-7", *DRAFTS, *CHAINS, "static small-7, traversal", PAC]


def test_certificate_passes_and_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certify", "tiny", *SMALL]) == 0
    certificate = rows("results/certify-tiny/certificate.csv")
    written = capsys.readouterr()
    assert written.out.splitlines()[0].startswith("model,check,setting,figure,measured")
    assert "13 trials (2 on tables, 11 with tiny): about " in written.err
    assert written.err.count("certificate") == 2, "progress is one task"
    of_check = {
        check: [row for row in certificate if row["check"].startswith(check)]
        for check in ("table", "whole")
    }
    assert [row["setting"] for row in of_check["table"]] == [
        "static small-7, tables",
        "static own-3-af3235, tables",
    ]
    assert {row["n"] for row in of_check["table"]} == {"2000"}
    assert [row["setting"] for row in of_check["whole"]] == CELLS
    assert {row["n"] for row in of_check["whole"]} == {"8"}
    assert [row["check"] for row in certificate[13:]] == ["greedy identity"] * 5
    assert {row["passed"] for row in certificate} == {"yes"}
    tests = rows("results/certify-tiny/lossless_tests.csv")
    assert len(tests) == 2 * 4 + TESTS * len(CELLS)
    assert {row["p_value"] == "" for row in tests} == {False}
    measurement = json.loads(Path("results/certify-tiny/measurement.json").read_text())
    assert (measurement["dtype"], measurement["thorough"]) == ("float32", False)
    assert measurement["weights"] == {"target": "1", "drafter": "2"}


def test_thorough_tests_the_model_under_every_filter() -> None:
    assert cli.main(["certify", "tiny", *SMALL, "--thorough", "--samples", "64"]) == 0
    whole = [
        row
        for row in rows("results/certify-tiny/certificate.csv")
        if row["check"].startswith("whole")
    ]
    siblings = "static own-3-af3235"
    narrow = [CELLS[0], siblings, *DRAFTS, *CHAINS, CELLS[-2], f"{siblings}, traversal", PAC]
    assert [row["setting"] for row in whole] == [*CELLS, *(f"{cell}, top-k 3" for cell in narrow)]
    assert {row["n"] for row in whole} == {"64"}


def test_power_counts_the_images_of_each_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "_BROKEN_FACTOR", 1)
    assert cli.main(["certify", "tiny", *SMALL, "--power", "--format", "table"]) == 0
    power = rows("results/certify-tiny/power.csv")
    written = capsys.readouterr()
    assert [row["fault"] for row in power] == [
        "residual left out",
        "a draft accepted once too often in 50",
    ] * 2
    assert {row["tested_on"] for row in power} == {"tables"}
    assert 0 < int(power[0]["images"]) <= 2000
    assert power[3]["images"] == ""
    assert "mistakes are not rejected: a draft accepted" in written.err
    assert "power of tiny" in written.out


def test_lossy_decoder_exits_with_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configured_rule, "accept_children", strict_without_residual)
    assert cli.main(["certify", "tiny", *SMALL, "--format", "table"]) == 5
    written = capsys.readouterr()
    assert "NO" in written.out
    assert "checks do not hold: tables follow the target (static small-7, tables)" in written.err
    assert Path("results/certify-tiny/certificate.csv").is_file()


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ([[0], [1], [0, 0]], ["static own-3-", "static chain-5, block", "static own-3-"]),
        (
            [[0], [0, 0], [0, 0, 0]],
            [
                "static chain-3",
                "static small-7",
                "static chain-3, block",
                "static chain-3, traversal",
                "static small-7, traversal",
            ],
        ),
    ],
)
def test_default_tree_may_be_a_list_of_paths(
    tree: list[list[int]], settings: list[str], tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "defaults", {**tiny.defaults, "tree": tree})
    assert cli.main(["certify", "tiny", *SMALL, "--samples", "16"]) == 0
    certificate = rows("results/certify-tiny/certificate.csv")
    tested = [row["setting"] for row in certificate if row["check"].startswith("whole")]
    static = [
        setting for setting in tested if setting.startswith("static") and "top-k" not in setting
    ]
    assert len(static) == len(settings)
    assert all(setting.startswith(start) for setting, start in zip(static, settings, strict=True))


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["certify", "tinny"], 2, "error: MODEL tinny: unknown model; did you mean tiny?"),
        (
            ["certify", "tiny", "--temperature", "0"],
            2,
            "at temperature 0 there is no distribution",
        ),
        (["certify", "tiny", "--delta", "0.2"], 2, "--delta"),
        (
            ["certify", "tiny", "--modes", "lantern"],
            2,
            "--neighbours 20: the model tiny has 16 codes",
        ),
        (["certify", "tiny", "--out", "file/there"], 2, "is a file, not a folder"),
        (["certify", "tiny", "--device", "cuda:9"], 3, "this machine has no such device"),
    ],
)
def test_errors_come_before_any_measurement(
    typed: list[str], code: int, message: str, tiny: TinyModel, refuse: Callable[..., None]
) -> None:
    Path("file").write_text("")
    refuse(typed, code, message)
    assert tiny.loads == 0
