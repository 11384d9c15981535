"""Sweeps on a real Ray cluster of this machine: tokens of a local run, lost nodes and workers, a
lost head.

The workers find the tables of `tests/helpers/tiny_model.py` through an entry point; images take
some hundredths of a second.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.plan import Plan, make_plan
from lantern_bench.config.settings import Overrides
from lantern_bench.models import registry
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.storage.run_directory import read_manifest, read_records
from lantern_bench.sweeps import choose_threads, decoder, ray_cluster
from lantern_bench.sweeps.ray_cluster import DeviceSlot, missing_of, shards_of, slots_of
from lantern_bench.sweeps.request import prepare
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.progress import Note, ProgressEvent, tell
from tests.faults.child import install
from tests.helpers.tiny_model import EXPERIMENT, PROMPTS, TinyModel

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
# A minute or two in all; on a busy machine every process takes long to start.
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="clusters"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
IMAGES = 12
CELLS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the experiment and with the family as an installed package, known to the nodes
    of clusters.
    """
    folder = tmp_path_factory.mktemp("ray")
    install(folder, EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TINY_SLEEP", "0.02")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield folder


Cluster = Any
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def one_node() -> Cluster:
    from ray.cluster_utils import Cluster

    return Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})


@pytest.fixture
def other(home: Path) -> Iterator[Cluster]:
    """A cluster of one node, for one test."""
    created = one_node()
    yield created
    created.shutdown()


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Cluster]:
    """A cluster of two nodes with a core each."""
    created = one_node()
    created.add_node(**NODE)
    created.wait_for_nodes()
    yield created
    created.shutdown()


def start(home: Path, out: str, flags: Iterable[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lantern_bench", "sweep", "tiny.yaml", "--out", out]
    command += ["--images", str(IMAGES), "--threads", "1", *flags, "-v"]
    return subprocess.Popen(
        command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def sweep(home: Path, out: str, *flags: str) -> tuple[int, str]:
    started = start(home, out, flags)
    output = started.communicate(timeout=600)[1]
    return started.returncode, output


def on(cluster: Cluster) -> tuple[str, ...]:
    return ("--ray", cluster.address)


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "records.jsonl"
    return (
        [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    )


def tokens(folder: Path) -> dict[str, str]:
    return {row["record_key"]: row["tokens_sha256"] for row in read_records(folder)}


def wait_for(
    started: subprocess.Popen[str], folder: Path, enough: Callable[[list[dict[str, Any]]], bool]
) -> None:
    deadline = time.monotonic() + 300
    while not enough(lines(folder)):
        if started.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(
                f"the run has {len(lines(folder))} records: {started.communicate()[1]}"
            )
        time.sleep(0.02)


@pytest.fixture(scope="module")
def local(home: Path) -> dict[str, str]:
    """The tokens of the run by this machine alone."""
    code, output = sweep(home, "local")
    assert code == 0, output
    expected = tokens(home / "local")
    assert len(expected) == IMAGES * CELLS
    return expected


def images_in_tables(folder: Path) -> list[tuple[str, int]]:
    """Cells and their numbers of images in the summary."""
    with (folder / "summary.csv").open(newline="") as file:
        return [(row["cell_id"], int(row["images"])) for row in csv.DictReader(file)]


def check_pairs(rows: list[dict[str, Any]]) -> None:
    """All cells of an image are of one process."""
    processes = defaultdict(set)
    for row in rows:
        processes[row["prompt_id"], row["repeat"]].add(row["process"])
    assert all(len(numbers) == 1 for numbers in processes.values())


@pytest.mark.long
def test_a_cluster_makes_the_images_of_a_local_run(
    home: Path, cluster: Cluster, local: dict[str, str]
) -> None:
    code, output = sweep(home, "whole", *on(cluster))
    assert code == 0, output
    for words in ("joining the Ray cluster", "waiting for a worker on ", "worker 1 joined on "):
        assert words in output
    assert tokens(home / "whole") == local
    rows = lines(home / "whole")
    assert len(rows) == IMAGES * CELLS
    assert {row["process"] for row in rows} == {0, 1}
    assert all(row["device"] and row["device_id"] and row["status"] == "ok" for row in rows)
    check_pairs(rows)
    manifest = read_manifest(home / "whole")
    assert manifest["engine"] == "ray"
    assert manifest["threads"] == 1
    assert [(session["process"], session["complete"]) for session in manifest["sessions"]] == [
        (0, True),
        (1, True),
    ]
    assert sum(session["images"] for session in manifest["sessions"]) == IMAGES * CELLS
    assert (home / "whole" / "speed.csv").read_text().count("\n") == CELLS + 1
    pictures = {path.relative_to(home / "whole") for path in (home / "whole").rglob("*.png")}
    assert pictures == {Path(row["image"]) for row in rows}


def test_of_two_nodes_one_is_killed_and_no_image_lost(
    home: Path, cluster: Cluster, local: dict[str, str]
) -> None:
    folder = home / "lost-node"
    (second,) = cluster.worker_nodes
    started = start(home, folder.name, on(cluster))
    try:
        wait_for(started, folder, lambda rows: len({row["process"] for row in rows}) == 2)
        cluster.remove_node(second, allow_graceful=False)
        assert len(lines(folder)) < IMAGES * CELLS, "the node was killed after the run"
        output = started.communicate(timeout=600)[1]
    finally:
        if second not in cluster.worker_nodes:
            cluster.add_node(**NODE)
            cluster.wait_for_nodes()
    assert started.returncode == 0, output
    assert "is lost" in output
    rows = read_records(folder)
    assert [row["status"] for row in rows] == ["ok"] * len(local)
    # Every image of the local run, each once, with its tokens.
    assert sorted((row["record_key"], row["tokens_sha256"]) for row in rows) == sorted(
        local.items()
    )
    assert [count for _, count in images_in_tables(folder)] == [IMAGES] * CELLS
    check_pairs(rows)
    # The images of the shard that the node had begun were made again, all of them, and replaced.
    again = Counter(row["record_key"] for row in lines(folder))
    replaced = [row for row in lines(folder) if again[row["record_key"]] == 2]
    assert max(again.values()) <= 2
    assert len({(row["prompt_id"], row["repeat"]) for row in replaced}) <= 1
    assert all(local[row["record_key"]] == row["tokens_sha256"] for row in replaced)
    sessions = read_manifest(folder)["sessions"]
    assert ["lost" in session for session in sessions].count(True) == 1
    assert len(sessions) == 2


@pytest.mark.long
def test_a_shard_that_loses_every_worker_fails_alone(home: Path, cluster: Cluster) -> None:
    (home / "die").write_text(PROMPTS[1])
    try:
        code, output = sweep(home, "failed", *on(cluster), "--images", "3", "--modes", "ar")
    finally:
        (home / "die").unlink()
    rows = read_records(home / "failed")
    assert code == 4, output
    assert "1 of 3 images failed" in output
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["prompt"] for row in failed} == {PROMPTS[1]}
    assert "lost 3 workers" in failed[0]["error"]
    assert {row["prompt"] for row in rows if row["status"] == "ok"} == {PROMPTS[0], PROMPTS[2]}
    # Two devices lost three workers, so one at least was replaced.
    sessions = read_manifest(home / "failed")["sessions"]
    assert sum("lost" in session for session in sessions) == 3
    assert len({session["process"] for session in sessions}) == len(sessions)


@pytest.mark.long
def test_several_processes_share_a_device_one_after_the_other(home: Path, cluster: Cluster) -> None:
    code, output = sweep(
        home, "dealt", *on(cluster), "--processes", "3", "--modes", "ar", "--images", "6"
    )
    assert code == 0, output
    counts = Counter(row["process"] for row in read_records(home / "dealt"))
    assert sum(counts.values()) == 6
    assert len(counts) >= 3


@pytest.mark.long
def test_an_error_of_a_worker_is_the_error_of_the_command(
    home: Path, cluster: Cluster, local: dict[str, str]
) -> None:
    before = lines(home / "local")
    code, output = sweep(home, "local", *on(cluster), "--set", "neighbour_space=normalised")
    assert code == 3
    assert "cannot resume local" in output
    assert "Traceback" not in output
    assert lines(home / "local") == before


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_a_lost_or_restarted_head_is_refused_and_the_run_resumed(
    home: Path, cluster: Cluster, other: Cluster, local: dict[str, str], *, again: bool
) -> None:
    folder = home / f"head-{again}"
    started = start(home, folder.name, on(other))
    wait_for(started, folder, lambda rows: len(rows) >= 8)
    other.head_node.kill_gcs_server()
    if again:
        other.head_node.start_gcs_server()
    output = started.communicate(timeout=300)[1]
    assert started.returncode == 3, output
    assert "the Ray cluster is lost: its head has ended or was started again" in output
    assert "Traceback" not in output
    finished = tokens(folder)
    assert f"{len(finished)} images are kept in {folder.name}" in output
    assert "the same command continues" in output
    assert finished.items() <= local.items()
    assert len(finished) < len(local)
    code, output = sweep(home, folder.name, *on(cluster))
    assert code == 0, output
    assert f"{len(finished)} images kept" in output
    assert tokens(folder) == local
    check_pairs(read_records(folder))


@pytest.mark.long
def test_ctrl_c_keeps_the_images_and_frees_the_devices(
    home: Path, cluster: Cluster, local: dict[str, str]
) -> None:
    started = start(home, "stopped", on(cluster))
    wait_for(started, home / "stopped", lambda rows: len(rows) >= 8)
    started.send_signal(signal.SIGINT)
    output = started.communicate(timeout=60)[1]
    finished = tokens(home / "stopped")
    assert started.returncode == 130
    assert "Traceback" not in output
    assert f"interrupted: {len(finished)} of {IMAGES * CELLS} images are done" in output
    assert all(session["ended"] for session in read_manifest(home / "stopped")["sessions"])
    code, output = sweep(home, "stopped", *on(cluster))
    assert code == 0, output
    assert tokens(home / "stopped") == local


def test_the_reason_of_a_loss_names_no_machine() -> None:
    error = RuntimeError(
        "The actor died.\n\tpid: 77\n\tip: 10.0.0.7\nIts node 10.0.0.7 ("
        + "0a" * 14
        + ") has died."
    )
    assert ray_cluster.reason_of(error) == "The actor died. Its node ... (...) has died."


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(
        RefusedError, match=re.escape("--ray 127.0.0.1:9: no Ray cluster answers there")
    ):
        ray_cluster.connect("127.0.0.1:9")


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"memory": 1e9, **resources}}


def test_every_device_has_one_slot_and_its_share_of_the_cores() -> None:
    gpus = [
        node("a", CPU=32, GPU=4),
        node("b", CPU=8, GPU=1),
        node("c", CPU=16),
        node("d", alive=False, CPU=8, GPU=8),
    ]
    assert slots_of(gpus, "auto", None) == {
        DeviceSlot("a", 8, 1): 4,
        DeviceSlot("b", 8, 1): 1,
    }
    assert slots_of(gpus, "cpu", None) == {
        DeviceSlot("a", 32, 0): 1,
        DeviceSlot("b", 8, 0): 1,
        DeviceSlot("c", 16, 0): 1,
    }
    assert slots_of(gpus, "cpu", 12).keys() == {DeviceSlot("a", 32, 0), DeviceSlot("c", 16, 0)}, (
        "b has too few cores"
    )
    assert slots_of([node("c", CPU=16), node("head", CPU=0)], "auto", None) == {
        DeviceSlot("c", 16, 0): 1
    }
    assert not slots_of([node("c", CPU=16)], "cuda", None)


def tiny_plan(home: Path, **flags: str) -> Plan:
    resolved = load_experiment(
        home / "tiny.yaml", {"tiny": TinyModel.defaults}, Overrides.from_flags(flags)
    )
    return make_plan(resolved, [Prompt(text) for text in PROMPTS])


def test_a_shard_has_all_cells_of_its_prompts(home: Path) -> None:
    plan = tiny_plan(home, images="9", batch="2")
    shards = shards_of(plan, lambda _task: False, 4)
    assert [len({task.image_index for task in shard.tasks}) for shard in shards] == [4, 4, 1]
    assert list(chain.from_iterable(shard.tasks for shard in shards)) == list(plan.tasks)
    batches = chain.from_iterable(shard.batches() for shard in shards)
    assert list(batches) == list(plan.batches())


def test_a_timed_shard_is_decoded_again_and_an_untimed_one_completed(home: Path) -> None:
    plan = tiny_plan(home, images="3")
    done = {plan.tasks[0], *(task for task in plan.tasks if task.image_index == 2)}
    shards = shards_of(plan, done.__contains__, 1)
    assert [len(shard.tasks) for shard in shards] == [CELLS, CELLS]
    assert [len(missing_of(shard, done.__contains__, timed=True)) for shard in shards] == [
        CELLS,
        CELLS,
    ]
    assert [len(missing_of(shard, done.__contains__, timed=False)) for shard in shards] == [
        CELLS - 1,
        CELLS,
    ]


def test_a_device_of_this_machine_is_refused_on_a_cluster(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "models", lambda: {"tiny": TinyModel()})
    overrides = Overrides.from_flags({"device": "cuda:1"})
    with pytest.raises(
        UserError, match="--device cuda:1: with --ray, Ray gives each worker its device"
    ):
        prepare(home / "tiny.yaml", overrides, ray="auto")


def test_what_a_worker_says_of_its_captions_reaches_the_driver(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_models(*_args: Any, **_named: Any) -> float:
        tell(ProgressEvent("captions", 1, 2))
        tell(Note("1 of 2 captions are longer"))
        return 0.0

    monkeypatch.setattr(registry, "models", lambda: {"tiny": TinyModel()})
    monkeypatch.setattr(decoder, "prepare_models", prepare_models)
    monkeypatch.setattr(choose_threads, "choose_threads_for", lambda *_args, **_named: None)
    overrides = Overrides.from_flags({"images": "2", "device": "cpu"})
    request = prepare(home / "tiny.yaml", overrides, out=tmp_path / "run", ray="auto")
    notes = ray_cluster.Worker().load(request, 1).notes
    assert [note.text for note in notes if note.level != "detail"] == ["1 of 2 captions are longer"]
