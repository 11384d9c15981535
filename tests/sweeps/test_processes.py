"""Runs by several worker processes: the same images as one process makes, and what happens when a
worker ends.

The workers are real; they find the tables of `tests/helpers/tiny_model.py` through an entry point.
Signals, workers that hang and parents that are killed: `tests/faults/test_signals.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lantern_bench.storage.run_directory import read_manifest, read_records
from tests.faults.conftest import SWEEP, Bench
from tests.helpers.tiny_model import PROMPTS

# Workers start one after the other, and each imports the package anew.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("processes"))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def expected(bench: Bench) -> dict[str, str]:
    """The tokens of the run by one process."""
    code, output = bench.sweep("whole")
    assert code == 0, output
    return bench.tokens("whole")


def test_processes_make_the_images_of_one_process(bench: Bench, expected: dict[str, str]) -> None:
    code, output = bench.sweep("dealt", "--processes", "2")
    assert code == 0, output
    assert bench.tokens("dealt") == expected
    rows = read_records(bench.folder / "dealt")
    assert {row["process"] for row in rows} == {0, 1}
    by_prompt = {row["prompt_id"]: set[int]() for row in rows}
    for row in rows:
        by_prompt[row["prompt_id"]].add(row["process"])
    assert all(len(processes) == 1 for processes in by_prompt.values())
    sessions = read_manifest(bench.folder / "dealt")["sessions"]
    assert [session["process"] for session in sessions] == [0, 1]
    assert all(session["complete"] for session in sessions)
    assert sessions[0]["ended"] <= sessions[1]["started"]


def test_a_resumed_run_continues_with_new_processes(bench: Bench, expected: dict[str, str]) -> None:
    assert bench.sweep("grown", "--images", "1")[0] == 0
    code, output = bench.sweep("grown", "--processes", "2")
    assert code == 0
    assert "3 images kept, 6 to do" in output
    assert sorted({row["process"] for row in read_records(bench.folder / "grown")}) == [0, 1, 2]
    assert bench.tokens("grown") == expected


def test_a_worker_that_dies_is_named_and_the_run_resumed(
    bench: Bench, expected: dict[str, str]
) -> None:
    (bench.folder / "die").write_text(PROMPTS[1])
    code, output = bench.sweep("died", "--processes", "2")
    (bench.folder / "die").unlink()
    assert code == 4
    assert "error: worker process" in output
    assert "of 2 ended with code 9" in output
    assert "The same command continues." in output
    code, output = bench.sweep("died", "--processes", "2")
    assert code == 0, output
    assert bench.tokens("died") == expected


def test_an_error_of_a_worker_is_the_error_of_the_command(bench: Bench) -> None:
    assert bench.sweep("refused", "--images", "1")[0] == 0
    flags = ["--processes", "2", "--set", "neighbour_space=normalised"]
    code, output = bench.run(*SWEEP, "refused", *flags)
    assert code == 3
    assert "cannot resume refused" in output
    assert "Traceback" not in output


def test_shards_by_several_processes_are_merged(bench: Bench, expected: dict[str, str]) -> None:
    names = ["part-shard1of2", "part-shard2of2"]
    for number, name in enumerate(names, start=1):
        code, output = bench.sweep(name, "--processes", "2", "--shard", f"{number}/2")
        assert code == 0, output
    parts = [read_manifest(bench.folder / name)["shard"] for name in names]
    # All images of the shard, not those of its last process.
    assert [part["images"] for part in parts] == [6, 3]
    code, output = bench.run("merge", *names)
    assert code == 0, output
    assert bench.tokens("part") == expected
