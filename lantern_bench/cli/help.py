"""Help texts, groups of options, and completion of names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand

from lantern_bench.cli.console import FORMATS
from lantern_bench.methods.catalog import MODES, PARAMETERS
from lantern_bench.methods.parameters import Importable, load_code

# ---- Help and completion, by the name of a flag or argument

_GROUPS = {
    "What": ("mode",),  # and what is in no other group
    "Decoding": (*PARAMETERS, "set", "neighbour_space"),
    "Run": (
        *("seed", "device", "dtype", "compile", "threads", "processes"),
        *("resume", "shard", "ray", "worker_timeout", "dry_run", "yes"),
    ),
    "Output": ("out", "force", "format"),
    "Options": ("help",),
}
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
    kinds = {"<int>": "NUMBER", "<float>": "NUMBER", "<path>": "PATH"}
    return kinds.get(parameter.display_type(ctx), key.upper())


class Command(TyperCommand):
    """A command whose help shows the options of a sweep in groups, with their values."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options."""
        parameters = {_key(parameter): parameter for parameter in self.get_params(ctx)}
        titles = ("Arguments", *_GROUPS)
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for key, parameter in parameters.items():
            group = next((group for group, keys in _GROUPS.items() if key in keys), "What")
            title = group if "temperature" in parameters else "Options"
            if parameter.param_type_name == "argument":
                title = "Arguments"
            else:
                parameter.metavar = parameter.metavar or _metavar(parameter, key, ctx)
            record = parameter.get_help_record(ctx)
            if record is not None:
                records[title].append((record[0].partition(" <")[0], record[1]))
        for title in filter(records.get, titles):
            with formatter.section(title):
                formatter.write_dl(records[title])


# ---- Helpers of several commands


def command_group(**settings: Any) -> typer.Typer:
    """Return a group of commands with plain help, because Rich help cuts messages."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        **settings, no_args_is_help=True, rich_markup_mode=None, context_settings=names
    )
