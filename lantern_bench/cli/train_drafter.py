"""`lantern-bench train drafter`: a drafter for any target, from pictures with captions or from captions alone.

All that can be wrong with flags and data is said before a model is loaded. The training is `training.drafter.run`; here
its events become progress, and its end a table with intervals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lantern_bench.cli.options import PROMPTS_HELP
from lantern_bench.config.trees import STATIC_TREES
from lantern_bench.console import FORMATS, Console, duration
from lantern_bench.errors import CheckFailedError, UserError
from lantern_bench.runs.store import results_root

if TYPE_CHECKING:
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.console import Progress
    from lantern_bench.models.registry import Family
    from lantern_bench.plugins import ModelCard
    from lantern_bench.training.drafter.dataset import Data
    from lantern_bench.training.drafter.job import DrafterJob, Examined
    from lantern_bench.training.drafter.recipe import DrafterRecipe
    from lantern_bench.training.loop import TrainEvent


# ---- What `train drafter` was typed with, read and checked before a model is loaded: recipe, data, decoding


def check_numbers(values: Mapping[str, int | None], least: int) -> None:
    """Refuse whole numbers, by flag, that are below `least`."""
    for flag, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: must be a whole number of at least {least}")


def check_words(device: str, dtype: str, features: str, minutes: float | None) -> None:
    """Refuse words that mean nothing, before torch is imported."""
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UserError(f"--minutes {minutes:g}: must be a number above 0")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: unknown device", "The devices are auto, cpu, mps, cuda and cuda:N.")
    for flag, value, words in (
        ("--dtype", dtype, ("auto", "float32", "bfloat16", "float16")),
        ("--features", features, ("live", "shards")),
    ):
        if value not in words:
            raise UserError(f"{flag} {value}: unknown", f"One of {', '.join(words)}.")


def chosen_recipe(source: str, typed: dict[str, Any], settings: Sequence[str]) -> DrafterRecipe:
    """The recipe with what was typed over it; a flag goes before `--set`."""
    import yaml

    from lantern_bench.training.drafter.recipe import read_recipe, with_settings

    values: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: must be key=value", "For example --set noise=0.05.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: cannot be read as a value") from error
    recipe = with_settings(read_recipe(source), values, "--set")
    for key, value in typed.items():
        if value is not None:
            recipe = with_settings(recipe, {key: value}, "--")
    return recipe


def target_of(name: str) -> tuple[ModelCard, Family]:
    """The card and the family of the target; raises `UserError` that names `--target`."""
    from lantern_bench.models.registry import card_of, family_of

    try:
        return card_of(name), family_of(name)
    except UserError as error:
        raise UserError(error.message.replace("--model", "--target"), error.advice) from error


def given_data(source: str, captions: Path | None, images: int | None, mirror: bool, family: Family) -> Data:
    """A folder is pictures; anything else captions alone."""
    from lantern_bench.training.drafter.dataset import Data

    folder = Path(source)
    if folder.is_dir():
        from lantern_bench.prompts.captioned import read_captioned

        found = read_captioned(folder, captions, family)
        if images is not None and images > len(found):
            raise UserError(f"--images {images}: --data {source} holds {len(found)} pictures")
        found = found[:images]
        made = Data([item.caption for item in found], [item.path for item in found], mirror)
    else:
        for flag, wrong in (("--captions", captions is not None), ("--mirror", mirror)):
            if wrong:
                raise UserError(f"{flag}: goes with pictures, and --data {source} is no folder", "Leave it out.")
        texts = prompts_of(source, "--data", family)
        made = Data([texts[number % len(texts)] for number in range(images or len(texts))])
    if len(made) < 2:
        raise UserError(f"--data {source}: one picture is too few", "Some are held out; give two at least.")
    return made


def prompts_of(source: str, flag: str, family: Family) -> list[str]:
    """The prompts of a set or a file; what is wrong is said of the flag they were typed with."""
    from lantern_bench.prompts.sets import load_prompts

    try:
        return [prompt.text for prompt in load_prompts(source, family)]
    except UserError as error:
        advice = error.advice
        if flag == "--data" and "no such file" in error.message:
            advice = f"{advice or ''} Or a folder of pictures with captions.".strip()
        raise UserError(error.message.replace("--prompts", flag), advice) from error


def examined_with(values: dict[str, Any], defaults: dict[str, Any]) -> Decoding:
    """Lossless speculative decoding with a stated tree, at the model's guidance where nothing is said."""
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.config.values import Place, Problems, read_parameter

    problems, read = Problems("train drafter"), dict[str, Any]()
    for key in ("cfg_scale", "temperature", "top_k", "tree"):
        value = values[key] if values[key] is not None else defaults.get(key)
        if value is not None:
            for one in read_parameter(key, value, Place(f"--{key.replace('_', '-')}"), problems):
                read["topology" if isinstance(one.value, tuple) else key] = one.value
    problems.raise_all()
    usual = defaults.get("cfg_scale", 1.0)
    return Decoding(mode="speculative", drafting="static", rule="strict", cfg_default=usual, **read)


# ----

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
    from lantern_bench.training.drafter.job import DrafterJob

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

    from lantern_bench.runs.devices import choose_place
    from lantern_bench.training.drafter.job import plan_rows, shape_of

    shape = shape_of(job.target)
    if shape is None:
        raise UserError(f"--target {job.target}: has no features to learn from", "Give a model that is a transformer.")
    rows = plan_rows(job, shape, choose_place(device, dtype).dtype)
    console.table(pd.DataFrame(rows, columns=["what", "how much"]), title=f"drafter for {job.target}", format=format)
    console.say(f"would be written to {job.out}; nothing was made")


def _run(job: DrafterJob, device: str, dtype: str, min_mal: float | None, console: Console, format: str | None) -> None:
    from lantern_bench.cli.options import writable
    from lantern_bench.models.registry import load_model
    from lantern_bench.runs.devices import choose_place
    from lantern_bench.training.drafter.run import train_drafter
    from lantern_bench.training.loop import is_one_of_several, join

    if is_one_of_several() and job.minutes is not None:
        raise UserError("--minutes: clocks of several processes differ", "Give --steps or --epochs.")
    if job.compiled:
        from lantern_bench.decoding.compile import compiler_problem

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
