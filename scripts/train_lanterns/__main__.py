"""Train or measure the models of the bundled family.

Run `python -m scripts.train_lanterns` in the root of the repository. Weights go to the package's
own folder unless `--out` names another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from typer.main import get_command

from lantern_bench.analysis.statistics import proportion, ratio_of_sums
from lantern_bench.cli.console import FORMATS, Console
from lantern_bench.cli.options import DEVICE_HELP, FormatOption, check_choice
from lantern_bench.devices.compute import choose_compute
from lantern_bench.metrics.extractors import EMBEDDED_FEATURES, find_extractor
from lantern_bench.metrics.image_scorers import load_clip
from lantern_bench.models.families.lanterns.description import FILES, WEIGHTS_FOLDER
from lantern_bench.storage.run_directory import results_root
from lantern_bench.training.recipe import checked, flag_of
from lantern_bench.training.trainer import TrainEvent
from lantern_bench.utils.errors import CheckFailedError, LanternError, UserError
from lantern_bench.utils.files import check_writable
from lantern_bench.utils.progress import Emit, ProgressEvent
from lantern_bench.utils.text import duration
from scripts.train_lanterns.part_tasks import reference_scenes
from scripts.train_lanterns.parts import (
    PARTS,
    REPORT,
    RecipeSettings,
    check_part,
    train_part,
    write_embedded,
)
from scripts.train_lanterns.quality_gates import Evaluation, QualityGate, check_weights

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train_lanterns(
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="tokenizer, features, clip, target or drafter; repeatable. Default: all."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes per part. Default: the part's own, for a CPU.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps per part: the same seed then gives the same model.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from the weights in this folder.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the weights. Default: the package's own.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of data and checkpoints. Default: results/training/lanterns."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    resume: Annotated[
        bool, typer.Option(help="Continue from the checkpoint, or start again.")
    ] = True,
    evaluate: Annotated[
        bool,
        typer.Option(
            "--evaluate", help="Measure the weights against their quality gates; train nothing."
        ),
    ] = False,
    images: Annotated[int, typer.Option(help="Images to sample with --evaluate.")] = 500,
    format: FormatOption = None,
) -> None:
    """Train the bundled models, or measure them with --evaluate.

    The same command continues a training.
    """
    console = Console()
    if format is not None:
        check_choice("--format", format, FORMATS)
        console.format = format
    only_training = {"minutes": minutes, "steps": steps, "init_from": init_from}
    shared = {"seed": seed, "resume": resume, "device": device, "images": images}
    settings = checked(RecipeSettings, only_training | shared)
    unused = [
        flag_of(key) for key, value in only_training.items() if evaluate and value is not None
    ]
    if unused:
        raise UserError(
            f"{unused[0]} does not go with --evaluate, which trains nothing",
            "Train first, then evaluate.",
        )
    folder = out or WEIGHTS_FOLDER
    for name in part or ():
        check_part(name, folder, tuple(PARTS))
    parts = [name for name in PARTS if not part or name in part]
    if evaluate:
        check_weights(parts, folder)
        _evaluate(parts, folder, settings=settings, console=console)
        return
    for number, name in enumerate(parts):
        check_part(part=name, folder=folder, among=parts[:number], init_from=init_from)
    _train(
        parts=parts,
        folder=folder,
        work=work or results_root() / "training" / "lanterns",
        settings=settings,
        console=console,
    )


def _train(
    parts: Sequence[str], folder: Path, work: Path, settings: RecipeSettings, console: Console
) -> None:
    device = choose_compute(settings.device).device
    check_writable(folder)
    check_writable(work, "--work")
    for name in parts:
        path = folder / FILES[name]
        exists = path.is_file()
        with console.events() as emit:
            on_event = partial(_show_event, emit, name)
            report = train_part(
                part=name,
                folder=folder,
                work=work,
                settings=settings,
                device=device,
                on_event=on_event,
                emit=emit,
            )
        if name == "features":
            # The embedded reference has features of this network.
            scenes, label = reference_scenes()
            write_embedded(
                path=folder / EMBEDDED_FEATURES.name,
                scenes=scenes,
                extractor=find_extractor(weights=path),
                label=label,
            )
        figures = ", ".join(
            f"{key.replace('_', ' ')} {value:.4g}" for key, value in report.figures.items()
        )
        console.say(f"{name}: {report.steps} steps in {duration(report.seconds)}; {figures}")
        console.say(f"{name}: {'replaced' if exists else 'wrote'} {path}")
    console.say(f"report: {folder / REPORT}")


def _show_event(emit: Emit, part: str, event: TrainEvent) -> None:
    figures = {"step": str(event.step), "loss": event.loss, **event.figures}
    emit(ProgressEvent(f"training the {part}", event.fraction, figures=figures))


def _evaluate(
    parts: Sequence[str],
    folder: Path,
    *,
    settings: RecipeSettings,
    console: Console,
) -> None:
    """Print one row per quality gate, with the 95% interval if the figure was sampled."""
    device = choose_compute(settings.device).device
    clip = load_clip(weights=folder / "clip", device=device) if "clip" in parts else None
    with console.events() as emit:
        evaluation = Evaluation(
            folder=folder,
            clip=clip,
            device=device,
            images=settings.images,
            seed=settings.seed,
            emit=emit,
        )
        gates = list(evaluation.measure(parts))
    columns = ["part", "bar", "measured", "low", "high", "wanted", "met"]
    table = pd.DataFrame([_row(gate) for gate in gates], columns=columns).astype(
        {"low": float, "high": float}
    )
    console.table(table, title="quality gates of the bundled models")
    failed = [gate.name for gate in gates if gate.passed is False]
    if failed:
        count = f"{len(failed)} of {sum(bool(gate.wanted) for gate in gates)}"
        raise CheckFailedError(f"{count} quality gates failed: {'; '.join(failed)}")


def _row(gate: QualityGate) -> list[object]:
    low = high = None
    if gate.observations is not None:
        numerator, denominator, prompts = gate.observations
        interval = ratio_of_sums(numerator, denominator, prompts)
        if set(denominator) == {1.0} and set(numerator) in ({0.0}, {1.0}):
            # All or none were right. Resampling prompts shows no variation, so Wilson's interval.
            interval = proportion(int(sum(numerator)), len(numerator))
        low = interval.low
        high = interval.high
    wanted = " and ".join(f"{side} {bound:g}" for side, bound in gate.wanted)
    met = {True: "yes", False: "NO", None: ""}[gate.passed]
    return [gate.part, gate.name, gate.value, low, high, wanted, met]


def main(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; return the exit code that `lantern-bench` would."""
    try:
        get_command(app)(args=list(arguments), prog_name="python -m scripts.train_lanterns")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except KeyboardInterrupt:
        Console().say("stopped; the same command continues")
        return 130
    except LanternError as error:
        Console().error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
