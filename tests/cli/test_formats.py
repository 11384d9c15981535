"""Every command that prints a table prints it in all five formats."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lantern_bench.checks import certification, doctor, trials
from lantern_bench.checks.doctor import Finding
from lantern_bench.cli import main as cli
from lantern_bench.cli.console import FORMATS
from lantern_bench.metrics.protocols import protocol_of
from lantern_bench.models import registry
from lantern_bench.profile import step_costs
from lantern_bench.storage.run_directory import RESULTS_VARIABLE
from tests.cli.test_commands import commands
from tests.helpers.made_up_run import make_records, make_scores, write_run
from tests.helpers.tiny_model import EXPERIMENT, TinyModel

CERTIFY = ["--dtype", "float32", "--no-compile", "--threads", "1", "--out", "certificate"]
PAPER = (
    "\npaper:\n  title: A | paper\n  columns: [speedup]\n"
    "  rows:\n    - {name: 50 % a_row, match: {mode: ar}}\n"
)
TYPED = [
    ["sweep", "tiny.yaml", "--threads", "1"],
    ["sweep", "tiny.yaml", "--dry-run"],
    ["merge", "shard1", "shard2"],
    ["reproduce", "paper.yaml", "--threads", "1"],
    ["reproduce", "paper.yaml", "--dry-run"],
    ["explore", "tiny.yaml", "--temperature", "1", "--verify", "0", "--threads", "1"],
    ["score", "first"],
    ["import-scores", "first", "paper.yaml"],
    *(
        ["show", "first", "--table", table]
        for table in ("summary", "speed", "quality", "acceptance")
    ),
    ["show", "first", "--by", "category"],
    ["show", "first", "second"],
    ["show", "first", "second", "--table", "quality", "--by", "category"],
    ["compare", "first", "second"],
    ["predict", "first", "--prompts", "1000"],
    ["predict", "first", "--device", "a100", "--model", "llamagen-t2i-stage1", "--prompts", "1000"],
    ["certify", "tiny", *CERTIFY],
    ["recommend", "first", "--within", "clip_score=0.1"],
    [
        "generate",
        "one red lantern",
        "--model",
        "tiny",
        "--mode",
        "all",
        "--neighbours",
        "3",
        "--force",
    ],
    ["models"],
    ["models", "lanterns"],
    ["experiments"],
    [
        "profile",
        "--size",
        "2x64x64x4",
        "--no-compile",
        "--images",
        "1",
        "--tree",
        "small-7",
        "--threads",
        "1",
    ],
    ["check-model", "tiny"],
    ["doctor"],
    ["check-run", "first"],
    ["train", "drafter", "--target", "lanterns", "--data", "held-out", "--dry-run"],
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two made-up runs, and of two shards of a run of the tiny model."""
    root = tmp_path_factory.mktemp("runs")
    records = make_records()
    for row in records:
        row["prompt_metadata"] = {"category": f"{row['seed'] % 2} | two"}
    for name in ("first", "second"):
        write_run(root / name, records, make_scores(records))
    (root / "tiny.yaml").write_text(EXPERIMENT)
    (root / "paper.yaml").write_text(EXPERIMENT + PAPER)
    model = TinyModel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "models", lambda: {"tiny": model})
        for shard in ("1", "2"):
            typed = [
                "sweep",
                str(root / "tiny.yaml"),
                "--threads",
                "1",
                "--shard",
                f"{shard}/2",
                "--out",
            ]
            assert cli.main([*typed, str(root / f"shard{shard}")]) == 0
    return root


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is called once: measuring takes long."""
    results: list[Any] = []

    def call(*arguments: Any, **named: Any) -> Any:
        if not results:
            results.append(function(*arguments, **named))
        return results[0]

    return call


def test_all_of_them_are_typed_here() -> None:
    printing = {
        path
        for path, command in commands().items()
        if any("--format" in flag.opts for flag in command.params)
    }
    assert printing == {
        path for path in commands() if any(tuple(typed[: len(path)]) == path for typed in TYPED)
    }


@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_a_table_in_all_formats(
    typed: list[str],
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, str(runs))
    monkeypatch.setattr(certification, "certify", once(certification.certify))
    monkeypatch.setattr(step_costs, "measure", once(step_costs.measure))
    few = dict(list(trials.table_decodings().items())[:2])
    monkeypatch.setattr(trials, "table_decodings", lambda: few)
    registered = registry.models()
    tiny = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: registered | {"tiny": tiny})
    scored = protocol_of("embedded"), 1
    monkeypatch.setattr(
        "lantern_bench.metrics.score_run.score_run_directory", lambda *_, **__: scored
    )
    monkeypatch.setattr(
        "lantern_bench.storage.official_scores.import_scores", lambda *_: ("embedded", 1, {})
    )
    findings = [
        Finding("torch", "ok", "2.10"),
        Finding(check="a | b", state="warn", result="", fix="c"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda _: findings)
    words = [
        str(runs / word) if word.endswith(".yaml") or word.startswith("shard") else word
        for word in typed
    ]
    printed = {}
    for name in FORMATS:
        out = []
        if typed[0] == "merge":
            out = ["--out", name]
        elif typed[0] in ("sweep", "reproduce"):
            out = ["--out", "run"]
        assert cli.main([*words, *out, "--format", name]) in (0, 4, 5), capsys.readouterr().err
        written = capsys.readouterr()
        assert "internal" not in written.err, written.err
        printed[name] = written.out
    rows = json.loads(printed["json"])
    assert rows
    assert len(list(csv.reader(io.StringIO(printed["csv"])))) == 1 + len(rows)
    lines = [line.replace("\\|", "") for line in printed["md"].splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1
    assert r"\end{tabular}" in printed["latex"]
    assert len(printed["table"].splitlines()) > 2
