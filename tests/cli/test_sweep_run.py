"""Sweeps that resume or have failed images; prompts and spaces in records; pictures by `generate`.

On the tiny model of logit tables.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lantern_bench.cli import main as cli
from lantern_bench.cli.console import Console
from lantern_bench.methods.catalog import DRAFTINGS, MODES
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.storage.run_directory import read_manifest, read_records
from lantern_bench.sweeps.choose_threads import Calibrated
from lantern_bench.utils.errors import RefusedError

SWEEP = ["sweep", "tiny.yaml", "--threads", "1"]
ONE_CELL = [*SWEEP, "--modes", "ar", "--out", "run"]


@pytest.mark.parametrize(
    ("lost", "warning"),
    [
        (0.04, ""),
        (0.2, "warning: other programs"),
        (0.63, "warning: speed cannot be measured now: other programs"),
    ],
)
def test_a_busy_processor_is_named_before_the_first_image(
    capsys, lost: float, warning: str
) -> None:
    console = Console()
    for note in Calibrated(1, {1: 4.0, 2: 5.0}, lost).notes():
        console.note(note)
    written = capsys.readouterr().err
    assert written.startswith(warning)
    assert bool(written) == bool(warning)


def test_sweep_prints_its_run_directory_first_and_last(tiny, capsys) -> None:
    assert cli.main(SWEEP) == 0
    written = capsys.readouterr()
    (run,) = Path("results").iterdir()
    lines = written.err.splitlines()
    assert lines[0] == lines[-1] == f"run: {run}"
    assert any(line.startswith("images: 18 of 18") for line in lines)
    assert "mal " in written.err
    assert "s/image" in written.err
    assert len(pd.read_csv(io.StringIO(written.out))) == 6


def test_same_command_resumes_unless_no_resume(tiny, tiny_run, capsys) -> None:
    shutil.copytree(tiny_run, "run")
    before = (Path("run") / "records.jsonl").read_bytes()
    assert cli.main([*SWEEP, "--out", "run"]) == 0
    assert "18 images kept, 0 to do" in capsys.readouterr().err
    assert (Path("run") / "records.jsonl").read_bytes() == before
    keys = {row["record_key"] for row in read_records(Path("run")) if row["mode"] == "ar"}
    assert cli.main([*ONE_CELL, "--no-resume", "--format", "table"]) == 0
    written = capsys.readouterr().out
    assert "speedup" in written
    assert "1.00x" in written
    assert "no interval: 3 of the 4 prompts" in written
    assert {row["record_key"] for row in read_records(Path("run-2"))} == keys


def test_failed_images_exit_4_and_are_retried(tiny, capsys) -> None:
    Path("broken.txt").write_text("one red lantern\nbroken\ntwo blue lanterns\n")
    typed = [*SWEEP, "--prompts", "broken.txt", "--out", "run"]
    assert cli.main(typed) == 4
    written = capsys.readouterr()
    assert "6 of 18 images failed" in written.err
    assert "RuntimeError: no memory left" in written.err
    assert "Traceback" not in written.err
    listed = pd.read_csv(io.StringIO(written.out))
    assert set(listed["failed"]) == {1}
    assert set(listed["images"]) == {2}
    assert cli.main(typed) == 4
    assert "12 images kept, 6 to do" in capsys.readouterr().err
    Path("broken.txt").write_text("broken\n")
    assert cli.main([*SWEEP, "--prompts", "broken.txt", "--images", "1"]) == 4
    assert "6 of 6 images failed" in capsys.readouterr().err


def test_neighbour_space_is_part_of_the_record_key(tiny, capsys) -> None:
    typed = [*SWEEP, "--images", "1", "--modes", "lantern++"]
    assert cli.main([*typed, "--out", "a"]) == 0
    assert cli.main([*typed, "--out", "b", "--neighbour-space", "normalised"]) == 0
    published = read_manifest(Path("a"))
    other = read_manifest(Path("b"))
    assert "neighbour_space" not in published["experiment"]
    assert "tiny/neighbours" not in published["key"]["weights"]
    assert other["experiment"]["neighbour_space"] == "normalised"
    assert other["key"]["weights"]["tiny/neighbours"] == "normalised"
    keys = [{row["record_key"] for row in read_records(Path(run))} for run in "ab"]
    assert not keys[0] & keys[1]
    assert cli.main([*typed, "--out", "a", "--neighbour-space", "normalised"]) == 3


def test_records_and_manifest_name_the_prompt_source(tiny) -> None:
    rows = [
        {"image_id": 9 + n, "caption": text}
        for n, text in enumerate(["one red", "two blue lanterns"])
    ]
    rows.append({"image_id": 9, "caption": "one red lantern"})
    Path("captions.json").write_text(json.dumps({"annotations": rows}))
    assert cli.main([*ONE_CELL, "--images", "2", "--prompts", "coco:captions.json"]) == 0
    prompts = {row["prompt_source"]: row["prompt"] for row in read_records(Path("run"))}
    assert prompts == {"coco:9": "one red lantern", "coco:10": "two blue lanterns"}
    described = read_manifest(Path("run"))["prompts"]
    assert described["set"] == "coco:captions.json"
    assert described["prompts"] == 2
    assert len(described["file_sha256"]) == 64


# ---- Models with a text encoder: all captions are encoded before decoding starts


def with_text_encoder(
    tiny: Any, prepare: Callable[[Sequence[str]], Iterator[tuple[int, int]]]
) -> None:
    load = tiny.load

    def load_prepared(*arguments: Any) -> LoadedModel:
        model: LoadedModel = load(*arguments)
        model.prepare = prepare
        return model

    tiny.load = load_prepared


def test_only_pending_captions_are_encoded(tiny, capsys) -> None:
    encoded: list[list[str]] = []

    def prepare(prompts: Sequence[str]) -> Iterator[tuple[int, int]]:
        encoded.append(list(prompts))
        yield from ((done, len(prompts)) for done in range(len(prompts) + 1))

    with_text_encoder(tiny, prepare)
    assert cli.main([*ONE_CELL, "--images", "2"]) == 0
    assert "captions for tiny: 2 of 2" in capsys.readouterr().err
    assert cli.main([*ONE_CELL, "--images", "3"]) == 0
    assert [len(prompts) for prompts in encoded] == [2, 1]
    sessions = read_manifest(Path("run"))["sessions"]
    assert all(session["prepare_seconds"] >= 0 and session["complete"] for session in sessions)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted before the first image"),
        (
            RefusedError("tiny needs its text encoder", "Type `lantern-bench weights get tiny`."),
            3,
            "error: tiny needs its text encoder\n  Type",
        ),
    ],
)
def test_a_text_encoder_that_fails_leaves_no_run(
    tiny, capsys, error: BaseException, code: int, message: str
) -> None:
    def prepare(_prompts: Sequence[str]) -> Iterator[tuple[int, int]]:
        raise error
        yield 0, 1

    with_text_encoder(tiny, prepare)
    assert cli.main(ONE_CELL) == code
    written = capsys.readouterr()
    assert message in written.err
    assert written.out == ""
    assert not Path("run").exists()


# ---- generate


def test_generate_repeats_images_at_a_seed(tiny, capsys) -> None:
    typed = ["generate", "one red lantern", "--model", "tiny", "--neighbours", "3", "--images", "3"]
    for name, flags in (("a", []), ("b", []), ("c", ["--seed", "1"])):
        assert cli.main([*typed, "--out", f"{name}.png", *flags]) == 0
    assert len(pd.read_csv(io.StringIO(capsys.readouterr().out.split("cell_id", 2)[1]))) == 3
    pictures = [Path(f"{name}.png").read_bytes() for name in "abc"]
    assert pictures[0] == pictures[1] != pictures[2]
    assert cli.main([*typed, "--out", "a.png"]) == 3
    assert cli.main([*typed, "--out", "a.png", "--seed", "1", "--force"]) == 0
    assert Path("a.png").read_bytes() == pictures[2]


def test_generate_with_a_failing_model_exits_4(tiny, capsys) -> None:
    assert (
        cli.main(["generate", "broken", "--model", "tiny", "--mode", "ar", "--out", "a.png"]) == 4
    )
    assert "RuntimeError" in capsys.readouterr().err
    assert not Path("a.png").exists()


def test_generate_decodes_all_modes_that_the_model_has_the_parts_for(
    tiny, capsys, monkeypatch
) -> None:
    typed = ["generate", "one red lantern", "--model", "tiny", "--force"]
    assert cli.main([*typed, "--mode", "all", "--neighbours", "3"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    with_drafter = [name for name in MODES if name != "zipar"]
    assert all(
        cell.startswith(f"{mode}-")
        for mode, cell in zip(with_drafter, listed["cell_id"], strict=True)
    )
    assert "zipar-w4-t1 is left out: mode zipar: the tokens of this model" in written.err
    assert (listed[["seconds", "target_forwards", "mean_accepted_length"]] > 0).all(axis=None)
    load = tiny.load

    def without_drafter(*arguments: Any) -> Any:
        model = load(*arguments)
        model.drafter = None
        return model

    monkeypatch.setattr(tiny, "load", without_drafter)
    assert cli.main([*typed, "--mode", "all", "--neighbours", "3"]) == 0
    written = capsys.readouterr()
    listed = pd.read_csv(io.StringIO(written.out))
    able = [name for name in with_drafter if not DRAFTINGS[MODES[name].drafting].needs_drafter]
    assert all(
        cell.startswith(f"{mode}-") for mode, cell in zip(able, listed["cell_id"], strict=True)
    )
    assert written.err.count("is left out: mode ") == len(MODES) - len(able) > 0
    assert cli.main([*typed, "--mode", "ar,speculative"]) == 3
    assert "mode speculative needs a drafter" in capsys.readouterr().err
