"""The command `explore`: its table and its files, what it refuses, and how it continues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.config.decoding import Decoding
from lantern_bench.profile import exploration, shadow_walk, walks
from lantern_bench.profile.cost_model import find_device
from lantern_bench.profile.step_costs import StepCost
from lantern_bench.report.draw import SURFACE, draw_surface
from lantern_bench.storage.schema import frame
from lantern_bench.utils.progress import ignore_events
from tests.helpers.tiny_model import TinyModel

GRID = """
name: grid
model: tiny
images: 3
compile: false
threads: 1
cells:
  - {mode: speculative, drafting: static, rule: [strict, block], tree: [chain-3, chain-4]}
  - {mode: speculative, drafting: static, rule: traversal, tree: small-7}
  - {mode: lantern, drafting: static, tree: [chain-4, small-7], neighbours: 3, delta: [0.1, 0.4]}
  - {mode: lantern, nodes: 6, depth: 2, beam: 2, neighbours: 3, delta: 0.2}
  - {mode: lantern, nodes: 2, depth: 1, beam: 3, neighbours: 3, delta: 0.2}
  - {mode: cool-sd, tree: chain-3, strength: 1.5, temperature: 0.9}
"""


@pytest.fixture
def grid(tiny: TinyModel) -> Path:
    del tiny  # the fixture makes it the only model
    path = Path("grid.yaml")
    path.write_text(GRID)
    return path


def surface(folder: str) -> pd.DataFrame:
    return pd.read_csv(Path(folder) / SURFACE).set_index("cell_id")


def test_every_cell_is_predicted_beside_the_strict_rule_on_its_tree(
    grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", str(grid), "--out", "out", "--images", "5", "--verify", "0"]) == 0
    table = surface("out")
    assert set(table["tree"]) == {"chain-3", "chain-4", "small-7", "6n2d2b", "2n1d3b"}
    # 12 cells, and the strict rule on small-7, on both dynamic trees and at the other temperature
    assert len(table) == 16
    assert (table["images"] == 5).all()
    assert (table["mean_accepted_length"] > 1).all()
    assert table["predicted_speedup"].notna().all()
    lossless = table[table["output"] == "lossless"]
    assert (lossless["distance"] == 0).all()
    assert (lossless["emitted_tv"] == 0).all()
    near = table.loc["lantern-static-chain-4-k3-delta0.1-t1"]
    far = table.loc["lantern-static-chain-4-k3-delta0.4-t1"]
    assert near["mean_accepted_length"] < far["mean_accepted_length"]
    assert near["emitted_tv"] < far["emitted_tv"]
    figures = {path.name for path in Path("out/figures").iterdir()}
    for name in ("predicted-speedup-distance", "acceptance-rate-by-delta"):
        assert {f"{name}.png", f"{name}.csv"} <= figures
    drawn = pd.read_csv("out/figures/acceptance-rate-by-delta.csv")
    assert drawn.groupby("tree")["delta"].nunique().to_dict() == {
        "2n1d3b": 1,
        "6n2d2b": 1,
        "chain-4": 2,
        "small-7": 2,
    }
    rates = [float(rate) for rate in far["acceptance_by_depth"].split()]
    assert len(rates) == 4
    assert 0 < min(rates) <= far["acceptance_rate"] <= max(rates) <= 1
    shown = capsys.readouterr()
    assert "surface.csv" in shown.err
    assert "speculative" in shown.out


def test_a_finished_walk_is_not_walked_again(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "_TOGETHER", 2)
    command = [
        "explore",
        str(grid),
        "--out",
        "out",
        "--modes",
        "lantern",
        "--images",
        "4",
        "--verify",
        "0",
    ]
    assert cli.main(command) == 0
    whole = surface("out")
    parts = sorted(Path("out/walks").iterdir())
    assert len(parts) == 8  # four trees, two images at once
    parts[0].unlink()
    walked = []

    def counted(**arguments: object) -> shadow_walk.WalkSums:
        walked.append(arguments["prompts"])
        return shadow_walk.walk_images(**arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(walks, "walk_images", counted)
    assert cli.main(command) == 0
    assert len(walked) == 1
    again = surface("out")
    timed = ["step_ms", "dominated", *whole.filter(like="speedup")]
    pd.testing.assert_frame_equal(again.drop(columns=timed), whole.drop(columns=timed))


def test_images_decoded_together_do_not_change_the_figures(
    grid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for together in (1, 3):
        monkeypatch.setattr(walks, "_TOGETHER", together)
        table = lantern_bench.explore(
            str(grid), out=f"out{together}", modes="lantern", images=3, progress=False
        )
        tables.append(table[["mean_accepted_length", "distance", "surprise", "emitted_tv"]])
    pd.testing.assert_frame_equal(*tables, rtol=1e-4)


def test_the_best_settings_are_swept_beside_their_predictions(grid: Path) -> None:
    typed = ["--max-distance", "1", "--verify", "20", "--images", "6", "--modes", "lantern"]
    assert cli.main(["explore", str(grid), "--out", "out", *typed]) == 0
    table = pd.read_csv("out/verified.csv").set_index("cell_id")
    assert len(table) == len(surface("out")) == 10  # six relaxed settings and four strict ones
    swept = lantern_bench.load_run("out/verified")
    assert set(swept.cells) == {"ar-t1", *table.index}
    measured = swept.speed.set_index("cell_id")
    for cell_id, row in table.iterrows():
        assert row["mean_accepted_length"] == pytest.approx(
            measured.at[cell_id, "mean_accepted_length"], rel=1e-4
        )
        assert row["predicted_length"] == pytest.approx(row["mean_accepted_length"], rel=0.3)
        assert row["strict_length"] > 1
        # Along images of the strict rule, the strict rule predicts itself.
        if cell_id.startswith("speculative"):
            assert row["strict_length"] == pytest.approx(row["predicted_length"], rel=0.2)
    assert cli.main(["report", "out/verified"]) == 0
    page = Path("out/verified/report.html").read_text(encoding="utf-8")
    assert "Predicted settings of out" in page
    best = surface("out").query("dominated == 0").index[0]
    assert f"<td>{best}</td>" in page


def test_a_grid_of_neighbours_and_a_bound_has_a_map(tmp_path: Path) -> None:
    rows = []
    for neighbours, delta in itertools.product((2, 5, 10), (0.1, 0.2, 0.3)):
        row = {"model": "tiny", "tree": "chain-3", "mode": "lantern", "drafting": "static"}
        row |= {"cell_id": f"{neighbours}-{delta}", "neighbours": neighbours, "delta": delta}
        row |= {"predicted_speedup": 1.0 + delta, "distance": delta * neighbours / 10}
        row |= {"acceptance_rate": delta, "mean_accepted_length": 2.0, "dominated": 0}
        rows.append(row)
    files = draw_surface(frame("surface", rows), tmp_path)
    assert {path.name for path in files if path.name.startswith("map")} == {
        "map-tiny-chain-3-delta.png"
    }
    names = {path.stem for path in files}
    assert {"acceptance-rate-by-delta", "acceptance-rate-by-neighbours"} <= names
    assert all(path.stat().st_size > 0 for path in files)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ("{mode: sjd, window: 4}", ["sjd-jacobi-w4-row-t1", "drafts of jacobi depend on what"]),
        ("{mode: hybrid, window: 4}", ["hybrid-w4", "drafts of hybrid"]),
        ("{mode: sjd-pac, window: 4}", ["sjd-pac", "drafts of pac"]),
        ("{mode: ar}", ["None of them has drafts"]),
        ("{mode: zipar}", ["zipar-w4-t1", "zipar verifies no drafts"]),
        ("{mode: speculative, temperature: 0}", ["-t0", "temperature 0"]),
        ("{mode: speculative}\nbatch: 4", ["speculative-static-small-7-t1", "--batch 1"]),
    ],
)
def test_cells_without_a_prediction_are_refused_by_name_before_anything_is_loaded(
    cells: str, words: list[str], tiny: TinyModel, refuse: Callable[..., None]
) -> None:
    Path("some.yaml").write_text(f"name: some\nmodel: tiny\ncells:\n  - {cells}\n")
    refuse(["explore", "some.yaml", "--out", "out"], 2, "cannot be explored", *words)
    assert tiny.loads == 0


def test_speed_on_another_device_needs_known_sizes(
    grid: Path, tiny: TinyModel, refuse: Callable[..., None]
) -> None:
    typed = ["explore", str(grid), "--out", "out", "--predict-device"]
    refuse([*typed, "h100"], 3, "the sizes of tiny are not known")
    refuse([*typed, "h1000"], 2, "--predict-device h1000: unknown device")
    assert tiny.loads == 0


def test_times_on_another_device_grow_with_the_chain() -> None:
    times = [
        exploration.modelled_times(
            "lanterns",
            Decoding("speculative", drafting="static", tree=tree, cfg_scale=2.0),
            device=find_device("h100"),
            length=3.0,
        )
        for tree in ("chain-3", "chain-7")
    ]
    assert times[0].ar == times[1].ar < times[0].step < times[1].step
    row = {"mean_accepted_length": 4.0, "mean_accepted_length_low": None}
    row["mean_accepted_length_high"] = 5.0
    columns = exploration.speed_columns(row, times[0], tokens=256)
    plain = times[0].prefill + 255 * times[0].ar
    expected = plain / (times[0].prefill + 255 / 4.0 * times[0].step)
    assert columns["predicted_speedup"] == pytest.approx(expected)
    assert columns["predicted_speedup"] < columns["predicted_speedup_high"]
    assert "predicted_speedup_low" not in columns


def test_rules_of_a_walk_share_the_time_of_their_drafts_and_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs: dict[tuple[str, str | None, float], float] = {
        ("ar", None, 2.0): 2.0,
        ("ar", None, 1.0): 1.0,
        ("strict", "chain-3", 2.0): 10.0,
        ("additive", "chain-3", 2.0): 30.0,
        ("strict", "chain-3", 1.0): 5.0,
        ("strict", "chain-7", 2.0): 50.0,
    }
    order = []

    def measured(
        _model: Any, decodings: Sequence[Decoding], _prompts: Any, **_: Any
    ) -> list[StepCost]:
        found = []
        for decoding in decodings:
            rule = "ar" if decoding.mode == "ar" else decoding.rule
            target = costs[rule, decoding.tree_label, decoding.cfg_scale]
            # The machine gets slower: the second time of `ar` is 1 ms longer.
            target += order.count((rule, decoding.cfg_scale)) if rule == "ar" else 0
            order.append((rule, decoding.cfg_scale))
            parts = {"draft_ms": 0.0, "target_ms": target, "verify_ms": 1.0, "other_ms": 0.0}
            trace = SimpleNamespace(phases={"prefill": 0.004})
            total = sum(parts.values())
            found.append(StepCost(total, parts, mean_accepted_length=1.0, traces=[trace]))  # type: ignore[list-item]
        return found

    monkeypatch.setattr(exploration, "step_costs", measured)
    monkeypatch.setattr(exploration, "choose_threads", lambda *_, **__: None)

    def static(mode: str, tree: str, cfg_scale: float, **values: Any) -> Decoding:
        return Decoding(mode, drafting="static", tree=tree, cfg_scale=cfg_scale, **values)

    settings = [
        static("speculative", "chain-3", 2.0),
        static("lantern", "chain-3", 2.0, neighbours=3, delta=0.1),
        static("lantern", "chain-3", 2.0, neighbours=3, delta=0.4),
        static("speculative", "chain-3", 1.0),
        static("speculative", "chain-7", 2.0),
    ]
    image = SimpleNamespace(prompt=SimpleNamespace(text="a lantern"))
    times = exploration.measured_times(
        None,  # type: ignore[arg-type]
        settings,
        image,  # type: ignore[arg-type]
        emit=ignore_events,
    )
    steps = [times[setting].step for setting in settings]
    assert steps == [21.0, 21.0, 21.0, 6.0, 51.0]  # 20 is the mean of 10 and 30
    # 1 ms of `ar` is in verify, as in every step
    assert [times[setting].ar for setting in settings] == [3.5, 3.5, 3.5, 2.5, 3.5]
    assert times[settings[0]].prefill == pytest.approx(4.0)


@pytest.mark.parametrize(
    "typed", [["--set", "metrics=quality"], ["--set", "reference=embedded"], ["--metrics=speed"]]
)
def test_flags_of_pictures_are_refused(
    grid: Path, tiny: TinyModel, refuse: Callable[..., None], typed: list[str]
) -> None:
    refuse(["explore", str(grid), *typed], 2, typed[-1].split("=")[0])
    assert tiny.loads == 0


def test_parts_of_walks_with_another_dtype_are_not_taken(grid: Path) -> None:
    typed = ["explore", str(grid), "--out", "out", "--modes", "speculative", "--verify", "0"]
    for dtype, parts in {"float32": 3, "bfloat16": 6}.items():
        assert cli.main([*typed, "--images", "2", "--dtype", dtype]) == 0
        assert len(list(Path("out/walks").iterdir())) == parts


def test_a_folder_that_is_a_file_is_refused(grid: Path, refuse: Callable[..., None]) -> None:
    refuse(["explore", str(grid), "--out", str(grid)], 2, "--out grid.yaml")


def test_the_best_settings_keep_the_limit() -> None:
    table = pd.DataFrame(
        {
            "model": "m",
            "cell_id": ["far", "impossible", "fast", "slow", "lossless"],
            "output": ["relaxed"] * 4 + ["lossless"],
            "predicted_speedup": [3.0, 2.9, 2.0, 1.5, 1.2],
            "distance": [0.5, 0.0, 0.01, 0.01, 0.0],
            "impossible": [0.0, 0.1, 0.0, 0.0, 0.0],
        }
    )
    best = exploration.best_settings(table, max_distance=0.02, count=1)
    assert best["cell_id"].tolist() == ["fast", "lossless"]
