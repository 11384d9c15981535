"""`lantern-bench profile` on a random model: parts of steps, searches and usage errors."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lantern_bench.cli import main as cli
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.models import registry
from lantern_bench.models.random_weights import read_size
from lantern_bench.profile import tree_search
from lantern_bench.profile.cost_model import (
    KERNEL_COUNTS,
    Workload,
    find_device,
    named_draft,
    step_seconds,
)
from lantern_bench.profile.tree_search import SEARCHED, describe, searched_lossless
from lantern_bench.sweeps import choose_threads
from lantern_bench.sweeps.choose_threads import Calibrated
from lantern_bench.utils.progress import Note
from tests.helpers.tiny_model import TinyModel

TYPED = ["profile", "--size", "2x64x64x4", "--no-compile", "--images", "1", "--tree", "small-7"]
SEARCH = [
    "profile",
    "--model",
    "tiny",
    "--search",
    "--no-compile",
    "--threads",
    "1",
    "--format",
    "csv",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of one profile of a random model."""
    folder = tmp_path_factory.mktemp("profile")
    flags = ["--threads", "1", "--out", str(folder), "--save-device", str(folder / "here.yaml")]
    assert cli.main([*TYPED, *flags]) == 0
    return folder


def test_random_model_is_measured(measured: Path) -> None:
    table = pd.read_csv(measured / "profile.csv")
    assert (measured / "profile.png").read_bytes().startswith(b"\x89PNG")
    forwards = table[table["what"] == "forward"]
    steps = table[table["what"] == "step"]
    assert forwards["nodes"].tolist() == [1, 8, 16, 32, 64]
    assert steps["name"].tolist() == ["ar", "small-7"]
    assert steps["nodes"].tolist() == [1, 8]
    parts = steps[["draft_ms", "target_ms", "verify_ms", "other_ms"]].sum(axis=1)
    assert (parts - steps["milliseconds"]).abs().max() < 0.01
    assert (forwards["bound_ms"] > 0).all()
    ratio = forwards["over_bound"] * forwards["bound_ms"] / forwards["milliseconds"]
    assert ((ratio - 1).abs() < 0.05).all()
    drafted = steps[steps["name"] != "ar"]
    assert (drafted["break_even_mal"] > 1).all()
    assert (drafted["draft_ms"] > 0).all()
    assert steps["mean_accepted_length"].isna().all()  # undefined for random weights
    assert (steps["accounted_memory_mb"] > 0).all()


def test_saved_device_reproduces_what_it_was_fitted_to(measured: Path) -> None:
    device = find_device(str(measured / "here.yaml"))
    assert (device.name, device.kind, device.code) == ("here", "cpu", "eager")
    assert device.weight_bytes in (2, 4)
    assert device.about
    assert set(device.target_factors) == {1, 8}
    assert device.sources[0].startswith("fitted to ")
    steps = pd.read_csv(measured / "profile.csv").query("what == 'step'").set_index("name")
    sizes = read_size("2x64x64x4")
    step = step_seconds(
        device=device,
        stack=KERNEL_COUNTS["compiled"],
        setting=Workload(sizes=sizes, batch=1, guided=True, context=8),
        draft=named_draft("small-7"),
        committed=2.0,
    )["total"]
    # One draft and one verification were measured: their factors make them exact.
    assert 1e3 * step["draft"] == pytest.approx(steps["draft_ms"]["small-7"], rel=0.05)
    assert 1e3 * step["verify"] == pytest.approx(steps["verify_ms"]["small-7"], rel=0.05)


def test_threads_are_tried_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = list[list[bool]]()
    before = torch.get_num_threads()

    def fastest(
        model: Any, prompt: str, decodings: list[Decoding], emit: Callable[[Note], object]
    ) -> None:
        tried.append([decoding.drafts for decoding in decodings])
        choose(model=model, prompt=prompt, decodings=decodings, emit=emit)

    choose = choose_threads.choose_threads
    monkeypatch.setattr(choose_threads, "choose_threads", fastest)
    monkeypatch.setattr(
        choose_threads, "calibrate", lambda *_: Calibrated(1, {1: 2.0, 4: 3.0}, 0.3)
    )
    monkeypatch.setattr("lantern_bench.profile.step_costs.measure", lambda **_: [])
    try:
        assert cli.main([*TYPED, "--threads", "1"]) == 0
        assert not tried
        torch.set_num_threads(2)
        assert cli.main(TYPED) == 0
        assert [set(kinds) for kinds in tried] == [{False, True}]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert "speed cannot be measured now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (["--size", "8by256"], "--size 8by256: must be LAYERSxWIDTH"),
        (["--size", "8x100"], "--size 8x100: the width must be a multiple of 64"),
        (["--tree", "smal-7"], "--tree smal-7: unknown tree; did you mean small-7?"),
        (["--model", "lantern"], "did you mean lanterns?"),
        (
            ["--size", "1x64x16x4", "--search"],
            "--size: not with --search, which takes a trained model",
        ),
        (["--tree", "chain-3", "--search"], "--tree: not with --search"),
        (["--save-device", "here.txt"], "--save-device here.txt: must end in .yaml"),
        (["--save-device", "a.yaml", "--search"], "--save-device: not with --search"),
        (["--mode", "ar"], "--mode ar: drafts nothing"),
        (["--mode", "zipar"], "--mode zipar: drafts nothing"),
        (
            ["--mode", "lantern", "--delta", "0.1,0.2"],
            "measures one mode and rule at a time, and these are 2",
        ),
        (["--mode", "lantern++", "--lambda", "0.5"], "--lambda 0.5: must be a number above 1"),
        (["--rule", "block", "--tree", "small-7"], "--tree small-7: the rule block needs a chain"),
        (["--tree", "9n1d3b"], "--tree 9n1d3b: nodes 9: depth 1 and beam 3 make only 3 candidates"),
    ],
)
def test_usage_errors(
    typed: list[str], wrong: str, folder: Path, refuse: Callable[..., None]
) -> None:
    refuse(["profile", *typed], 2, wrong)


@pytest.fixture
def few(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tiny model, searches of a few small drafts."""
    monkeypatch.setattr(tree_search, "_DYNAMIC", ["2n1d2b", "3n2d2b", "6n2d2b"])
    monkeypatch.setattr(tree_search, "_MEASURED", 2)
    monkeypatch.setattr(tree_search, "_WINDOWS", [{"window": 2}, {"window": 4}])


@pytest.mark.usefixtures("few")
def test_every_mode_and_rule_is_searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = ["--mode", "speculative,lantern", "--neighbours", "3", "--delta", "0.2"]
    assert cli.main([*SEARCH, "--images", "8", *rules, "--drafting", "static,dynamic"]) == 0
    written = capsys.readouterr()
    tables = [pd.read_csv(StringIO("tree," + text)) for text in written.out.split("tree,")[1:]]
    assert len(tables) == 4
    for table in tables:
        assert table["speedup"].is_monotonic_decreasing
        assert 2 <= len(table) <= 9
        length = table["mean_accepted_length"]
        assert (
            length / table["speedup"] * table["ar_ms"] / table["milliseconds"] - 1
        ).abs().max() < 0.02
        assert (table["expected_length"] - length).abs().max() < 1.0
    lines = [line for line in written.err.splitlines() if line.startswith("  - {")]
    path = tmp_path / "found.yaml"
    path.write_text("\n".join(["model: tiny", "baseline: false", "cells:", *lines]))
    cells = load_experiment(path, registry.defaults_of(["tiny"])).cells
    pairs = [(cell.decoding.mode, cell.decoding.drafting) for cell in cells]
    modes = ("speculative", "lantern")
    assert pairs == list(product(modes, ("static", "dynamic")))
    fastest = [describe(cell.decoding) for cell in cells]
    assert fastest == [table["tree"].astype(str)[0] for table in tables]


@pytest.mark.usefixtures("few")
def test_chains_alone_are_searched_for_a_rule_of_chains(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SEARCH, "--rule", "block", "--images", "40"]) == 0
    table = pd.read_csv(StringIO(capsys.readouterr().out))
    assert (table["nodes"] == table["levels"]).all()
    assert (table["expected_length"] - table["mean_accepted_length"]).abs().max() < 0.3


@pytest.mark.usefixtures("few")
def test_static_trees_are_not_searched_at_temperature_0(capsys: pytest.CaptureFixture[str]) -> None:
    typed = [*SEARCH, "--mode", "speculative", "--drafting", "static", "--temperature", "0"]
    assert cli.main(typed) == 2
    assert "--temperature 0: trees are searched by probabilities" in capsys.readouterr().err


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("mode", "nodes"),
    [
        ("scd", {"w2": 2, "w4": 4}),
        ("sjd-pac", {"w2": 12, "w4": 14}),
        ("hybrid", {"w2": 2, "w4": 4}),
    ],
)
def test_windows_are_searched(
    mode: str, nodes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SEARCH, "--images", "4", "--mode", mode]) == 0
    table = pd.read_csv(StringIO(capsys.readouterr().out))
    assert {
        tree[:2]: count for tree, count in zip(table["tree"], table["nodes"], strict=True)
    } == nodes
    assert (table["expected_length"] > 1).all()
    if mode == "scd":  # searched with the coupling of the mode
        assert set(table["tree"]) == {"w2-row-maximal", "w4-row-maximal"}
        assert (table["expected_length"] - table["mean_accepted_length"]).abs().max() < 0.5


@pytest.mark.usefixtures("few")
def test_without_a_mode_every_lossless_method_is_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched = []

    def search(*, decoding: Decoding, **_others: object) -> list[tuple[Decoding, dict[str, float]]]:
        searched.append((decoding.mode, decoding.drafting, decoding.rule))
        return [(decoding, {"speedup": 1.0})]

    monkeypatch.setattr(tree_search, "search_trees", search)
    assert cli.main(SEARCH) == 0
    assert searched == searched_lossless()
    assert capsys.readouterr().err.count("  - {mode:") == len(searched)
    names = {" ".join(method) for method in searched}
    assert names >= {"speculative static block", "speculative dynamic strict", "sjd jacobi block"}
    assert names >= {"scd jacobi strict", "sjd-pac pac strict", "hybrid hybrid strict"}
    assert names >= {"block-scd jacobi block"}
    assert "speculative dynamic block" not in names
    # On a chain traversal is block.
    assert "speculative static traversal" in names
    assert "sjd jacobi traversal" not in names


@pytest.mark.usefixtures("tiny")
def test_a_drafting_without_a_search_is_refused(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., None]
) -> None:
    monkeypatch.setattr(tree_search, "SEARCHED", [name for name in SEARCHED if name != "static"])
    words = "are not searched\n  Drafts of jacobi, pac, hybrid and dynamic are."
    refuse([*SEARCH, "--drafting", "static"], 2, words)
