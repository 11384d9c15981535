"""Commands for scorers outside the package: `export` and `import-scores`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import RunArgument, check_choice, with_format
from lantern_bench.storage.layouts import LAYOUTS, PICTURES_PER_PROMPT


def export(
    ctx: typer.Context,
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.")],
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "folder",
) -> None:
    """Write the images of a run as scorers or the model's own decoder read them.

    Each cell has a folder.
    """
    check_choice("--layout", layout, LAYOUTS)
    console: Console = ctx.obj

    from lantern_bench.models.registry import model_of
    from lantern_bench.storage.layouts import export_run

    described = cache(model_of)
    count = export_run(
        run,
        out,
        layout,
        decoder_input=lambda model, tokens: described(model).decoder_input(tokens),
    )
    if layout != "tokens":
        console.say(f"{count} pictures a prompt; published scores are of {PICTURES_PER_PROMPT}")
    console.data(str(out))


@with_format
def import_scores(
    console: Console,
    run: RunArgument,
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="Results of GenEval (.jsonl) or DPG-Bench (.txt)."
        ),
    ],
    cell: Annotated[
        str | None, typer.Option(help="The cell, where the paths in FILE name no cell's folder.")
    ] = None,
) -> None:
    """Read results of an official scorer, of pictures that `export` wrote, into quality.csv."""
    from lantern_bench.analysis.tables import write_tables
    from lantern_bench.storage.official_scores import import_scores as read_scores

    protocol, _, missing = read_scores(run, file, cell)
    for cell_id, text in missing.items():
        console.warn(f"{cell_id}: {text}", "Score all pictures of its folder.")
    quality = write_tables(run)["quality"]
    rows = quality[quality["protocol"] == protocol].reset_index(drop=True)
    console.table(rows, "quality", title=run.name)
