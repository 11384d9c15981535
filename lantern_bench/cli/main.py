"""The `lantern-bench` program.

Commands import heavy packages when they run, so that `--help` is fast.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.main import get_command

from lantern_bench import __version__
from lantern_bench.cli.checks import certify, check_model, check_run, doctor
from lantern_bench.cli.console import Console
from lantern_bench.cli.explore import explore
from lantern_bench.cli.external import export, import_scores
from lantern_bench.cli.generate import generate
from lantern_bench.cli.models import models, weights
from lantern_bench.cli.options import Command, command_group, complete_names
from lantern_bench.cli.profile import predict, profile
from lantern_bench.cli.results import compare, curves, recommend, report, score, show
from lantern_bench.cli.streams import ReaderGoneError, checked_streams, open_closed_streams
from lantern_bench.cli.sweep import REPRODUCE_HELP, experiments, merge, sweep
from lantern_bench.cli.train import train
from lantern_bench.devices.environment import prepare_environment
from lantern_bench.sweeps.request import DEFAULT_CLUSTER
from lantern_bench.utils import signals
from lantern_bench.utils.causes import explained
from lantern_bench.utils.clock import collect_seldom
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.quick_exit import exit_quickly

_EPILOG = (
    "Exit codes: 0 success; 1 internal error; 2 usage error; "
    "3 refused (locked, mismatched, missing weights); 4 some images failed; 5 a check failed; "
    "130 interrupted; 143 terminated."
)
_RARE = "Flags that are rarely used: --help-all."
_EXAMPLES = """\b
Examples:
lantern-bench sweep --images 24 --modes ar,scd,lantern++ --lambda 2,5,10
lantern-bench sweep mine.yaml --model llamagen-t2i-stage1 --prompts captions.txt --dry-run
"""
# What the parser raises; typer exports only its subclass.
_UsageError: Any = typer.BadParameter.__base__
# These flags work before and after the command name.
_GLOBAL = {"-q", "--quiet", "-v", "--verbose", "--debug"}

app = command_group(name="lantern-bench", pretty_exceptions_enable=False, epilog=_EPILOG)
app.command(cls=Command, epilog=_EXAMPLES, rich_help_panel="Run")(sweep)
app.command("reproduce", cls=Command, help=REPRODUCE_HELP, rich_help_panel="Run")(sweep)
_COMMANDS = {
    "Run": (explore, generate, experiments, merge),
    "Read": (show, curves, report, compare, recommend, predict, score, export, import_scores),
    "Check": (certify, check_model, check_run, doctor, profile),
    "Models": (models,),
}
for title, commands in _COMMANDS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=title)(command)
app.add_typer(train, rich_help_panel="Models")
app.add_typer(weights, rich_help_panel="Models")


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"lantern-bench {__version__}")
        raise typer.Exit


@app.callback()
def _flags(
    ctx: typer.Context,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only errors and results.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more details.")] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Benchmark speculative decoding of image generators: speed and quality in one run."""
    Path.cwd()  # without a working folder, libraries end the process
    console = Console(quiet=quiet, verbose=verbose)
    # the command line as typed, which `main` passes on
    ctx.meta["command"] = ctx.obj
    ctx.obj = console
    ctx.call_on_close(functools.partial(setattr, warnings, "showwarning", warnings.showwarning))
    warnings.showwarning = lambda message, *_: console.warn(str(message))
    prepare_environment()
    collect_seldom()


@functools.cache
def build_program(all_flags: bool = False) -> Any:
    """Build the commands, once per process; with `all_flags`, help shows rare flags too."""
    program: Any = get_command(app)
    commands: list[Any] = []
    for command in program.commands.values():
        commands += getattr(command, "commands", {"": command}).values()
    for command in commands:
        is_short = False
        for parameter in command.params:
            parameter._custom_shell_complete = complete_names
            if getattr(parameter, "hidden", False):
                parameter.hidden = not all_flags
                is_short = not all_flags
        if is_short:
            command.epilog = "\n\n".join(filter(None, [command.epilog, _RARE]))
    return program


def run() -> None:
    """Run the command line and end this process with its code: the console script.

    Programs that go on afterwards call `main`.
    """
    exit_quickly(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code; never raises."""
    open_closed_streams()
    try:
        with signals.signals_noted():
            code = _run(arguments)
            return signals.exit_code() or code
    except KeyboardInterrupt as stopped:  # between the command and the end of this function
        return getattr(stopped, "exit_code", 130)


def _run(arguments: Sequence[str]) -> int:
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    flags = [word for word in arguments[:end] if word in _GLOBAL]
    words = _with_cluster([word for word in arguments[:end] if word not in _GLOBAL])
    try:
        with checked_streams():
            try:
                return _command(words, [*flags, *words, *arguments[end:]])
            except Exception as error:
                if "--debug" in flags:
                    traceback.print_exc()
                shown = explained(error)
                shown.message = _as_typed(shown.message, words)
                Console().error(shown)
                return shown.exit_code
    except KeyboardInterrupt:
        return 130
    except (ReaderGoneError, RefusedError) as error:  # standard error cannot be written
        return error.exit_code


def _command(words: Sequence[str], arguments: Sequence[str]) -> int:
    """Parse and run a command."""
    program = build_program(all_flags="--help-all" in words)
    typed = ["--help" if word == "--help-all" else word for word in arguments]
    try:
        code = program(
            args=typed,
            prog_name="lantern-bench",
            obj=_as_recorded(arguments),
            standalone_mode=False,
        )
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except _UsageError as error:
        if error.format_message().startswith("Usage: "):  # only a group was typed: its help
            error.show()
            return int(error.exit_code)
        raise _in_our_words(error) from error
    finally:
        sys.stdout.flush()
    return code or 0


def _in_our_words(error: Any) -> UserError:
    """Return an error of the parser in the form of all other errors."""
    message = error.format_message().removeprefix("Invalid value for ").rstrip(".")
    message = re.sub("^'(-[^']*)'", r"\1", message)
    cause = error.__cause__
    if isinstance(cause, ValidationError):  # says what is allowed, but not what was given
        given = cause.errors()[0]["input"]
        message = message.replace(": Input should", f" {given}: must")
    command = error.ctx.command_path if error.ctx else "lantern-bench"
    return UserError(message, f"`{command} -h` shows what it takes.")


def _as_recorded(arguments: Sequence[str]) -> str:
    """Return the command line for manifests, which name no folder of this machine."""
    words = [re.sub(r"(^|[=:@])/(?!/).*/", r"\1", word) for word in arguments]
    return shlex.join(["lantern-bench", *words])


def _with_cluster(words: Sequence[str]) -> list[str]:
    """Give `--ray` without an address its default; the parser has no optional values."""
    result = []
    for word, after in zip(words, [*words[1:], ""], strict=False):
        is_alone = word == "--ray" and after not in ("auto", "local") and ":" not in after
        result.append(f"--ray={DEFAULT_CLUSTER}" if is_alone else word)
    return result


def _as_typed(message: str, words: Sequence[str]) -> str:
    """Name a flag in a message as an argument (`MODEL`) where the command takes an argument."""
    command = build_program()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            message = re.sub(f"^--{parameter.name}(?= )", parameter.name.upper(), message)
    return message
