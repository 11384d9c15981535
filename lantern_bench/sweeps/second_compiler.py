"""Compile the steps of a first start in two processes.

At first the other process compiles what is timed to choose the number of threads. Then both compile
the steps of the same batches, this process from the first and the other from the last. A compiled
program is kept in a file (`SavedProgram`), where either process finds what the other has compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self

import torch

from lantern_bench.config.plan import ImageTask
from lantern_bench.devices.compute import Compute
from lantern_bench.models.load import are_saved, compile_models, load_uncompiled
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.sweeps.choose_threads import thread_counts, timed_work_of
from lantern_bench.sweeps.decoder import Batch, Decoder, prepare_models
from lantern_bench.sweeps.request import Request
from lantern_bench.sweeps.worker_process import has_room_for_second, unheard_process
from lantern_bench.utils.progress import Emit, ignore_events


class SecondCompiler:
    """A second process that compiles, where nothing is compiled yet and this machine has room.

    It ends with the block of a `with` statement.
    """

    def __init__(
        self, request: Request, models: Mapping[str, LoadedModel], compute: Compute
    ) -> None:
        """Find out whether a second process would help.

        Args:
            request: The sweep.
            models: The loaded models of this process, not compiled yet.
            compute: Their device and type.
        """
        self._request = request
        self._process = ExitStack()
        is_first_start = (
            request.experiment.settings.compile
            and compute.device.type == "cpu"
            and not are_saved(models.values(), compute)
        )
        self.helps = is_first_start and has_room_for_second()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def compile_timed(self, tasks: Sequence[ImageTask]) -> None:
        """Let the second process compile what is timed to choose the number of threads.

        Args:
            tasks: The result of `timed_tasks`.
        """
        # This process begins with the largest number.
        threads = thread_counts()[:-1]
        self._start(partial(_compile_timed, tasks=tasks, threads=threads))

    def compile_steps(self, batches: Sequence[Batch], threads: int) -> None:
        """Let the second process compile the steps of batches instead, the last one first.

        Args:
            batches: The batches.
            threads: The number of threads for which they are compiled.
        """
        self._start(partial(_compile_steps, batches=batches[::-1], threads=threads))

    def end(self) -> None:
        """End the second process."""
        self._process.close()

    def give_up(self) -> None:
        """End the second process, and start no other: nothing can be compiled here."""
        self.end()
        self.helps = False

    def _start(self, work: partial[None]) -> None:
        self.end()
        if self.helps and all(work.keywords.values()):
            # What it says, this process says too.
            self._process.enter_context(unheard_process(work, self._request))


def _compile_steps(
    request: Request, _emit: Emit, *, batches: Sequence[Batch], threads: int
) -> None:
    """Compile the steps of batches, in the second process."""
    compute, models = _load(request, batches)
    decoder = Decoder(models, compute, session={"warm_up": []}, repeat_disturbed=False)
    torch.set_num_threads(threads)
    for _ in decoder.warm_up(batches):
        pass


def _compile_timed(
    request: Request, _emit: Emit, *, tasks: Sequence[ImageTask], threads: Sequence[int]
) -> None:
    """Compile what is timed for each number of threads, in the second process."""
    _, models = _load(request, [(task,) for task in tasks])
    work = timed_work_of(tasks, models)
    for count in threads:
        torch.set_num_threads(count)
        work()


def _load(request: Request, batches: Sequence[Batch]) -> tuple[Compute, Mapping[str, LoadedModel]]:
    """Load what batches need. The first process tries the compiler."""
    compute, models = load_uncompiled(request.experiment, ignore_events)
    compile_models(models.values(), compute, try_compiler=False)
    prepare_models(batches, models, ignore_events)
    return compute, models
