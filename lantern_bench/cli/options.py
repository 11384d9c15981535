"""Options and helpers that several commands share, each defined once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from lantern_bench.cli.console import FORMATS
from lantern_bench.methods.catalog import (
    DRAFTINGS,
    MODES,
    OUTSIDE_RULES,
    PARAMETERS,
    RULES,
    raise_if_refused,
)
from lantern_bench.storage.run_directory import find_run
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import did_you_mean, split_words

if TYPE_CHECKING:
    from lantern_bench.config.experiment import ResolvedExperiment


PROMPTS_HELP = (
    "Prompt set, file, coco:FILE, parti:FILE or imagenet; append #100 to take one hundred of them."
)
RUN_HELP = "Run directory, or the name (or a prefix of it) of a run under results/."
DEVICE_HELP = "auto, cpu, mps, cuda or cuda:N."
MOST_SEED = 2**63 - 1

# ---- Flags whose values a command uses itself. Only --help-all shows `hidden` flags.


def check_choice(flag: str, value: str, choices: Collection[str]) -> None:
    """Raise `UserError` for a value that is not one of the choices.

    Args:
        flag: The flag.
        value: Its value.
        choices: The allowed values.
    """
    if value not in choices:
        raise UserError(f"{flag} {value}: unknown", f"One of {', '.join(choices)}.")


def _checked_format(value: str | None) -> str | None:
    if value is not None:
        check_choice("--format", value, FORMATS)
    return value


FormatOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--format",
        callback=_checked_format,
        help=f"Table format: {', '.join(FORMATS)}. Default: table on a terminal, csv elsewhere.",
    ),
]
ModesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--modes", help="Run only these modes; modes that the experiment lacks are added."
    ),
]
PromptsOption: TypeAlias = Annotated[str | None, typer.Option("--prompts", help=PROMPTS_HELP)]
SettingsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the experiment file."),
]
DeviceOption: TypeAlias = Annotated[str, typer.Option("--device", help=DEVICE_HELP)]
RunArgument: TypeAlias = Annotated[
    Path, typer.Argument(parser=find_run, metavar="RUN", help=RUN_HELP)
]
RunsArgument: TypeAlias = Annotated[
    list[Path], typer.Argument(parser=find_run, metavar="RUN", help=RUN_HELP)
]

# ---- Flags that are keys of an experiment. Their values are text, which `config` reads and checks.

_WORD = str | None
_SWITCH = bool | None
_LIST = list[str] | None  # several values, with commas or by repeating the flag, are a grid


def flag(key: str, kind: Any, help: str, *, rare: bool = False) -> tuple[str, Any]:
    """Return a key of an experiment and its option.

    Args:
        key: The key.
        kind: The type of the value; a switch also gets its `--no-` form.
        help: The help text.
        rare: Only `--help-all` shows the flag.
    """
    words = key.replace("_", "-")
    names = f"--{words}/--no-{words}" if kind == _SWITCH else f"--{words}"
    return key, Annotated[kind, typer.Option(names, help=help, hidden=rare)]


_BEFORE_PARAMETERS = (
    flag("model", _LIST, "One or several models. Default: the experiment's."),
    flag("prompts", _WORD, PROMPTS_HELP),
    flag("images", _WORD, "Images per cell; published tables use 1,000 to 5,000."),
    flag(
        "metrics",
        _LIST,
        "speed, quality (of pictures), distance (from the target). Default: all.",
    ),
    flag("protocol", _WORD, "The quality protocol; see `score -h`."),
    flag("reference", _WORD, "What fidelity is measured against; see `score -h`."),
    flag(
        "processes",
        _WORD,
        "Worker processes that run in turn; 3 or more give speedups an interval.",
    ),
    flag("repeats", _WORD, "Repeat the images this many times, with new seeds."),
    flag("batch", _WORD, "Batch size, or a list; published figures use 1."),
    flag("baseline", _SWITCH, "Add an ar cell if there is none."),
    flag("pool_devices", _SWITCH, "Give one speedup over several kinds of device.", rare=True),
)
_PARAMETERS = dict(
    flag(key, _LIST, row.help, rare=row.rare) for key, row in PARAMETERS.items() if key != "mode"
)
_AFTER_PARAMETERS = (
    flag("seed", _WORD, "Random seed."),
    flag("device", _WORD, DEVICE_HELP),
    flag(
        "dtype",
        _WORD,
        "auto, float32, bfloat16 or float16. auto: bfloat16 on CUDA and, in sweeps, fast CPUs.",
    ),
    flag("compile", _SWITCH, "Compile the decode steps."),
    flag(
        "threads",
        _WORD,
        "CPU threads. Default: sweeps measure the fastest number; others use all cores.",
    ),
    flag(
        "neighbour_space",
        _WORD,
        "Space of code distances: raw or normalised. Default: as published.",
        rare=True,
    ),
)
DECODING_FLAGS = _PARAMETERS | dict(_AFTER_PARAMETERS)
EXPERIMENT_FLAGS = dict(_BEFORE_PARAMETERS) | DECODING_FLAGS
_OF_TREES = set().union(*(row.parameter_names for row in DRAFTINGS.values()))
# Flags for commands that choose trees themselves.
RULE_FLAGS = {key: option for key, option in _PARAMETERS.items() if key not in _OF_TREES}


def with_flags(flags: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command.

    The argument `flags` of the command gets their values by key, None for flags not given.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        arguments = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [
            argument.replace(kind=keyword) for argument in arguments if argument.name != "flags"
        ]
        # The prefix is needed because a Python argument cannot be called `lambda`.
        for key, kind in flags.items():
            parameters.append(
                inspect.Parameter(f"flag_{key}", keyword, default=None, annotation=kind)
            )

        @functools.wraps(function)
        def command(**values: Any) -> None:
            typed = {key: values.pop(f"flag_{key}") for key in flags}
            function(
                **values,
                flags={key: None if value == [] else value for key, value in typed.items()},
            )

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return add


# ---- From flags to cells


def resolve_flags(
    name: str,
    flags: Mapping[str, Any],
    mode: Sequence[str],
    settings: Sequence[str] = (),
    **defaults: Any,
) -> ResolvedExperiment:
    """Resolve the flags of a command to an experiment with these modes.

    Args:
        name: The name of the experiment, for messages.
        flags: Values by key of an experiment.
        mode: The values of `--mode`, or `all`.
        settings: The values of `--set`.
        **defaults: Values by key that flags replace.

    Raises:
        UserError: A mode or a value is wrong.
    """
    modes = split_words(mode)
    if "all" in modes:
        modes = list(MODES)
    for word in modes:
        if word not in MODES:
            raise_if_refused(word)
            hint = did_you_mean(word, MODES)
            raise UserError(
                f"--mode {word}: unknown mode{hint}", f"The modes are {', '.join(MODES)}, or all."
            )
    return resolve_cells(
        name=name,
        flags=flags,
        cells=[{"mode": word} for word in modes],
        settings=settings,
        **defaults,
    )


def resolve_cells(
    name: str,
    flags: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    settings: Sequence[str],
    **defaults: Any,
) -> ResolvedExperiment:
    """Resolve the flags of a command to an experiment with these cells.

    A relaxed rule without a bound gets its example bound. A sweep has no such default, because it
    compares values.

    Args:
        name: The name of the experiment, for messages.
        flags: Values by key of an experiment.
        cells: The cells, as an experiment file writes them.
        settings: The values of `--set`.
        **defaults: Values by key that flags replace.
    """
    from lantern_bench.config.experiment import load_experiment
    from lantern_bench.config.settings import Overrides
    from lantern_bench.models.registry import defaults_of, model_of
    from lantern_bench.sweeps.request import check_cells
    from lantern_bench.utils.yaml_file import Source

    models = {word: model_of(word) for word in flags["model"]}
    outside = {
        row.name: {row.bound: row.example} for row in OUTSIDE_RULES.values() if not row.lossless
    }
    bounds = {
        row.bound: row.example
        for row in RULES.values()
        if not row.lossless and row.name not in outside
    }
    bounded = []
    for cell in cells:
        rule = cell.get("rule", MODES[cell["mode"]].rule)
        bounded.append({**outside.get(rule, {}), **cell})
    data = {"name": name, "model": "?", "baseline": False, **bounds, **defaults, "cells": bounded}
    overrides = Overrides.from_flags(flags, settings=settings)
    resolved = load_experiment(Source(name, Path(), data), defaults_of, overrides)
    check_cells(resolved.cells, models, with_drafters=False)
    return resolved
