"""Options and helpers that several commands share, each defined once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import UserError
from lantern_bench.methods.tables import DRAFTINGS, MODES, OUTSIDE_RULES, PARAMETERS, RULES, raise_if_refused
from lantern_bench.runs.store import find_run, results_root

if TYPE_CHECKING:
    from lantern_bench.config.experiment import ResolvedExperiment
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Compute

PROMPTS_HELP = "Prompt set, file, coco:FILE, parti:FILE or imagenet; append #100 to take one hundred of them."
RUN_HELP = "Run directory, or the name (or a prefix of it) of a run under results/."


FormatOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--format",
        callback=lambda value: None if value is None else Console.checked_format(value),
        help=f"Table format: {', '.join(FORMATS)}. Default: table on a terminal, csv elsewhere.",
    ),
]
ModesOption: TypeAlias = Annotated[list[str] | None, typer.Option("--modes", help="Keep only cells of these modes.")]
PromptsOption: TypeAlias = Annotated[str | None, typer.Option("--prompts", help=PROMPTS_HELP)]
SettingsOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="key=value; sets any key of the experiment file.")
]
DEVICE_HELP = "auto, cpu, mps, cuda or cuda:N."

Flag: TypeAlias = tuple[str, Any]


def flag(key: str, help: str, kind: Any = list[str] | None) -> Flag:
    """A flag of strings; the experiment's validation reads them. Flags of lists can be repeated."""
    return key, Annotated[kind, typer.Option(f"--{key.replace('_', '-')}", help=help)]


_OF_TREES = frozenset(name for row in DRAFTINGS.values() for name in row.parameter_names)
# The parameters of decoding but those of a tree, for commands that choose trees themselves.
RULE_FLAGS = tuple(flag(key, one.help) for key, one in PARAMETERS.items() if key != "mode" and key not in _OF_TREES)
# The parameters of decoding, whose several values (commas, or a repeated flag) make a grid; then seed and device.
DECODING_FLAGS: tuple[Flag, ...] = (
    *(flag(key, one.help) for key, one in PARAMETERS.items() if key != "mode"),
    flag("seed", "Random seed.", str | None),
    flag("device", DEVICE_HELP, str | None),
    flag("dtype", "auto, float32, bfloat16 or float16. auto: bfloat16 on CUDA and, in sweeps, fast CPUs.", str | None),
    ("compile", Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the decode steps.")]),
    flag(
        "threads",
        "Threads on a CPU. Default: sweeps try several and keep the fastest number; others use all cores.",
        str | None,
    ),
    flag("neighbour_space", "Space of code distances: raw or normalised. Default: as published.", str | None),
)


def with_flags(*flags: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command; its `flags` argument receives their values by key, None where a flag is not given."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [one.replace(kind=keyword) for one in own if one.name != "flags"]
        # The prefix is needed because a Python argument cannot be called `lambda`.
        parameters += [inspect.Parameter(f"flag_{key}", keyword, default=None, annotation=kind) for key, kind in flags]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            given = {key: values.pop(f"flag_{key}") for key, _ in flags}
            function(**values, flags={key: None if value == [] else value for key, value in given.items()})

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return wrap


decoding_flags = with_flags(*DECODING_FLAGS)


def split_modes(mode: Sequence[str]) -> list[str]:
    """Return the values of a repeated flag, each of which may list several with commas."""
    return [one.strip() for text in mode for one in text.split(",") if one.strip()]


def resolve_flags(
    name: str, flags: Mapping[str, Any], mode: Sequence[str], settings: Sequence[str] = (), **usual: Any
) -> ResolvedExperiment:
    """Resolve the flags of a command as an experiment of these modes; raises one `UserError` with all their problems.

    A relaxed rule without a bound gets its row's example. `usual` values hold where flags and settings give none.
    """
    from lantern_bench.errors import did_you_mean

    modes = list(MODES) if "all" in (modes := split_modes(mode)) else modes
    for one in modes:
        if one not in MODES:
            raise_if_refused(one)
            hint = did_you_mean(one, MODES)
            raise UserError(f"--mode {one}: unknown mode{hint}", f"The modes are {', '.join(MODES)}, or all.")
    return resolve_cells(name, flags, [{"mode": one} for one in modes], settings, **usual)


def resolve_cells(
    name: str, flags: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], settings: Sequence[str], **usual: Any
) -> ResolvedExperiment:
    """Resolve the flags of a command with cells and `usual` values of an experiment; otherwise as `resolve_flags`."""
    from lantern_bench.config.experiment import resolve
    from lantern_bench.config.parse_experiment import read_experiment
    from lantern_bench.config.values import Overrides
    from lantern_bench.config.yaml_source import Source
    from lantern_bench.models.registry import defaults_of, model_of
    from lantern_bench.runs.request import check_neighbours

    model_of(flags["model"][0])
    # A sweep has no default bounds, because it compares values.
    own = {row.name: {row.bound: row.example} for row in OUTSIDE_RULES.values() if not row.lossless}
    bounds = {rule.bound: rule.example for rule in RULES.values() if not rule.lossless and rule.name not in own}
    bounded = [{**own.get(cell.get("rule", MODES[cell["mode"]].rule), {}), **cell} for cell in cells]
    data = {"name": name, "model": "?", "baseline": False, **bounds, **usual, "cells": bounded}
    overrides = Overrides.from_flags(flags, settings=settings)
    experiment, problems = read_experiment(Source(name, Path(), data), overrides)
    problems.raise_all()
    resolved = resolve(experiment, defaults_of(flags["model"]))
    check_neighbours(resolved)
    return resolved


def command_group(**settings: Any) -> typer.Typer:
    """A group of commands with plain help: Rich markup draws boxes and cuts messages at the terminal's width."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(**settings, no_args_is_help=True, rich_markup_mode=None, context_settings=names)


def locate(run: str) -> Path:
    """Return a run directory by path or name; raises `UserError` that lists the existing runs."""
    return find_run(run, results_root())


def locate_all(runs: Sequence[str]) -> list[Path]:
    """Return the directories of several runs without duplicates; raises as `locate`."""
    return list(dict.fromkeys(locate(run) for run in runs))


def compile_steps(models: Iterable[LoadedModel], compute: Compute, console: Console) -> None:
    """Compile the models' decode steps on first use; warn and continue uncompiled where this is impossible."""
    from lantern_bench.runs.devices import compile_models

    if (note := compile_models(models, compute)) is not None:
        console.note(*note)


def say_memory(total: int, device: str, console: Console) -> None:
    """Say how much memory a model needs, and how much is free on a CPU."""
    import psutil

    console.say(f"memory needed: {total / 1e9:.2f} GB on {device}, without the activations of a forward")
    if device == "cpu":
        free = psutil.virtual_memory().available
        console.say(f"free here: {free / 1e9:.2f} GB" + ("" if free > total else ": not enough"))


def writable(folder: Path, flag: str) -> None:
    """Create a directory; raises `UserError` where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {folder}: cannot be written to")
