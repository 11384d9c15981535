"""`lantern-bench generate`: decode a prompt in one or several modes, save the picture, show how it was decoded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lantern_bench.cli.options import (
    DECODING,
    FormatOption,
    SettingsOption,
    compile_steps,
    experiment_flags,
    resolve_flags,
    show_memory,
    split_words,
)
from lantern_bench.console import Console
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.tables import MODES
from lantern_bench.runs.threads import set_threads


@experiment_flags(*DECODING)
def generate(
    ctx: typer.Context,
    caption: Annotated[str | None, typer.Argument(help="The caption.")] = None,
    model: Annotated[str, typer.Option(help="The model, or the YAML file that describes one.")] = "lanterns",
    label: Annotated[int | None, typer.Option("--class", min=0, help="A class instead of a caption.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights and random caption features.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show sizes and memory only.")] = False,
    mode: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(MODES)}, or all. Default: lantern++, or scd for a model without a drafter."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images per mode, one below the other.")] = 1,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("picture.png"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    settings: SettingsOption = None,
    format: FormatOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make pictures of a caption or a class and show how they were decoded."""
    console: Console = ctx.obj
    from lantern_bench.models.registry import model_of

    modes = mode or [model_of(model).mode]
    # Not compiled by default: compiling takes longer than an image.
    resolved = resolve_flags("generate", flags | {"model": [model]}, modes, settings or [], compile=False)
    if dry_run:
        table = show_memory(resolved, console)
        console.table(table, title=resolved.settings.model[0], format=format)
        return
    prompt = _prompt(caption, label, random_weights, model)
    _check_file(out, force)
    set_threads(resolved.settings.threads)

    import torch

    from lantern_bench.models.io.files import write_atomically
    from lantern_bench.models.loaded_model import NoPixels
    from lantern_bench.models.random_model import random_model
    from lantern_bench.runs import runner
    from lantern_bench.runs.devices import choose_compute, load_models

    compute, seed = choose_compute(resolved.settings.device, resolved.settings.dtype), resolved.settings.seed
    if random_weights:
        weights = f"the weights of {model} are random (seed {seed}, {compute.dtype_name})"
        console.warn(f"{weights}, and so are its caption features: the picture means nothing")
        loaded = random_model(model, *compute, torch.Generator(compute.device).manual_seed(seed))
    else:
        (loaded,) = load_models(resolved, compute).values()
    if isinstance(loaded.pixels, NoPixels):
        raise loaded.pixels.problem
    cells = resolved.cells
    if "all" in split_words(modes):
        cells, reasons = runner.runnable(loaded, cells)
        for reason in reasons:
            console.say(reason)
    if resolved.settings.compile:
        compile_steps([loaded], compute, console)
    tasks = runner.tasks_of(cells, seed, [prompt], images)
    decoded = []
    with console.progress() as progress:
        progress.share("images", 0, len(tasks))
        for image in runner.decode_tasks(loaded, compute, tasks):
            decoded.append(image)
            progress.share("images", len(decoded), len(tasks))
    try:
        write_atomically(out, runner.picture_png(decoded, len(cells)))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    console.table(runner.numbers_table(tasks, decoded), title=prompt, format=format)
    console.say(f"picture: {out}")


def _prompt(caption: str | None, label: int | None, random: bool, model: str) -> str:
    """Return the prompt; with random weights and none typed, the first default prompt."""
    from lantern_bench.models.model import class_prompt
    from lantern_bench.models.registry import model_of

    described = model_of(model)
    if caption is not None and label is not None:
        raise UserError("a caption and --class: are mutually exclusive", "Give one of them.")
    if label is not None and label >= (described.classes or 0):
        classes = f"has {described.classes or 'no'} classes"
        raise UserError(f"--class {label}: {model} {classes}", "Give a smaller number, or a caption.")
    text = class_prompt(label) if label is not None else caption
    if text is None and not random:
        raise UserError("the prompt is missing", "Give a caption or --class N.")
    if text is None:
        text = next((prompts[0] for prompts in described.prompt_sets.values() if prompts), "anything")
    described.check_prompt(text)
    return text


def _check_file(path: Path, force: bool) -> None:
    folder = path.absolute().parent
    if path.suffix.lower() != ".png":
        raise UserError(f"--out {path}: must end with .png", f"For example {path.stem or 'picture'}.png.")
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--out {path}: cannot be written", "Give a file in an existing folder that you may write to.")
    if path.exists() and not force:
        raise RefusedError(f"--out {path}: is there already", "Give another name, or --force to overwrite it.")
