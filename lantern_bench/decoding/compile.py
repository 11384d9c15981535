"""How the programs of a decode step run: eagerly, compiled, or on CUDA captured as a graph besides.

A step is three programs (draft, score, settle) of fixed shapes that keep their state in tensors at fixed addresses, so
each is compiled once per shape and then runs without a decision on the host. `step.py` says what they do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lantern_bench.chatter import silence_compiler

if TYPE_CHECKING:
    from lantern_bench.decoding.kept_programs import ProgramStore

silence_compiler()

T = TypeVar("T")
_numbers = itertools.count()


class Engine:
    """Programs of one model, made once for every shape and kept.

    `compile` False runs functions eagerly. What a program reads besides its arguments must stay the same object at the
    same address for as long as the engine lives; its arguments must have the shapes of the first call. `store` keeps
    the programs of a CPU for later processes.
    """

    def __init__(self, compile: bool = False, backend: Any = "inductor", store: ProgramStore | None = None) -> None:
        self.compile, self._backend, self._store = compile, backend, store
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gave at the first call with this key and this number of threads.

        The compiler writes the number of threads into code for a CPU: every number gets programs of its own.
        """
        key = (key, torch.get_num_threads())
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def only_compiles(self) -> bool:
        """Whether programs are made and not run now (`compiling`)."""
        return self._store is not None and self._store.only_compiles

    @contextlib.contextmanager
    def compiling(self) -> Iterator[bool]:
        """Make programs without running them: a decode ends after a step of empty tensors.

        The C++ compiler then works on several programs at once. Yields False where this cannot be done.
        """
        if self._store is None:
            yield False
            return
        self._store.only_compiles = True
        try:
            yield True
        finally:
            self._store.only_compiles = False

    def program(self, key: Hashable, function: Callable[..., T], device: torch.device) -> Callable[..., T]:
        """Return `function` as this engine runs it on `device`; later calls with this key get the same program."""
        if not self.compile:
            return function
        store = self._store
        if store is not None and device.type == "cpu" and store.keeps(key):
            return self.once(("program", key), lambda: store.program((key, torch.get_num_threads()), function))
        return self.once(("program", key), lambda: compile_function(function, device, self._backend))


def compile_function(function: Callable[..., T], device: torch.device, backend: Any = "inductor") -> Callable[..., T]:
    """Return `function` compiled, and on CUDA replayed as a graph."""
    # A step calls some hundred kernels, and many take less time than a call from Python.
    options = {"cpp_wrapper": True} if backend == "inductor" and device.type == "cpu" else {}
    compiled = compile_alone(function, backend, **options)
    return _Graph(compiled) if device.type == "cuda" else compiled


def compile_alone(function: Callable[..., T], backend: Any, **options: Any) -> Callable[..., T]:
    """Return `function` compiled whole, without guards, with a code object of its own."""

    def run(*arguments: Any) -> T:
        return function(*arguments)

    # The compiler keeps its results with a code object. Every program gets its own, so that no call needs the guards
    # (some microseconds per weight) that tell programs of one code object apart.
    code = run.__code__.replace(co_name=f"program_{next(_numbers)}")
    alone = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    compiled: Callable[..., T] = torch.compile(alone, backend=backend, dynamic=False, fullgraph=True, options=options)
    return compiled


class _Graph:
    """A function of tensors that runs once, is then captured as a CUDA graph and replayed, which overwrites results.

    Every run reads copies of the arguments that stay in place: a graph knows addresses, and a program that is compiled
    without guards knows strides, which may differ from call to call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._held: tuple[Any, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._held is None:
            self._held = pytree.tree_map(_copy, arguments)
            return self._warm_up(self._held)
        for held, given in zip(pytree.tree_leaves(self._held), pytree.tree_leaves(arguments), strict=True):
            if isinstance(given, Tensor):
                held.copy_(given)
        (self._graph or self._capture(self._held)).replay()
        return self._result

    def _warm_up(self, arguments: tuple[Any, ...]) -> Any:
        """Run on a side stream, as CUDA graph capture requires."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _capture(self, arguments: tuple[Any, ...]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self._function(*arguments)
        self._graph = graph
        return graph


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def compiler_problem(device: torch.device) -> str | None:
    """Return why nothing can be compiled for `device` here, in one line; None where a trial succeeds."""
    try:
        compile_function(lambda x: (x * 2).sum(), torch.device("cpu"))(torch.ones(64, device=device))
    except Exception as error:  # any error of the compiler chain counts
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
