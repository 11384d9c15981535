"""`sweep` before decoding: the plan, and every usage error.

The family is the bundled one; its weights are never opened.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import load_file

from lantern_bench.cli import main as cli
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.settings import Overrides
from lantern_bench.models.families.lanterns.description import FILES, WEIGHTS_FOLDER
from lantern_bench.models.registry import defaults_of
from lantern_bench.storage.schema import SCHEMA_VERSION

CAPTION = "two round red lanterns over a lake at dusk"


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    """The folder; no model may be loaded."""

    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lantern_bench.models.families.lanterns.family.Lanterns.load", load)
    return folder


def write(text: str, name: str) -> None:
    Path(name).write_text(text)


def plan(capsys, *typed: str) -> pd.DataFrame:
    assert cli.main(["sweep", *typed, "--dry-run", "-q"]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    return pd.read_csv(io.StringIO(written.out))


def test_the_default_plan(capsys, here):
    assert cli.main(["sweep", "--dry-run"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    assert listed["cell"].tolist()[:2] == ["ar-t1", "ar-t0"]
    assert len(listed) == 14
    assert set(listed["images"]) == {6}
    assert set(listed["done"]) == {0}
    assert "run: results/lanterns-" in written.err
    assert "84 to do" in written.err
    assert "unknown" in written.err
    assert list(here.iterdir()) == []


def test_the_plan_says_how_many_prompts_are_used(capsys):
    other = "one round red lantern over a lake at dusk"
    write(f"{CAPTION}\n{other}\n{CAPTION}\none blue lantern\n", "my.txt")
    arguments = ["sweep", "--prompts", "my.txt", "--modes", "ar", "--dry-run"]
    said = {
        "2": "4 prompts from my.txt, 2 of them used; 1 texts occur more than once",
        "9": "4 prompts from my.txt, 4 of them used; 1 texts occur more than once",
    }
    for images, text in said.items():
        assert cli.main([*arguments, "--images", images]) == 0
        assert text in capsys.readouterr().err
    assert cli.main([*arguments, "--images", "4", "--shard", "1/2"]) == 0
    assert "4 prompts from my.txt, 2 of them used" in capsys.readouterr().err


def test_a_decimal_comma_is_said_to_be_a_list(capsys):
    for flag in (["--temperature", "0,7"], ["--set", "temperature=0,7"]):
        assert cli.main(["sweep", "--modes", "ar", *flag, "--dry-run"]) == 0
        said = "0,7: read as 2 values, 0 and 7. A decimal number is written 0.7."
        assert said.removeprefix("0,7") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "cells"),
    [
        (["--modes", "lantern", "--delta", "0.01,0.1", "--delta", "0.2"], 10),
        (["--modes", "lantern++", "--lambda", "2,3", "--neighbours", "5,10"], 9),
        (["--modes", "speculative", "--no-baseline", "--temperature", "1"], 4),
        (
            [
                "--modes",
                "speculative",
                "--tree",
                "chain-5",
                "--temperature",
                "1",
                "--rule",
                "strict",
            ],
            3,
        ),
        (["--modes", "ar", "--set", "temperature=0.5,0.9"], 2),
        (
            ["--modes", "lantern", "--delta", "0.1", "--nodes", "8", "--depth", "3", "--beam", "4"],
            4,
        ),
        (
            [
                "--modes",
                "ar",
                "--top-k",
                "100",
                "--top-p",
                "0.9",
                "--filter-order",
                "top_p_first",
                "--cfg-scale",
                "3",
            ],
            2,
        ),
        (["--modes", "lantern++", "--residual", "official", "--lambda", "2"], 3),
    ],
)
def test_flags_make_grids(capsys, typed, cells):
    assert len(plan(capsys, *typed)) == cells


def test_a_mode_that_the_experiment_lacks_is_added_on_its_trees(capsys):
    cells = set(plan(capsys)["cell"])
    added = {*plan(capsys, "--modes", "ar,scd,gsd,lantern++")["cell"]} - cells
    assert added == {"scd-jacobi-w16-row-maximal-t1", "gsd-static-chain-7-cluster14-t1"}
    assert {*plan(capsys, "--modes", "ar,lantern++")["cell"]} < cells
    shapes = set(plan(capsys, "tree-shapes", "--modes", "lantern", "--delta", "0.2")["cell"])
    assert shapes == {"ar-t1", "lantern-dynamic-24n4d6b-k10-delta0.2-t1"}


@pytest.mark.parametrize(
    "command", [["sweep", "--prompts", "examples", "--modes"], ["generate", "x", "--mode"]]
)
def test_a_model_without_a_drafter_is_offered_other_modes(refuse, capsys, command):
    typed = [*command, "lantern++", "--model", "lumina-mgpt-7b-768", "--dry-run"]
    others = "ar, sjd, scd, block-scd, sjd++, sjd-pac, csd, addition and zipar"
    refuse(typed, 3, "lantern++ needs a drafter", others, "train")
    typed[typed.index("lantern++")] = "sjd"
    assert cli.main(typed) == 0


@pytest.mark.parametrize(
    ("flags", "remarks"),
    [
        (["--images", "2", "--batch", "8"], ["batch 8: 4 images are decoded 2 at a time"]),
        (["--images", "10", "--batch", "8"], ["batch 8: 4 images are decoded 2 at a time"]),
        (["--images", "16", "--batch", "8"], []),
        (["--images", "5", "--shard", "2/2", "--batch", "4"], ["batch 4: 2 images are decoded 1 "]),
        # Batches of three end where a batch of eight does.
        (
            ["--images", "9", "--batch", "3,8"],
            ["batch 3: 2 images are decoded 1 at a", "batch 3: 4 images", "batch 8: 2 images"],
        ),
        (["--temperature", "0"], ["cool-sd follows the strict rule at temperature 0: cool-sd-"]),
    ],
)
def test_the_plan_says_what_it_does_otherwise(capsys, flags, remarks):
    assert cli.main(["sweep", "--modes", "ar,cool-sd", "--dry-run", *flags]) == 0
    said = capsys.readouterr().err.splitlines()[2:-1]
    assert len(said) == len(remarks)
    for line, remark in zip(said, remarks, strict=True):
        assert line.startswith(remark)


def test_images_repeats_and_shards(capsys):
    assert set(plan(capsys, "--images", "5", "--repeats", "2")["images"]) == {10}
    assert set(plan(capsys, "--images", "5", "--shard", "1/2")["images"]) == {3}
    assert set(plan(capsys, "--images", "5", "--shard", "2/2")["images"]) == {2}


def test_plan_counts_finished_images_and_estimates_time(capsys, here):
    assert (
        cli.main(
            [
                "sweep",
                "--images",
                "1",
                "--modes",
                "ar",
                "--temperature",
                "1",
                "--dry-run",
                "--out",
                "run",
            ]
        )
        == 0
    )
    capsys.readouterr()
    from lantern_bench.models.families.lanterns.description import HELD_OUT
    from lantern_bench.prompts.prompt import Prompt
    from lantern_bench.storage.records import line_of

    key = {"prompt_id": Prompt(HELD_OUT[0].caption()).id, "repeat": 0}
    row = {
        "record_key": "1",
        "status": "ok",
        "cell_id": "ar-t1",
        "seconds": 1.5,
        "pixel_seconds": 0.5,
        **key,
    }
    (here / "run").mkdir()
    (here / "run" / "records.jsonl").write_bytes(line_of(row))
    flags = Overrides.from_flags({"images": 1, "temperature": 1}, modes="ar")
    experiment = load_experiment("lanterns", defaults_of, flags).to_dict()
    manifest = {"schema_version": SCHEMA_VERSION, "experiment": experiment}
    (here / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert (
        cli.main(
            [
                "sweep",
                "--images",
                "3",
                "--modes",
                "ar",
                "--temperature",
                "1",
                "--dry-run",
                "--out",
                "run",
            ]
        )
        == 0
    )
    written = capsys.readouterr()
    assert "1 done, 2 to do; time left: 4 s" in written.err
    assert pd.read_csv(io.StringIO(written.out))["s_per_image"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            ["--modes", "lantrn"],
            ["--modes lantrn: unknown mode; did you mean lantern?", "speculative"],
        ),
        (["--delta", "1.5"], ["--delta 1.5: must lie strictly between 0 and 1"]),
        (["--delta", "0.1,x", "--lambda", "0.5"], ["2 problems", "--delta x:", "--lambda 0.5:"]),
        (["--temperature", "-1"], ["--temperature -1: must be a number of at least 0"]),
        (["--tree", "small-8"], ["--tree small-8: unknown tree; did you mean small-7?"]),
        (["--drafting", "statc"], ["--drafting statc", "did you mean static?"]),
        (["--images", "many"], ["--images many: must be a whole number of at least 1"]),
        (["--batch", "0"], ["--batch 0: must be a whole number of at least 1"]),
        (["--metrics", "sped"], ["--metrics", "speed"]),
        (["--dtype", "float3"], ["--dtype float3: must be one of auto"]),
        (["--device", "gpu"], ["--device gpu: must be auto, cpu, mps, cuda or cuda:N"]),
        (["--model", "lantern"], ["--model", "did you mean lanterns?"]),
        (["--neighbours", "2048"], ["--neighbours 2048: the model lanterns has 2048 codes"]),
        (
            ["--neighbour-space", "cosine", "--dry-run"],
            ["--neighbour-space cosine: must be raw or normalised"],
        ),
        (
            ["--metrics", "quality", "--protocol", "embeded"],
            ["unknown protocol; did you mean embedded?"],
        ),
        (["--prompts", "none.txt"], ["--prompts none.txt: no such file", "held-out"]),
        (
            ["--prompts", "captions.txt"],
            ["error: --prompts captions.txt line 2:", "'pink'", "orange"],
        ),
        (["--set", "delta"], ["--set delta: must have the form key=value"]),
        (["--set", "detla=0.1"], ["--set detla=0.1: unknown key; did you mean delta?"]),
        (["--shard", "3/2"], ["--shard 3/2: must be i/n"]),
        (["--format", "yaml"], ["--format yaml: unknown", "One of table, csv"]),
        (["--modes", "ar", "--delta", "0.1"], ["--delta 0.1: reaches no cell"]),
        (
            ["--out", "there.png/run"],
            ["--out there.png/run: ", "there.png is a file, not a folder"],
        ),
        (["--out", "notes"], ["--out notes: contains todo.txt and is not a run directory"]),
        (["nothere"], ["no experiment is named 'nothere'", "lanterns"]),
        (["nothere.yaml"], ["nothere.yaml: no such experiment file"]),
        (["empty.yaml"], ["the file is empty"]),
        (["open.yaml"], ["open.yaml line 5", "not valid YAML"]),
        (
            ["wrong.yaml"],
            ["3 problems", "line 2: imagse: unknown key; did you mean images?", "line 4", "line 5"],
        ),
    ],
)
def test_a_sweep_is_refused_before_a_model_is_loaded(refuse, here, typed, words):
    write("", "there.png")
    write("", "empty.yaml")
    write("name: x\nmodel: lanterns\ncells:\n  - {mode: ar\n", "open.yaml")
    cells = "cells:\n  - {mode: lantrn}\n  - {mode: lantern, delta: 2}\n"
    write(f"model: lanterns\nimagse: 3\n{cells}", "wrong.yaml")
    write(f"{CAPTION}\ntwo round pink lanterns over a lake at dusk\n", "captions.txt")
    (here / "notes").mkdir()
    write("", "notes/todo.txt")
    refuse(["sweep", *typed], 2, *words)


def test_missing_scorers_are_refused_before_a_model_is_loaded(refuse):
    refuse(
        ["sweep", "--metrics", "quality", "--protocol", "lantern-coco"],
        3,
        "are not on this machine",
    )


PARTS = "the target, tokenizer, drafter and text encoder of llamagen-t2i-stage1: not on this"
NETWORKS = "weights-inception-2015-12-05-6726825d.pth, vgg16-397923af.pth and ViT-B-32-quickgelu.s"


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        ([], 3, [PARTS, NETWORKS]),
        (["--metrics", "speed"], 3, [PARTS]),
        (["--prompts", "none.txt"], 2, [PARTS, NETWORKS, "--prompts none.txt: no such file"]),
        (["--prompts", "none.txt", "--dry-run"], 2, [PARTS, NETWORKS, "--prompts none.txt"]),
        (["--modes", "ar,scd", "--metrics", "speed"], 3, ["the target, tokenizer and text enc"]),
        (["--ray", "auto", "--metrics", "quality"], 3, [NETWORKS]),
    ],
)
def test_everything_that_is_missing_is_named_the_model_first(capsys, here, typed, code, words):
    assert cli.main(["sweep", "--model", "llamagen-t2i-stage1", *typed]) == code
    message = capsys.readouterr().err.partition("error: ")[2]
    found = [message.find(word) for word in words]
    assert found[0] > -1
    assert found == sorted(found)
    # Workers on Ray have files of their own.
    assert ("of llamagen" in message) == ("--ray" not in typed)
    assert list(here.iterdir()) == []


def test_a_dry_run_warns_of_what_is_missing(capsys):
    model = ["--model", "llamagen-t2i-stage1"]
    assert cli.main(["sweep", *model, "--dry-run"]) == 0
    written = capsys.readouterr()
    assert "warning: 2 problems:\n  the target, tokenizer" in written.err
    assert "lantern-bench weights get llamagen-t2i-stage1" in written.err
    assert NETWORKS in written.err
    assert "ar-t0" in written.out
    assert cli.main(["sweep", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "word", "code"),
    [
        (["two pink lanterns"], "'pink'", 2),
        ([CAPTION, "--mode", "lantrn"], "--mode lantrn: unknown mode; did you mean lantern?", 2),
        (
            [CAPTION, "--model", "lantern"],
            "--model lantern: unknown model; did you mean lanterns?",
            2,
        ),
        ([CAPTION, "--delta", "0.1"], "--delta 0.1: reaches no cell", 2),
        ([CAPTION, "--neighbours", "5000"], "--neighbours 5000", 2),
        ([CAPTION, "--out", "there.png/a.png"], "there.png is a file, not a folder", 2),
        ([CAPTION, "--out", "a.jpg"], "--out a.jpg: must end with .png", 2),
        ([CAPTION, "--images", "0"], "--images", 2),
        ([CAPTION, "--out", "there.png"], "there.png: is there already", 3),
    ],
)
def test_generate_checks_before_it_loads(refuse, typed, word, code):
    write("", "there.png")
    refuse(["generate", *typed], code, word)


def test_models_are_listed_with_their_licence(capsys):
    assert cli.main(["models"]) == 0
    listed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    (row,) = listed[listed["model"] == "lanterns"].to_dict("records")
    assert row["licence"] == "Apache-2.0"
    assert "chain-4" in row["defaults"]
    weights = load_file(WEIGHTS_FOLDER / FILES["target"])
    assert row["tokens"] == 256
    assert row["parameters_m"] == round(sum(part.size for part in weights.values()) / 1e6)
    # Of every model: its size, its files, and where those that are not here come from.
    assert listed[["parameters_m", "tokens"]].notna().all(axis=None)
    published = listed[listed["files"].notna()]
    assert {"llamagen-t2i-stage1", "llamagen-c2i-3B-384", "anole-7b", "lumina-mgpt-7b-768"} <= set(
        published["model"]
    )
    assert (
        published["missing"].isna() | published["get"].str.startswith("lantern-bench weights get")
    ).all()


def test_one_model_is_shown_with_its_parts_and_memory(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cli.main(["models", "llamagen-t2i-stage1"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    assert set(listed["part"]) == {"target", "tokenizer", "drafter", "text_encoder"}
    assert not listed["found"].any()
    assert "missing: target, " in written.err
    assert "lantern-bench weights get llamagen-t2i-stage1" in written.err
    assert "memory needed: " in written.err
    assert "free here: " in written.err
