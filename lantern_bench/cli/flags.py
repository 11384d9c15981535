"""The flags that say how to decode and where, defined once for every command that decodes.

A command takes them by `with_flags`; what was typed comes to it as one mapping by the keys of an experiment file. All
values stay text here and are checked where an experiment file's are, so that both give the same message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lantern_bench.spec.topologies import STATIC_TREES

__all__ = ["DECODING", "PLACE", "PROMPTS_HELP", "with_flags"]

PROMPTS_HELP = "A prompt set, a file, coco:FILE, parti:FILE or imagenet; with #100 a hundred of them."

Flag = tuple[str, Any]


def _text(key: str, help: str) -> Flag:
    return key, Annotated[str | None, typer.Option(f"--{key.replace('_', '-')}", help=help)]


def _grid(key: str, help: str) -> Flag:
    return key, Annotated[list[str] | None, typer.Option(f"--{key.replace('_', '-')}", help=help)]


def _switch(key: str, help: str) -> Flag:
    return key, Annotated[bool | None, typer.Option(f"--{key}/--no-{key}", help=help)]


DECODING: tuple[Flag, ...] = (
    _grid("drafting", "static, dynamic, or chain (static with the tree chain-5)."),
    _grid("rule", "Acceptance rule: strict, block, additive, multiplicative, or one from outside the package."),
    _grid("tree", f"Static tree: {', '.join(STATIC_TREES)}; @FILE; or a list of paths."),
    _grid("nodes", "Nodes of a dynamic tree, root not counted."),
    _grid("depth", "Depth of a dynamic tree."),
    _grid("beam", "Beam of a dynamic tree."),
    _grid("neighbours", "Nearest codes whose mass a draft may take (k)."),
    _grid("neighbour_metric", "What near is: l2, cosine or random."),
    _grid("delta", "Bound of the additive rule, between 0 and 1."),
    _grid("lambda", "Bound of the multiplicative rule, above 1."),
    _grid("bound", "Bound of a rule from outside the package."),
    _grid("residual", "exact or official."),
    _grid("temperature", "Sampling temperature; 0 is greedy."),
    _grid("top_k", "Keep the k most probable tokens; 0 is off."),
    _grid("top_p", "Keep the smallest set of this mass; 1 is off."),
    _grid("filter_order", "top_k_first or top_p_first."),
    _grid("cfg_scale", "Guidance scale; 1 is off."),
)
"""Decoding parameters. Commas and repetition make a grid."""

PLACE: tuple[Flag, ...] = (
    _text("seed", "Seed of everything random."),
    _text("device", "auto, cpu, mps, cuda or cuda:N."),
    _text("dtype", "auto, float32, bfloat16 or float16; auto is bfloat16 on CUDA, and in sweeps on a CPU made for it."),
    _switch("compile", "Compile the decode steps first, outside what is timed."),
    _text("neighbour_space", "raw or normalised: where codes are near each other; default as published."),
)
"""Where, from which randomness, and with which neighbours."""


def with_flags(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command: its `flags` argument gets what was typed, by key, and the rest of it stays as it is."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        mine = [parameter.replace(kind=keyword) for parameter in own if parameter.name != "flags"]
        # An argument's name in Python cannot be a keyword such as lambda.
        added = [inspect.Parameter(f"flag_{key}", keyword, default=None, annotation=kind) for key, kind in flags]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            typed = {key: values.pop(f"flag_{key}") for key, _ in flags}
            function(**values, flags=typed)

        parameters = [*mine, *added]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return wrap
