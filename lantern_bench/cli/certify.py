"""`lantern-bench certify`: the honesty check of a model, and the measurements that belong to it.

The flags, and what is shown and written at the end; what happens in between is `cli/certification.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lantern_bench.cli.certification import Certification, Sizes, make_certification
from lantern_bench.cli.options import DECODING, PLACE, PROMPTS_HELP, compile_steps, results_root, with_flags
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import CheckFailedError

__all__ = ["certify"]

# What a certificate makes do with, and what a measurement of its own is made of.
_QUICK = {"positions": 48, "draws": 64}
_FULL = {"positions": 200, "draws": 256}
# Not among the columns on a screen: they are in the files, and what is wrong with them is in the notes.
_ASIDE = ("prompts", "emitted_tv_crossed", "emitted_tv_median", "moved_mass")


@with_flags(*DECODING, *PLACE)
def certify(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="The model.")] = "lanterns",
    emitted_tv: Annotated[bool, typer.Option("--emitted-tv", help="Only measure what relaxation costs.")] = False,
    ambiguity: Annotated[bool, typer.Option("--ambiguity", help="Only measure how sure the target is.")] = False,
    experiment: Annotated[
        str | None,
        typer.Option(help="Whose relaxed cells are measured; certify, or relaxation-cost with --emitted-tv."),
    ] = None,
    modes: Annotated[list[str] | None, typer.Option(help="Keep the cells of these modes.")] = None,
    prompts: Annotated[str | None, typer.Option(help=PROMPTS_HELP)] = None,
    positions: Annotated[
        int | None, typer.Option(min=1, help="Places of emitted TV: 48, and 200 with --emitted-tv.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=2, help="Draws of a sampled draft at a place: 64, and 256 with --emitted-tv.")
    ] = None,
    samples: Annotated[int, typer.Option(min=50, help="Images of each G-test, for each of two prompts.")] = 1000,
    greedy: Annotated[int, typer.Option(min=1, help="Prompts of the greedy identity.")] = 8,
    images: Annotated[int, typer.Option(min=1, help="Images of --ambiguity.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Folder of the CSV files; results/certify-MODEL.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as for a sweep.")] = None,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Check that decoding is honest: lossless where it says so, and what it costs where not. Exit code 5 if it fails.

    G-test of the first tokens with its power shown, greedy identity, emitted TV of relaxed modes beside their bounds.
    """
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    usual = _FULL if emitted_tv else _QUICK
    sizes = Sizes(positions or usual["positions"], draws or usual["draws"], samples, greedy, images)
    # A certificate is about the arithmetic: float32, unless another type is asked for.
    typed = {key: None if value == [] else value for key, value in flags.items()} | {"model": [model]}
    typed |= {"prompts": prompts, "dtype": flags["dtype"] or "float32"}
    source = experiment or ("relaxation-cost" if emitted_tv or ambiguity else "certify")
    course = make_certification(source, typed, modes or None, settings or [], sizes)
    folder = out or results_root() / f"certify-{Path(model).name}"
    course.check_folder(folder)
    if course.settings.compile:
        compile_steps([course.loaded], course.place, console)
    if emitted_tv or ambiguity:
        _measure(course, folder, console, emitted_tv, ambiguity, chosen)
        return
    _certify(course, folder, console, chosen)


def _measure(
    course: Certification, folder: Path, console: Console, emitted_tv: bool, ambiguity: bool, format: str | None
) -> None:
    """Show and write the measurements that were asked for."""
    from lantern_bench.report.tables import frame

    with console.progress() as progress:
        course.prepare(progress)
        tables = course.emitted_tv(progress) if emitted_tv else {}
        tables |= course.ambiguity(progress) if ambiguity else {}
    course.write(folder, tables)
    if emitted_tv:
        title = f"what relaxation costs: {course.sizes.positions} places of real images"
        table = frame("emitted_tv", tables["emitted_tv"])
        shown = table if _for_programs(console, format) else table.drop(columns=list(_ASIDE))
        console.table(shown, "emitted_tv", title=title, format=format)
    if ambiguity:
        table = frame("ambiguity", tables["ambiguity"])
        shown = (
            table if _for_programs(console, format) else table[table["axis"] == "all"].drop(columns=["axis", "index"])
        )
        console.table(shown.dropna(axis=1, how="all"), title=f"token ambiguity of {course.model}", format=format)
    console.say(f"tables: {folder}")


def _certify(course: Certification, folder: Path, console: Console, format: str | None) -> None:
    """Run every check, show the certificate, and raise `CheckFailedError` where one does not hold."""
    from lantern_bench.certify.tables import failures
    from lantern_bench.report.tables import frame

    with console.progress() as progress:
        course.prepare(progress)
        tables = course.certificate(progress)
    course.write(folder, tables)
    rows = tables["certificate"]
    table = frame("certificate", rows)
    title = f"certificate of {course.model}"
    shown = table if _for_programs(console, format) else table.drop(columns="model")
    console.table(shown, title=title, format=format)
    console.say(f"tables: {folder}")
    if failed := failures(rows):
        raise CheckFailedError(f"{len(failed)} checks do not hold: " + "; ".join(failed))


def _for_programs(console: Console, format: str | None) -> bool:
    """Whether a table is written whole and as it is."""
    return (format or console.format) in ("csv", "json")
