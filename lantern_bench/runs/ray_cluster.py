"""A Ray cluster as a driver sees it: joining it, watching its head, and what devices its nodes have."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.clock import now
from lantern_bench.errors import RefusedError

if TYPE_CHECKING:
    from lantern_bench.runs.engines import Workers

LOOK = 2.0
"""Seconds between looks at the head and at the nodes."""
# Workers on one GPU with --throughput.
_PER_GPU = 2


class HeadLostError(Exception):
    """The head of the cluster does not answer."""


class Head:
    """The head of a cluster at `host:port`: Ray's own calls would wait a minute for one that is gone."""

    def __init__(self, address: str) -> None:
        self.address, self._looked, self._missed = address, now(), 0

    def check(self) -> None:
        """Raise `HeadLostError` when the head has not answered three times; looks every `LOOK` seconds."""
        if now() - self._looked < LOOK:
            return
        self._missed = 0 if answers(self.address) else self._missed + 1
        self._looked = now()
        if self._missed > 2:
            raise HeadLostError(f"{self.address} does not answer")


def answers(address: str) -> bool:
    """Return whether something listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return True
    except (OSError, ValueError):
        return False


def connect(address: str | None) -> Head:
    """Join the cluster at `address`; None: that of `RAY_ADDRESS`, else a new one on this machine.

    Raises `RefusedError` for a cluster that cannot be reached, or that runs another version of Ray or Python.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    plain = where.removeprefix("ray://")
    if where not in ("auto", "local") and not answers(plain):
        advice = "Give auto on a node of the cluster, HOST:6379, or ray://HOST:10001."
        raise RefusedError(f"--address {where}: no Ray cluster answers there", advice)
    dashboard = False if where == "local" else None
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=where, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=dashboard)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        first = " ".join(str(error).split())[:300]
        advice = "Start a cluster with `ray start --head`, or leave --address out for a new one on this machine."
        raise RefusedError(f"--address {where}: the Ray cluster cannot be joined: {first}", advice) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)  # Ray has set its own, which ends the process at once
    return Head(plain if where.startswith("ray://") else str(ray.get_runtime_context().gcs_address))


class Slot(NamedTuple):
    """What a worker takes of the cluster. A CPU worker's device is its node; Ray chooses the GPU of a GPU worker."""

    node: str | None
    cpus: int
    gpus: float


def slots_of(nodes: Iterable[dict[str, Any]], device: str, threads: int | None, workers: Workers) -> Counter[Slot]:
    """Return the slots of a cluster's live nodes: one for each GPU, else for each node's CPU, cores divided evenly.

    `auto` takes GPUs where there are any. With `throughput` a GPU has `per_device` slots and a CPU one for each
    `threads` cores (by default one).
    """
    alive = [(str(node["NodeID"]), node["Resources"]) for node in nodes if node["Alive"]]
    slots: Counter[Slot] = Counter()
    if device == "cuda" or (device == "auto" and any(has.get("GPU", 0) >= 1 for _, has in alive)):
        share = (workers.per_device or _PER_GPU) if workers.throughput else 1
        for _, has in alive:
            if count := int(has.get("GPU", 0)) * share:
                slots[Slot(None, int(has.get("CPU", 0)) // count, 1 / share)] += count
        return slots
    for name, has in alive:
        cores = each = int(has.get("CPU", 0))
        if workers.throughput and cores:
            each = max(1, cores // workers.per_device if workers.per_device else threads or 1)
        if cores and each >= (threads or 1):
            slots[Slot(name, each, 0.0)] += cores // each
    return slots


def reason_of(error: Exception) -> str:
    """Return why a worker was lost, in one line without the addresses and numbers of nodes: manifests are published."""
    lines = [line.strip() for line in str(error).splitlines() if line and not line[0].isspace()]
    text = " ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__
    text = text.partition(" Some common causes")[0]
    return re.sub(r"\b([0-9a-f]{16,}|\d+(\.\d+){3})\b", "...", text)[:300]
