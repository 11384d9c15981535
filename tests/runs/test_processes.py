"""Runs by several worker processes: the same images as one process makes, and what happens when a worker ends.

The workers are real; they find the tables of `tests/tiny_family.py` through an entry point.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lantern_bench.config.plan import Plan, Prompt, make_plan
from lantern_bench.runs.store import read_manifest, read_records
from tests.tiny_family import EXPERIMENT, PROMPTS

ROOT = Path(__file__).parents[2]
# A model whose images take long enough to be interrupted; `die` ends the process that decodes it.
SLOW = """
import os, time
from tests.tiny_family import TinyFamily, TinySession

class Slow(TinyFamily):
    def load(self, name, device, dtype):
        model = super().load(name, device, dtype)
        plain = model.condition
        def condition(prompts):
            time.sleep(float(os.environ.get("TINY_SLEEP", 0)))
            if os.environ.get("TINY_DIE") in prompts:
                os._exit(9)
            return plain(prompts)
        model.condition = condition
        return model

family = Slow()
"""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the experiment and with the family as an installed package."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "tiny.yaml").write_text(EXPERIMENT)
    (folder / "slow_family.py").write_text(SLOW)
    info = folder / "slow_family-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-family\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lantern_bench.families]\ntiny = slow_family:family\n")
    return folder


def start(at: Path, out: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(at), str(ROOT)])
    command = [sys.executable, "-m", "lantern_bench", "sweep", "tiny.yaml", "--out", out, *flags]
    settings = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        command, cwd=at, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def sweep(at: Path, out: str, *flags: str, **environment: str) -> tuple[int, str]:
    started = start(at, out, *flags, **environment)
    said = started.communicate(timeout=300)[1]
    return started.returncode, said


def tokens(folder: Path) -> dict[str, str]:
    return {row["record_key"]: row["tokens_sha256"] for row in read_records(folder)}


@pytest.fixture(scope="module")
def whole(at: Path) -> dict[str, str]:
    """The tokens of the run by one process."""
    code, said = sweep(at, "whole")
    assert code == 0, said
    return tokens(at / "whole")


def test_processes_make_the_images_of_one_process(at: Path, whole: dict[str, str]) -> None:
    code, said = sweep(at, "dealt", "--processes", "2")
    assert code == 0, said
    assert tokens(at / "dealt") == whole
    rows = read_records(at / "dealt")
    assert {row["process"] for row in rows} == {0, 1}
    by_prompt = {row["prompt_id"]: set[int]() for row in rows}
    for row in rows:
        by_prompt[row["prompt_id"]].add(row["process"])
    assert all(len(processes) == 1 for processes in by_prompt.values())
    sessions = read_manifest(at / "dealt")["sessions"]
    assert [one["process"] for one in sessions] == [0, 1] and all(one["complete"] for one in sessions)
    assert sessions[0]["ended"] <= sessions[1]["started"]


def test_a_resumed_run_continues_with_new_processes(at: Path, whole: dict[str, str]) -> None:
    assert sweep(at, "grown", "--images", "1")[0] == 0
    code, said = sweep(at, "grown", "--processes", "2")
    assert code == 0 and "6 images kept, 12 to do" in said
    assert sorted({row["process"] for row in read_records(at / "grown")}) == [0, 1, 2]
    assert tokens(at / "grown") == whole


def test_a_worker_that_dies_is_named_and_the_run_resumed(at: Path, whole: dict[str, str]) -> None:
    code, said = sweep(at, "died", "--processes", "3", TINY_DIE=PROMPTS[1])
    assert code == 4 and "error: worker process" in said and "of 3 ended with code 9" in said
    assert "The same command continues." in said
    code, said = sweep(at, "died", "--processes", "3")
    assert code == 0 and tokens(at / "died") == whole, said


def test_an_error_of_a_worker_is_the_error_of_the_command(at: Path) -> None:
    assert sweep(at, "refused", "--images", "1")[0] == 0
    code, said = sweep(at, "refused", "--processes", "2", "--set", "neighbour_space=normalised")
    assert code == 3 and "cannot resume refused" in said and "Traceback" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_the_worker_and_keeps_the_images(at: Path, whole: dict[str, str]) -> None:
    started = start(at, "stopped", "--processes", "2", TINY_SLEEP="0.3")
    deadline, records = time.monotonic() + 120, at / "stopped" / "records.jsonl"
    while not (records.exists() and len(records.read_bytes().splitlines()) >= 2):
        assert time.monotonic() < deadline and started.poll() is None, "no records to be interrupted after"
        time.sleep(0.05)
    os.kill(started.pid, signal.SIGINT)
    said = started.communicate(timeout=60)[1]
    kept = len(read_records(at / "stopped"))
    assert started.returncode == 130 and "Traceback" not in said
    assert f"interrupted: {kept} of 18 images are done" in said
    assert read_manifest(at / "stopped")["sessions"][0]["ended"] is not None
    code, said = sweep(at, "stopped", "--processes", "2")
    assert code == 0 and f"{kept} images kept" in said and tokens(at / "stopped") == whole


def test_prompts_are_dealt_in_equal_shuffled_shares(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 10)
    parts = plan.deal(plan, 3, seed=0)
    shares = [list(dict.fromkeys(unit.image_index for unit in part.units)) for part in parts]
    assert sorted(map(len, shares)) == [3, 3, 4] and sorted(chain(*shares)) == list(range(10))
    assert shares[0] != [0, 3, 6, 9]
    assert all([u.order_index for u in part.units] == sorted(u.order_index for u in part.units) for part in parts)
    assert parts == plan.deal(plan, 3, seed=0) != plan.deal(plan, 3, seed=1)


def plan_of(folder: Path, count: int, **flags: Any) -> Plan:
    from lantern_bench.config.experiment import load_experiment, resolve
    from lantern_bench.config.values import Overrides

    (folder / "tiny.yaml").write_text(EXPERIMENT)
    loaded = load_experiment(folder / "tiny.yaml", Overrides.from_flags({"images": count} | flags))
    return make_plan(resolve(loaded, {"tiny": {"cfg_scale": 2.0}}), [Prompt(f"prompt {n}") for n in range(count)])
