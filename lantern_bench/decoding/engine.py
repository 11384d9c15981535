"""How the programs of a decode step run: eagerly, compiled, or captured as CUDA graphs.

The programs of a step (`step.py`, `plain.py`) have fixed shapes and keep their state in tensors at
fixed addresses. So each is compiled once per shape, and then runs without a decision on the host.
`programs.py` holds the kinds of programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lantern_bench.decoding.programs import (
    Fallbacks,
    GraphedProgram,
    SavedProgram,
    can_save_programs,
    compile_function,
)
from lantern_bench.utils.text import one_line

T = TypeVar("T")

ENGINE_VERSION = "10"
"""Incremented when tokens at a seed or timing change; a run never mixes two versions."""


class Engine:
    """Programs of one model, compiled once for every shape.

    What a program reads besides its arguments must stay the same object at the same address for as
    long as the engine lives. Its arguments must have the shapes of the first call.
    """

    def __init__(
        self,
        *,
        compile: bool = False,
        backend: Any = "inductor",
        folder: Path | None = None,
        graphs: bool = True,
    ) -> None:
        """Create an engine without programs.

        Args:
            compile: Whether programs are compiled; otherwise functions run eagerly.
            backend: The backend of `torch.compile`.
            folder: Where programs for a CPU are saved for later processes.
            graphs: Whether programs on CUDA are captured as graphs.
        """
        self.compile = compile
        self.folder = folder
        self._backend = backend
        self._fallbacks = Fallbacks(graphs=graphs)
        self._cache: dict[Hashable, Any] = {}

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Why `compiling` or `capture` failed on CUDA, for each that did."""
        return self._fallbacks.reasons

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned at the first call with this key and this number of threads.

        The compiler writes the number of threads into code for a CPU, so programs depend on it.
        """
        key = (key, torch.get_num_threads())
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value

    def program(
        self, key: Hashable, method: Callable[..., T], device: torch.device
    ) -> Callable[..., T]:
        """Return a bound method as this engine runs it.

        Args:
            key: Names the program; later calls with this key get the same program.
            method: The method.
            device: Where it computes.
        """
        if not self.compile:
            return method
        return self.cached(("program", key), lambda: self._compiled(key, method, device))

    def _compiled(
        self, key: Hashable, method: Callable[..., T], device: torch.device
    ) -> Callable[..., T]:
        is_cuda = device.type == "cuda"
        can_save = self._backend == "inductor" and can_save_programs()
        if self.folder is not None and can_save and not is_cuda:
            text = repr((key, torch.get_num_threads()))
            name = hashlib.sha256(text.encode()).hexdigest()[:24]
            return SavedProgram(method, self.folder / f"{name}.program")

        compiled = compile_function(method, device, self._backend)
        if not is_cuda:
            return compiled
        return GraphedProgram(compiled, plain=method, device=device, fallbacks=self._fallbacks)


def tensors_of(model: object) -> tuple[Tensor, ...]:
    """Return every tensor of a module once, plain attributes included; () if it is no module."""
    if not isinstance(model, nn.Module):
        return ()
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for values in (module._parameters, module._buffers, vars(module)):
            tensors |= {id(value): value for value in values.values() if isinstance(value, Tensor)}
    return tuple(tensors.values())


def compiler_problem(device: torch.device) -> str | None:
    """Return in one line why nothing can be compiled for `device`; None where a trial succeeds."""
    try:
        compile_function(lambda x: (x * 2).sum(), device)(torch.ones(64, device=device))
    except Exception as error:  # any error of the compiler chain counts
        return one_line(error)
    return None
