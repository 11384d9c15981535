"""Options and helpers that several commands share, their help and their completion."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from lantern_bench.cli.console import FORMATS
from lantern_bench.config.settings import OF_RESULTS, Overrides, Settings, decimal_commas
from lantern_bench.methods.catalog import DRAFTINGS, MODES, PARAMETERS, RULES, check_modes
from lantern_bench.methods.parameters import Importable, load_code
from lantern_bench.storage.run_directory import find_run
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import split_words

if TYPE_CHECKING:
    from lantern_bench.config.experiment import ResolvedExperiment


RUN_HELP = "Run directory, or the name (or a prefix of it) of a run under results/."
_SETTINGS_HELP = {key: str(field.title) for key, field in Settings.model_fields.items()}
PROMPTS_HELP = _SETTINGS_HELP["prompts"]
DEVICE_HELP = _SETTINGS_HELP["device"]
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


FormatOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"Table format: {', '.join(FORMATS)}. Default: table on a terminal, csv elsewhere.",
    ),
]
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


def option(key: str, kind: Any, help: str, *, rare: bool = False) -> Any:
    """Return the option of a key; a switch also gets its `--no-` form.

    Args:
        key: The key.
        kind: The type of the value.
        help: The help text.
        rare: Only `--help-all` shows the flag.
    """
    words = key.replace("_", "-")
    names = f"--{words}/--no-{words}" if kind is bool else f"--{words}"
    return Annotated[kind | None, typer.Option(names, help=help, hidden=rare)]


def _option_of_setting(key: str, kind: Any) -> Any:
    text_kind: Any = bool if kind is bool else str
    if get_origin(kind) is tuple:
        text_kind = list[str]
    rare = key in ("pool_devices", "redecode_disturbed", "neighbour_space")
    return option(key, text_kind, _SETTINGS_HELP[key], rare=rare)


# Several values, with commas or by repeating the flag, are a grid.
_PARAMETERS = {
    key: option(key, list[str], row.help, rare=row.rare)
    for key, row in PARAMETERS.items()
    if key != "mode"
}
_SETTINGS = {
    key: _option_of_setting(key, field.annotation)
    for key, field in Settings.model_fields.items()
    if field.title
}
EXPERIMENT_FLAGS = _PARAMETERS | _SETTINGS
EXPLORE_FLAGS = {key: option for key, option in EXPERIMENT_FLAGS.items() if key not in OF_RESULTS}
DECODING_FLAGS = _PARAMETERS | {
    key: _SETTINGS[key]
    for key in ("seed", "device", "dtype", "compile", "threads", "neighbour_space")
}
_OF_TREES = set().union(*(row.parameter_names for row in DRAFTINGS.values()))
# Flags for commands that choose trees themselves.
RULE_FLAGS = {key: option for key, option in _PARAMETERS.items() if key not in _OF_TREES}


def with_flags(flags: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command, and `--format`, which sets the format of the console.

    The argument `flags` of the command gets their values by key, None for flags not given. The
    argument `console` gets the console.
    """
    # The prefix is needed because a Python argument cannot be called `lambda`.
    kinds = {f"flag_{key}": kind for key, kind in flags.items()}
    kinds |= {"ctx": typer.Context, "format": FormatOption}

    def add(function: Callable[..., None]) -> Callable[..., None]:
        arguments = inspect.signature(function, eval_str=True).parameters
        parameters = [
            row for name, row in arguments.items() if name not in ("ctx", "console", "flags")
        ]
        for name, kind in kinds.items():
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
                )
            )

        @functools.wraps(function)
        def command(*, ctx: typer.Context, format: str | None, **values: Any) -> None:
            if format is not None:
                check_choice("--format", format, FORMATS)
                ctx.obj.format = format
            if "ctx" in arguments:
                values["ctx"] = ctx
            if flags:
                values["flags"] = {key: values.pop(f"flag_{key}") for key in flags}
                for text in decimal_commas(values["flags"], values.get("settings")):
                    ctx.obj.warn(text)
            function(console=ctx.obj, **values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return add


with_format = with_flags({})
"""Adds `--format` to a command that prints a table."""


# ---- Help and completion, by the name of a flag or argument

_TITLES = ("Arguments", "What", "Decoding", "Run", "Output", "Options")
# Groups of flags; "What" has the others.
_GROUPS = dict.fromkeys((*PARAMETERS, "set", "neighbour_space"), "Decoding") | {"mode": "What"}
_GROUPS |= dict.fromkeys(("seed", "device", "dtype", "compile", "threads", "processes"), "Run")
_GROUPS |= dict.fromkeys(("resume", "shard", "ray", "worker_timeout", "dry_run", "yes"), "Run")
_GROUPS |= dict.fromkeys(("out", "force", "format"), "Output") | {"help": "Options"}
_FEW = 4  # help lists at most this many choices in place of a name
# Names that a shell completes, or the function that returns them.
_NAMES: dict[str, Collection[str] | Importable] = {
    **{key: row.kind.choices for key, row in PARAMETERS.items()},
    **dict.fromkeys(
        ("run", "runs", "run_a", "run_b"), "lantern_bench.storage.run_directory:known_runs"
    ),
    **dict.fromkeys(("model", "target"), "lantern_bench.models.registry:models"),
    "modes": MODES,
    "experiment": "lantern_bench.config.experiment:shipped_experiments",
    "device": ("auto", "cpu", "cuda", "mps"),
    "predict device": "lantern_bench.profile.cost_model:devices",
    "format": FORMATS,
}


def _key(parameter: Any) -> str:
    """Return the name of a flag or argument; the Python argument may be called otherwise."""
    return str(max(parameter.opts, key=len).lstrip("-").replace("-", "_"))


def complete_names(context: Any, parameter: Any, incomplete: str) -> list[str]:
    """Return the names that complete a word, also after a comma.

    Args:
        context: The context of the command.
        parameter: The flag or argument.
        incomplete: What is typed so far.
    """
    key = _key(parameter)
    before, comma, word = incomplete.rpartition(",")
    names: Any = _NAMES.get(f"{context.command.name} {key}", _NAMES.get(key, ()))
    names = load_code(names)() if isinstance(names, str) else names
    return [f"{before}{comma}{name}" for name in names if name.startswith(word)]


def _metavar(parameter: Any, key: str, ctx: Any) -> str:
    """Return how help shows the value of a flag."""
    if key in PARAMETERS and len(PARAMETERS[key].kind.choices) <= _FEW:
        return "|".join(PARAMETERS[key].kind.choices) or "NUMBERS"
    # Versions of typer before 0.29 have click's method.
    describe = getattr(parameter, "display_type", None) or parameter.make_metavar
    kinds = {"int": "NUMBER", "integer": "NUMBER", "float": "NUMBER", "path": "PATH"}
    return kinds.get(describe(ctx).strip("<>").lower(), key.upper())


_WHOLE = 1_000  # characters, more than a first sentence has


class Command(TyperCommand):
    """A command whose help shows the options of a sweep in groups, with their values."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options."""
        parameters = {_key(parameter): parameter for parameter in self.get_params(ctx)}
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES}
        for key, parameter in parameters.items():
            title = _GROUPS.get(key, "What") if "temperature" in parameters else "Options"
            if parameter.param_type_name == "argument":
                title = "Arguments"
            else:
                parameter.metavar = parameter.metavar or _metavar(parameter, key, ctx)
            record = parameter.get_help_record(ctx)
            if record is not None:
                records[title].append((record[0].partition(" <")[0], record[1]))
        for title in filter(records.get, _TITLES):
            with formatter.section(title):
                formatter.write_dl(records[title])


class Group(TyperGroup):
    """A group whose help shows its commands under the headings of `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their first sentences, whole."""
        records: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            title = getattr(command, "rich_help_panel", None)
            title = title if isinstance(title, str) else "Commands"
            records[title].append((name, command.get_short_help_str(limit=_WHOLE)))
        for title, lines in records.items():
            with formatter.section(title):
                formatter.write_dl(lines)


def command_group(**settings: Any) -> typer.Typer:
    """Return a group of commands with plain help, because Rich help cuts messages."""
    return typer.Typer(
        **settings,
        cls=Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


# ---- From flags to cells


def resolve_flags(
    name: str,
    flags: Mapping[str, Any],
    mode: Sequence[str],
    settings: Sequence[str] | None = None,
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
    check_modes("--mode", modes)
    cells = [{"mode": word} for word in (MODES if "all" in modes else modes)]
    return resolve_cells(name=name, flags=flags, cells=cells, settings=settings, **defaults)


def resolve_cells(
    name: str,
    flags: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    settings: Sequence[str] | None,
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
    from lantern_bench.models.registry import defaults_of, model_of
    from lantern_bench.sweeps.request import check_cells
    from lantern_bench.utils.yaml_file import Source

    models = {word: model_of(word) for word in flags["model"]}
    bounds = {row.bound: row.example for row in RULES.values() if not row.lossless}
    bounded = []
    for cell in cells:
        # Rules of other packages may share the name of their bound.
        rule = RULES[cell.get("rule", MODES[cell["mode"]].rule)]
        own = {} if rule.lossless else {rule.bound: rule.example}
        bounded.append({**own, **cell})
    data = {"name": name, "model": "?", "baseline": False, **bounds, **defaults, "cells": bounded}
    overrides = Overrides.from_flags(flags, settings=settings)
    resolved = load_experiment(Source(name, Path(), data), defaults_of, overrides)
    check_cells(resolved.cells, models, with_drafters=False)
    return resolved
