"""The end of a process that leaves its objects to the operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}  # the end of the process has something to write
# Imports the package first, as every command does. `Kept` shows whether objects are destroyed.
PROGRAM = """
import lantern_bench
import atexit, sys, threading, time

class Kept:
    def __del__(self):
        sys.stderr.write("destroyed\\n")
kept = Kept()
kept.itself = kept

def finish():
    time.sleep(0.2)
    sys.stderr.write("thread\\n")
atexit.register(lambda: sys.stderr.write("handler\\n"))
threading.Thread(target=finish).start()
print("x" * {size})
from lantern_bench.utils.quick_exit import exit_quickly
from lantern_bench.cli.main import run
{last}
"""


def ended(last: str) -> subprocess.CompletedProcess[str]:
    """Run the program with this last line."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last=last, size=1_000_000)],
        capture_output=True,
        text=True,
        env=BUFFERED,
        check=False,
    )


def test_output_threads_and_handlers_come_to_their_end_and_objects_do_not() -> None:
    process = ended("exit_quickly(3)")
    assert process.returncode == 3
    assert len(process.stdout) == 1_000_001
    assert process.stderr.split() == ["thread", "handler"]


def test_the_console_script_ends_like_this() -> None:
    process = ended("sys.argv = ['lantern-bench', '--version']; run()")
    assert process.returncode == 0
    assert process.stderr.split() == ["thread", "handler"]


def test_a_program_that_only_imports_the_package_ends_as_usual() -> None:
    process = ended("sys.exit(4)")
    assert process.returncode == 4
    assert process.stderr.split() == ["thread", "handler", "destroyed"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_output_that_cannot_be_written_changes_the_code() -> None:
    program = PROGRAM.format(last="exit_quickly(0)", size=10)
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            env=BUFFERED,
            check=False,
        )
    assert process.returncode == 120
    assert b"No space left" in process.stderr
