"""The engines of a sweep: what decodes and scores the images of a request. One row each in `ENGINES`.

`local` works on this machine. `ray` works on the devices of a Ray cluster (`runs/ray_driver.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from lantern_bench.config.parse_experiment import Settings


class Workers(NamedTuple):
    """Where a sweep runs: the engine, the address of its cluster, and whether workers share devices.

    With `throughput` a device has several workers (`per_device`; None: the engine decides): no seconds are measured.
    """

    engine: str = "local"
    address: str | None = None
    throughput: bool = False
    per_device: int | None = None


LOCAL = Workers()
"""This machine alone: the default."""


class Engine(NamedTuple):
    """An engine: what it is, and what runs a request; `run(request, tell)` returns how many images failed."""

    about: str
    run: Callable[[Any, Callable[[Any], None]], int]


def _local(request: Any, tell: Callable[[Any], None]) -> int:
    from lantern_bench.runs.sweep import run_here

    return run_here(request, tell)


def _ray(request: Any, tell: Callable[[Any], None]) -> int:
    from lantern_bench.runs.ray_driver import run_on_ray

    return run_on_ray(request, tell)


ENGINES: dict[str, Engine] = {
    "local": Engine("this machine", _local),
    "ray": Engine("one worker for each device of a Ray cluster", _ray),
}


def check_workers(workers: Workers, settings: Settings) -> None:
    """Raise `UserError` for flags of an engine that do not go together, or not with the experiment."""
    if workers.engine not in ENGINES:
        hint = did_you_mean(workers.engine, ENGINES)
        raise UserError(f"--engine {workers.engine}: unknown engine{hint}", f"The engines are {', '.join(ENGINES)}.")
    given = {"--address": workers.address, "--throughput": workers.throughput or None}
    if workers.engine == "local":
        for flag, value in given.items():
            if value is not None:
                raise UserError(f"{flag} is for --engine ray", "Give both, or neither.")
    if workers.per_device is not None and not workers.throughput:
        what = f"--per-device {workers.per_device}: workers that share a device cannot be timed"
        raise UserError(what, "Give --throughput too, for runs with --metrics quality.")
    if workers.throughput and "speed" in settings.metrics:
        what = "--throughput: workers that share a device cannot be timed, and this run measures speed"
        raise UserError(what, "Give --metrics quality, or leave --throughput out.")
    if workers.engine == "ray" and (settings.device == "mps" or ":" in settings.device):
        what = f"--device {settings.device}: with --engine ray, Ray gives each worker its device"
        raise UserError(what, "Give --device cuda, --device cpu, or leave it out.")
