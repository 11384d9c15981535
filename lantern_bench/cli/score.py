"""The command `score`."""

from __future__ import annotations

from typing import Annotated

import typer

from lantern_bench.cli.console import Console, show_events
from lantern_bench.cli.options import (
    DeviceOption,
    FormatOption,
    RunArgument,
)
from lantern_bench.metrics.protocols import PROTOCOLS


def score(
    ctx: typer.Context,
    run: RunArgument,
    protocol: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PROTOCOLS)}; default: the run's own.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="embedded, a folder, a COCO .json (or FILE.json=FOLDER), or a .npz (mu, sigma)."
        ),
    ] = None,
    infinity: Annotated[
        bool,
        typer.Option(
            "--fid-infinity", help="Also extrapolate FID to infinitely many pictures.", hidden=True
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Score pictures again that these scorers have scored.")
    ] = False,
    device: DeviceOption = "auto",
    format: FormatOption = None,
) -> None:
    """Score the pictures of a run by a quality protocol. Nothing is decoded."""
    from lantern_bench.metrics.score_run import score_run_directory

    console: Console = ctx.obj
    with console.progress() as progress:
        show = show_events(console, progress)
        scored_by, count = score_run_directory(
            run,
            show,
            protocol=protocol,
            reference=reference,
            device=device,
            infinity=infinity,
            rescore=again,
        )

    from lantern_bench.analysis.tables import write_tables

    quality = write_tables(run)["quality"]
    rows = quality[quality["protocol"] == scored_by.name].reset_index(drop=True)
    title = f"{run.name}: {scored_by.name}, version {scored_by.version}"
    console.table(rows, "quality", title=title, format=format)
    message = (
        f"{count} scores added"
        if count
        else "nothing to add: these scorers have scored everything (--again)"
    )
    console.say(f"{message}; {run / 'scores.jsonl'}")
