"""The command `explore`: many settings predicted from one walk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import EXPLORE_FLAGS, SettingsOption, with_flags
from lantern_bench.config.settings import Overrides

_SHOWN = 5  # settings of the table in the terminal
# only in the file
_NOT_SHOWN = [
    "acceptance_by_depth",
    "surprise",
    "surprise_low",
    "surprise_high",
    "impossible",
    "step_ms",
    "dominated",
]


@with_flags(EXPLORE_FLAGS)
def explore(
    console: Console,
    experiment: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped experiment.")
    ],
    modes: Annotated[
        list[str] | None,
        typer.Option(help="Predict only these modes; modes that the experiment lacks are added."),
    ] = None,
    max_distance: Annotated[
        float, typer.Option(min=0.0, help="Largest distance of the settings that are shown.")
    ] = 0.02,
    verify: Annotated[
        int, typer.Option(min=0, help="Sweep this many of the best settings as well.")
    ] = 3,
    on: Annotated[
        str | None,
        typer.Option(
            "--predict-device",
            metavar="NAME",
            help="Predict speedups for a device (h100, ...) or its YAML file. Default: here.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder. Default: results/explore-<name>-<hash>.")
    ] = None,
    settings: SettingsOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Predict a grid of any size.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Predict speed and distance of every cell from a walk on each tree (default: 16 images)."""
    from lantern_bench.profile import exploration
    from lantern_bench.profile.cost_model import find_device
    from lantern_bench.report.draw import SURFACE, draw_surface

    request = exploration.explore_request(
        experiment, Overrides.from_flags(flags, modes=modes, settings=settings, many=yes), out=out
    )
    device = find_device(on, flag="--predict-device") if on else None
    with console.events() as emit:
        table = exploration.explore(request, emit, device)
    files = draw_surface(table, request.folder / "figures")
    best = exploration.best_settings(table, max_distance, _SHOWN)
    console.table(
        best.drop(columns=_NOT_SHOWN),
        "surface",
        title=f"{len(table)} settings, {request.experiment.settings.images} images; the fastest "
        f"with a distance of at most {max_distance:g}, and the fastest lossless one",
        notes=["Predicted, not measured. Quote figures of a sweep only."],
    )
    console.say(
        f"all settings: {request.folder / SURFACE}; {len(files)} files of figures: "
        f"{request.folder / 'figures'}"
    )
    if verify:
        with console.events() as emit:
            verified = exploration.verify_best(request, table, max_distance, verify, emit=emit)
        console.table(
            verified, "verified", title=f"measured by a sweep: {request.folder / 'verified'}"
        )
