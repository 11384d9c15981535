"""Decode a request on a Ray cluster.

One worker decodes on each device. One driver gives shards to the workers and stores their images.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lantern_bench.config.plan import ImageTask, Plan
from lantern_bench.devices.environment import prepare_environment
from lantern_bench.storage.records import check_same_run
from lantern_bench.storage.run_directory import done_images
from lantern_bench.storage.run_store import RunStore
from lantern_bench.sweeps.events import ImageDone, Started
from lantern_bench.sweeps.request import DEFAULT_CLUSTER, Request
from lantern_bench.sweeps.worker_process import WorkerEndedError, events_of
from lantern_bench.utils import signals
from lantern_bench.utils.clock import collect_garbage, collect_seldom, now, stamp
from lantern_bench.utils.errors import LanternError, RecordsFailedError, RefusedError
from lantern_bench.utils.progress import Emit, Note, heard_by, ignore_events
from lantern_bench.utils.text import one_line

if TYPE_CHECKING:
    from lantern_bench.sweeps.decoder import Decoder, Result


# Most prompts of a shard. A shard encodes its captions at once, and a lost worker costs a shard.
_PROMPTS = 16
_SHARDS = 4  # shards per worker, so that all workers end at about the same time
# Limit of lost workers: of one shard, and of one device before its first image.
_LOSSES = 3
_PATIENCE = 60.0  # seconds to wait for a device if the cluster has none
_LOOK = 2.0  # seconds between two checks of the nodes


def decode_on_ray(request: Request, emit: Emit) -> None:
    """Decode the missing images on a Ray cluster."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise RefusedError(
            "--ray: Ray is not installed", "Type `pip install -e '.[ray]'` in the clone."
        ) from error
    try:
        # Ray writes pages to standard error when its head is gone.
        for event in events_of(
            drive, request, "the driver of the Ray cluster", stderr=subprocess.DEVNULL
        ):
            emit(event)
    except WorkerEndedError as error:
        raise _head_lost(request, error.message) from error


def _head_lost(request: Request, reason: str) -> RefusedError:
    return RefusedError(
        f"the Ray cluster is lost: its head has ended or was started again ({reason}); "
        f"{_kept(request)}",
        "Start or join a cluster; the same command continues.",
    )


def _kept(request: Request) -> str:
    return f"{len(done_images(request.folder))} images are kept in {request.folder}"


def drive(request: Request, emit: Emit) -> None:
    """Decode the missing images as a driver of Ray."""
    import ray

    address = request.ray if request.ray != DEFAULT_CLUSTER else os.environ.get("RAY_ADDRESS")
    doing = "starting a Ray cluster on this machine"
    if address:
        doing = f"joining the Ray cluster {address}"
    emit(Note(doing))
    connect(address or "local")
    try:
        RayDriver(ray, request, emit).run()
    except (ConnectionError, ray.exceptions.RpcError) as error:
        raise _head_lost(request, reason_of(error)) from error
    ray.shutdown()


# ---- The cluster


class DeviceSlot(NamedTuple):
    """The part of the cluster that a worker occupies."""

    node: str
    cpus: int
    gpus: int


def slots_of(
    nodes: Iterable[dict[str, Any]], device: str, threads: int | None
) -> Counter[DeviceSlot]:
    """Return the slots of the live nodes and their number.

    Args:
        nodes: The nodes as `ray.nodes()` returns them.
        device: `cuda` gives a slot per GPU, `cpu` a slot per node with enough cores. `auto` is
            `cuda` where a node has a GPU.
        threads: The cores that a worker on a CPU needs, by default one.
    """
    resources = {str(node["NodeID"]): node["Resources"] for node in nodes if node["Alive"]}
    has_gpu = any(has.get("GPU", 0) >= 1 for has in resources.values())
    on_gpus = device == "cuda" or (device == "auto" and has_gpu)
    slots: Counter[DeviceSlot] = Counter()
    for node, has in resources.items():
        cores = int(has.get("CPU", 0))
        gpus = int(has.get("GPU", 0))
        if on_gpus and gpus:
            slots[DeviceSlot(node, cpus=cores // gpus, gpus=1)] += gpus
        elif not on_gpus and cores >= (threads or 1):
            slots[DeviceSlot(node, cpus=cores, gpus=0)] += 1
    return slots


def connect(address: str) -> None:
    """Join the cluster at `address`. The address `local` starts a new one on this machine."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address not in ("auto", "local") and not _answers(address.removeprefix("ray://")):
        raise RefusedError(
            f"--ray {address}: no Ray cluster answers there",
            "Give auto on a node of the cluster, HOST:6379, or ray://HOST:10001.",
        )
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False if address == "local" else None,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RefusedError(
            f"--ray {address}: the Ray cluster cannot be joined: {one_line(error)}",
            "Start a cluster with `ray start --head`, "
            "or give --ray alone for a new one on this machine.",
        ) from error
    # Ray has set its own handler, which ends the process at once.
    signal.signal(signal.SIGTERM, on_terminate)


def _answers(address: str) -> bool:
    """Return whether something listens at `host:port`. Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return True
    except (OSError, ValueError):
        return False


def reason_of(error: Exception) -> str:
    """Return why a worker was lost.

    Addresses and numbers of nodes are left out, because manifests are published.
    """
    lines = [line.strip() for line in str(error).splitlines() if line and not line[0].isspace()]
    first_and_last = dict.fromkeys([*lines[:1], *lines[-1:]])
    text = " ".join(first_and_last) or type(error).__name__
    text = text.partition(" Some common causes")[0]
    return re.sub(r"\b([0-9a-f]{16,}|\d+(\.\d+){3})\b", "...", text)[:300]


# ---- The worker


class Ready(NamedTuple):
    """The answer of a worker that has loaded its models."""

    notes: list[Note]
    key: dict[str, Any]  # the fields of the record key that hold on this device
    session: dict[str, Any]  # its device and machine, for its entry in the manifest
    block: dict[str, Any]  # `compute_block`, for the manifest


class Worker:
    """The actor: the models of a run on one device."""

    decoder: Decoder

    def __init__(self) -> None:
        prepare_environment()
        collect_seldom()

    def load(self, request: Request, cores: int) -> Ready:
        """Load the models of a request. The images of its plan are timed to choose threads."""
        import torch

        from lantern_bench.devices.machine import compute_block, device_columns, machine_block
        from lantern_bench.models.load import load_to_decode
        from lantern_bench.sweeps.choose_threads import choose_threads_for
        from lantern_bench.sweeps.decode_missing import key_fields
        from lantern_bench.sweeps.decoder import Decoder, prepare_models

        settings = request.experiment.settings
        heard = list[Any]()
        compute, models = load_to_decode(request.experiment, heard.append)
        if compute.device.type == "cpu":
            torch.set_num_threads(settings.threads or cores)
        if settings.threads is None:
            with heard_by(heard.append):
                prepare_models(list(request.plan.batches()), models, emit=ignore_events)
            choose_threads_for(request.plan.tasks, models, emit=heard.append)
        self.decoder = Decoder(models, compute, {}, settings.redecodes)
        key = key_fields(models, settings, compute, cells=request.plan.cells)
        return Ready(
            # Progress that is over says nothing.
            notes=[event for event in heard if isinstance(event, Note)],
            key=key,
            session={"device": device_columns(compute.device), "machine": machine_block()},
            block=compute_block(compute, compiled=key["compile"]),
        )

    def decode(
        self, shard: Plan, missing: frozenset[int], session: dict[str, Any], threads: int
    ) -> Iterator[Note | Result | dict[str, Any]]:
        """Decode a shard.

        Args:
            shard: The images, in whole batches.
            missing: The `order_index` of each image to return.
            session: The session of this worker, which its first shard begins.
            threads: The number of threads, on a CPU.

        Yields:
            Notes and images, then the session.
        """
        import torch

        from lantern_bench.sweeps.decoder import prepare_models

        decoder = self.decoder
        if decoder.compute.device.type == "cpu":
            torch.set_num_threads(threads)
        batches = {}  # the images to return, by their batch
        for batch in shard.batches():
            tasks = [task for task in batch if task.order_index in missing]
            if tasks:
                batches[batch] = tasks
        prepare_seconds = prepare_models(list(batches), decoder.models, emit=ignore_events)
        if not decoder.session:
            decoder.session = session
            yield from decoder.warm_up(batches)
            collect_garbage()
        decoder.session["prepare_seconds"] += prepare_seconds
        for batch, tasks in batches.items():
            yield from decoder.decode(batch, tasks)
        yield decoder.session


# ---- The driver


def shards_of(plan: Plan, is_done: Callable[[ImageTask], bool], prompts: int) -> list[Plan]:
    """Divide a plan into shards of several prompts with all their cells.

    Args:
        plan: The images of a run.
        is_done: Whether an image is finished. Shards of finished images are left out.
        prompts: The number of prompts of a shard, at most; a shard has at least one batch.
    """
    size = max(1, prompts // plan.together) * plan.together
    blocks: dict[int, list[ImageTask]] = {}
    for task in plan.tasks:
        blocks.setdefault(task.image_index // size, []).append(task)
    return [
        replace(plan, tasks=tuple(tasks))
        for tasks in blocks.values()
        if not all(map(is_done, tasks))
    ]


def missing_of(shard: Plan, is_done: Callable[[ImageTask], bool], *, timed: bool) -> frozenset[int]:
    """Return the `order_index` of the images of a shard to decode.

    Args:
        shard: The shard.
        is_done: Whether an image is finished.
        timed: Whether the run measures speed. Then all images of a shard are timed together.
    """
    return frozenset(task.order_index for task in shard.tasks if timed or not is_done(task))


@dataclass
class WorkerHandle:
    """A worker as the driver sees it."""

    slot: DeviceSlot
    actor: Any
    # Ray's reference or generator of the answer to its last call; None while it has no work
    answer: Any
    shard: Plan | None = None
    # its entry in the manifest; empty while it loads the models
    session: dict[str, Any] = field(default_factory=dict)
    name: str = "a worker on a device"
    finished: int = 0  # shards
    last_answer: float = 0.0  # time of its last answer


class RayDriver:
    """Gives shards to workers, stores their images, and replaces lost workers.

    It runs in a separate process, because Ray ends the process of a driver whose head is gone.
    """

    _store: RunStore

    def __init__(self, ray: Any, request: Request, emit: Emit) -> None:
        self._ray = ray
        self._request = request
        self._emit = emit
        self._settings = request.experiment.settings
        self._workers: list[WorkerHandle] = []
        self._shards: deque[Plan] = deque()
        # lost workers by the first image of their shard
        self._losses: Counter[ImageTask] = Counter()
        # The store is opened when the first worker has sent its key.
        self._is_open = False
        self._threads = self._settings.threads
        # Shards after which a worker is replaced, where `--processes` asks for several per device.
        self._most_shards = math.inf
        self._failed_starts: Counter[DeviceSlot] = Counter()
        self._last_loss = ""
        self._last_look = -math.inf
        self._last_worker = now()

    def run(self) -> None:
        """Decode the missing images."""
        try:
            while not self._is_open or self._shards or self._is_decoding():
                signals.check()
                if now() - self._last_look > _LOOK:
                    self._start_workers()
                self._receive()
                for worker in self._workers:
                    if worker.session and worker.shard is None and self._shards:
                        self._give(worker, self._shards.popleft())
        finally:
            self._close()

    def _is_decoding(self) -> bool:
        return any(worker.shard for worker in self._workers)

    def _start_workers(self) -> None:
        """Start a worker on every device that has none, but no more workers than shards."""
        self._last_look = now()
        slots = slots_of(self._ray.nodes(), self._settings.device, self._threads)
        usable = Counter(
            {slot: n for slot, n in slots.items() if self._failed_starts[slot] < _LOSSES}
        )
        self._check_slots(slots, usable)
        free = usable - Counter(worker.slot for worker in self._workers)
        shards = len(self._shards) if self._is_open else max(1, len(self._request.plan.tasks))
        without_work = sum(worker.shard is None for worker in self._workers)
        for slot in islice(free.elements(), max(0, shards - without_work)):
            self._start(slot)
            device = "a GPU" if slot.gpus else f"{slot.cpus} CPU cores"
            self._emit(Note(f"waiting for a worker on {device} to load the models"))

    def _check_slots(self, slots: Counter[DeviceSlot], usable: Counter[DeviceSlot]) -> None:
        """Raise an error if no worker runs and none could be started for a while."""
        if self._workers:
            self._last_worker = now()
        elif slots and not usable:
            raise RecordsFailedError(
                f"no worker could be started: {self._last_loss}",
                "See the logs of the Ray nodes, /tmp/ray/session_latest/logs.",
            )
        elif not slots and (not self._is_open or now() - self._last_worker > _PATIENCE):
            kind = "GPU" if self._settings.device == "cuda" else "CPU"
            raise RefusedError(
                f"the Ray cluster has no {kind} for a worker; {_kept(self._request)}",
                "Start nodes that have one, or give another --device or fewer --threads. "
                "The same command continues.",
            )

    def _start(self, slot: DeviceSlot) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        placed = self._ray.remote(Worker).options(
            num_cpus=slot.cpus,
            num_gpus=slot.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
        )
        actor = placed.remote()
        plan = self._request.plan
        first = replace(plan, tasks=plan.tasks[: len(plan.cells) * plan.together])
        answer = actor.load.remote(replace(self._request, plan=first), slot.cpus)
        self._workers.append(WorkerHandle(slot, actor, answer))

    def _lose(self, worker: WorkerHandle, reason: Exception) -> None:
        """Requeue a lost shard first. After too many losses, mark its images as failed."""
        self._last_loss = reason_of(reason)
        self._remove(worker, lost=self._last_loss)
        self._emit(Note(f"{worker.name} is lost: {self._last_loss}", level="warning"))
        if worker.shard is None:  # it was loading the models
            self._failed_starts[worker.slot] += 1
            return
        first = worker.shard.tasks[0]
        self._losses[first] += 1
        if self._losses[first] < _LOSSES:
            self._shards.appendleft(worker.shard)
            return
        from lantern_bench.sweeps.decoder import Result

        error = f"lost {_LOSSES} workers: {self._last_loss}"
        for task in worker.shard.tasks:
            self._save(Result.failed(task, error, worker.session["process"]))

    def _remove(self, worker: WorkerHandle, **end: Any) -> None:
        self._workers.remove(worker)
        self._ray.kill(worker.actor)
        self._last_look = -math.inf
        self._end_session(worker, **end)

    def _end_session(self, worker: WorkerHandle, **end: Any) -> None:
        if worker.session:
            worker.session |= {"ended": stamp(), **end}
            self._store.update_manifest()

    def _close(self) -> None:
        """End the sessions. Ray ends the workers when their driver ends."""
        complete = not self._shards and not self._is_decoding()
        for worker in self._workers:
            self._end_session(worker, complete=complete)
        if self._is_open:
            self._store.update_manifest(ended=stamp())
            self._store.close()

    def _receive(self) -> None:
        """Wait a moment for answers of workers and handle them. Replace silent workers."""
        waiting = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        answered = []
        if waiting:
            answered, _ = self._ray.wait(list(waiting), timeout=1.0)
        for reference in answered:
            worker = waiting[reference]
            try:
                answer = self._ray.get(next(reference) if worker.session else reference)
            except StopIteration:
                self._finish_shard(worker)
            except self._ray.exceptions.RayTaskError as error:
                # An error of this package, or a bug, which would occur again.
                raise error.cause if isinstance(error.cause, LanternError) else error from None
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
            else:
                self._handle(worker, answer)
        limit = self._request.worker_timeout
        for worker in list(self._workers):
            if worker.shard and now() - worker.last_answer > limit:
                self._lose(worker, TimeoutError(f"no answer in {limit:g} s (--worker-timeout)"))

    def _finish_shard(self, worker: WorkerHandle) -> None:
        """Free a worker that has decoded its shard, or replace it after `_most_shards`."""
        worker.answer = None
        worker.shard = None
        worker.finished += 1
        if worker.finished >= self._most_shards:
            self._remove(worker, complete=True)

    def _handle(self, worker: WorkerHandle, answer: Ready | Note | Result | dict[str, Any]) -> None:
        worker.last_answer = now()
        if isinstance(answer, Ready):
            self._admit(worker, answer)
        elif isinstance(answer, dict):
            worker.session |= answer
        elif not isinstance(answer, Note):
            self._save(answer)
        elif worker is self._workers[0]:
            self._emit(answer)

    def _admit(self, worker: WorkerHandle, ready: Ready) -> None:
        """Open the session of a worker with loaded models. The first one opens the store."""
        if not self._is_open:
            self._open(ready)
        store = self._store
        device = ready.session["device"]["device"]
        check_same_run(
            folder=f"{store.folder.name} on {device}",
            manifest=store.manifest,
            wanted={"key": ready.key},
            finished=store.finished,
        )
        worker.session = store.begin_session(**ready.session)
        worker.answer = None
        worker.name = f"worker {worker.session['process']} on {device}"
        self._emit(Note(f"worker {worker.session['process']} joined on {device}"))

    def _open(self, ready: Ready) -> None:
        """Open the store and divide the missing images into shards."""
        from lantern_bench.sweeps.decode_missing import begin_run

        request = self._request
        store = RunStore.open(request.folder, request.experiment, ready.key)
        self._store = store
        self._is_open = True
        self._threads = store.threads or self._settings.threads or ready.block["threads"]
        begin_run(
            store,
            request,
            machine=ready.session["machine"],
            load_before=round(psutil.getloadavg()[0], 2),
            **(ready.block | {"threads": self._threads}),
        )
        devices = slots_of(self._ray.nodes(), self._settings.device, self._threads).total()
        images = len({task.image_index for task in request.plan.tasks})
        prompts = min(images // (_SHARDS * max(1, devices)), _PROMPTS)
        self._shards = deque(shards_of(request.plan, store.is_done, prompts))
        if self._settings.processes > 1:
            self._most_shards = math.ceil(len(self._shards) / self._settings.processes)
        for note in ready.notes:
            self._emit(note)
        self._emit(Started.of(request.plan, store.missing(request.plan.tasks)))

    def _give(self, worker: WorkerHandle, shard: Plan) -> None:
        missing = missing_of(shard, self._store.is_done, timed="speed" in self._settings.metrics)
        decode = worker.actor.decode.options(num_returns="streaming")
        worker.answer = decode.remote(shard, missing, worker.session, self._threads)
        worker.shard = shard
        worker.last_answer = now()

    def _save(self, result: Result) -> None:
        """Store an image, and report it unless it was finished before."""
        was_done = self._store.is_done(result.task)
        if result.png is None and was_done:
            return  # a failed image never replaces a finished one
        record = self._store.append(*result)
        if not was_done:
            self._emit(ImageDone(result.task, record))
