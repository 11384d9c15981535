"""Compiling the decode steps as a command asks for it, and saying so where it cannot be done.

Every command that decodes goes on without; what is compiled, and how, is `decoding/compile.py`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.config.trees import STATIC_TREES
from lantern_bench.console import Console
from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Place


# ---- The flags that say how to decode and where, defined once for every command that decodes


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


# ---- Where runs are: the results folder, and a run given by path or by name


RESULTS_VARIABLE = "LANTERN_BENCH_RESULTS"
RUN_HELP = "A run's folder, its name under results/, or the beginning of the name."


def results_root() -> Path:
    """Return the folder that holds runs; it need not exist."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")


def locate(run: str) -> Path:
    """Return a run's folder by path or name; raises `UserError` with the runs there are."""
    from lantern_bench.runs.store import find_run

    return find_run(run, results_root())


def locate_all(runs: Sequence[str]) -> list[Path]:
    """Return the folders of several runs, each once; raises as `locate`."""
    return list(dict.fromkeys(locate(run) for run in runs))


# ----


def compile_steps(models: Iterable[LoadedModel], place: Place, console: Console) -> None:
    """Have the models' steps compiled from their first use on; where that cannot be, say why and leave them."""
    from lantern_bench.runs.devices import compile_models

    problem = compile_models(models, place)
    if problem is not None:
        console.warn(
            f"decoding is not compiled: {problem}",
            "It is slower so. Compiling needs torch 2.10 or newer and a C++ compiler; or leave it out.",
        )


def writable(folder: Path, flag: str) -> None:
    """Make the folder; raises `UserError` where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {folder}: cannot be written to")
