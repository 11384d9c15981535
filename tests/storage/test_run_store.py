"""The run directory: resuming loses no finished image and mixes none, and every refusal names its
reason.

The property test cuts records.jsonl at any byte, as a killed process would, and continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lantern_bench.config.experiment import ResolvedExperiment, load_experiment
from lantern_bench.config.plan import ImageTask, Plan, make_plan
from lantern_bench.config.settings import Overrides
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.records import line_of, record_key
from lantern_bench.storage.run_directory import (
    done_images,
    find_run,
    planned_images,
    read_manifest,
    read_records,
    read_run,
    run_folder,
)
from lantern_bench.storage.run_store import RunStore, check_folder
from lantern_bench.storage.schema import SCHEMA_VERSION, columns
from lantern_bench.utils.errors import RefusedError, UserError

KEY: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "engine_version": "1",
    "torch_version": "2.15.0",
    "dtype": "float32",
    "device_type": "cpu",
    "compile": False,
    "weights": {"lanterns/target": "3f9c", "lanterns/drafter": "b07a"},
}
PROMPTS = [Prompt("one red lantern"), Prompt("two “round” lanterns\n")]


def experiment(**flags: Any) -> ResolvedExperiment:
    return load_experiment(
        "lanterns",
        {"lanterns": {"cfg_scale": 3.0, "tree": "small-7"}},
        Overrides.from_flags({"images": 2} | flags, modes="ar,lantern++"),
    )


EXPERIMENT = experiment()
PLAN: Plan = make_plan(EXPERIMENT, PROMPTS)


def key(**changes: Any) -> dict[str, Any]:
    return {**KEY, **changes}


def to_do(store: RunStore, tasks: Iterable[ImageTask]) -> list[ImageTask]:
    return [task for task in tasks if not store.is_done(task)]


def fill(folder: Path, count: int | None = None, status: str = "ok") -> None:
    with RunStore.open(folder, EXPERIMENT, KEY) as store:
        for task in to_do(store, PLAN.tasks)[:count]:
            store.append(
                task, {"status": status, "tokens": task.seed % 97, "accepted_per_step": [1, 2]}
            )


@pytest.fixture(autouse=True)
def _results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_BENCH_RESULTS", str(tmp_path))


def test_new_run_gets_a_numbered_directory(tmp_path: Path) -> None:
    folder = run_folder(EXPERIMENT, resume=False)
    assert folder == tmp_path / f"lanterns-{EXPERIMENT.hash8}"
    fill(folder, 1)
    second = run_folder(EXPERIMENT, resume=False)
    assert second.name == f"{EXPERIMENT.run_name}-2"
    fill(second, 1)
    assert run_folder(EXPERIMENT, resume=False).name == f"{EXPERIMENT.run_name}-3"
    assert run_folder(EXPERIMENT) == folder


def test_records_have_every_column_in_schema_order(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    lines = (tmp_path / "run" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(PLAN.tasks)
    for task, line in zip(PLAN.tasks, lines, strict=True):
        row = json.loads(line)
        assert list(row) == [column.name for column in columns("records")]
        assert row["cell_id"] == task.cell.cell_id
        assert row["record_key"] == record_key(task, KEY)
        assert (row["prompt"], row["seed"], row["order_index"]) == (
            task.prompt.text,
            task.seed,
            task.order_index,
        )
        assert (row["status"], row["error"], row["accepted_per_step"]) == ("ok", None, [1, 2])


def test_store_refuses_undeclared_columns_and_nan(tmp_path: Path) -> None:
    with RunStore.open(tmp_path / "run", EXPERIMENT, KEY) as store:
        with pytest.raises(ValueError, match="no column speed"):
            store.append(PLAN.tasks[0], {"speed": 3})
        with pytest.raises(ValueError, match="no column fdi"):
            store.append_score({"fdi": 3})
        with pytest.raises(ValueError, match="JSON"):
            store.append(PLAN.tasks[0], {"seconds": float("nan")})
    assert read_records(tmp_path / "run") == []


def test_a_key_is_a_hash_of_the_sorted_json_of_all_that_it_covers() -> None:
    task = replace(PLAN.tasks[0], prompt=PROMPTS[1], repeat=3)
    covered = {
        "run": KEY,
        "cell": task.cell.settings(),
        "prompt_id": PROMPTS[1].id,
        "repeat": 3,
        "seed": task.seed,
    }
    digest = hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()
    assert record_key(task, KEY) == digest[:16]


@pytest.mark.parametrize(
    ("changes", "message", "typed"),
    [
        (
            {"torch_version": "2.16.0"},
            "torch_version changed\n  recorded  2.15.0\n  now       2.16.0",
            "--no-resume",
        ),
        (
            {"dtype": "bfloat16"},
            "dtype changed\n  recorded  float32\n  now       bfloat16",
            "--dtype float32",
        ),
        (
            {"device_type": "cuda"},
            "device_type changed\n  recorded  cpu\n  now       cuda",
            "--device cpu",
        ),
        (
            {"compile": True},
            "compile changed\n  recorded  false\n  now       true",
            "--set compile=false",
        ),
        (
            {"weights": {"lanterns/target": "3f9c", "lanterns/drafter": "0000"}},
            "weights of lanterns/drafter changed\n  recorded  b07a\n  now       0000",
            "--out FOLDER",
        ),
    ],
)
def test_another_key_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, typed: str
) -> None:
    fill(tmp_path / "run", 2)
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(RefusedError) as caught:
        RunStore.open(tmp_path / "run", EXPERIMENT, key(**changes))
    assert caught.value.message.startswith(f"cannot resume run: {message}\n2 finished images")
    assert typed in str(caught.value.advice)
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before
    fill(tmp_path / "run")  # the lock was let go, and the run goes on as recorded


def test_key_may_change_while_no_image_is_finished(tmp_path: Path) -> None:
    fill(tmp_path / "run", 2, status="failed")
    with RunStore.open(tmp_path / "run", EXPERIMENT, key(dtype="bfloat16")) as store:
        assert to_do(store, PLAN.tasks) == list(PLAN.tasks)
    assert read_manifest(tmp_path / "run")["key"]["dtype"] == "bfloat16"


def test_resume_refuses_other_settings_but_not_more_images(tmp_path: Path) -> None:
    fill(tmp_path / "run", 2)
    with pytest.raises(RefusedError, match="seed changed\n  recorded  0\n  now       7") as caught:
        check_folder(tmp_path / "run", experiment(seed=7))
    assert "--seed 0" in str(caught.value.advice)
    with pytest.raises(RefusedError, match=r'cells changed\n  recorded  .*"lambda": 2.0'):
        RunStore.open(tmp_path / "run", experiment(**{"lambda": "3,5"}), KEY)
    more = experiment(images=4, metrics="speed")
    check_folder(tmp_path / "run", more)
    with RunStore.open(tmp_path / "run", more, KEY) as store:
        assert len(to_do(store, make_plan(more, PROMPTS).tasks)) == len(more.cells) * 4 - 2


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_unwritable_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        RunStore.open(tmp_path / name, EXPERIMENT, KEY)
    assert (tmp_path / "file").read_text() == "x"


class Killed(BaseException):
    """The end of a process, where no handler of errors runs."""


@pytest.mark.parametrize("file", [".writer.json", "manifest.json"])
def test_a_run_killed_while_it_writes_its_first_files_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def replace(draft: Path, target: Path) -> Path:
        if target.name == file:
            raise Killed
        return draft.rename(target)

    with monkeypatch.context() as killing, pytest.raises(Killed):
        killing.setattr(Path, "replace", replace)
        RunStore.open(tmp_path, EXPERIMENT, KEY)
    assert f".{file}.part" in {path.name for path in tmp_path.iterdir()}
    fill(tmp_path, 1)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("manifest.json", "{", UserError, "damaged, not JSON"),
        (
            "manifest.json",
            '{"schema_version": 0}',
            RefusedError,
            f"schema version 0, and this program reads {SCHEMA_VERSION}",
        ),
        (
            "records.jsonl",
            '{"a": 1}\n',
            UserError,
            "records.jsonl line 1: damaged, its checksum differs",
        ),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, file: str, content: str, error: type, message: str
) -> None:
    fill(tmp_path / "run", 2)
    (tmp_path / "run" / file).write_text(content)
    with pytest.raises(error) as caught:
        RunStore.open(tmp_path / "run", EXPERIMENT, KEY)
    assert message in caught.value.message


def test_runs_are_found_by_path_name_and_prefix(tmp_path: Path) -> None:
    for name in ("lanterns-aa11", "lanterns-bb22", "table1-cc33"):
        fill(tmp_path / name, 1)
    assert find_run(tmp_path / "lanterns-aa11") == tmp_path / "lanterns-aa11"
    assert find_run("lanterns-bb22") == tmp_path / "lanterns-bb22"
    assert find_run("table1") == tmp_path / "table1-cc33"
    with pytest.raises(UserError, match="several runs start with this") as caught:
        find_run("lanterns")
    assert "lanterns-aa11, lanterns-bb22" in str(caught.value.advice)
    with pytest.raises(UserError, match="no such run"):
        find_run("other")


@pytest.mark.parametrize(
    ("changes", "planned"),
    [
        ({"images": 2, "cells": [{}, {}]}, 4),
        ({"images": 2, "cells": [{}, {}], "repeats": 3}, 12),
        ({"images": 2, "cells": [{}], "batch": [1, 4]}, 4),
        ({"images": 2, "cells": [{}], "batch": 4}, 2),
        ({"cells": [{}, {}]}, 14),  # every prompt once
        ({}, 0),
    ],
)
def test_the_manifest_tells_how_many_images_a_run_has(
    changes: dict[str, Any], planned: int
) -> None:
    manifest = {"experiment": {"repeats": 1, "batch": 1, **changes}, "prompts": {"prompts": 7}}
    assert planned_images(manifest) == planned
    assert planned_images(manifest | {"shard": {"images": 3}}) == 3


def test_a_run_says_which_images_it_lacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fill(run, 3)
    remark = read_run(run).incomplete
    assert remark == "3 of 8 images. The command that started the run continues it."
    fill(run, 1, status="failed")
    assert str(read_run(run).incomplete).startswith("3 of 8 images, 1 failed. ")
    fill(run)
    assert read_run(run).incomplete is None
    for name in ("records.jsonl", "scores.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"schema_version"')
    lines = "the last line of {} is cut off and left out".format
    both = "; ".join(map(lines, ("records.jsonl", "scores.jsonl")))
    assert str(read_run(run).incomplete).startswith(f"{both}. ")


def test_finished_images_are_read_again_when_only_the_content_changed(tmp_path: Path) -> None:
    """Programs that copy files can keep size and times."""
    run = tmp_path / "run"
    fill(run)
    path = run / "records.jsonl"
    before = done_images(run)
    state = path.stat()
    lines = path.read_bytes().splitlines(keepends=True)
    other = [line_of(json.loads(line) | {"status": "OK"}) for line in lines]
    assert len(b"".join(other)) == state.st_size
    path.write_bytes(b"".join(other))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns
    assert len(before) == len(PLAN.tasks)
    assert done_images(run) == set()


@pytest.mark.parametrize(
    ("place", "files", "message", "advice"),
    [
        ("empty", [], "it is empty", "`lantern-bench sweep` wrote"),
        ("copied", ["records.jsonl=x", "images/"], "it has images, records.jsonl", "cp ORIGINAL/"),
        ("copied", ["speed.csv=x"], "it has speed.csv", "manifest.json copied"),
        ("begun", ["records.jsonl=", ".lock="], "it has records.jsonl", "--out begun"),
        ("run.merging", ["records.jsonl=x"], "it has records.jsonl", "merge again"),
        ("many", [f"{n}.png=" for n in range(9)], "4.png, 5.png and 3 more", "sweep"),
        ("all", ["b/manifest.json={}", "a/manifest.json={}"], "it has the runs a, b", "all/a"),
        ("r/images", ["../manifest.json={}"], "is a part of a run", "Give the run: "),
        ("r/records.jsonl", ["../manifest.json={}", "=x"], "is a part of a run", "Give the run: "),
        ("a.png", ["=x"], "a.png: is a file, not a run", "Give the folder of a run."),
    ],
)
def test_a_path_that_is_no_run_is_described(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    files: list[str],
    message: str,
    advice: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "=x" not in files:
        Path(place).mkdir(parents=True)
    for file in files:
        name, is_file, content = file.partition("=")
        path = Path(place, name)
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        if is_file:
            path.resolve().write_text(content)
        else:
            path.mkdir()
    with pytest.raises(UserError) as caught:
        find_run(place)
    assert message in caught.value.message
    assert advice in str(caught.value.advice)
    if Path(place).is_dir():
        with pytest.raises(UserError) as read:
            read_manifest(Path(place))
        assert read.value.message == caught.value.message


def test_records_without_a_manifest_are_not_resumed(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(UserError, match="not a run directory, it has no") as caught:
        check_folder(tmp_path / "run", EXPERIMENT)
    assert "cp ORIGINAL/manifest.json" in str(caught.value.advice)


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.data())
def test_run_cut_at_any_byte_resumes_to_the_same_records(
    tmp_path: Path, data: st.DataObject
) -> None:
    complete = tmp_path / "whole"
    if not complete.exists():
        fill(complete)
    content = (complete / "records.jsonl").read_bytes()
    length = data.draw(st.integers(0, len(content)))
    cut = tmp_path / "cut"
    shutil.rmtree(cut, ignore_errors=True)
    shutil.copytree(complete, cut)
    (cut / "records.jsonl").write_bytes(content[:length])
    assert len(read_records(cut)) == content[:length].count(b"\n")
    fill(cut)
    assert (cut / "records.jsonl").read_bytes() == content
