"""Compiled programs in files: a later process loads them and traces nothing.

A program reads tensors that its function holds (weights, caches) besides its arguments. Its file has the code that
the compiler wrote, the path from the function to each of those tensors, and the form of its result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lantern_bench.decoding.compile import Engine, compile_alone, compile_function

Steps: TypeAlias = tuple[tuple[str, Any], ...]
"""How to get from a function to a tensor: attributes, items and cells of closures."""


class Place(NamedTuple):
    """Where a value of a program is: the number of an output, an input or an argument."""

    kind: str
    number: int


class Form(NamedTuple):
    """How to call a program's code: each input's source, descriptions of inputs and outputs, and the result."""

    sources: tuple[Steps | Place, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    result: Any


class Ready(NamedTuple):
    """A program that is loaded or compiled for this process; `inputs` are the tensors that its function holds."""

    form: Form
    source: str
    inputs: list[Any]


class ProgramStore:
    """The folder of one version of code, model, processor and torch: one file for each program.

    `prepare` is called before something is compiled. A damaged file is ignored and written again. While `only_compiles`
    is True programs are not run and return empty tensors, and the C++ compiler works beside the caller.
    """

    def __init__(self, folder: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self.folder, self.prepare, self.only_compiles = folder, prepare, False
        self.compilers = ThreadPoolExecutor(os.cpu_count())

    @property
    def used(self) -> bool:
        """Whether a program was kept here before."""
        return any(self.folder.glob("*.program"))

    def keeps(self, key: Hashable) -> bool:
        """Whether the key says all about a program: it holds numbers and text only, not a function."""
        if isinstance(key, tuple):
            return all(map(self.keeps, key))
        return key is None or isinstance(key, str | int | float)

    def program(self, key: Hashable, function: Callable[..., Any]) -> KeptProgram:
        """Return the program of `function`, which is loaded or compiled at its first call."""
        named = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        return KeptProgram(function, self.folder / f"{named}.program", self)


class KeptProgram:
    """A function whose compiled form is in a file after the first call of any process."""

    def __init__(self, function: Callable[..., Any], path: Path, store: ProgramStore) -> None:
        self._function, self._path, self._store = function, path, store
        self._ready: Ready | None = None
        self._run: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the program, which the first call loads or compiles."""
        if self._store.only_compiles:
            return self._pretend(arguments)
        if self._run is None:
            self._run = self._start(arguments)
        return self._run(*arguments)

    def _pretend(self, arguments: tuple[Any, ...]) -> Any:
        """Load or compile, and return empty tensors of the result's shapes."""
        if self._ready is None:
            self._ready = self._read(arguments) or self._compile(arguments)
        form, _, inputs = self._ready
        outputs = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype, *_ in form.outputs]
        return _filled(form.result, outputs, _with_arguments(form, inputs, arguments))

    def _start(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        ready = self._ready or self._read(arguments)
        if (
            ready is not None
            and _descriptions(_with_arguments(ready.form, ready.inputs, arguments)) == ready.form.inputs
        ):
            try:
                return _runner(ready)
            except Exception:  # whatever the compiler's own damaged files raise, the program is compiled again
                self._ready = None
        try:
            return _runner(self._compile(arguments))
        except Exception as error:
            plain = compile_function(self._function, torch.device("cpu"))
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"a compiled program cannot be kept for the next start: {reason}", stacklevel=4)
            return plain

    def _read(self, arguments: tuple[Any, ...]) -> Ready | None:
        """Return the program of the file; None without a file, or where it is damaged or of other tensors."""
        try:
            digest, content = (whole := self._path.read_bytes())[:32], whole[32:]
            if hashlib.sha256(content).digest() != digest:
                return None
            form, source = pickle.loads(content)
            inputs = [None if isinstance(source, Place) else _follow(self._function, source) for source in form.sources]
            fits = _descriptions(_with_arguments(form, inputs, arguments)) == form.inputs
        except Exception:  # whatever a foreign or damaged file raises, the program is compiled again
            return None
        return Ready(form, source, inputs) if fits else None

    def _compile(self, arguments: tuple[Any, ...]) -> Ready:
        """Compile without running, and keep the program; the C++ compiler may still work when this returns.

        Raises what tracing and compiling raise, and KeyError or ValueError for programs that files cannot describe.
        """
        self._store.prepare()
        made: dict[str, Any] = {}

        def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def inner(graph: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
                (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
                code: Any = compile_fx_inner(graph, examples, **options)
                outputs = [
                    torch.empty_strided(*_description(node.meta["val"])[:2], dtype=node.meta["val"].dtype)
                    for node in outputs
                ]

                def pretend(inputs: list[Any]) -> list[Tensor]:
                    made.update(code=code, inputs=list(inputs), outputs=outputs)
                    return outputs

                pretend._boxed_call = True  # type: ignore[attr-defined]
                return pretend

            # A step calls some hundred kernels, and many take less time than a call from Python.
            patches: Any = {"inner_compile": inner, "config_patches": {"cpp_wrapper": True}}
            with torch._functorch.config.patch(enable_autograd_cache=False), _build_beside(self._store.compilers):
                compiled: Any = compile_fx(graph, examples, **patches)
            return compiled  # type: ignore[no-any-return]

        result = compile_alone(self._function, backend)(*arguments)
        code, inputs = made["code"], made["inputs"]
        if code.constants:
            raise ValueError("the program has constants of its own")
        form = self._form(arguments, inputs, made["outputs"], result)
        content = pickle.dumps((form, code.source_code))
        _write(self._path, hashlib.sha256(content).digest() + content)
        held = [None if isinstance(source, Place) else one for source, one in zip(form.sources, inputs, strict=True)]
        return Ready(form, code.source_code, held)

    def _form(self, arguments: tuple[Any, ...], inputs: Sequence[Any], outputs: Sequence[Any], result: Any) -> Form:
        given = {id(leaf): Place("argument", number) for number, leaf in enumerate(_leaves(arguments))}
        held = _reachable(self._function)
        sources = tuple(given.get(id(one)) or held[id(one)] for one in inputs)
        places = {id(one): Place("input", number) for number, one in enumerate(inputs)}
        places |= {id(one): Place("output", number) for number, one in enumerate(outputs)}

        def placed(value: Any) -> Any:
            if isinstance(value, tuple):
                parts = map(placed, value)
                return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
            return places[id(value)] if isinstance(value, Tensor) else value

        return Form(sources, _descriptions(inputs), _descriptions(outputs), placed(result))


def _runner(ready: Ready) -> Callable[..., Any]:
    """Return the function of the arguments that calls a program's code."""
    form, source, inputs = ready
    space: dict[str, Any] = {}
    exec(source, space)
    code, given = space["call"], _given(form)

    def run(*arguments: Any) -> Any:
        leaves, values = list(_leaves(arguments)), inputs.copy()
        for at, number in given:
            values[at] = leaves[number]
        # The code empties the list that it is given.
        return _filled(form.result, code(values.copy()), values)

    return run


def _given(form: Form) -> list[tuple[int, int]]:
    """Which inputs are arguments, and their numbers."""
    return [(at, source.number) for at, source in enumerate(form.sources) if isinstance(source, Place)]


def _with_arguments(form: Form, inputs: list[Any], arguments: tuple[Any, ...]) -> list[Any]:
    leaves, values = list(_leaves(arguments)), inputs.copy()
    for at, number in _given(form):
        values[at] = leaves[number]
    return values


@contextlib.contextmanager
def _build_beside(compilers: Executor) -> Iterator[None]:
    """Let the C++ compiler of a program work in another thread; the program is loaded later."""
    from torch._inductor.codecache import CppWrapperCodeCache

    def begin(*arguments: Any, **options: Any) -> None:
        CppWrapperCodeCache.load_pybinding_async(*arguments, **{**options, "submit_fn": compilers.submit})

    CppWrapperCodeCache.load_pybinding = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CppWrapperCodeCache.load_pybinding  # the inherited method again


def _filled(result: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    if isinstance(result, Place):
        return (outputs if result.kind == "output" else inputs)[result.number]
    if isinstance(result, tuple):
        parts = [_filled(part, outputs, inputs) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def _leaves(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


def _description(value: Any) -> Any:
    """What a program's code depends on in an input, as far as it can be read off a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a program takes tensors, not {type(value).__name__}")
    strides = value.stride() if value.layout == torch.strided else ()
    return tuple(value.shape), strides, value.dtype, value.layout, value.device.type


def _descriptions(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(_description, values))


def _reachable(function: Callable[..., Any]) -> dict[int, Steps]:
    """Return the shortest path to every tensor that a function holds, by id of the tensor."""
    found: dict[int, Steps] = {}
    waiting: deque[tuple[Any, Steps]] = deque([(function, ())])
    seen: dict[int, Any] = {}
    while waiting:
        value, path = waiting.popleft()
        if id(value) in seen or isinstance(value, type | ModuleType | str | bytes | Engine):
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found[id(value)] = path
            continue
        waiting.extend((part, (*path, step)) for step, part in _parts(value))
    return found


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, MethodType):
        yield ("attribute", "__self__"), value.__self__
    elif isinstance(value, FunctionType):
        for number, cell in enumerate(value.__closure__ or ()):
            yield ("cell", number), _content(cell)
    elif isinstance(value, dict):
        yield from ((("item", key), part) for key, part in value.items() if isinstance(key, str | int | tuple))
    elif isinstance(value, list | tuple):
        yield from ((("item", number), part) for number, part in enumerate(value))
    else:
        yield from ((("attribute", name), part) for name, part in getattr(value, "__dict__", {}).items())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _follow(value: Any, path: Steps) -> Any:
    for kind, step in path:
        if kind == "attribute":
            value = getattr(value, step) if step == "__self__" else value.__dict__[step]
        else:
            value = value.__closure__[step].cell_contents if kind == "cell" else value[step]
    return value


def _write(path: Path, content: bytes) -> None:
    """Write a file that several processes may write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
