"""`lantern-bench`: the commands, and what happens when one of them fails.

Commands stand in their own files and import what is heavy inside themselves, so that `--help` is quick. A command gets
its `Console` as `ctx.obj`. What goes wrong for a reason outside this program is one paragraph on stderr and the exit
code of its error; what is our own fault is one line and 1. The codes are in the help and in the README.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from lantern_bench import __version__
from lantern_bench.cli.certify import certify
from lantern_bench.cli.generate import generate
from lantern_bench.cli.models import experiments, models, neighbours, weights
from lantern_bench.cli.profile import profile
from lantern_bench.cli.results import compare, curves, report, show
from lantern_bench.cli.sweep import reproduce, score, sweep
from lantern_bench.cli.train import train
from lantern_bench.console import Console
from lantern_bench.errors import LanternError

__all__ = ["app", "main", "run"]

_EPILOG = (
    "Exit codes: 0 all good; 1 internal error; 2 what was typed or written is wrong; 3 right but refused now; "
    "4 some images failed; 5 a check failed; 130 interrupted."
)
# May be typed before or after the command; the callback below takes them before it.
_ANYWHERE = {"-q", "--quiet", "-v", "--verbose", "--debug"}

# Plain help and messages: Rich would draw boxes around them, and cut them at the width of a terminal.
app = typer.Typer(
    name="lantern-bench",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(sweep)
app.command()(reproduce)
app.command()(score)
app.command()(show)
app.command()(curves)
app.command()(compare)
app.command()(report)
app.command()(certify)
app.command()(generate)
app.command()(models)
app.command()(experiments)
app.command()(profile)
app.command()(neighbours)
app.add_typer(train)
app.add_typer(weights)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lantern-bench {__version__}")
        raise typer.Exit


@app.callback()
def _flags(
    ctx: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors and results.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure relaxed speculative decoding of image generators: speed and quality in one run."""
    ctx.obj = Console(quiet=quiet, verbose=verbose)


def run() -> None:
    """Run the command line and exit with its code: the console script."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run the command line with these arguments and return the exit code; nothing is raised."""
    typed = _hoisted(arguments)
    debug = "--debug" in typed
    try:
        app(args=typed, prog_name="lantern-bench")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except LanternError as error:
        _trace(debug)
        Console().error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the last line of defence: whatever escapes is reported, with 1
        _trace(debug)
        advice = "This is a fault of lantern-bench" + ("." if debug else "; --debug shows where it happened.")
        Console().error(LanternError(f"internal: {type(error).__name__}: {error}", advice))
        return LanternError.exit_code
    return 0


def _hoisted(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the flags of `_ANYWHERE` in front; what follows `--` stays where it is."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    front = [word for word in arguments[:end] if word in _ANYWHERE]
    return front + [word for word in arguments[:end] if word not in _ANYWHERE] + list(arguments[end:])


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()
