"""`sweep` before decoding: the plan without torch, and every usage error.

The family is the bundled one; its weights are never opened.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock
from safetensors.numpy import load_file

from lantern_bench.cli import main as cli
from lantern_bench.models.lanterns import FILES, WEIGHTS_FOLDER
from lantern_bench.runs.store import RESULTS_VARIABLE

CAPTION = "two round red lanterns over a lake at dusk"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Stand in an empty folder, with the results in it; no model may be loaded."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, "results")
    monkeypatch.setattr("lantern_bench.models.lanterns.Lanterns.load", refuse)
    return tmp_path


def write(text: str, name: str = "mine.yaml") -> str:
    Path(name).write_text(text)
    return name


def plan(capsys, *typed: str) -> pd.DataFrame:
    assert cli.main(["sweep", *typed, "--dry-run", "-q"]) == 0
    return pd.read_csv(io.StringIO(capsys.readouterr().out))


def test_the_default_plan(capsys, here):
    listed = plan(capsys)
    assert listed["cell"].tolist()[:2] == ["ar-t1", "ar-t0"]
    assert len(listed) == 12 and set(listed["images"]) == {6} and set(listed["done"]) == {0}
    assert list(here.iterdir()) == []


def test_dry_run_prints_directory_and_time(capsys):
    assert cli.main(["sweep", "--dry-run"]) == 0
    written = capsys.readouterr().err
    assert "run: results/lanterns-" in written and "72 to do" in written and "unknown" in written


def test_a_plan_needs_no_torch(tmp_path):
    code = (
        "import sys; from lantern_bench.cli.main import main; code = main(['sweep', '--dry-run']);"
        "heavy = {'torch', 'torchvision', 'open_clip', 'torch_fidelity'} & set(sys.modules);"
        "assert code == 0 and not heavy, (code, heavy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


@pytest.mark.parametrize(
    ("typed", "cells"),
    [
        (["--modes", "lantern", "--delta", "0.01,0.1", "--delta", "0.2"], 8),
        (["--modes", "lantern++", "--lambda", "2,3", "--neighbours", "5,10"], 6),
        (["--modes", "speculative", "--no-baseline", "--temperature", "1"], 4),
        (["--modes", "speculative", "--tree", "chain-5", "--temperature", "1", "--rule", "strict"], 3),
        (["--modes", "ar", "--set", "temperature=0.5,0.9"], 2),
        (["--modes", "lantern", "--delta", "0.1", "--nodes", "8", "--depth", "3", "--beam", "4"], 4),
        (["--modes", "ar", "--top-k", "100", "--top-p", "0.9", "--filter-order", "top_p_first", "--cfg-scale", "3"], 2),
        (["--modes", "lantern++", "--residual", "official", "--lambda", "2"], 3),
    ],
)
def test_flags_make_grids(capsys, typed, cells):
    assert len(plan(capsys, *typed)) == cells


def test_images_repeats_and_shards(capsys):
    assert set(plan(capsys, "--images", "5", "--repeats", "2")["images"]) == {10}
    assert set(plan(capsys, "--images", "5", "--shard", "1/2")["images"]) == {3}
    assert set(plan(capsys, "--images", "5", "--shard", "2/2")["images"]) == {2}


def test_plan_counts_finished_images_and_estimates_time(capsys, here):
    assert cli.main(["sweep", "--images", "1", "--modes", "ar", "--temperature", "1", "--dry-run", "--out", "run"]) == 0
    capsys.readouterr()
    from lantern_bench.config.plan import Prompt
    from lantern_bench.models.lanterns import HELD_OUT

    key = {"prompt_id": Prompt(HELD_OUT[0].caption()).id, "repeat": 0}
    row = {"record_key": "1", "status": "ok", "cell_id": "ar-t1", "seconds": 1.5, "pixel_seconds": 0.5, **key}
    (here / "run").mkdir()
    (here / "run" / "records.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["sweep", "--images", "3", "--modes", "ar", "--temperature", "1", "--dry-run", "--out", "run"]) == 0
    written = capsys.readouterr()
    assert "1 done, 2 to do; time left: 4 s" in written.err
    assert pd.read_csv(io.StringIO(written.out))["s_per_image"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (["--modes", "lantrn"], ["--modes lantrn: unknown mode; did you mean lantern?", "speculative"]),
        (["--delta", "1.5"], ["--delta 1.5: must lie strictly between 0 and 1"]),
        (["--delta", "0"], ["--delta 0: must lie strictly between 0 and 1"]),
        (["--lambda", "1"], ["--lambda 1: must be a number above 1"]),
        (["--delta", "0.1,x", "--lambda", "0.5"], ["2 problems", "--delta x:", "--lambda 0.5:"]),
        (["--temperature", "-1"], ["--temperature -1: must be a number of at least 0"]),
        (["--tree", "small-8"], ["--tree small-8: unknown tree; did you mean small-7?"]),
        (["--drafting", "statc"], ["--drafting statc", "did you mean static?"]),
        (["--images", "0"], ["--images 0: must be a whole number of at least 1"]),
        (["--images", "many"], ["--images many: must be a whole number of at least 1"]),
        (["--batch", "0"], ["--batch 0: must be a whole number of at least 1"]),
        (["--seed", "-3"], ["--seed -3: must be a whole number of at least 0"]),
        (["--metrics", "sped"], ["--metrics", "speed"]),
        (["--dtype", "float3"], ["--dtype float3: must be one of auto"]),
        (["--device", "gpu"], ["--device gpu: must be auto, cpu, mps, cuda or cuda:N"]),
        (["--model", "lantern"], ["--model", "did you mean lanterns?"]),
        (["--neighbours", "2048"], ["--neighbours 2048: the model lanterns has 2048 codes"]),
        (["--prompts", "captions.txt"], ["--prompts captions.txt: no such file", "held-out"]),
        (["--set", "delta"], ["--set delta: must have the form key=value"]),
        (["--set", "detla=0.1"], ["--set detla: unknown key; did you mean delta?"]),
        (["--shard", "3/2"], ["--shard 3/2: must be i/n"]),
        (["--format", "yaml"], ["--format yaml: unknown", "One of table, csv"]),
        (["--modes", "ar", "--delta", "0.1"], ["--delta 0.1: reaches no cell"]),
        (["nothere"], ["no experiment is named 'nothere'", "lanterns"]),
        (["nothere.yaml"], ["nothere.yaml: no such experiment file"]),
    ],
)
def test_wrong_flags_give_one_error_and_exit_2(capsys, here, typed, wrong):
    assert cli.main(["sweep", *typed]) == 2
    written = capsys.readouterr()
    assert written.out == "" and written.err.startswith("error: ") and "Traceback" not in written.err
    assert all(part in written.err for part in wrong), written.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("name: x\nmodel: lanterns\ncells:\n  - {mode: ar\n", ["mine.yaml line 5", "not valid YAML"]),
        ("model: lanterns\ncells:\n  - {mode: lantern, detla: 0.1}\n", ["line 3", "detla", "did you mean delta?"]),
        ("model: lanterns\nimagse: 3\ncells: [{mode: ar}]\n", ["line 2", "imagse: unknown key; did you mean images?"]),
        ("model: lanterns\ncells: [{mode: lantern}]\n", ["needs delta", "--delta 0.02"]),
        (
            "model: lanterns\nimages: none\ncells:\n  - {mode: lantrn}\n  - {mode: lantern, delta: 2}\n",
            ["3 problems", "line 2", "line 4", "line 5"],
        ),
        ("", ["the file is empty"]),
    ],
)
def test_experiment_errors_name_the_line(capsys, here, text, wrong):
    assert cli.main(["sweep", write(text)]) == 2
    written = capsys.readouterr().err
    assert all(text in written for text in wrong), written
    assert [path.name for path in here.iterdir()] == ["mine.yaml"]


def test_unknown_word_in_a_prompt_names_the_line(capsys, here):
    write(f"{CAPTION}\ntwo round pink lanterns over a lake at dusk\n", "captions.txt")
    assert cli.main(["sweep", "--prompts", "captions.txt"]) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: --prompts captions.txt line 2:") and "'pink'" in written and "orange" in written
    assert [path.name for path in here.iterdir()] == ["captions.txt"]


def test_a_folder_that_cannot_be_written(capsys, here):
    write("", "file")
    assert cli.main(["sweep", "--out", "file/run"]) == 2
    written = capsys.readouterr().err
    assert "--out file/run: " in written and "file is a file, not a folder" in written
    (here / "notes").mkdir()
    (here / "notes" / "todo.txt").write_text("")
    assert cli.main(["sweep", "--out", "notes"]) == 2
    assert "--out notes: contains todo.txt and is not a run directory" in capsys.readouterr().err


def test_a_folder_without_permission(capsys, here, monkeypatch):
    monkeypatch.setattr("lantern_bench.runs.store.os.access", lambda *_: False)
    assert cli.main(["sweep"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_locked_run_exits_3(capsys, here):
    (here / "run").mkdir()
    with FileLock(here / "run" / ".lock"):
        assert cli.main(["sweep", "--out", "run"]) == 3
    assert "run is in use" in capsys.readouterr().err


def test_other_experiment_in_the_run_directory_exits_3(capsys, here):
    (here / "run").mkdir()
    row = {"record_key": "1", "status": "ok", "cell_id": "ar-t1", "prompt_id": "x", "repeat": 0}
    (here / "run" / "records.jsonl").write_text(json.dumps(row) + "\n")
    experiment = {"model": ["lanterns"], "prompts": "held-out", "seed": 4}
    (here / "run" / "manifest.json").write_text(json.dumps({"schema_version": 1, "experiment": experiment}))
    assert cli.main(["sweep", "--out", "run"]) == 3
    written = capsys.readouterr().err
    assert "cannot resume run: seed changed" in written and "--seed 4" in written and "--no-resume" in written


@pytest.mark.parametrize(
    ("typed", "wrong", "code"),
    [
        (["two pink lanterns"], "'pink'", 2),
        ([CAPTION, "--mode", "lantrn"], "--mode lantrn: unknown mode; did you mean lantern?", 2),
        ([CAPTION, "--model", "lantern"], "--model lantern: unknown model; did you mean lanterns?", 2),
        ([CAPTION, "--delta", "0.1"], "--delta 0.1: reaches no cell", 2),
        ([CAPTION, "--lambda", "1"], "--lambda 1: must be a number above 1", 2),
        ([CAPTION, "--neighbours", "5000"], "--neighbours 5000", 2),
        ([CAPTION, "--out", "there.png/a.png"], "there.png is a file, not a folder", 2),
        ([CAPTION, "--out", "a.jpg"], "--out a.jpg: must end with .png", 2),
        ([CAPTION, "--images", "0"], "--images", 2),
        ([CAPTION, "--out", "there.png"], "there.png: is there already", 3),
    ],
)
def test_generate_checks_before_it_loads(capsys, here, typed, wrong, code):
    write("", "there.png")
    assert cli.main(["generate", *typed]) == code
    written = capsys.readouterr()
    assert wrong in written.err and "Traceback" not in written.err and written.out == ""
    assert [path.name for path in here.iterdir()] == ["there.png"]


def test_models_are_listed_with_their_licence(capsys):
    assert cli.main(["models"]) == 0
    listed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    (row,) = listed[listed["model"] == "lanterns"].to_dict("records")
    assert row["licence"] == "Apache-2.0" and "chain-4" in row["defaults"]
    weights = load_file(WEIGHTS_FOLDER / FILES["target"])
    assert row["tokens"] == 256 and row["parameters_m"] == round(sum(part.size for part in weights.values()) / 1e6)
    # Of every model: its size, its files, and where those that are not here come from.
    assert listed[["parameters_m", "tokens"]].notna().all(axis=None)
    published = listed[listed["files"].notna()]
    assert {"llamagen-t2i-stage1", "llamagen-c2i-3B-384", "anole-7b", "lumina-mgpt-7b-768"} <= set(published["model"])
    assert (published["missing"].isna() | published["get"].str.startswith("lantern-bench weights get")).all()


def test_one_model_is_shown_with_its_parts_and_memory(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cli.main(["models", "llamagen-t2i-stage1"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    assert set(listed["part"]) == {"target", "tokenizer", "drafter", "text_encoder"} and not listed["found"].any()
    assert "missing: target, " in written.err and "lantern-bench weights get llamagen-t2i-stage1" in written.err
    assert "memory needed: " in written.err and "free here: " in written.err
