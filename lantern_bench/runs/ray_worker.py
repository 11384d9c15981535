"""What runs on a device of a Ray cluster: an actor that decodes batches, and tasks that score pictures.

Nothing here writes to the run directory: what a worker makes goes to the driver (`ray_driver.py`), which has the one
store. Torch is imported inside functions, after the environment of its threads is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.clock import settle_garbage
from lantern_bench.errors import LanternError
from lantern_bench.runs.threads import prepare_environment

if TYPE_CHECKING:
    from lantern_bench.config.plan import Unit
    from lantern_bench.runs.devices import Place
    from lantern_bench.runs.keys import KeyFields
    from lantern_bench.runs.runner import DecodedUnit, WarmedUp
    from lantern_bench.runs.sweep import Request
    from lantern_bench.runs.threads import Calibrated


class Ready(NamedTuple):
    """The models are loaded: where, the fields of the record key that hold here, the machine, and the device's columns.

    `facts` are what the manifest says of how the worker decodes.
    """

    place: Place
    compile_problem: str | None
    key: KeyFields
    machine: dict[str, Any]
    device: dict[str, Any]
    facts: dict[str, Any]


class Started(NamedTuple):
    """Steps are compiled and warm: what the warm-up was, the threads that decode, and how they were chosen."""

    warmed: list[WarmedUp]
    threads: int
    calibrated: Calibrated | None
    prepare_seconds: float


class Batch(NamedTuple):
    """What a worker made of one batch, and the entry of its session in the manifest so far."""

    images: list[DecodedUnit]
    session: dict[str, Any]


class Worker:
    """The models of a run on one device. Ray runs one call at a time, in the order of the calls.

    `load` and `start` return the `LanternError` that a user can act on; they do not raise it, since Ray would wrap it.
    """

    def __init__(self) -> None:
        prepare_environment()

    def load(self, request: Request) -> Ready | LanternError:
        """Load the models of a request; its plan is that of the batches to come, without units."""
        import torch

        from lantern_bench.models.loaded_model import NoPixels
        from lantern_bench.runs.devices import choose_place, compile_models, key_fields, load_models
        from lantern_bench.runs.machine import device_columns, machine_block
        from lantern_bench.runs.runner import place_facts

        settings = request.experiment.settings
        try:
            self.place = choose_place(settings.device, settings.dtype, fast=True)
            self.models = load_models(request.experiment, self.place)
            for model in self.models.values():
                if isinstance(model.pixels, NoPixels):
                    raise model.pixels.problem
        except LanternError as error:
            return error
        problem = compile_models(self.models.values(), self.place) if settings.compile else None
        key = key_fields(self.models, settings, self.place, request.plan.cells)
        if self.place.device.type == "cpu":
            torch.set_num_threads(cores_of_actor())
        facts = place_facts(self.place, any(model.engine.compile for model in self.models.values()))
        return Ready(self.place, problem, key, machine_block(), device_columns(self.place.device), facts)

    def start(
        self, kinds: Sequence[tuple[Unit, ...]], process: int, threads: int | None, again: bool
    ) -> Started | LanternError:
        """Warm up what these batches run, on `threads` threads; None: on as many as decode fastest."""
        import torch

        from lantern_bench.runs.runner import Decoder, fastest_for, new_session
        from lantern_bench.runs.threads import set_threads

        calibrated = None
        try:
            seconds = self._prepare([unit for group in kinds for unit in group])
        except LanternError as error:
            return error
        if threads is None:
            calibrated = fastest_for([unit for group in kinds for unit in group], self.models)
            threads = calibrated.threads if calibrated is not None else None
        set_threads(threads)
        self.decoder = Decoder(self.models, self.place, new_session(process, seconds), again)
        warmed = list(self.decoder.warm_up(kinds))
        settle_garbage()
        return Started(warmed, torch.get_num_threads(), calibrated, seconds)

    def decode(
        self, group: tuple[Unit, ...], waiting: Sequence[Unit], block: Sequence[Unit] = ()
    ) -> Batch | LanternError:
        """Decode a batch and return its images `waiting`; the first batch of a block brings the units of the block."""
        try:
            self.decoder.session["prepare_seconds"] += self._prepare(block)
        except LanternError as error:
            return error
        return Batch(list(self.decoder.decode(group, waiting)), self.decoder.session)

    def _prepare(self, units: Sequence[Unit]) -> float:
        """Make what these images need before they are decoded: encoded captions, neighbour tables."""
        from lantern_bench.config.plan import Plan
        from lantern_bench.runs.runner import prepare_models

        cells = tuple(dict.fromkeys(unit.cell for unit in units))
        plan = Plan(cells, tuple(units))
        return prepare_models(plan, self.models, (), lambda _event: None) if units else 0.0


def cores_of_actor() -> int:
    """Return how many CPU cores Ray has reserved for this worker, at least 1."""
    import ray

    assigned = ray.get_runtime_context().get_assigned_resources()
    return max(1, int(assigned.get("CPU", os.cpu_count() or 1)))
