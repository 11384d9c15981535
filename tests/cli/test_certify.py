"""`lantern-bench certify` on a model of tables: certificate, files, exit codes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lantern_bench.certify.run import strict_without_residual
from lantern_bench.certify.whole_image import TESTS
from lantern_bench.cli import main as cli
from lantern_bench.decoding.acceptance import walk
from tests.tiny_model import TinyModel

pytestmark = pytest.mark.usefixtures("tiny")
SMALL = ["--dtype", "float32", "--no-compile", "--threads", "1", "--neighbours", "3"]
SMALL += ["--positions", "9", "--draws", "8", "--samples", "64"]


def rows(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_certificate_passes_and_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certify", "tiny", *SMALL]) == 0
    certificate = rows("results/certify-tiny/certificate.csv")
    assert capsys.readouterr().out.splitlines()[0].startswith("model,check,setting,figure,measured")
    checks = [row["check"] for row in certificate]
    exact_checks = [row for row in certificate if row["check"] == "whole images follow the target"]
    drafts = ["jacobi w4", "pac w4x2x2-maximal", "hybrid w4d2-row-maximal", "dynamic 10n2d5b"]
    chains = ["static chain-5, block", "jacobi w4, block"]
    last = "jacobi w4, traversal"
    cells = ["static small-7", *drafts, *chains, "static small-7, traversal", last]
    siblings = "static own-3-af3235"
    narrow = [cells[0], siblings, *drafts, *chains, cells[-2], f"{siblings}, traversal", last]
    narrow = [f"{cell}, top-k 3" for cell in narrow]
    assert [row["setting"] for row in exact_checks] == [*cells, *narrow]
    broken = [row for row in certificate if row["check"] == "broken rule rejected"]
    assert [row["setting"].split(": ")[0] for row in broken].count("static chain-5, block") == 3
    assert {row["setting"].split(": ", 1)[1] for row in broken} == {
        "residual left out",
        "a draft accepted once too often in 50",
        "share not updated after a rejection",
        "not renormalised after a rejected sibling",
        "relaxed: lambda 2, k 4",
    }
    others = certificate[len(exact_checks) + len(broken) :]
    assert checks[-len(others) :][:6] == ["greedy identity"] * 5 + ["strict rule emits the target"]
    assert {row["passed"] for row in exact_checks + others[:6]} == {"yes"}
    assert {row["passed"] for row in broken} <= {"yes", "weak"}  # their power: tests/certify/test_whole_images.py
    assert {row["passed"] for row in others[6:]} == {"yes", ""}
    tests = rows("results/certify-tiny/lossless_tests.csv")
    assert len(tests) == TESTS * (len(exact_checks) + len(broken))
    assert {row["p_value"] == "" for row in tests} == {False}
    assert all(row["measured_low"] and row["measured_high"] for row in certificate if row["check"] == "emitted TV")
    assert len(rows("results/certify-tiny/emitted_tv_places.csv")) == 9 * len(
        rows("results/certify-tiny/emitted_tv.csv")
    )
    facts = json.loads(Path("results/certify-tiny/measurement.json").read_text())
    assert (facts["dtype"], facts["positions"], facts["weights"]) == ("float32", 9, {"target": "1", "drafter": "2"})


def test_lossy_decoder_exits_with_5(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(walk, "accept_children", strict_without_residual)
    assert cli.main(["certify", "tiny", *SMALL, "--format", "table"]) == 5
    written = capsys.readouterr()
    assert "NO" in written.out
    assert "checks do not hold: whole images follow the target (static small-7" in written.err
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
    assert cli.main(["certify", "tiny", *SMALL, "--positions", "3", "--samples", "16"]) == 0
    certificate = rows("results/certify-tiny/certificate.csv")
    tested = [row["setting"] for row in certificate if row["check"].startswith("whole")]
    static = [setting for setting in tested if setting.startswith("static") and "top-k" not in setting]
    assert len(static) == len(settings)
    assert all(setting.startswith(start) for setting, start in zip(static, settings, strict=True))


def test_measurements_without_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["certify", "tiny", "--emitted-tv", "--delta", "0.05,0.4", "--lambda", "3", *SMALL]
    assert cli.main([*typed, "--out", "here"]) == 0
    cost = rows("here/emitted_tv.csv")
    assert {(row["mode"], row["drafting"], row["residual"]) for row in cost} == {
        ("lantern", "dynamic", "exact"),
        ("lantern", "dynamic", "official"),
        ("lantern", "static", "exact"),
        ("lantern", "static", "official"),
        ("lantern++", "static", "exact"),
        ("lantern++", "static", "official"),
    }
    assert len(cost) == 2 * 2 * 2 + 2
    assert {row["places"] for row in cost} == {"9"}
    exact = {row["delta"]: float(row["emitted_tv"]) for row in cost if row["residual"] == "exact" and row["delta"]}
    assert exact["0.4"] > exact["0.05"]
    assert not Path("here/certificate.csv").exists()


RULES = """
name: rules
model: tiny
baseline: false
neighbours: 3
tree: small-7
cells:
  - {mode: cool-sd, strength: [0.8, 1.5], drafting: [static, dynamic]}
  - {mode: gsd, cluster: 4, code_gap: 0, drafting: [static, dynamic], residual: [exact, official]}
  - {mode: entropy, entropy_scale: 0.3}
  - {mode: typical, drafting: dynamic, epsilon: 0.09, residual: [exact, official]}
"""


def test_rules_of_every_kind_are_measured() -> None:
    Path("rules.yaml").write_text(RULES)
    assert cli.main(["certify", "tiny", *SMALL, "--experiment", "rules.yaml", "--samples", "16", "--out", "here"]) == 0
    # Four times the images, or four times a quarter of them, show too little of this model.
    weak = {row["n"] for row in rows("here/certificate.csv") if row["passed"] == "weak"}
    assert weak == {"64", "16"}
    cost = {row["cell_id"]: row for row in rows("here/emitted_tv.csv")}
    assert len(cost) == 4 + 4 + 1 + 2
    (lossless,) = [row for name, row in cost.items() if "dynamic" in name and row["strength"] == "0.8"]
    assert float(lossless["emitted_tv"]) < 1e-5
    assert all(float(row["emitted_tv"]) > 1e-3 for row in cost.values() if row["strength"] != "0.8")
    bounded = [row for row in rows("here/certificate.csv") if row["wanted"].startswith("<= mass moved")]
    # Deterministic drafts under `exact`: two of cool-sd, one of gsd, one of typical.
    assert len(bounded) == 4 and {row["passed"] for row in bounded} == {"yes"}


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["certify", "tinny"], 2, "error: MODEL tinny: unknown model; did you mean tiny?"),
        (
            ["certify", "tiny", "--temperature", "0", "--neighbours", "3"],
            2,
            "at temperature 0 there is no distribution",
        ),
        (["certify", "tiny", "--modes", "ar"], 2, "has no relaxed cell"),
        (["certify", "tiny", "--delta", "2"], 2, "--delta 2: must lie strictly between 0 and 1"),
        (["certify", "tiny"], 2, "--neighbours 20: the model tiny has 16 codes"),
        (["certify", "tiny", "--experiment", "nothing"], 2, "no experiment is named 'nothing'"),
        (["certify", "tiny", "--neighbours", "3", "--out", "file/there"], 2, "is a file, not a folder"),
        (["certify", "tiny", "--neighbours", "3", "--device", "cuda:9"], 3, "this machine has no such device"),
    ],
)
def test_errors_come_before_any_measurement(
    typed: list[str], code: int, message: str, tiny: TinyModel, refuse: Callable[..., None]
) -> None:
    Path("file").write_text("")
    refuse(typed, code, message)
    assert tiny.loads == 0
