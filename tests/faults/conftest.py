"""A folder with a tiny experiment, and a way to start commands there and to end them."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from lantern_bench.storage.run_directory import read_records
from tests.faults import child

SECONDS = 600.0  # for a command of this machine, however busy it is

Outcome = Callable[[str], None]


class Command:
    """A command that runs in a separate process."""

    def __init__(self, process: BaseProcess, output: Path) -> None:
        self.process = process
        self._output = output
        self.began = time.monotonic()
        process.start()
        assert process.pid is not None
        self.pid = process.pid

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so, while the command runs."""
        while not true():
            assert self.process.is_alive(), self.output
            assert time.monotonic() < self.began + SECONDS, self.output
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for the end and return the exit code; a signal that ended it is negative."""
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, f"still running\n{self.output}"
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""


class Bench:
    """A folder with the experiment `tiny.yaml`, in which commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._count = 0
        self._context.set_forkserver_preload(["tests.faults.child"])
        self._running: list[Command] = []
        child.install(folder)

    def start(
        self, arguments: Sequence[str], largest_file: int | None = None, **environment: str
    ) -> Command:
        self._count += 1
        output = self.folder / f"output-{self._count}.txt"
        call = (list(arguments), str(self.folder), str(output), environment, largest_file)
        command = Command(self._context.Process(target=child.run, args=call), output)
        self._running.append(command)
        return command

    def run(
        self, *arguments: str, largest_file: int | None = None, **environment: str
    ) -> tuple[int, str]:
        """Run a command to its end; return its exit code and what it printed."""
        command = self.start(arguments, largest_file=largest_file, **environment)
        return command.end(), command.output

    def sweep(
        self, out: str, *flags: str, largest_file: int | None = None, **environment: str
    ) -> tuple[int, str]:
        return self.run(*SWEEP, out, *flags, largest_file=largest_file, **environment)

    def tokens(self, out: str) -> dict[str, str]:
        """The tokens of every finished image by its record key."""
        rows = read_records(self.folder / out)
        return {row["record_key"]: row["tokens_sha256"] for row in rows if row["status"] == "ok"}

    def lines(self, out: str) -> int:
        path = self.folder / out / "records.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def problems(self, out: str) -> list[str]:
        """What `check-run` finds, as lines of CSV."""
        _code, output = self.run("check-run", out, "--format", "json")
        listed = output[output.find("[") : output.rfind("]") + 1]
        return [f"{row['file']}: {row['problem']}" for row in json.loads(listed or "[]")]

    def close(self) -> None:
        for command in self._running:
            command.process.kill()
            command.process.join()


SWEEP = ("sweep", "tiny.yaml", "--threads", "1", "--out")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tokens of a run that nothing happens to."""
    bench = Bench(tmp_path_factory.mktemp("whole"))
    code, output = bench.sweep("run")
    assert code == 0, output
    assert bench.run("check-run", "run")[0] == 0
    tokens = bench.tokens("run")
    assert len(tokens) == child.IMAGES
    return tokens


@pytest.fixture
def outcome(record_property: Callable[[str, object], None]) -> Outcome:
    """What the program did, for the table of tests/faults/README.md."""
    return lambda text: record_property("outcome", text)
