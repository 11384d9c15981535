"""`lantern-bench generate`: decode a prompt in one or several modes, save the picture, show how it was decoded.

Flags and checks are those of a sweep; only the files that the flags name are written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    FormatOption,
    SettingsOption,
    compile_steps,
    decoding_flags,
    resolve_flags,
    split_modes,
)
from lantern_bench.config.methods import MODES
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.runs.threads import set_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lantern_bench.config.experiment import ResolvedExperiment
    from lantern_bench.config.plan import Unit
    from lantern_bench.console import Console
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Place
    from lantern_bench.runs.runner import Made


@decoding_flags
def generate(
    ctx: typer.Context,
    caption: Annotated[str | None, typer.Argument(help="The caption.")] = None,
    model: Annotated[str, typer.Option(help="The model, or the YAML file that describes one.")] = "lanterns",
    label: Annotated[int | None, typer.Option("--class", min=0, help="A class instead of a caption.")] = None,
    condition: Annotated[
        Path | None, typer.Option(help="Features instead of a caption: .npz with embeddings and mask, or input_ids.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights and random caption features.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show sizes and memory only.")] = False,
    mode: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(MODES)}, or all. Default: lantern++, or scd for a model without a drafter."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images per mode, one below the other.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="The PNG file. Default: picture.png; with --animate none.", show_default=False)
    ] = None,
    animate: Annotated[
        Path | None,
        typer.Option(
            help="Also paint the first image of each mode, side by side in measured time, in this GIF. Steps are then "
            "compiled (--no-compile: not), and --dtype is chosen as in a sweep."
        ),
    ] = None,
    save_tokens: Annotated[
        Path | None, typer.Option(help="Also write tokens int32 [n, N] and accept_lengths per step to this .npz.")
    ] = None,
    save_logits: Annotated[bool, typer.Option(help="Add guided float32 logits [n, N, V] to the .npz.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    settings: SettingsOption = None,
    format: FormatOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make pictures of a caption or a class and show how they were decoded."""
    console: Console = ctx.obj
    from lantern_bench.models.registry import card_of

    modes, race = mode or [card_of(model).mode], animate is not None
    resolved = resolve_flags("generate", flags | {"model": [model]}, modes, settings or [], compile=race)
    if dry_run:
        _show_memory(resolved, console, format)
        return
    prompt = _prompt(caption, label, condition, random_weights, model)
    if save_logits and save_tokens is None:
        raise UserError("--save-logits: needs a file to write to", "Add --save-tokens FILE.npz.")
    if save_tokens is not None and len(resolved.cells) > 1:
        raise UserError(f"--save-tokens {save_tokens}: holds one way of decoding", f"These are {len(resolved.cells)}.")
    out = Path("picture.png") if out is None and not race else out
    for flag, path, suffix in [
        ("out", out, ".png"),
        ("save-tokens", save_tokens, ".npz"),
        ("animate", animate, ".gif"),
    ]:
        if path is not None:
            _check_file(f"--{flag}", path, suffix, force)

    from lantern_bench.models.io.files import write_atomically
    from lantern_bench.models.loaded_model import NoPixels
    from lantern_bench.runs import generation
    from lantern_bench.runs.devices import choose_place

    set_threads(resolved.settings.threads)
    place = choose_place(resolved.settings.device, resolved.settings.dtype, fast=race)
    loaded = _loaded(resolved, place, random_weights, console)
    cells = resolved.cells
    if "all" in split_modes(modes):
        cells, reasons = generation.runnable(loaded, cells)
        for reason in reasons:
            console.say(reason)
    # Off by default: compiling takes longer than one image.
    if resolved.settings.compile:
        compile_steps([loaded], place, console)
    if isinstance(loaded.pixels, NoPixels):
        if save_tokens is None or race:
            raise loaded.pixels.problem
        console.warn(loaded.pixels.problem.message)
    prompts = [prompt] if condition is None else generation.read_prompts(condition, loaded)
    units = generation.units_of(cells, resolved.settings.seed, prompts, images)
    made = []
    with console.progress() as progress:
        progress.start(len(units), "images")
        for one in generation.decode_units(loaded, place, units, save_logits, timed=race):
            made.append(one)
            progress.advance()
    files: list[tuple[str, str, Path, bytes]] = []
    if out is not None and not isinstance(loaded.pixels, NoPixels):
        files.append(("picture", "--out", out, generation.picture_png(made, len(cells))))
    if save_tokens is not None:
        files.append(("tokens", "--save-tokens", save_tokens, generation.tokens_npz(made)))
    if animate is not None:
        files.append(("race", "--animate", animate, _race(units, made, loaded)))
    for _, flag, path, content in files:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise UserError(f"{flag} {path}: cannot be written: {error.strerror}") from error
    console.table(generation.numbers_table(units, made), title=", ".join(prompts[:3]), format=format)
    console.say(", ".join(f"{what}: {path}" for what, _, path, _ in files))


def _prompt(caption: str | None, label: int | None, condition: Path | None, random: bool, model: str) -> str:
    """The prompt (empty with --condition); with random weights and none given, the first default prompt.

    Raises `UserError` for no prompt, more than one, and one that the model does not accept.
    """
    from lantern_bench.models.family import class_prompt
    from lantern_bench.models.registry import card_of, family_of

    given = {"a caption": caption, "--class": label, "--condition": condition}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)}: are mutually exclusive", "Give one of them.")
    if not names and not random:
        raise UserError("the prompt is missing", "Give a caption, --class N or --condition FILE.npz.")
    if condition is not None:
        if not condition.is_file():
            raise UserError(f"--condition {condition}: no such file")
        return ""
    classes, family = card_of(model).classes, family_of(model)
    if label is not None and classes is None:
        raise UserError(f"--class {label}: {model} takes no classes", "Give a caption.")
    if label is not None and classes is not None and label >= classes:
        raise UserError(f"--class {label}: {model} has {classes} classes", f"At most {classes - 1}.")
    text = class_prompt(label) if label is not None else caption
    if text is None:
        text = next((prompts[0] for prompts in family.prompt_sets().values() if prompts), "anything")
    family.check_prompt(text)
    return text


def _check_file(flag: str, path: Path, suffix: str, force: bool) -> None:
    """Refuse an output file with another suffix, one that exists, and one that cannot be written."""
    folder = path.absolute().parent
    if path.suffix.lower() != suffix:
        raise UserError(f"{flag} {path}: must end with {suffix}", f"For example {path.stem or 'picture'}{suffix}.")
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{flag} {path}: cannot be written", "Give a file in an existing folder that you may write to.")
    if path.exists() and not force:
        raise RefusedError(f"{flag} {path}: is there already", "Give another name, or --force to overwrite it.")


def _race(units: Sequence[Unit], made: Sequence[Made], model: LoadedModel) -> bytes:
    """Draw the first image of every cell as a race."""
    import pandas as pd

    from lantern_bench.report.labels import labels, styles
    from lantern_bench.report.race import Lane, Step, race_gif

    first = [(unit, one) for unit, one in zip(units, made, strict=True) if unit.image_index == 0]
    table = pd.DataFrame([{"run": "", "model": model.name, **unit.cell.decoding.columns()} for unit, _ in first])
    looks = zip(labels(table), styles(table).values(), strict=True)
    ar = next((one.trace.seconds for unit, one in first if not unit.cell.decoding.drafts), None)
    lanes = []
    for (_, one), (label, style) in zip(first, looks, strict=True):
        trace = one.trace
        steps = zip(trace.ends, [0, *trace.start], [1, *trace.committed], [0, *trace.accepted], strict=True)
        picture, speedup = one.pixels.cpu().numpy(), ar and ar / trace.seconds
        kept = [Step(*step) for step in steps]
        lanes.append(Lane(label, style.colour, trace.seconds, kept, trace.tokens, picture, model.grid, speedup))
    return race_gif(lanes, units[0].prompt.text, model.name)


def _loaded(resolved: ResolvedExperiment, place: Place, random: bool, console: Console) -> LoadedModel:
    """Load the model from its files, or make it with random weights."""
    from lantern_bench.runs.devices import load_models

    name, seed = resolved.settings.model[0], resolved.settings.seed
    if not random:
        return load_models(resolved, place)[name]
    import torch

    from lantern_bench.models.random_model import random_model

    what = f"the weights of {name} are random (seed {seed}, {place.dtype_name}), and so are its caption features"
    console.warn(f"{what}: the picture means nothing")
    return random_model(name, *place, torch.Generator(place.device).manual_seed(seed))


def _show_memory(resolved: ResolvedExperiment, console: Console, format: str | None) -> None:
    """Print the memory that the model needs, by part, and what is free."""
    import psutil

    from lantern_bench.runs.devices import choose_place
    from lantern_bench.runs.generation import memory_table

    place = choose_place(resolved.settings.device, resolved.settings.dtype)
    table, total = memory_table(resolved, place)
    console.say(f"memory needed: {total / 1e9:.2f} GB on {place.device}, without the activations of a forward")
    if place.device.type == "cpu":
        free = psutil.virtual_memory().available
        console.say(f"free here: {free / 1e9:.2f} GB" + ("" if free > total else ": not enough"))
    console.table(table, title=resolved.settings.model[0], format=format)
