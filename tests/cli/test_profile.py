"""`lantern-bench profile` on a random model: the parts of a step add up, and usage errors are refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from lantern_bench.cli import main as cli

TYPED = ["profile", "--size", "2x64x64x4", "--no-compile", "--images", "1", "--tree", "small-7,6n2d3b"]


def test_random_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TYPED, "--out", str(tmp_path), "--format", "csv"]) == 0
    table = pd.read_csv(tmp_path / "profile.csv")
    assert capsys.readouterr().out.startswith("what,name,nodes")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    forwards, steps = table[table["what"] == "forward"], table[table["what"] == "step"]
    assert forwards["nodes"].tolist() == [1, 8, 16, 32, 64]
    assert steps["name"].tolist() == ["ar", "small-7", "6n2d3b"] and steps["nodes"].tolist() == [1, 8, 7]
    parts = steps[["draft_ms", "target_ms", "verify_ms", "other_ms"]].sum(axis=1)
    assert (parts - steps["milliseconds"]).abs().max() < 0.01
    assert (forwards["bound_ms"] > 0).all()
    measured = forwards["over_bound"] * forwards["bound_ms"] / forwards["milliseconds"]
    assert ((measured - 1).abs() < 0.05).all()
    drafted = steps[steps["name"] != "ar"]
    assert (drafted["break_even_mal"] > 1).all() and (drafted["draft_ms"] > 0).all()
    assert steps["mean_accepted_length"].isna().all()  # undefined for random weights
    assert (steps["peak_memory_mb"] > 0).all()


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (["--size", "8by256"], "--size 8by256: must be LAYERSxWIDTH"),
        (["--size", "8x100"], "--size 8x100: the width must be a multiple of 64"),
        (["--tree", "smal-7"], "unknown tree 'smal-7'"),
        (["--model", "lantern"], "did you mean lanterns?"),
        (["--size", "1x64x16x4", "--search"], "--search: needs weights"),
        (["--neighbours", "9", "--search"], "--neighbours 9: needs --search with --lambda"),
        (["--lambda", "5"], "--lambda 5: needs --search"),
        (["--search", "--lambda", "0.5"], "--lambda 0.5: needs --search, and a value above 1"),
        (["--search", "--tree", "6n2d3b", "--no-compile", "--images", "1", "--tokens", "8"], "Add one to --tree"),
    ],
)
def test_usage_errors(typed: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *typed]) == 2
    assert wrong in capsys.readouterr().err
