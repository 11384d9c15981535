"""Files of a run that cannot be written, are damaged or gone; and what `check-run` says of them and
repairs.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lantern_bench.storage.records import read_lines
from tests.faults.child import IMAGES
from tests.faults.conftest import SWEEP, Bench, Outcome
from tests.helpers.tiny_model import PROMPTS

# Several commands in processes of their own, on machines that may be busy.
pytestmark = pytest.mark.timeout(1200)

Tokens = dict[str, str]


def finish(bench: Bench, out: str, expected: Tokens) -> None:
    """The same command ends with the records of an undisturbed run, undamaged."""
    code, output = bench.sweep(out)
    assert code == 0, output
    assert bench.tokens(out) == expected
    assert bench.problems(out) == []


def repaired(bench: Bench, out: str, expected: Tokens, problems: list[str]) -> None:
    """`check-run` names exactly these problems; after `--repair` the same command leaves none."""
    assert bench.problems(out) == problems
    code, output = bench.run("check-run", out, "--format", "csv")
    assert code == 5, output
    code, output = bench.run("check-run", out, "--repair", "--format", "csv")
    assert code == 0, output
    finish(bench, out, expected)


def test_disk_full(bench: Bench, expected: Tokens, outcome: Outcome) -> None:
    """Disk full in the middle of a line"""
    code, output = bench.sweep("run", largest_file=10_000)
    finished = len(bench.tokens("run"))
    assert code == 3
    assert "records.jsonl: cannot be written: File too large" in output
    assert "Traceback" not in output
    assert 0 < finished < IMAGES
    assert bench.lines("run") == finished
    assert (bench.folder / "run" / "records.jsonl").read_bytes().endswith(b"\n")
    finish(bench, "run", expected)
    kept = f"{finished} of 9 images kept, resumed to the same tokens"
    outcome(f"exit {code}: {output.splitlines()[-2]}; {kept}")


def test_read_only_folder(bench: Bench, outcome: Outcome) -> None:
    """A read-only folder, as --out and above it"""
    closed = bench.folder / "closed"
    closed.mkdir(mode=0o555)
    # Permissions do not bind root, so it gets a folder that refuses root too.
    folders = ["/proc/1/run"] if os.access(closed, os.W_OK) else ["closed", "closed/run"]
    for folder in folders:
        code, output = bench.sweep(folder)
        assert code == 2
        assert f"--out {folder}: cannot be written" in output
        assert "Traceback" not in output
        assert not Path(folder, "records.jsonl").exists()
    outcome(f"exit {code}, before a model is loaded: --out FOLDER: cannot be written")


def test_truncated_records(bench: Bench, expected: Tokens, outcome: Outcome) -> None:
    """records.jsonl cut off in the middle of a line"""
    assert bench.sweep("run")[0] == 0
    path = bench.folder / "run" / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:200])
    problems = bench.problems("run")
    assert problems[0] == "records.jsonl: ends in the middle of a line, 200 bytes"
    assert sum("images have no record" in problem for problem in problems) == len(problems) - 1
    finish(bench, "run", expected)
    outcome("the same command makes the 4 missing images")


def flip(line: bytes, position: int) -> bytes:
    return line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]


def test_flipped_bits_in_records(bench: Bench, expected: Tokens, outcome: Outcome) -> None:
    """A flipped bit in a record, at 40 random places"""
    assert bench.sweep("run")[0] == 0
    path = bench.folder / "run" / "records.jsonl"
    content = path.read_bytes()
    noise = np.random.default_rng(0)
    first = content.splitlines(keepends=True)
    for position in noise.integers(0, len(first[0]) - 1, 40):
        path.write_bytes(b"".join([flip(first[0], position), *first[1:]]))
        damaged = [line for line in read_lines(path, "records") if line.row is None]
        near = first[0][max(0, position - 20) : position + 20]
        assert [line.number for line in damaged][:1] == [1], near
    # One that is valid JSON still: only the checksum tells.
    digit = first[4].index(b'"seed": ') + len(b'"seed": ')
    path.write_bytes(b"".join([*first[:4], flip(first[4], digit), *first[5:]]))
    code, output = bench.sweep("run")
    assert code == 2
    assert "records.jsonl line 5: damaged, its checksum differs" in output
    assert "--repair" in output
    cell = json.loads(first[4])["cell_id"]
    problems = ["records.jsonl: line 5: damaged, its checksum differs"]
    repaired(
        bench=bench,
        out="run",
        expected=expected,
        problems=[*problems, f"records.jsonl: {cell}: 1 of 3 images have no record"],
    )
    outcome("exit 2, the line is named; after check-run --repair the sweep makes its image again")


def test_interleaved_records(bench: Bench, expected: Tokens, outcome: Outcome) -> None:
    """Lines of two writers mixed into each other, and a line twice"""
    assert bench.sweep("run")[0] == 0
    path = bench.folder / "run" / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    mixed = lines[3][:300] + lines[4][:-1] + lines[3][300:]
    path.write_bytes(b"".join([*lines[:3], mixed, *lines[5:], lines[0]]))
    missing = sorted(
        f"records.jsonl: {json.loads(line)['cell_id']}: 1 of 3 images have no record"
        for line in lines[3:5]
    )
    problems = bench.problems("run")
    assert problems[0] == "records.jsonl: line 4: damaged, its checksum differs"
    assert sorted(problems[1:]) == missing
    repaired(bench=bench, out="run", expected=expected, problems=problems)
    outcome(
        "check-run names the line; after --repair the sweep makes its two images again; "
        "a line twice counts once"
    )


@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_pictures(bench: Bench, expected: Tokens, outcome: Outcome, damage: str) -> None:
    """A deleted picture, a damaged picture"""
    assert bench.sweep("run")[0] == 0
    pictures = sorted((bench.folder / "run").glob("images/*/*.png"))
    before = {path: path.read_bytes() for path in pictures}
    picture = pictures[4]
    if damage == "deleted":
        picture.unlink()
    else:
        picture.write_bytes(flip(before[picture], len(before[picture]) // 2))
    problem = {
        "deleted": "missing",
        "damaged": "damaged, its SHA-256 differs from the one in the record",
    }[damage]
    name = picture.relative_to(bench.folder / "run")
    times = {path: path.stat().st_mtime_ns for path in pictures if path != picture}
    repaired(bench=bench, out="run", expected=expected, problems=[f"{name}: {problem}"])
    assert {path: path.read_bytes() for path in pictures} == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
    outcome("check-run names the picture; after --repair the sweep makes it again, byte for byte")


def test_damaged_table(bench: Bench, expected: Tokens, outcome: Outcome) -> None:
    """A damaged table"""
    assert bench.sweep("run")[0] == 0
    path = bench.folder / "run" / "speed.csv"
    before = path.read_bytes()
    path.write_bytes(before[:-30])
    repaired(
        bench=bench,
        out="run",
        expected=expected,
        problems=["speed.csv: differs from the table of the records"],
    )
    assert path.read_bytes() == before
    outcome("check-run names the table; --repair, like show, makes it again from the records")


def test_a_second_writer(bench: Bench, expected: Tokens, outcome: Outcome) -> None:
    """A second writer of a run, and the lock of a killed one"""
    first = bench.start([*SWEEP, "run"], TINY_HANG=PROMPTS[1])  # it never ends by itself
    first.until(lambda: bench.lines("run") >= 1)
    code, output = bench.sweep("run")
    assert code == 3
    assert f"run is in use: process {first.pid} on " in output
    os.kill(first.pid, signal.SIGKILL)
    first.end()
    assert (bench.folder / "run" / ".writer.json").exists()
    finish(bench, "run", expected)
    assert not (bench.folder / "run" / ".writer.json").exists()
    outcome(
        f"exit {code}: in use: process N on HOST is writing to it; "
        "the lock of a killed writer is free at once"
    )


def test_failed_write_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_bench.utils.files import write_atomically

    (tmp_path / "kept").write_bytes(b"before")
    fsync: Callable[[int], None] = os.fsync

    def full(number: int) -> None:
        fsync(number)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "kept", b"after")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("kept", b"before")]
