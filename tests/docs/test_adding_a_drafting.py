"""docs/adding-a-drafting.md is true: its drafting is found, swept, certified and lossless."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lantern_bench.checks import tabular_model
from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.loop import decode
from lantern_bench.methods import catalog
from lantern_bench.methods.draftings import Mode
from tests.docs.test_adding_a_rule import ROOT, rows, run

EXAMPLE = ROOT / "tests" / "examples" / "echo_drafting"
IMAGES = 3_000


@pytest.mark.timeout(1200)
def test_an_outside_drafting_is_swept_and_certified(tmp_path: Path) -> None:
    tiny = ["--model", "tiny", "--neighbours", "3"]
    sweep = [
        "sweep",
        str(EXAMPLE / "echo.yaml"),
        *tiny,
        "--images",
        "4",
        "--metrics",
        "speed",
        "--no-compile",
    ]
    done = run(
        tmp_path,
        [*sweep, "--out", "run"],
        ["curves", "run"],
        ["certify", "tiny", "--power", "--out", "certificate"],
        path=EXAMPLE,
        ONLY_TABLES_OF="echo",
    )
    assert done.returncode == 0, done.stderr
    speed = {row["cell_id"]: row for row in rows(tmp_path / "run" / "speed.csv")}
    assert {"echo-echo-w2-t1", "echo-echo-w4-t1", "lantern++-echo-w3-k3-lambda5-t1"} < set(speed)
    assert speed["echo-echo-w2-t1"]["tree"] == "w2"
    assert float(speed["echo-echo-w4-t1"]["mean_accepted_length"]) > 1
    drawn = rows(tmp_path / "run" / "figures" / "acceptance-by-depth.csv")
    assert any(row["label"].startswith("echo") for row in drawn)
    certificate = rows(tmp_path / "certificate" / "certificate.csv")
    assert {row["setting"] for row in certificate if "echo" in row["setting"]} >= {
        "echo w3, tables",
        "echo w3",
    }
    power = [
        row
        for row in rows(tmp_path / "certificate" / "power.csv")
        if row["setting"] == "echo w3, tables"
    ]
    assert len(power) == 2
    assert all(row["images"] for row in power)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The drafting beside the shipped ones, and tables without a drafter."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    package = importlib.import_module("echo_drafting")
    monkeypatch.setitem(catalog.DRAFTINGS, "echo", package.DRAFTING)
    monkeypatch.setitem(catalog.MODES, "echo", Mode(name="echo", drafting="echo", rule="strict"))
    monkeypatch.setitem(catalog.PARAMETERS, "length", package.LENGTH)
    model = replace(tabular_model.table_model(), drafter=None)
    monkeypatch.setattr(tabular_model, "table_model", lambda *_tokens: model)
    return importlib.import_module("echo_drafting.method")


def p_value(values: dict[str, Any]) -> float:
    """The smallest of the G-tests that an audit makes."""
    decoding = Decoding("echo", **values)
    p_values, _ = tabular_model.g_tests(
        decoding, tabular_model.table_images(decoding, range(IMAGES))
    )
    print(f"G-tests echo {values}: {p_values}")
    return min(p_values.values())


@pytest.mark.timeout(1200)
def test_an_installed_package_changes_no_run_that_does_not_use_it(tmp_path: Path) -> None:
    """Neither the columns of its parameters nor those of its metrics."""
    tiny = ["--model", "tiny", "--modes", "ar,scd", "--images", "1", "--metrics", "speed"]
    commands = [
        ["sweep", *tiny, "--no-compile", "--out", "run"],
        ["show", "run", "--table", "quality", "--format", "json"],
        ["check-run", "run"],
    ]
    none = tmp_path / "none"
    none.mkdir()
    packages = [EXAMPLE, ROOT / "tests" / "examples" / "sharpness_metric"]
    both = Path(os.pathsep.join(map(str, packages)))
    columns = {}
    for name, path in (("without", none), ("with", both)):
        folder = tmp_path / name
        folder.mkdir()
        done = run(folder, *commands, path=path)
        assert done.returncode == 0, done.stderr
        line = (folder / "run" / "records.jsonl").read_text().splitlines()[0]
        columns[name] = {
            "records": list(json.loads(line)),
            "shown": list(json.loads(done.stdout[done.stdout.index("[\n") :])[0]),
        }
        for file in (folder / "run").glob("*.csv"):
            columns[name][file.name] = file.read_text().splitlines()[0].split(",")
    assert columns["with"] == columns["without"]
    # A run that was made without the package stays as it is.
    code = run(tmp_path / "without", ["check-run", "run"], path=both)
    assert code.returncode == 0, code.stderr


def test_a_length_out_of_range_is_refused(echo: ModuleType) -> None:
    assert Decoding("echo", length=2).cell_id == "echo-echo-w2-t1"
    with pytest.raises(ParameterError, match="length must be a whole number of at least 1"):
        Decoding("echo", length=0)


@pytest.mark.parametrize("values", [{"length": 2}, {"length": 3, "temperature": 0.9, "top_k": 2}])
def test_it_is_lossless_without_a_drafter(echo: ModuleType, values: dict[str, Any]) -> None:
    assert p_value(values) > 1e-3


def test_a_stale_q_is_rejected(echo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn from the last distribution but verified with another one."""

    right = echo.Echo.draft

    def draft(self: Any, inputs: Any) -> None:
        right(self, inputs)
        self.tree.q.fill_(1 / tabular_model.VOCABULARY)

    monkeypatch.setattr(echo.Echo, "draft", draft)
    assert p_value({"length": 2}) < 1e-6


def test_greedy_equals_autoregressive_decoding(echo: ModuleType) -> None:
    cells = (Decoding(mode="ar", temperature=0), Decoding("echo", length=3, temperature=0))
    model = tabular_model.table_model()
    generator = torch.Generator().manual_seed(0)
    plain, drafted = (
        decode(model=model, condition=[""], decoding=cell, generators=[generator])[
            0
        ].tokens.tolist()
        for cell in cells
    )
    assert drafted == plain
