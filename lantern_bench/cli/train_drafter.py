"""`lantern-bench train drafter`: a drafter for any target, from pictures with captions or from captions alone.

All that can be wrong with flags and data is said before a model is loaded. The training is `train.drafter_run`; here
its events become progress, and its end a table with intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lantern_bench.cli.flags import PROMPTS_HELP
from lantern_bench.cli.places import results_root
from lantern_bench.cli.train_drafter_input import (
    check_numbers,
    check_words,
    chosen_recipe,
    examined_with,
    given_data,
    prompts_of,
    target_of,
)
from lantern_bench.console import FORMATS, Console, duration
from lantern_bench.errors import CheckFailedError, UserError
from lantern_bench.spec.topologies import STATIC_TREES

if TYPE_CHECKING:
    from lantern_bench.console.progress import Progress
    from lantern_bench.spec.decoding import Decoding
    from lantern_bench.train.drafter_job import DrafterJob, Examined
    from lantern_bench.train.drafter_recipe import DrafterRecipe
    from lantern_bench.train.examples import Data
    from lantern_bench.train.loop import TrainEvent

__all__ = ["drafter"]

_TREE = "eagle1-25"


def drafter(
    ctx: typer.Context,
    target: Annotated[str, typer.Option(help="The model to draft for, or the YAML file that describes it.")],
    data: Annotated[
        str,
        typer.Option(help=f"A folder of pictures with captions; or captions, which the target draws: {PROMPTS_HELP}"),
    ],
    captions: Annotated[Path | None, typer.Option(help="File names and captions (.jsonl, .csv, .tsv, .txt).")] = None,
    images: Annotated[
        int | None, typer.Option(help="Pictures to take of a folder, or to draw. Default: all; one a caption.")
    ] = None,
    mirror: Annotated[bool, typer.Option(help="Learn from the pictures' mirror images as well.")] = False,
    recipe: Annotated[str, typer.Option(help="published, lanterns, or a YAML file of settings.")] = "published",
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value: a setting of the recipe.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps; else the recipe's epochs.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times each picture is seen.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training instead.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    init: Annotated[
        str, typer.Option(help="random; shipped, the model's own drafter; or a drafter's folder.")
    ] = "random",
    features: Annotated[
        str, typer.Option(help="live: made as they are needed; shards: made once, kept in --work.")
    ] = "live",
    out: Annotated[Path | None, typer.Option(help="Folder of the drafter. Default: results/drafters/TARGET.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of tokens, features, checkpoint. Default: OUT/work.")
    ] = None,
    tree: Annotated[str, typer.Option(help=f"Tree to examine with: {', '.join(STATIC_TREES)}.")] = _TREE,
    cfg_scale: Annotated[
        float | None, typer.Option(help="Guidance of drawing and examining; default the model's.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of drawing and examining.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Top-k of drawing and examining; default the model's.")] = None,
    eval_prompts: Annotated[
        str | None, typer.Option(help="Prompts to examine with, as --data; default: the captions held out.")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between examinations; 0: only at the end.")] = 500,
    eval_images: Annotated[int, typer.Option(help="Images of each.")] = 8,
    final_images: Annotated[int, typer.Option(help="Images of the last one, of both drafters.")] = 32,
    min_mal: Annotated[float | None, typer.Option(help="Exit with 5 where the drafter's MAL ends below this.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the training step; pays in long trainings.")] = False,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint, or start anew.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made, and make nothing.")] = False,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Train a drafter for a target and write it as the published ones are. The same command continues a training."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    check_numbers({"--images": images, "--steps": steps, "--batch": batch, "--accumulate": accumulate}, 1)
    often = {"--eval-every": eval_every, "--eval-images": eval_images, "--final-images": final_images}
    check_numbers(often | {"--seed": seed}, 0)
    check_words(device, dtype, features, minutes)
    typed = {"steps": steps, "epochs": epochs, "batch": batch, "accumulate": accumulate, "lr": lr}
    numbers = chosen_recipe(recipe, typed, settings or [])
    card, family = target_of(target)
    given = given_data(data, captions, images, mirror, family)
    sampling = {"cfg_scale": cfg_scale, "temperature": temperature, "top_k": top_k, "tree": tree}
    decoding = examined_with(sampling, dict(card.defaults))
    prompts = [] if eval_prompts is None else prompts_of(eval_prompts, "--eval-prompts", family)
    folder = out or results_root() / "drafters" / Path(card.name).stem
    sizes = _Sizes(eval_every, eval_images, final_images, minutes)
    job = _job(target, given, numbers, decoding, folder, work, prompts, init, features, seed, sizes, resume, compile)
    if dry_run:
        _plan(job, device, dtype, console, chosen)
        return
    _run(job, device, dtype, min_mal, console, chosen)


class _Sizes(NamedTuple):
    """How often and how much is examined, and how long is trained."""

    every: int
    images: int
    final: int
    minutes: float | None


def _job(
    target: str,
    data: Data,
    recipe: DrafterRecipe,
    decoding: Decoding,
    out: Path,
    work: Path | None,
    prompts: list[str],
    init: str,
    features: Any,
    seed: int,
    sizes: _Sizes,
    resume: bool,
    compiled: bool,
) -> DrafterJob:
    from lantern_bench.train.drafter_job import DrafterJob

    start: Any = init if init in ("random", "shipped") else Path(init)
    if isinstance(start, Path) and not start.is_dir():
        raise UserError(f"--init {init}: no such folder", "Type random or shipped, or give a drafter's folder.")
    return DrafterJob(
        target,
        data,
        recipe,
        decoding,
        out,
        work or out / "work",
        prompts,
        start,
        features,
        seed,
        sizes.minutes,
        sizes.every,
        sizes.images,
        sizes.final,
        resume=resume,
        compiled=compiled,
    )


def _plan(job: DrafterJob, device: str, dtype: str, console: Console, format: str | None) -> None:
    """Show what would be made."""
    import pandas as pd

    from lantern_bench.runs.local import choose_place
    from lantern_bench.train.drafter_plan import plan_rows, shape_of

    shape = shape_of(job.target)
    if shape is None:
        raise UserError(f"--target {job.target}: has no features to learn from", "Give a model that is a transformer.")
    rows = plan_rows(job, shape, choose_place(device, dtype).dtype)
    console.table(pd.DataFrame(rows, columns=["what", "how much"]), title=f"drafter for {job.target}", format=format)
    console.say(f"would be written to {job.out}; nothing was made")


def _run(job: DrafterJob, device: str, dtype: str, min_mal: float | None, console: Console, format: str | None) -> None:
    from lantern_bench.cli.train import writable
    from lantern_bench.models.registry import load_model
    from lantern_bench.runs.local import choose_place
    from lantern_bench.train.drafter_run import train_drafter
    from lantern_bench.train.workers import is_one_of_several, join

    if is_one_of_several() and job.minutes is not None:
        raise UserError("--minutes: clocks of several processes differ", "Give --steps or --epochs.")
    if job.compiled:
        from lantern_bench.decode.engine import compiler_problem

        problem = compiler_problem(choose_place(device, dtype).device)
        if problem is not None:
            raise UserError(f"--compile: {problem}", "Leave it out.")
    writable(job.out, "--out")
    writable(job.work, "--work")
    workers = join(cpu=device == "cpu")
    place = choose_place(device if workers.device is None else str(workers.device), dtype)
    model = load_model(job.target, place.device, place.dtype)
    shown = console if workers.first else Console(quiet=True)
    before = (job.out / "model.safetensors").is_file()
    try:
        with shown.progress() as progress:
            report, examined = train_drafter(job, model, _Training(progress), progress.share, workers)
    except KeyboardInterrupt:
        shown.say(f"stopped; the same command continues from what is in {job.work}")
        raise
    if not workers.first:
        return
    console.table(_table(examined, job.decoding), title=f"drafter for {job.target}", format=format)
    console.say(f"{report.steps} steps in {duration(report.seconds)}; log: {job.out / 'log.csv'}")
    console.say(f"{'replaced' if before else 'wrote'} {job.out}; use it: --model {job.out / 'model.yaml'}")
    accepted = examined[0].accepted
    if min_mal is not None and (accepted is None or accepted.mal < min_mal):
        found = "not measured" if accepted is None else f"{accepted.mal:.3f}"
        raise CheckFailedError(f"--min-mal {min_mal:g}: the drafter's MAL is {found}", "Train longer or on more data.")


class _Training:
    """Events of a training as progress; the bar begins with the first one, and anew after an examination."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, event: TrainEvent) -> None:
        self._progress.share("training the drafter", event.fraction)
        self._progress.reach(event.fraction, step=str(event.step), loss=event.loss, **event.parts)


def _table(examined: Sequence[Examined], decoding: Decoding) -> Any:
    """One row a drafter; the last column compares with the model's own, paired by prompt."""
    import pandas as pd

    from lantern_bench.report.stats import ratio_of_sums

    rows = []
    own = examined[1].accepted if len(examined) > 1 else None
    for one in examined:
        row: dict[str, Any] = {"drafter": one.name, "one_minus_tv": one.one_minus_tv, "tree": decoding.tree}
        row |= {"images": len(one.accepted.steps) if one.accepted else 0}
        if one.accepted is not None:
            mal = ratio_of_sums(one.accepted.committed, one.accepted.steps, one.accepted.prompts)
            row |= {"mal": mal.value, "mal_low": mal.low, "mal_high": mal.high}
            if own is not None:
                # Both commit the same number of tokens, so the ratio of their lengths is that of their steps.
                ratio = ratio_of_sums(own.steps, one.accepted.steps, one.accepted.prompts)
                row |= {"over_own": ratio.value, "over_own_low": ratio.low, "over_own_high": ratio.high}
        rows.append(row)
    return pd.DataFrame(rows)
