"""Call the code that the compiler wrote for a program, without torch's wrappers around it.

At every call torch collects the inputs of a program again and passes several wrappers, which takes
a few percent of a small step. All inputs but the arguments are the same tensors at every call
(`Engine`). So the first call records the inputs, and later calls replace the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


def call_and_shorten(
    program: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, Callable[..., Any]]:
    """Call a compiled program, and return its result with a program for later calls.

    That is a `DirectProgram` where one is possible, and the same program otherwise.
    """
    with _recorded_calls() as calls:
        result = program(*arguments)
    if len(calls) != 1:
        return result, program
    try:
        return result, DirectProgram(calls[0], arguments=arguments, result=result)
    except LookupError:
        return result, program


class _Call(NamedTuple):
    """A call of the code that inductor wrote for a program."""

    code: Callable[[list[Any]], Sequence[Any]]
    inputs: list[Any]
    outputs: Sequence[Any]


@contextmanager
def _recorded_calls() -> Iterator[list[_Call]]:
    """Record calls of inductor's code; none if torch keeps it under another name."""
    calls: list[_Call] = []
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:
        yield calls
        return

    original = CompiledFxGraph.__call__

    def record(graph: Any, inputs: Sequence[Any]) -> Any:
        taken = list(inputs)  # the code empties its list of inputs
        outputs = original(graph, inputs)
        code = getattr(graph, "current_callable", None)
        if code is not None:
            calls.append(_Call(code, taken, outputs))
        return outputs

    CompiledFxGraph.__call__ = record  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        CompiledFxGraph.__call__ = original  # type: ignore[method-assign]


class DirectProgram:
    """A program that passes its inputs to inductor's code.

    Args:
        call: The recorded call of the code.
        arguments: The arguments of the program in that call: tensors in nested tuples.
        result: The result of the program in that call: tensors in nested tuples.

    Raises:
        LookupError: The code computes something other than the program. Torch then computes the
            rest around it, for example a view of an input, or a copy to an argument.
    """

    def __init__(self, call: _Call, *, arguments: tuple[Any, ...], result: Any) -> None:
        self._code = call.code
        self._inputs = call.inputs

        # 1. Find each argument among the inputs.
        numbers = _numbers_of(call.inputs, first=0)
        self._arguments = [
            (place, numbers[id(value)])
            for place, value in enumerate(_leaves(arguments))
            if value is not None
        ]

        # 2. Find each part of the result among the inputs and the outputs.
        outputs = _numbers_of(call.outputs, first=len(call.inputs))
        numbers |= outputs
        self._result = _mapped(result, lambda value: numbers[id(value)])
        if not set(outputs.values()).issubset(_leaves((self._result,))):
            raise LookupError("an output of the code is not in the result of the program")

    def __call__(self, *arguments: Any) -> Any:
        """Run the program with arguments in the structure of the first call."""
        values = list(_leaves(arguments))
        inputs = self._inputs.copy()
        for place, number in self._arguments:
            inputs[number] = values[place]
        tensors = [*inputs, *self._code(inputs.copy())]
        return _mapped(self._result, tensors.__getitem__)


def _numbers_of(values: Sequence[Any], *, first: int) -> dict[int, int]:
    """Return the number of each tensor, by its identity."""
    numbered = enumerate(values, first)
    return {id(value): number for number, value in numbered if isinstance(value, Tensor)}


def _leaves(tree: tuple[Any, ...]) -> Iterator[Any]:
    """Yield what nested tuples hold, in order."""
    for part in tree:
        if isinstance(part, tuple):
            yield from _leaves(part)
        else:
            yield part


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to what nested tuples hold, except None."""
    if tree is None:
        return None
    if not isinstance(tree, tuple):
        return function(tree)
    parts = [_mapped(part, function) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
