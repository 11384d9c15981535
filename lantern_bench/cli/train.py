"""`lantern-bench train`: `lanterns` makes the embedded models, or measures them against their bars; and `drafter`.

All that can be wrong is checked before anything is painted or trained. The recipe is
`training.lanterns.recipe`; here its events become progress, and its bars a table with intervals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.cli.options import writable
from lantern_bench.cli.train_drafter import drafter
from lantern_bench.console import FORMATS, Console, duration
from lantern_bench.errors import CheckFailedError, UserError
from lantern_bench.runs.store import results_root

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from lantern_bench.console import Progress
    from lantern_bench.training.lanterns.quality_gates import Bar, Observations
    from lantern_bench.training.lanterns.recipe import RecipeSettings
    from lantern_bench.training.loop import TrainEvent

__all__ = ["train"]

train = typer.Typer(
    name="train",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train a drafter for any target, or the embedded family with its own recipe.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


train.command()(drafter)


@train.command()
def lanterns(
    ctx: typer.Context,
    part: Annotated[
        list[str] | None, typer.Option(help="tokenizer, features, clip, target or drafter; repeatable. Default: all.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes a part. Default: the part's own, for a CPU.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps a part: the same seed then gives the same model.")] = None,
    init_from: Annotated[Path | None, typer.Option(help="Start from the weights in this folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the weights. Default: the package's own.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of data and checkpoints. Default: results/training/lanterns.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint, or start anew.")] = True,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Train nothing: measure the weights against their bars.")
    ] = False,
    images: Annotated[int, typer.Option(help="Pictures to sample with --evaluate.")] = 500,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Train the embedded models, or measure them with --evaluate. The same command continues a training."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    _check(minutes, steps, init_from, seed, device, images, evaluate)
    work = work or results_root() / "training" / "lanterns"

    from lantern_bench.models.lanterns import WEIGHTS_FOLDER
    from lantern_bench.runs.devices import choose_place
    from lantern_bench.training.lanterns.recipe import RecipeSettings

    folder = out or WEIGHTS_FOLDER
    parts = _parts(part, folder, init_from, evaluate)
    place = choose_place(device)
    if evaluate:
        _evaluate(parts, folder, place.device, images, seed, console, chosen)
        return
    writable(folder, "--out")
    writable(work, "--work")
    settings = RecipeSettings(minutes=minutes, steps=steps, seed=seed, resume=resume, init_from=init_from)
    _train(parts, folder, work, settings, place.device, console)


def _check(
    minutes: float | None,
    steps: int | None,
    init_from: Path | None,
    seed: int,
    device: str,
    images: int,
    evaluate: bool,
) -> None:
    """Refuse values that cannot be, before torch is imported."""
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UserError(f"--minutes {minutes:g}: must be a number above 0")
    for flag, value, least in (("--steps", steps, 1), ("--images", images, 1), ("--seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: must be a whole number of at least {least}")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: unknown device", "The devices are auto, cpu, mps, cuda and cuda:N.")
    if init_from is not None and not init_from.is_dir():
        raise UserError(f"--init-from {init_from}: there is no such folder")
    given = {"--minutes": minutes, "--steps": steps, "--init-from": init_from}
    of_training = [flag for flag, value in given.items() if value is not None]
    if evaluate and of_training:
        raise UserError(
            f"{of_training[0]} does not go with --evaluate, which trains nothing", "Train first, then type --evaluate."
        )


def _parts(named: Sequence[str] | None, folder: Path, init_from: Path | None, evaluate: bool) -> list[str]:
    """The parts in the order of the recipe; each has what it needs, or it will be trained before it."""
    from lantern_bench.training.lanterns.quality_gates import check_weights
    from lantern_bench.training.lanterns.recipe import PARTS, check_part

    for part in named or ():
        check_part(part, folder, tuple(PARTS))
    parts = [part for part in PARTS if not named or part in named]
    if evaluate:
        check_weights(parts, folder)
    else:
        for number, part in enumerate(parts):
            check_part(part, folder, tuple(parts[:number]), init_from)
    return parts


def _train(
    parts: Sequence[str], folder: Path, work: Path, settings: RecipeSettings, device: torch.device, console: Console
) -> None:
    from lantern_bench.models.lanterns import FILES
    from lantern_bench.training.lanterns.recipe import REPORT, train_part

    for part in parts:
        path = folder / FILES[part]
        before = path.is_file()
        with console.progress() as progress:
            report = train_part(part, folder, work, settings, device, _Training(progress, part), progress.share)
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in report.figures.items())
        console.say(f"{part}: {report.steps} steps in {duration(report.seconds)}; {figures}")
        console.say(f"{part}: {'replaced' if before else 'wrote'} {path}")
    console.say(f"report: {folder / REPORT}")


class _Training:
    """Events of a training as progress; the bar begins with the first one."""

    def __init__(self, progress: Progress, part: str) -> None:
        self._progress, self._part, self._begun = progress, part, False

    def __call__(self, event: TrainEvent) -> None:
        if not self._begun:
            self._begun = True
            self._progress.start(1, f"training the {self._part}")
        self._progress.reach(event.fraction, step=str(event.step), loss=event.loss, **event.parts)


def _evaluate(
    parts: Sequence[str],
    folder: Path,
    device: torch.device,
    images: int,
    seed: int,
    console: Console,
    format: str | None,
) -> None:
    from lantern_bench.metrics.clip import LOCAL_DIR, load_clip
    from lantern_bench.training.lanterns.quality_gates import Evaluation

    clip = load_clip(f"{LOCAL_DIR}{folder / 'clip'}", device=device) if "clip" in parts else None
    with console.progress() as progress:
        evaluation = Evaluation(folder, clip, device, images, seed, on_progress=progress.share)
        bars = list(evaluation.measure(parts))
    console.table(_table(bars), title="bars of the embedded family", format=format)
    failed = [bar for bar in bars if bar.passed is False]
    if failed:
        raise CheckFailedError(
            f"{len(failed)} of {sum(bool(bar.wanted) for bar in bars)} bars are not met: "
            + "; ".join(bar.name for bar in failed)
        )


def _table(bars: Sequence[Bar]) -> pd.DataFrame:
    """One row a bar, with the interval where the figure was sampled."""
    import pandas as pd

    rows = []
    for bar in bars:
        low, high = _interval(bar.observations) if bar.observations is not None else (None, None)
        wanted = " and ".join(f"{side} {bound:g}" for side, bound in bar.wanted)
        met = {True: "yes", False: "NO", None: ""}[bar.passed]
        rows.append([bar.part, bar.name, bar.value, low, high, wanted, met])
    columns = ["part", "bar", "measured", "low", "high", "wanted", "met"]
    return pd.DataFrame(rows, columns=columns).astype({"low": float, "high": float})


def _interval(observations: Observations) -> tuple[float | None, float | None]:
    """95 % over prompts; Wilson's where all or none were right, since resampling sees no variation there."""
    from lantern_bench.report.stats import proportion, ratio_of_sums

    over, under, _ = observations
    if set(under) == {1.0} and (set(over) == {1.0} or set(over) == {0.0}):
        interval = proportion(int(sum(over)), len(over))
    else:
        interval = ratio_of_sums(*observations)
    return interval.low, interval.high
