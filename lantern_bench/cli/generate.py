"""`lantern-bench generate`: decode a prompt in one or several modes, save the picture, show how it was decoded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    DECODING,
    FormatOption,
    SettingsOption,
    compile_steps,
    experiment_flags,
    resolve_flags,
    say_memory,
    split_words,
)
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.tables import MODES
from lantern_bench.runs.threads import set_threads

if TYPE_CHECKING:
    from lantern_bench.config.experiment import ResolvedExperiment
    from lantern_bench.console import Console
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Compute


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
        _show_memory(resolved, console, format)
        return
    prompt = _prompt(caption, label, random_weights, model)
    _check_file(out, force)

    from lantern_bench.models.io.files import write_atomically
    from lantern_bench.models.loaded_model import NoPixels
    from lantern_bench.runs import runner
    from lantern_bench.runs.devices import choose_compute

    set_threads(resolved.settings.threads)
    compute = choose_compute(resolved.settings.device, resolved.settings.dtype)
    loaded = _load(resolved, compute, random_weights, console)
    if isinstance(loaded.pixels, NoPixels):
        raise loaded.pixels.problem
    cells = resolved.cells
    if "all" in split_words(modes):
        cells, reasons = runner.runnable(loaded, cells)
        for reason in reasons:
            console.say(reason)
    if resolved.settings.compile:
        compile_steps([loaded], compute, console)
    tasks = runner.tasks_of(cells, resolved.settings.seed, [prompt], images)
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
    """Return the prompt; with random weights and none typed, the first default prompt.

    Raises `UserError` for no prompt, two of them, and one that the model does not accept.
    """
    from lantern_bench.models.model import class_prompt
    from lantern_bench.models.registry import model_of

    if caption is not None and label is not None:
        raise UserError("a caption and --class: are mutually exclusive", "Give one of them.")
    if caption is None and label is None and not random:
        raise UserError("the prompt is missing", "Give a caption or --class N.")
    described = model_of(model)
    classes = described.classes
    if label is not None and classes is None:
        raise UserError(f"--class {label}: {model} takes no classes", "Give a caption.")
    if label is not None and classes is not None and label >= classes:
        raise UserError(f"--class {label}: {model} has {classes} classes", f"At most {classes - 1}.")
    text = class_prompt(label) if label is not None else caption
    if text is None:
        text = next((prompts[0] for prompts in described.prompt_sets.values() if prompts), "anything")
    described.check_prompt(text)
    return text


def _check_file(path: Path, force: bool) -> None:
    """Refuse a file that is no PNG, one that exists, and one that cannot be written."""
    folder = path.absolute().parent
    if path.suffix.lower() != ".png":
        raise UserError(f"--out {path}: must end with .png", f"For example {path.stem or 'picture'}.png.")
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--out {path}: cannot be written", "Give a file in an existing folder that you may write to.")
    if path.exists() and not force:
        raise RefusedError(f"--out {path}: is there already", "Give another name, or --force to overwrite it.")


def _load(resolved: ResolvedExperiment, compute: Compute, random: bool, console: Console) -> LoadedModel:
    """Load the model from its files, or make it with random weights."""
    from lantern_bench.runs.devices import load_models

    name, seed = resolved.settings.model[0], resolved.settings.seed
    if not random:
        return load_models(resolved, compute)[name]
    import torch

    from lantern_bench.models.random_model import random_model

    weights = f"the weights of {name} are random (seed {seed}, {compute.dtype_name}), and so are its caption features"
    console.warn(f"{weights}: the picture means nothing")
    return random_model(name, *compute, torch.Generator(compute.device).manual_seed(seed))


def _show_memory(resolved: ResolvedExperiment, console: Console, format: str | None) -> None:
    """Print the memory that the model needs, by part, and what is free."""
    from lantern_bench.runs.devices import choose_compute
    from lantern_bench.runs.runner import memory_table

    compute = choose_compute(resolved.settings.device, resolved.settings.dtype)
    table, total = memory_table(resolved, compute)
    say_memory(total, compute.device.type, console)
    console.table(table, title=resolved.settings.model[0], format=format)
