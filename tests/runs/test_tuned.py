"""The tuned lossless cell: what its key covers, which sweeps get it, and that a run keeps the one it began with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lantern_bench.cli import main as cli
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import ResolvedExperiment, resolve
from lantern_bench.config.parse_experiment import Settings
from lantern_bench.config.values import Overrides
from lantern_bench.methods.tables import DRAFTINGS
from lantern_bench.models import registry
from lantern_bench.report.cost_model import devices as known_devices
from lantern_bench.report.predict import predict_run
from lantern_bench.runs import devices, tuned
from lantern_bench.runs.devices import Place
from lantern_bench.runs.store import RESULTS_VARIABLE, read_manifest, read_records, read_run
from lantern_bench.runs.sweep import load, prepare
from tests.tiny_model import EXPERIMENT, TinyModel

MODELS = registry.models
PLACE = Place(torch.device("cpu"), torch.float32)
CHAIN = Decoding(mode="speculative", tree="chain-3", cfg_scale=2, cfg_default=2)
BLOCK = Decoding(mode="speculative", rule="block", tree="chain-4", cfg_scale=2, cfg_default=2)
OWN_TREE = Decoding(mode="speculative", topology=((0,), (1,), (0, 0)), cfg_scale=2, cfg_default=2)
RELAXED = {"mode": "lantern", "neighbours": 3, "delta": 0.2}
SOURCE = {"name": "tiny", "model": "tiny", "metrics": ["speed"], "dtype": "float32"}
SETTINGS = Settings(name="tiny", model="tiny", dtype="float32")


@pytest.fixture(autouse=True)
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    """One tiny model, an empty cache and results folder."""
    model = TinyModel()
    monkeypatch.setattr(registry, "models", lambda: {"tiny": model})
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv(RESULTS_VARIABLE, "results")
    monkeypatch.chdir(tmp_path)
    return model


def keep(decoding: Decoding = CHAIN, speedup: float = 1.5, place: Place = PLACE, compile: bool = False) -> None:
    tuned.keep("tiny", decoding, speedup, place, compile)


def find(decoding: Decoding = CHAIN, settings: Settings = SETTINGS) -> list[dict[str, Any]]:
    return tuned.find("tiny", decoding, settings)


def make(*cells: dict[str, Any], **more: Any) -> ResolvedExperiment:
    return resolve(load(SOURCE | {"cells": list(cells)} | more, Overrides()), registry.defaults_of(["tiny"]))


def added(asked: ResolvedExperiment) -> tuple[list[str], tuple[str, ...]]:
    """The ids of the cells that the experiment gets, and the lines about them."""
    found, about = tuned.add_lossless(asked, Path("run"))
    ids = [cell.cell_id for cell in found.cells]
    assert ids[: len(asked.cells)] == [cell.cell_id for cell in asked.cells]
    assert [one["cell_id"] for one in about.cells] == ids[len(asked.cells) :]
    assert json.loads(json.dumps(about.cells)) == list(about.cells)
    return ids[len(asked.cells) :], about.lines


# ---- What is kept


def test_the_fastest_of_all_searches_comes_first() -> None:
    keep(CHAIN, 1.5)
    keep(BLOCK, 1.7)
    assert [cell["tree"] for cell in find()] == ["chain-4", "chain-3"]
    keep(BLOCK, 1.2)  # the newest search of a method counts
    assert [cell["tree"] for cell in find()] == ["chain-3", "chain-4"]
    assert len(list(Path("cache/lossless").iterdir())) == 1


@pytest.mark.parametrize(
    ("decoding", "settings"),
    [
        ({"temperature": 0.5}, {}),
        ({"cfg_scale": 3}, {}),
        ({"top_k": 5}, {}),
        ({"top_p": 0.9}, {}),
        ({"filter_order": "top_p_first"}, {}),
        ({}, {"dtype": "bfloat16"}),
        ({}, {"compile": True}),
        ({}, {"device": "cuda:77"}),
    ],
)
def test_another_sampling_or_place_finds_nothing(decoding: dict[str, Any], settings: dict[str, Any]) -> None:
    keep()
    asked = Decoding.model_validate({"mode": "ar", "cfg_scale": 2} | decoding)
    assert find(asked, SETTINGS.model_copy(update=settings)) == []


def test_seeds_do_not_matter() -> None:
    keep()
    assert find(Decoding(mode="ar", cfg_scale=2, seed_set=3)) == find() != []


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(devices, "ENGINE_VERSION", "another"),
        lambda patch: patch.setattr(devices, "processor", lambda: ("another",)),
        lambda patch: patch.setattr(torch, "__version__", "another"),
        lambda patch: Path("target.safetensors").write_bytes(b"other weights"),
    ],
)
def test_another_machine_version_or_weights_find_nothing(
    change: Callable[[pytest.MonkeyPatch], Any], family: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("target.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(family, "files", lambda: {"target": Path("target.safetensors")})
    keep()
    assert find()
    change(monkeypatch)
    assert find() == []
    keep()
    assert find()


def test_a_damaged_file_is_ignored_and_written_again() -> None:
    keep()
    (path,) = Path("cache/lossless").iterdir()
    for text in ("{", "[]", '{"key": {}, "found": {"a": {"cell": 3}}}'):
        path.write_text(text)
        assert find() == []
    keep()
    assert find()


# ---- Which sweeps get it


@pytest.mark.parametrize("decoding", [CHAIN, BLOCK, OWN_TREE])
def test_a_sweep_with_relaxed_cells_gets_the_tuned_cell(decoding: Decoding) -> None:
    keep(decoding)
    ids, lines = added(make({"mode": "speculative"}, RELAXED))
    assert ids == [decoding.cell_id]
    assert lines == (f"lossless cell added: {decoding.cell_id}, found by `profile --search` here",)
    extended, _ = tuned.add_lossless(make(RELAXED), Path("run"))
    assert extended.cells[-1].decoding == decoding


def test_a_cell_that_the_experiment_has_is_not_added_again() -> None:
    keep(CHAIN)
    assert added(make({"mode": "speculative", "tree": "chain-3"}, RELAXED)) == ([], ())


@pytest.mark.parametrize(
    ("cells", "more"),
    [
        ([{"mode": "speculative"}, {"mode": "ar"}], {}),
        ([RELAXED], {"metrics": ["quality"]}),
        ([RELAXED], {"lossless": False}),
    ],
)
def test_nothing_is_added_where_nothing_is_compared(cells: list[dict[str, Any]], more: dict[str, Any]) -> None:
    keep()
    assert added(make(*cells, **more)) == ([], ())


def test_without_a_search_the_own_lossless_cell_counts_and_the_command_is_named() -> None:
    ids, (line,) = added(make({"mode": "speculative"}, RELAXED))
    assert ids == []
    assert line.endswith("to tune one: lantern-bench profile --search --model tiny --dtype float32 --no-compile")


def test_without_a_search_and_without_a_lossless_cell_the_models_default_is_added() -> None:
    ids, (what, how) = added(make(RELAXED, compile=True, dtype="auto"))
    assert ids == ["speculative-static-small-7-t1"] and what.endswith("the default of tiny")
    assert how.endswith("to tune one: lantern-bench profile --search --model tiny")


def test_every_sampling_of_a_relaxed_cell_has_its_own() -> None:
    keep(Decoding(mode="speculative", tree="chain-5", temperature=0, cfg_scale=2, cfg_default=2))
    asked = make({"mode": "speculative", "temperature": 1}, RELAXED | {"temperature": [0, 0.5, 1], "top_k": 4})
    ids, lines = added(asked)
    assert ids == ["speculative-static-chain-5-t0"] + [f"speculative-static-small-7-t{t}-topk4" for t in (0.5, 1)]
    # Filters do nothing in greedy decoding, which is tuned already.
    assert lines[-1].endswith("--model tiny --temperature 0.5,1 --top-k 4 --dtype float32 --no-compile")


def test_every_batch_size_gets_the_cell() -> None:
    keep()
    ids, _ = added(make(RELAXED, batch=[1, 2]))
    assert ids == ["speculative-static-chain-3-t1-batch1", "speculative-static-chain-3-t1-batch2"]


def test_without_a_drafter_the_default_drafts_as_the_relaxed_cells_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTINGS, "dynamic", replace(DRAFTINGS["dynamic"], needs_drafter=False))
    assert added(make(RELAXED))[0] == ["speculative-dynamic-6n2d2b-t1"]
    assert added(make(RELAXED, {"mode": "lantern++", "neighbours": 3, "lambda": 2}))[0] == [
        "speculative-static-small-7-t1"
    ]


def test_a_kept_cell_of_a_package_that_is_gone_is_passed_over() -> None:
    keep(BLOCK, 1.7)
    keep(CHAIN, 1.5)
    (path,) = Path("cache/lossless").iterdir()
    path.write_text(path.read_text().replace('"rule": "block"', '"rule": "gone"'))
    assert added(make(RELAXED))[0] == [CHAIN.cell_id]


# ---- The cell in plans and runs


def sweep(*typed: str) -> int:
    Path("tiny.yaml").write_text(EXPERIMENT + "dtype: float32\nthreads: 1\n")
    return cli.main(["sweep", "tiny.yaml", *typed])


def test_plans_count_the_cell_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    keep()
    assert sweep("--dry-run") == 0
    written = capsys.readouterr()
    assert "21 to do" in written.err and f"lossless cell added: {CHAIN.cell_id}" in written.err
    assert pd.read_csv(io.StringIO(written.out))["cell"].tolist()[-1] == CHAIN.cell_id
    for typed in (["--no-lossless"], ["--set", "lossless=false"]):
        assert sweep("--dry-run", *typed) == 0
        assert "18 to do" in capsys.readouterr().err
    assert sweep("--dry-run", "--set", "lossless=maybe") == 2
    assert "--set lossless=maybe: must be true or false" in capsys.readouterr().err


def test_a_run_keeps_the_cell_that_it_began_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(OWN_TREE)
    assert sweep() == 0
    (run,) = Path("results").iterdir()
    capsys.readouterr()
    keep(BLOCK, 9.0)
    assert sweep() == 0
    assert "21 images kept, 0 to do" in (said := capsys.readouterr().err)
    assert f"found by `profile --search` since: {BLOCK.cell_id}; the run keeps" in said
    assert len(read_records(run)) == 21 and list(Path("results").iterdir()) == [run]
    (kept,) = read_manifest(run)["lossless"]
    assert (kept["cell_id"], kept["from"]) == (OWN_TREE.cell_id, tuned.SEARCH)
    assert kept["cell"]["tree"] == [[0], [1], [0, 0]]
    table = pd.read_csv(run / "summary.csv").set_index("cell_id")
    assert table["speedup_over_lossless"].notna().all()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "models", MODELS)
        predicted = predict_run(read_run(run), known_devices()["a100"], "compiled", "llamagen-t2i-stage1")
    predicted = predicted.set_index("cell_id")
    assert predicted.loc[OWN_TREE.cell_id, "nodes"] == 4 and predicted["speedup"].notna().all()
    assert sweep("--no-resume") == 0
    (other,) = set(Path("results").iterdir()) - {run}
    assert other.name == f"{run.name}-2" and read_manifest(other)["lossless"][0]["cell_id"] == BLOCK.cell_id


def test_a_run_that_began_without_a_cell_goes_on_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--images", "2") == 0
    keep()
    capsys.readouterr()
    assert sweep("--images", "2") == 0
    assert "12 images kept, 0 to do" in capsys.readouterr().err
    # A run continues with the cells that it began with; asking for fewer is refused.
    assert sweep("--out", "run") == 0
    assert sweep("--out", "run", "--no-lossless") == 3
    assert "cells changed" in capsys.readouterr().err


def test_runs_from_before_the_key_are_continued() -> None:
    name = make(RELAXED).run_name
    assert name == make(RELAXED, lossless=True).run_name != make(RELAXED, lossless=False).run_name
    keep()
    request = prepare(SOURCE | {"cells": [RELAXED]}, Overrides())
    assert request.experiment.cells[-1].cell_id == CHAIN.cell_id and request.folder.name == name
