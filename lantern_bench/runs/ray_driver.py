"""The Ray engine: one worker for each device of a cluster, shards of prompts, and the one store of the run.

The driver is a process of its own, since Ray ends the process of a driver whose head is gone; the command then says so.
A shard is a block of prompts with all their cells: the images that are compared come from one device. Records go to the
store as they come. The shard of a lost worker is decoded again as a whole, and its records replace those of the same
keys. Ray restarts nothing here: it could not know that a shard must be timed whole.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lantern_bench import stopping
from lantern_bench.clock import now, stamp
from lantern_bench.errors import LanternError, RecordsFailedError, RefusedError
from lantern_bench.runs.keys import check_same_key
from lantern_bench.runs.processes import WorkerEndedError, events_of
from lantern_bench.runs.ray_cluster import LOOK, Head, HeadLostError, Slot, answers, connect, reason_of, slots_of
from lantern_bench.runs.ray_worker import Batch, Ready, Started, Worker
from lantern_bench.runs.store import RunStore, done_images

if TYPE_CHECKING:
    from lantern_bench.config.plan import Plan, Unit
    from lantern_bench.runs.runner import Event
    from lantern_bench.runs.sweep import Request

    Tell = Callable[[Event], None]

RESUME_ADVICE = "Start or join a cluster; the same command continues."

# Prompts of a shard at most: each shard encodes its captions at once, and a lost worker costs one shard.
_PROMPTS = 16
# Shards for each worker, so that all end at about the same time.
_SHARDS = 4
# Batches that a worker has at once: the second waits at the worker, so that no device waits for the driver.
_AHEAD = 2
# How often a shard may lose its worker, and a device its worker before the first image.
_LOSSES = 3
# Seconds without any device.
_PATIENCE = 60.0


# ---- The command's side


def run_on_ray(request: Request, tell: Tell) -> int:
    """Run a request on a Ray cluster, from a new process; return how many images failed. Raises as `sweep.run`.

    Raises `RefusedError` when Ray is not installed, the cluster cannot be reached, has no device of the wanted kind, or
    loses its head.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise RefusedError("--engine ray: Ray is not installed", "pip install 'lantern-bench[ray]'") from error
    # Ray writes pages there when its head is gone.
    with tempfile.TemporaryFile() as said:
        try:
            for event in events_of(drive, request, "the driver of the Ray cluster", said=said):
                tell(event)
        except WorkerEndedError as error:
            raise head_lost(request, str(error)) from error
    done = done_images(request.folder)
    return sum((unit.cell.cell_id, unit.prompt.id, unit.repeat) not in done for unit in request.plan.units)


def head_lost(request: Request, why: str) -> RefusedError:
    """Return the error for a cluster whose head has ended or was started again."""
    made = len(done_images(request.folder))
    what = f"the Ray cluster is lost: its head has ended or was started again ({why})"
    return RefusedError(f"{what}; {made} images are kept in {request.folder}", RESUME_ADVICE)


# ---- The driver's side


def drive(request: Request, tell: Tell) -> None:
    """Decode and score a request as a driver of Ray. Raises as `run_on_ray`."""
    import ray

    from lantern_bench.runs.ray_scoring import score_on_ray
    from lantern_bench.runs.sweep import load_scorers_of

    # Before any image: missing weights of scorers are found here.
    scorers, reference = load_scorers_of(request, "auto")
    head = connect(request.workers.address)
    fleet = Fleet(ray, request, tell, head)
    try:
        fleet.run()
        if scorers is not None and done_images(request.folder):
            score_on_ray(ray, request, scorers, reference, tell)
    except (ConnectionError, HeadLostError) as error:
        tell(head_lost(request, str(error)))  # type: ignore[arg-type]
        # Ray's own exit would wait a minute for the head.
        os._exit(RefusedError.exit_code)
    ray.shutdown()


@dataclass
class Block:
    """A shard: its batches with the images that each must give, how many have not come, how often a worker was lost."""

    batches: list[tuple[tuple[Unit, ...], list[Unit]]]
    left: int = 0
    losses: int = 0

    @property
    def prompts(self) -> int:
        """How many images of a cell it has."""
        return len({unit.image_index for group, _ in self.batches for unit in group})


def blocks_of(plan: Plan, done: Callable[[Unit], bool], prompts: int, *, whole: bool) -> list[Block]:
    """Divide the images that are not done into blocks of `prompts` prompts with all their cells, in the plan's order.

    With `whole`, a block with a missing image gives all of its images again, so that they are timed together.
    """
    size = max(1, prompts // plan.together) * plan.together
    found: dict[int, list[Unit]] = {}
    for unit in plan.units:
        found.setdefault(unit.image_index // size, []).append(unit)
    blocks = []
    for units in found.values():
        if all(map(done, units)):
            continue
        batches = [
            (group, [unit for unit in group if whole or not done(unit)])
            for group in replace(plan, units=tuple(units)).batches()
        ]
        blocks.append(Block([one for one in batches if one[1]]))
    return blocks


class Call(NamedTuple):
    """A call that a worker has not answered; a batch has its block."""

    ref: Any
    block: Block | None = None


@dataclass
class Member:
    """A worker: its actor, its calls in order, the batches it has not been given, its entry in the manifest."""

    slot: Slot
    actor: Any
    calls: deque[Call] = field(default_factory=deque)
    batches: deque[tuple[Block, tuple[Unit, ...], list[Unit], Sequence[Unit]]] = field(default_factory=deque)
    ready: Ready | None = None
    started: bool = False
    session: dict[str, Any] = field(default_factory=dict)
    finished: int = 0
    answered: float = 0.0

    @property
    def blocks(self) -> list[Block]:
        """The blocks it has begun or been given, in order."""
        given = [call.block for call in self.calls if call.block] + [block for block, *_ in self.batches]
        return list({id(block): block for block in given}.values())


class Fleet:
    """The workers of a run: gives them shards, stores what they make, replaces those that are lost."""

    def __init__(self, ray: Any, request: Request, tell: Tell, head: Head) -> None:
        self._ray, self._request, self._tell, self._head = ray, request, tell, head
        self._settings = request.experiment.settings
        self._timed = "speed" in self._settings.metrics
        self._actor = ray.remote(Worker)
        self._members: list[Member] = []
        self._todo: deque[Block] = deque()
        self._kinds: list[tuple[Unit, ...]] = []
        self._store: RunStore | None = None
        self._threads: int | None = None
        self._told: set[str] = set()
        self._failed_starts: Counter[Slot] = Counter()
        self._share, self._looked, self._seen = math.inf, -math.inf, now()
        self._devices: set[str] = set()

    def run(self) -> None:
        """Make the missing images."""
        try:
            self._reconcile(first=True)
            while True:
                stopping.check()
                self._head.check()
                self._reconcile()
                self._receive()
                if self._store is not None and not self._todo and not any(one.blocks for one in self._members):
                    break
        finally:
            if self._store is not None:
                self._end()

    def _slots(self) -> Counter[Slot]:
        settings = self._settings
        threads = self._threads or settings.threads
        found = slots_of(self._ray.nodes(), settings.device, threads, self._request.workers)
        return Counter({slot: count for slot, count in found.items() if self._failed_starts[slot] < _LOSSES})

    def _reconcile(self, *, first: bool = False) -> None:
        """Start a worker on every device that has none; of a lost node its devices are gone."""
        if now() - self._looked < LOOK:
            return
        self._looked, slots = now(), self._slots()
        if first and not slots:
            kind = "GPU" if self._settings.device == "cuda" else "CPU"
            what = f"the Ray cluster has no {kind} for a worker: it has {self._ray.cluster_resources() or 'nothing'}"
            raise RefusedError(what, "Start nodes that have one, or give another --device or fewer --threads.")
        if self._members:
            self._seen = now()
        elif now() - self._seen > _PATIENCE:
            made = len(done_images(self._request.folder))
            what = f"the Ray cluster has no device left; {made} images are kept in {self._request.folder}"
            raise RefusedError(what, RESUME_ADVICE)
        wanted = slots - Counter(member.slot for member in self._members)
        # No more workers than shards.
        most = len(self._todo) if self._store is not None else max(1, len(self._request.plan.units))
        for slot in sorted(wanted.elements(), key=lambda one: (-one.cpus, str(one.node))):
            if sum(not member.blocks for member in self._members) < most:
                self._members.append(self._start(slot))

    def _start(self, slot: Slot) -> Member:
        options: dict[str, Any] = {"num_cpus": slot.cpus, "num_gpus": slot.gpus, "max_restarts": 0}
        if slot.node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(slot.node, soft=False)
        member = Member(slot, self._actor.options(**options).remote())
        empty = self._request._replace(plan=replace(self._request.plan, units=()))
        member.calls.append(Call(member.actor.load.remote(empty)))
        return member

    def _receive(self) -> None:
        """Wait a moment for answers, and deal with those that came."""
        waiting = {member.calls[0].ref: member for member in self._members if member.calls}
        came, _ = self._ray.wait(list(waiting), timeout=1.0) if waiting else ([], [])
        for ref in came:
            member, errors = waiting[ref], self._ray.exceptions
            try:
                answer = self._ray.get(ref)
            except errors.RayTaskError:
                raise  # a fault of the code: it would come again
            except errors.RayError as error:
                self._lose(member, error)
                continue
            call, member.answered = member.calls.popleft(), now()
            if isinstance(answer, LanternError):
                raise answer
            if isinstance(answer, Ready):
                self._admit(member, answer)
            elif isinstance(answer, Started):
                self._begin(member, answer)
            elif call.block is not None:
                self._keep(member, call.block, answer)
        for member in list(self._members):
            # A worker that is not ready may be waiting for its device.
            if member.ready and member.calls and now() - member.answered > self._request.worker_timeout:
                self._lose(member, TimeoutError(f"no answer in {self._request.worker_timeout:g} s (--worker-timeout)"))
            else:
                self._feed(member)

    # -- What a worker goes through: ready, started, batches; or lost

    def _admit(self, member: Member, ready: Ready) -> None:
        """A worker has loaded the models: open the store for the first, compare the key of the others with it."""
        from lantern_bench.runs.runner import Loaded

        member.ready = ready
        if self._store is None:
            self._open(ready)
            self._tell(Loaded(ready.place, ready.compile_problem))
        else:
            where = f"{self._request.folder.name} on {ready.device['device']}"
            check_same_key(where, self._store.key, ready.key, self._store.finished)

    def _open(self, ready: Ready) -> None:
        """Open the store, divide the missing images into blocks, and say what there is to do."""
        from lantern_bench.runs import runner
        from lantern_bench.runs.sweep import manifest_facts

        request = self._request
        self._store = store = RunStore(request.folder, request.experiment, ready.key)
        facts = manifest_facts(request)
        facts |= {"started": store.manifest.get("started", stamp()), "ended": None, "machine": ready.machine}
        self._threads = runner.known_threads(store, self._settings.threads)
        facts |= ready.facts | ({} if self._threads is None else {"threads": self._threads})
        store.update_manifest(**facts, load_before=round(psutil.getloadavg()[0], 2))
        count = self._slots().total() or 1
        slots = max(len({unit.image_index for unit in request.plan.units}) // (_SHARDS * count), 1)
        blocks = blocks_of(request.plan, store.is_done, min(slots, _PROMPTS), whole=self._timed)
        self._todo = deque(blocks)
        if self._settings.processes > 1:
            self._share = math.ceil(len(blocks) / self._settings.processes)
        self._kinds = runner.kinds_of(group for block in blocks for group, _ in block.batches)
        waiting = Counter(unit.cell.cell_id for unit in request.plan.units if not store.is_done(unit))
        self._told = {store.key_of(unit) for unit in request.plan.units if store.is_done(unit)}
        self._tell(runner.Started(len(request.plan.units) - waiting.total(), waiting))

    def _begin(self, member: Member, started: Started) -> None:
        """A worker is warm: note how it decodes."""
        from lantern_bench.runs.runner import WorkerJoined

        assert self._store is not None and member.ready is not None
        member.started = True
        if self._threads is None:
            self._threads = started.threads
            self._store.update_manifest(threads=started.threads)
            if started.calibrated is not None:
                self._tell(started.calibrated)
        member.session["prepare_seconds"] = started.prepare_seconds
        for warmed in started.warmed:
            if len(self._sessions) == 1:
                self._tell(warmed)
        name = str(member.ready.device["device"])
        self._devices.add(name)
        self._tell(WorkerJoined(member.session["process"], name, len(self._devices)))

    @property
    def _sessions(self) -> list[dict[str, Any]]:
        assert self._store is not None
        return list(self._store.manifest.get("sessions", []))

    def _feed(self, member: Member) -> None:
        """Give a worker its next call."""
        if self._store is None or member.ready is None or not (self._todo or member.batches):
            return
        if not member.session:
            on_cpu = member.ready.place.device.type == "cpu"
            if on_cpu and self._threads is None and any(one.session for one in self._members):
                return  # another worker finds out how many threads are fastest
            self._open_session(member)
            process, threads = member.session["process"], self._threads if on_cpu else None
            call = member.actor.start.remote(self._kinds, process, threads, self._timed)
            member.calls.append(Call(call))
        if not member.calls:
            member.answered = now()
        while member.started and len(member.calls) < _AHEAD and self._next_batch(member):
            block, group, waiting, units = member.batches.popleft()
            member.calls.append(Call(member.actor.decode.remote(group, waiting, units), block))

    def _open_session(self, member: Member) -> None:
        from lantern_bench.runs.runner import new_session

        assert self._store is not None and member.ready is not None
        sessions = self._sessions
        known = (one["process"] for one in sessions)
        process = max(self._store.next_process(), 1 + max(known, default=-1))
        about = {"device": member.ready.device, "machine": member.ready.machine}
        member.session = new_session(process) | about
        self._store.update_manifest(sessions=[*sessions, member.session])

    def _next_batch(self, member: Member) -> bool:
        """Return whether the worker has a batch to be given, taking a new block if need be."""
        if not member.batches and self._todo and member.finished + len(member.blocks) < self._share:
            block = self._todo.popleft()
            block.left = len(block.batches)
            units = [unit for group, _ in block.batches for unit in group]
            for number, (group, waiting) in enumerate(block.batches):
                member.batches.append((block, group, waiting, () if number else units))
        return bool(member.batches)

    def _keep(self, member: Member, block: Block, batch: Batch) -> None:
        """Store the images of a batch; a failed one never replaces a finished one."""
        from lantern_bench.runs.runner import store_image

        assert self._store is not None
        for image in batch.images:
            if image.png is not None or not self._store.is_done(image.unit):
                done = store_image(self._store, image)
                self._show(done)
        member.session |= {key: batch.session[key] for key in ("images", "failed", "first_seconds", "again_seconds")}
        member.session |= {key: batch.session[key] for key in ("warm_up", "prepare_seconds")}
        if not self._timed:
            block.batches = [one for one in block.batches if not {i.unit for i in batch.images} >= set(one[1])]
        block.left -= 1
        member.finished += block.left == 0
        if member.finished >= self._share and not member.calls and not member.batches:
            self._retire(member)

    def _show(self, done: Any) -> None:
        """Tell of an image once, however often its shard was decoded."""
        assert self._store is not None
        key = str(done.record["record_key"])
        if key not in self._told:
            self._told.add(key)
            self._tell(done)

    def _retire(self, member: Member) -> None:
        """End a worker that has made its share of the run (`--processes`); the next takes its device."""
        assert self._store is not None
        member.session |= {"ended": stamp(), "complete": True}
        self._store.update_manifest()
        self._members.remove(member)
        self._ray.kill(member.actor)
        self._looked = -math.inf

    def _lose(self, member: Member, error: Exception) -> None:
        """A worker is lost: its shards go back to the front of the queue, to be decoded as wholes."""
        from lantern_bench.runs.runner import WorkerLost

        self._members.remove(member)
        self._ray.kill(member.actor)
        blocks, why = member.blocks, reason_of(error)
        if not member.finished and not blocks:
            self._failed_starts[member.slot] += 1
            if not self._members and not self._slots():
                what = f"no worker could be started: {why}"
                raise RecordsFailedError(what, "See the logs of the Ray nodes, /tmp/ray/session_latest/logs.")
        for number, block in enumerate(blocks):
            block.losses += number == 0  # the others had not begun
        for block in reversed(blocks):
            if block.losses < _LOSSES:
                self._todo.appendleft(block)
            else:
                self._give_up(block, why, member)
        if self._store is not None and member.session:
            member.session |= {"ended": stamp(), "lost": why}
            self._store.update_manifest()
        device = str(member.ready.device["device"]) if member.ready else "a device"
        self._tell(WorkerLost(member.session.get("process"), device, why, sum(block.prompts for block in blocks)))

    def _give_up(self, block: Block, why: str, member: Member) -> None:
        """Record the missing images of a block that has lost too many workers as failed."""
        from lantern_bench.runs.runner import DecodedUnit, store_image

        assert self._store is not None
        record = {"status": "failed", "error": f"lost {_LOSSES} workers: {why}", "process": member.session["process"]}
        for unit in (unit for _, waiting in block.batches for unit in waiting):
            if not self._store.is_done(unit):
                self._show(store_image(self._store, DecodedUnit(unit, record, None)))

    def _end(self) -> None:
        """Close the sessions and the store, and free the devices."""
        assert self._store is not None
        whole = not self._todo and not any(member.blocks for member in self._members)
        for member in self._members:
            if member.session:
                member.session |= {"ended": stamp(), "complete": whole}
        self._store.update_manifest(ended=stamp())
        self._store.close()
        if answers(self._head.address):
            for member in self._members:
                self._ray.kill(member.actor)
