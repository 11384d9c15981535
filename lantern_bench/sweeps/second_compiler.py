"""Compile the steps of a first start in two processes.

Both compile the steps of the same batches, this process from the first and the other from the last.
A compiled program is kept in a file (`SavedProgram`), where either process finds what the other has
compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from lantern_bench.models.load import load_to_decode
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.sweeps.decoder import Batch, Decoder, prepare_models
from lantern_bench.sweeps.request import Request
from lantern_bench.sweeps.worker_process import has_room_for_second, unheard_process
from lantern_bench.utils.progress import Emit, ignore_events


class SecondCompiler:
    """A second process that compiles, where nothing is compiled yet and this machine has room."""

    def __init__(self, request: Request, models: Iterable[LoadedModel]) -> None:
        """Find out whether a second process would help.

        Args:
            request: The sweep.
            models: The loaded models of this process.
        """
        self._request = request
        folders = [model.engine.folder for model in models if model.engine.compile]
        is_first_start = any(
            folder is not None and not any(folder.glob("*.program")) for folder in folders
        )
        self.helps = is_first_start and has_room_for_second()

    @contextmanager
    def compiling(self, batches: Sequence[Batch], threads: Sequence[int]) -> Iterator[None]:
        """Let the second process compile during the block, and end it with the block.

        Args:
            batches: The batches whose steps are compiled, the last one first.
            threads: The numbers of threads for which they are compiled.
        """
        if not (self.helps and batches and threads):
            yield
            return
        work = partial(_compile_steps, batches=batches[::-1], threads=threads)
        # What it says, this process says too.
        with unheard_process(work, self._request):
            yield


def _compile_steps(
    request: Request, _emit: Emit, *, batches: Sequence[Batch], threads: Sequence[int]
) -> None:
    """Compile the steps of batches, in the second process."""
    compute, models = load_to_decode(request.experiment, ignore_events)
    prepare_models(batches, models, ignore_events)
    decoder = Decoder(models, compute, session={"warm_up": []}, repeat_disturbed=False)
    for count in threads:
        torch.set_num_threads(count)
        for _ in decoder.warm_up(batches):
            pass
