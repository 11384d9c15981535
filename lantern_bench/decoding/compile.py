"""How the programs of a decode step run: eagerly, compiled, or on CUDA captured as a graph besides.

The three programs of a step (`step.py`) have fixed shapes and keep their state in tensors at fixed addresses, so that
each is compiled once per shape and then runs without a decision on the host.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lantern_bench.utils.text import one_line

# Torch says that it finds no GPU, advises to round float32 products, which we leave exact, and names a fusion left out.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not record.getMessage().startswith("No CUDA runtime is found")
)
for _text in (
    r"TensorFloat32 tensor cores .* available but not enabled",
    r"\s*Online softmax is disabled on the fly",
):
    warnings.filterwarnings("ignore", _text, UserWarning)

T = TypeVar("T")
_numbers = itertools.count()
# A step calls some hundred kernels, and many take less time than a call from Python.
_CPU_OPTIONS = {"cpp_wrapper": True}


class Engine:
    """Programs of one model, compiled once for every shape.

    `compile` False runs functions eagerly. What a program reads besides its arguments must stay the same object at the
    same address for as long as the engine lives; its arguments must have the shapes of the first call. `folder` saves
    the programs of a CPU for later processes. `graphs` False captures nothing on CUDA. `fallbacks` says why programs
    on CUDA run in another way than asked for: keys `compiling` and `capture`.
    """

    def __init__(
        self,
        compile: bool = False,
        backend: Any = "inductor",
        folder: Path | None = None,
        graphs: bool = True,
    ) -> None:
        self.compile = compile
        self.graphs = graphs
        self.folder = folder
        self._backend = backend
        self._cache: dict[Hashable, Any] = {}
        self.fallbacks: dict[str, str] = {}

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` gave at the first call with this key and this number of threads.

        The compiler writes the number of threads into code for a CPU: every number gets programs of its own.
        """
        key = (key, torch.get_num_threads())
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value

    def program(
        self, key: Hashable, method: Callable[..., T], device: torch.device
    ) -> Callable[..., T]:
        """Return a bound method as this engine runs it on `device`; later calls with this key get the same program."""
        if not self.compile:
            return method
        return self.cached(("program", key), lambda: self._compiled(key, method, device))

    def _compiled(
        self, key: Hashable, method: Callable[..., T], device: torch.device
    ) -> Callable[..., T]:
        if device.type == "cuda":
            return GraphedProgram(
                compiled=compile_function(method, device, self._backend),
                plain=method,
                device=device,
                engine=self,
            )
        if self.folder is None or self._backend != "inductor" or not can_save_programs():
            return compile_function(method, device, self._backend)
        name = hashlib.sha256(repr((key, torch.get_num_threads())).encode()).hexdigest()[:24]
        return SavedProgram(method, self.folder / f"{name}.program")

    def fall_back(self, failed: str, instead: str, error: Exception) -> None:
        """Note that programs run in another way than asked for from now on, and warn, once for each `failed`."""
        if failed not in self.fallbacks:
            self.fallbacks[failed] = reason = one_line(error)
            text = f"{failed} fails on this GPU, steps run {instead}: {reason}. Compare no seconds across this warning."
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class SavedProgram:
    """A method compiled for a CPU at its first call, or loaded from the file where an earlier process saved it.

    The weights are read from the method's object and not saved. What torch cannot save still runs, with a warning.
    """

    def __init__(self, method: Any, path: Path) -> None:
        self._method = method
        self._path = path
        self._run: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the program, which the first call loads or compiles."""
        if self._run is None:
            self._run = self._load() or self._compile(arguments)
        return self._run(*arguments)

    def _load(self) -> Callable[..., Any] | None:
        try:
            return self._ready(
                torch.compiler.load_compiled_function(io.BytesIO(self._path.read_bytes()))
            )
        # the file is missing, damaged or of another torch: the program is compiled again
        except Exception:
            return None

    def _compile(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        options: dict[str, Any] = {
            **_CPU_OPTIONS,
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        }
        compiled: Any = torch.compile(
            self._method.__func__, dynamic=False, fullgraph=True, options=options
        )
        try:
            program = compiled.aot_compile(((self._method.__self__, *arguments), {}))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            program.save_compiled_function(str(self._path))  # the whole file or none
            return self._ready(program)
        except Exception as error:
            text = f"a compiled program cannot be kept for the next start: {one_line(error)}"
            warnings.warn(text, stacklevel=4)
            return compile_function(self._method, torch.device("cpu"))

    def _ready(self, program: Any) -> Callable[..., Any]:
        program.disable_guard_check()
        return partial(program, self._method.__self__)


def tensors_of(model: object) -> tuple[Tensor, ...]:
    """Return every tensor of a module once, plain attributes included; none of a model that is no module."""
    tensors: dict[int, Tensor] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for values in (module._parameters, module._buffers, vars(module)):
            tensors |= {id(value): value for value in values.values() if isinstance(value, Tensor)}
    return tuple(tensors.values())


def take_inputs(tensors: Sequence[Tensor]) -> None:
    """Have a program that is being compiled take `tensors` from their tuple.

    A compiled program collects its inputs at every call, on the way on which the compiler met each of them first; the
    way through the attributes of many modules takes some 30 microseconds a call.
    """
    if torch.compiler.is_compiling():
        for tensor in tensors:
            tensor.dim()


def can_save_programs() -> bool:
    """Whether this torch saves compiled functions; before it did, inductor's own caches make later starts faster."""
    return hasattr(torch.compiler, "load_compiled_function")


def compile_function(
    function: Callable[..., T], device: torch.device, backend: Any = "inductor"
) -> Callable[..., T]:
    """Return `function` compiled whole for a device, without guards."""

    def run(*arguments: Any) -> T:
        return function(*arguments)

    # The compiler keeps its results with a code object. Every program gets its own, so that no call needs the guards
    # (some microseconds per weight) that tell programs of one code object apart.
    code = run.__code__.replace(co_name=f"program_{next(_numbers)}")
    alone = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if backend == "inductor" and device.type == "cpu":
        options |= _CPU_OPTIONS
    compiled: Callable[..., T] = torch.compile(
        alone, backend=backend, dynamic=False, fullgraph=True, options=options
    )
    return compiled


class GraphedProgram:
    """A program on CUDA: it runs once, is then captured as a graph and replayed, which overwrites results.

    Every run reads copies of the arguments that stay in place: a graph knows addresses, and a program that is compiled
    without guards knows strides, which may differ from call to call. Where the compiler fails `plain` runs, where
    capture fails the program runs without a graph; both set `Engine.fallbacks`. Other errors are raised.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        plain: Callable[..., Any],
        device: torch.device,
        engine: Engine,
    ) -> None:
        self._run = compiled
        self._plain = plain
        self._device = device
        self._engine = engine
        self._copies: tuple[Any, ...] | None = None
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the program: the first call compiles, the second captures."""
        if self._copies is None:
            self._copies = pytree.tree_map(_copy, arguments)
        else:
            for copy, argument in zip(
                pytree.tree_leaves(self._copies), pytree.tree_leaves(arguments), strict=True
            ):
                if isinstance(argument, Tensor):
                    copy.copy_(argument)
        graph = self._graph
        if graph is None:
            if not self._warm:
                return self._warm_up(self._copies)
            is_captured = self._engine.graphs and self._run is not self._plain
            if not is_captured or (graph := self._capture(self._copies)) is None:
                return self._run(*self._copies)
        graph.replay()
        return self._result

    def _warm_up(self, arguments: tuple[Any, ...]) -> Any:
        """Run on a side stream, as CUDA graph capture requires."""
        from torch._dynamo.exc import TorchDynamoException

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            try:
                result = self._run(*arguments)
            except TorchDynamoException as error:
                # The compiler fails before anything has run: no state has changed.
                self._engine.fall_back("compiling", "uncompiled", error)
                self._run = self._plain
                result = self._run(*arguments)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._warm = True
        return result

    def _capture(self, arguments: tuple[Any, ...]) -> torch.cuda.CUDAGraph | None:
        """Capture the program; nothing is computed. None where that fails: the engine then captures nothing more."""
        # By default the stream would be one of the device that captured first.
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            try:
                # Other threads may use the GPU, to score pictures for example.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._result = self._run(*arguments)
            except Exception as error:
                torch.cuda.set_stream(before)  # a failed capture can leave its own stream
                self._engine.graphs = False
                # The error that ends a capture does not say what failed inside it.
                cause = error.__context__ if isinstance(error.__context__, Exception) else error
                self._engine.fall_back("capture", "without CUDA graphs", cause)
                return None
        self._graph = graph
        return graph


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def compiler_problem(device: torch.device) -> str | None:
    """Return why nothing can be compiled for `device` here, in one line; None where a trial succeeds."""
    try:
        compile_function(lambda x: (x * 2).sum(), device)(torch.ones(64, device=device))
    except Exception as error:  # any error of the compiler chain counts
        return one_line(error)
    return None
