"""How the programs of a decode step run: eagerly, compiled, or captured as CUDA graphs.

The programs of a step (`step.py`, `orders/`) have fixed shapes and keep their state in tensors at
fixed addresses. So each is compiled once per shape, and then runs without a decision on the host
and without the compiler's guards. It is kept in memory, in a file, or as a CUDA graph.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from lantern_bench.decoding.direct_program import call_and_shorten
from lantern_bench.utils.text import one_line

T = TypeVar("T")

ENGINE_VERSION = "15"
"""Incremented when tokens at a seed or timing change; a run never mixes two versions."""

_LONGEST_COMPILATION = 300.0  # seconds to wait for another process that compiles a program

_numbers = itertools.count()

# Silence three harmless messages: no CUDA, TF32 advice, skipped fusion.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not record.getMessage().startswith("No CUDA runtime is found")
)
for _message in (
    r"TensorFloat32 tensor cores .* available but not enabled",
    r"\s*Online softmax is disabled on the fly",
):
    warnings.filterwarnings("ignore", _message, UserWarning)


def compile_function(
    function: Callable[..., T], device: torch.device, backend: Any = "inductor"
) -> Callable[..., T]:
    """Return a function compiled as one graph, without guards.

    Args:
        function: Takes and returns tensors of fixed shapes.
        device: Where it computes.
        backend: The backend of `torch.compile`.
    """

    def run(*arguments: Any) -> T:
        return function(*arguments)

    # The compiler caches its results by code object and tells programs that share one apart by
    # guards. Guards cost microseconds per weight, so each program gets a separate code object.
    code = run.__code__.replace(co_name=f"program_{next(_numbers)}")
    copy = FunctionType(
        code, run.__globals__, name=code.co_name, argdefs=None, closure=run.__closure__
    )
    compiled: Callable[..., T] = _without_guards(copy, device, backend)
    return compiled


def _without_guards(function: Callable[..., T], device: torch.device, backend: Any) -> Any:
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if backend == "inductor" and device.type == "cpu":
        options |= _cpu_options()
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True, options=options)


@cache
def _cpu_options() -> dict[str, bool]:
    """Options of inductor for a step: it calls about a hundred kernels, many of them very short.

    They are called from C++, and without checks of shapes, which never change. Options that this
    version of torch does not have are left out.
    """
    import torch._inductor.config as inductor

    checks = ("size_asserts", "alignment_asserts", "scalar_asserts")
    options = {"cpp_wrapper": True} | dict.fromkeys(checks, False)
    return {name: value for name, value in options.items() if hasattr(inductor, name)}


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a compiler before anything has run; none if torch does not tell."""
    try:
        from torch._dynamo.exc import TorchDynamoException
    except ImportError:
        return ()
    return (TorchDynamoException,)


def touch_while_tracing(tensors: Sequence[Tensor]) -> None:
    """Touch the weights while tracing, so that calls read them from one tuple.

    A compiled program collects its inputs at every call along the path by which the compiler first
    met each of them. The path through the attributes of many modules costs about 30 us a call.
    """
    if torch.compiler.is_compiling():
        for tensor in tensors:
            tensor.dim()


class BeingCompiledError(Exception):
    """Another process is compiling the program."""


class SavedProgram:
    """A method compiled for a CPU and kept in a file, which later processes load.

    Weights are read from the method's object and are not saved. If torch cannot save a program, the
    program still runs, with a warning.
    """

    def __init__(self, method: Any, path: Path, engine: Engine) -> None:
        self._method = method
        self._path = path
        self._engine = engine
        self._run: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the program. The first call loads or compiles it.

        Raises:
            BeingCompiledError: Another process is compiling it, and `engine` does not wait.
        """
        if self._run is None:
            program = self._load() or self._compile_alone(arguments)
            result, self._run = call_and_shorten(program, arguments)
            return result
        return self._run(*arguments)

    def _load(self) -> Callable[..., Any] | None:
        try:
            content = io.BytesIO(self._path.read_bytes())
            return self._ready(torch.compiler.load_compiled_function(content))
        except Exception:  # missing, damaged or written by another torch: compile it again
            return None

    def _compile_alone(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Compile the program, or wait while another process compiles it, and load it."""
        longest = _LONGEST_COMPILATION if self._engine.waits else 0.0
        with ExitStack() as locked:
            # Without a lock, both processes compile it.
            with suppress(OSError, NotImplementedError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(self._path.with_suffix(".lock"), timeout=longest)
                try:
                    locked.enter_context(lock)
                except Timeout:
                    if not self._engine.waits:
                        raise BeingCompiledError from None
            return self._load() or self._compile(arguments)

    def _compile(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        cpu = torch.device("cpu")
        compiled = _without_guards(self._method.__func__, cpu, "inductor")
        try:
            program = compiled.aot_compile(((self._method.__self__, *arguments), {}))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            program.save_compiled_function(str(self._path))  # writes the whole file or none
            return self._ready(program)
        except Exception as error:
            text = f"a compiled program cannot be kept for the next start: {one_line(error)}"
            warnings.warn(text, stacklevel=4)
            return compile_function(self._method, cpu)

    def _ready(self, program: Any) -> Callable[..., Any]:
        program.disable_guard_check()
        return partial(program, self._method.__self__)


class Fallbacks:
    """The failures of a GPU, shared by the programs of an engine.

    Attributes:
        graphs: Whether programs are still captured as CUDA graphs.
        reasons: Why `compiling` or `capture` failed, for each that did.
    """

    def __init__(self, *, graphs: bool = True) -> None:
        self.graphs = graphs
        self.reasons: dict[str, str] = {}

    def note(self, failed: str, instead: str, error: Exception) -> None:
        """Record how steps run from now on, and warn about it once.

        Args:
            failed: `compiling` or `capture`.
            instead: How steps run now.
            error: Why.
        """
        if failed in self.reasons:
            return
        reason = one_line(error)
        self.reasons[failed] = reason
        text = (
            f"{failed} failed on this GPU, so steps run {instead}: {reason}. "
            "Do not compare timings from before and after this warning."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)


class GraphedProgram:
    """A program on CUDA: runs once, is then captured as a graph and replayed.

    A replay overwrites the results of the replay before. Every run reads copies of the arguments
    that stay in place, because a graph knows addresses and a program without guards knows strides.
    If the compiler fails, `plain` runs; if the capture fails, the program runs without a graph.
    Other errors are raised.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        *,
        plain: Callable[..., Any],
        device: torch.device,
        fallbacks: Fallbacks,
    ) -> None:
        self._run = compiled
        self._plain = plain
        self._device = device
        self._fallbacks = fallbacks
        self._copies: tuple[Tensor, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *arguments: Tensor) -> Any:
        """Run the program. The first call compiles it, the second captures it."""
        if self._copies is None:
            return self._warm_up(arguments)

        for copy, argument in zip(self._copies, arguments, strict=True):
            copy.copy_(argument)
        is_compiled = self._run is not self._plain
        if self._graph is None and is_compiled and self._fallbacks.graphs:
            self._graph = self._capture(self._copies)
        if self._graph is None:
            return self._run(*self._copies)
        self._graph.replay()
        return self._result

    def _warm_up(self, arguments: tuple[Tensor, ...]) -> Any:
        """Copy the arguments, and run on a side stream, as CUDA graph capture requires."""
        copies = tuple(
            argument.clone(memory_format=torch.contiguous_format) for argument in arguments
        )
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            try:
                result = self._run(*copies)
            except _compiler_errors() as error:
                # The compiler fails before anything has run, so no state has changed.
                self._fallbacks.note("compiling", "uncompiled", error)
                self._run = self._plain
                result = self._run(*copies)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._copies = copies
        return result

    def _capture(self, arguments: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph | None:
        """Capture the program without computing; None if that fails, and then for all programs."""
        # Otherwise the stream would belong to the device that captured first.
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
                self._fallbacks.graphs = False
                # The error that ends a capture does not say what failed inside it.
                cause = error.__context__ if isinstance(error.__context__, Exception) else error
                self._fallbacks.note("capture", "without CUDA graphs", cause)
                return None
        return graph


class Engine:
    """Programs of one model, compiled once for every shape.

    What a program reads besides its arguments must stay the same object at the same address for as
    long as the engine lives. Its arguments must have the shapes of the first call.

    Attributes:
        waits: Whether a program that another process is compiling is waited for.
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
        self.waits = True
        self._backend = backend
        self.fallbacks = Fallbacks(graphs=graphs)
        self._cache: dict[Hashable, Any] = {}

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Raise `BeingCompiledError` during the block where a program would be waited for."""
        self.waits = False
        try:
            yield
        finally:
            self.waits = True

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
        # Older versions of torch cannot save compiled functions; they cache parts of them.
        can_save = self._backend == "inductor" and hasattr(torch.compiler, "load_compiled_function")
        if self.folder is not None and can_save and not is_cuda:
            text = repr((key, torch.get_num_threads()))
            name = hashlib.sha256(text.encode()).hexdigest()[:24]
            return SavedProgram(method, self.folder / f"{name}.program", self)

        compiled = compile_function(method, device, self._backend)
        if not is_cuda:
            return compiled
        return GraphedProgram(compiled, plain=method, device=device, fallbacks=self.fallbacks)


def tensors_of(model: object) -> tuple[Tensor, ...]:
    """Return every tensor of a module once, plain attributes included; () if it is no module."""
    if not isinstance(model, nn.Module):
        return ()
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for value in (*own, *vars(module).values()):
            if isinstance(value, Tensor):
                tensors[id(value)] = value
    return tuple(tensors.values())


def compiler_problem(device: torch.device) -> str | None:
    """Return in one line why nothing can be compiled for `device`; None where a trial succeeds."""
    try:
        compile_function(lambda x: (x * 2).sum(), device)(torch.ones(64, device=device))
    except Exception as error:  # any error of the compiler chain counts
        return one_line(error)
    return None
