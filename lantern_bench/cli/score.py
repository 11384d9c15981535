"""`lantern-bench score`: judge the pictures of a run again, by any protocol; nothing is decoded.

What the judges have said already is kept and not said twice. The rules are in `spec/protocols.py`, the judging in
`runs/score.py`; here what is missing is named before anything begins, and the quality table is shown at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_bench.cli.places import RUN_HELP, locate
from lantern_bench.console import FORMATS, Console
from lantern_bench.spec.protocols import PROTOCOLS

__all__ = ["score"]


def score(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    protocol: Annotated[str | None, typer.Option(help=f"One of {', '.join(PROTOCOLS)}; by default the run's.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="embedded, a folder of pictures, a COCO .json (or FILE.json=FOLDER), or a .npz (mu, sigma)."),
    ] = None,
    fid_infinity: Annotated[
        bool, typer.Option("--fid-infinity", help="Also extrapolate FID to infinitely many pictures.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Score also what these judges have scored already.")] = False,
    clip_weights: Annotated[Path | None, typer.Option(help="Checkpoint of the protocol's CLIP model.")] = None,
    features_weights: Annotated[Path | None, typer.Option(help="Weights of the protocol's extractor.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "auto",
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Score the pictures of a run by a quality protocol, without decoding again."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    folder = locate(run)

    from lantern_bench.runs.admission import default_protocol
    from lantern_bench.runs.store import read_manifest
    from lantern_bench.spec.protocols import protocol_of

    recorded = read_manifest(folder).get("experiment", {})
    named = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    rules = protocol_of(named)

    from lantern_bench.report.tables import write_tables
    from lantern_bench.runs.judges import judges_of
    from lantern_bench.runs.local import choose_place
    from lantern_bench.runs.reference import find_reference
    from lantern_bench.runs.reference_cache import cache_folder
    from lantern_bench.runs.score import score_run
    from lantern_bench.runs.scorebook import ScoreBook

    place = choose_place(device)
    judges = judges_of(rules, clip_weights=clip_weights, features_weights=features_weights, device=place.device)
    given = reference or (recorded.get("reference") if named == recorded.get("protocol") else None)
    against = find_reference(given, rules)
    with ScoreBook(folder) as book, console.progress() as progress:
        progress.start(1, "scoring")
        written = score_run(
            book,
            judges,
            against,
            on_cell=lambda _cell, done, total: progress.reach(done / total),
            cache=cache_folder(),
            infinity=fid_infinity,
            again=again,
        )
        progress.reach(1)
    quality = write_tables(folder)["quality"]
    mine = quality[quality["protocol"] == rules.name].reset_index(drop=True)
    console.table(mine, "quality", title=f"{folder.name}: {rules.name}, version {rules.version}", format=chosen)
    said = f"{written} scores added" if written else "nothing to add: these judges have scored all of it (--again)"
    console.say(f"{said}; {folder / 'scores.jsonl'}")
