"""`lantern-bench generate`: pictures of one prompt, and the numbers of how they were decoded.

Several modes, or a grid of values, stand side by side in one picture, an image a row. The same flags and the same
checks as a sweep's; nothing is kept but the files that were asked for. What is written is `generate_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lantern_bench.cli.options import DECODING, PLACE, compile_steps, with_flags
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import RecordsFailedError, RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.config.experiment import ResolvedExperiment
    from lantern_bench.config.plan import Unit
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.runs.devices import Place
    from lantern_bench.runs.runner import Made


# ---- What `lantern-bench generate` leaves and shows: the picture, the tokens, the table of numbers, the sizes


_GIGABYTE = 1e9


def check_file(flag: str, path: Path, suffix: str, force: bool) -> None:
    """Refuse a file that is of another kind, is there already, or cannot be."""
    import os

    if path.suffix.lower() != suffix:
        raise UserError(f"{flag} {path}: must end with {suffix}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: cannot be written", "Give a file in a folder that is there.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{flag} {path}: cannot be written", "Give a file that you may write.")
    if path.exists() and not force:
        raise RefusedError(f"{flag} {path}: is there already", "Give another name, or --force to write over it.")


def write_picture(path: Path, made: list[list[Made]]) -> None:
    """Write all images as one picture: a column for each cell, a row for each image."""
    import torch

    from lantern_bench.models.io.files import write_atomically
    from lantern_bench.runs.runner import png_bytes

    columns = [torch.cat([one.pixels for one in column], dim=0) for column in made]
    _written("--out", path, lambda: write_atomically(path, png_bytes(torch.cat(columns, dim=1))))


def write_tokens(path: Path, made: list[Made], with_logits: bool) -> None:
    """Write tokens int32 [n, N], accept_lengths int32 [n, steps] (drafts accepted, -1 behind the last), logits."""
    import io

    import numpy as np
    import torch

    from lantern_bench.models.io.files import write_atomically

    arrays: dict[str, Any] = {"tokens": torch.stack([one.tokens for one in made]).cpu().numpy().astype(np.int32)}
    # Uncut: the last step may run over the end, as the published code counts it.
    steps = [[count - 1 for count in one.trace.uncut] for one in made]
    arrays["accept_lengths"] = np.full((len(made), max(map(len, steps))), -1, np.int32)
    for row, counts in zip(arrays["accept_lengths"], steps, strict=True):
        row[: len(counts)] = counts
    if with_logits:
        logits = [one.logits for one in made if one.logits is not None]
        arrays["logits"] = torch.stack(logits).float().cpu().numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    _written("--save-tokens", path, lambda: write_atomically(path, buffer.getvalue()))


def _written(flag: str, path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written: {error.strerror}") from error


def numbers_table(columns: Sequence[Sequence[Unit]], made: Sequence[Sequence[Made]]) -> pd.DataFrame:
    """How every image was decoded."""
    import pandas as pd

    rows = []
    units = [unit for column in columns for unit in column]
    for unit, one in zip(units, [one for column in made for one in column], strict=True):
        trace = one.trace
        row = {"cell_id": unit.cell.cell_id, "image": unit.image_index, "tokens": trace.tokens}
        row |= {"target_forwards": trace.target_forwards, "mean_accepted_length": trace.mean_accepted_length}
        row |= {"step_compression": trace.step_compression, "seconds": trace.seconds}
        rows.append(row | {"pixel_seconds": one.pixel_seconds})
    return pd.DataFrame(rows)


def memory_table(resolved: ResolvedExperiment, console: Console) -> pd.DataFrame:
    """What the model's parts take, by part and in all; nothing of it is allocated, no file is opened."""
    import pandas as pd
    import psutil

    from lantern_bench.models.random_model import blueprint, sizes_of
    from lantern_bench.runs.devices import choose_place

    place = choose_place(resolved.settings.device, resolved.settings.dtype)
    _name, _family, parts = blueprint(resolved.settings.model[0])
    nodes = max(1 + (cell.decoding.nodes or len(cell.decoding.paths)) for cell in resolved.cells)
    guided = any(cell.decoding.cfg_scale != 1 for cell in resolved.cells)
    sizes = sizes_of(parts, place.dtype, guided=guided, nodes=nodes, batch=max(resolved.settings.batch))
    total = sum(size.bytes for size in sizes)
    rows = [
        {
            "part": size.part,
            "parameters": size.parameters or None,
            "dtype": str(size.dtype).removeprefix("torch."),
            "gigabytes": round(size.bytes / _GIGABYTE, 3),
        }
        for size in sizes
    ]
    rows.append({"part": "all", "parameters": sum(size.parameters for size in sizes), "dtype": "", "gigabytes": None})
    rows[-1]["gigabytes"] = round(total / _GIGABYTE, 3)
    console.say(f"memory needed: {total / _GIGABYTE:.2f} GB on {place.device}, and what a forward takes beside it")
    if place.device.type == "cpu":
        there = psutil.virtual_memory().available
        console.say(f"free here: {there / _GIGABYTE:.2f} GB" + ("" if there > total else ": not enough"))
    frame = pd.DataFrame(rows)
    return frame.astype({"parameters": "Int64"})


# ----

# What a relaxed mode takes where nothing is said; a sweep has no such values, since it is there to compare them.
_BOUNDS = {"delta": 0.02, "lambda": 2.0}
# Enough to run every program of a step more than once.
_COMPILED_TOKENS = 16


class _Asked(NamedTuple):
    """What the picture is of: a prompt, or the features in a file; with random weights, anything."""

    caption: str | None
    label: int | None
    condition: Path | None
    random: bool


@with_flags(*DECODING, *PLACE)
def generate(
    ctx: typer.Context,
    caption: Annotated[str | None, typer.Argument(help="What the picture shows.")] = None,
    model: Annotated[str, typer.Option(help="The model, or the YAML file that describes one.")] = "lanterns",
    label: Annotated[int | None, typer.Option("--class", min=0, help="A class instead of a caption.")] = None,
    condition: Annotated[
        Path | None, typer.Option(help="Caption features instead of a caption: .npz with embeddings and mask.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Weights and caption features are random numbers (--seed).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show sizes and memory, and make nothing.")] = False,
    mode: Annotated[list[str] | None, typer.Option(help="ar, speculative, lantern, lantern++, or all.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Pictures of each mode, one below the other.")] = 1,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("picture.png"),
    save_tokens: Annotated[
        Path | None,
        typer.Option(help="Also write tokens, int32 [n, N], and accept_lengths of the steps to this .npz."),
    ] = None,
    save_logits: Annotated[bool, typer.Option(help="Add guided float32 logits [n, N, V] to the .npz.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as for a sweep.")] = None,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make pictures of a caption or a class and show how they were decoded."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    typed = {key: None if value == [] else value for key, value in flags.items()} | {"model": [model]}
    resolved = _resolved(typed, mode or ["lantern++"], settings or [])
    if dry_run:
        console.table(memory_table(resolved, console), title=model, format=chosen)
        return
    asked = _Asked(caption, label, condition, random_weights)
    _check_asked(asked, model)
    if save_logits and save_tokens is None:
        raise UserError("--save-logits: needs the file to put them in", "Add --save-tokens FILE.npz.")
    if save_tokens is not None and len(resolved.cells) > 1:
        raise UserError(f"--save-tokens {save_tokens}: holds one way of decoding", f"These are {len(resolved.cells)}.")
    check_file("--out", out, ".png", force)
    if save_tokens is not None:
        check_file("--save-tokens", save_tokens, ".npz", force)

    place, loaded = _loaded(resolved, random_weights, console)
    drawn = _check_pixels(loaded, save_tokens, console)
    prompts = _prompts(asked, loaded)
    columns = _columns(resolved, prompts, images)
    made = _make(loaded, place, columns, save_logits, drawn, console)
    if drawn:
        write_picture(out, made)
    if save_tokens is not None:
        write_tokens(save_tokens, made[0], save_logits)
    console.table(numbers_table(columns, made), title=", ".join(prompts[:3]), format=chosen)
    written = ([f"picture: {out}"] if drawn else []) + ([f"tokens: {save_tokens}"] if save_tokens is not None else [])
    console.say(", ".join(written))


def _resolved(typed: dict[str, Any], mode: Sequence[str], settings: Sequence[str]) -> ResolvedExperiment:
    """Read the flags as the experiment they stand for; raises `UserError` for all that is wrong with them."""
    from lantern_bench.config.experiment import resolve
    from lantern_bench.config.methods import MODES, OUTSIDE_RULES
    from lantern_bench.config.parse_experiment import read_experiment
    from lantern_bench.config.values import Overrides
    from lantern_bench.config.yaml_source import Source
    from lantern_bench.errors import did_you_mean
    from lantern_bench.models.registry import card_of, defaults_of
    from lantern_bench.runs.preflight import check_neighbours

    names = [name.strip() for text in mode for name in text.split(",") if name.strip()]
    names = list(MODES) if "all" in names else names
    for name in names:
        if name not in MODES:
            hint = did_you_mean(name, MODES)
            raise UserError(f"--mode {name}: unknown mode{hint}", f"The modes are {', '.join(MODES)}, or all.")
    card_of(typed["model"][0])
    own = {name: {"bound": rule.example} for name, rule in OUTSIDE_RULES.items()}
    cells = [{"mode": name, **own.get(name, {})} for name in names]
    data = {"name": "generate", "model": "?", "baseline": False, **_BOUNDS, "cells": cells}
    overrides = Overrides.from_flags(typed, settings=settings)
    experiment, problems = read_experiment(Source("generate", Path(), data), overrides)
    problems.raise_all()
    resolved = resolve(experiment, defaults_of(typed["model"]))
    check_neighbours(resolved)
    return resolved


def _check_asked(asked: _Asked, model: str) -> None:
    """Refuse more than one subject, none, and one the model cannot take."""
    from lantern_bench.models.registry import card_of, family_of

    given = {"a caption": asked.caption, "--class": asked.label, "--condition": asked.condition}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)}: one of them says what the picture is of, not {len(names)}")
    if not names and not asked.random:
        raise UserError("nothing to make a picture of", "Give a caption, --class N or --condition FILE.npz.")
    if asked.condition is not None:
        if not asked.condition.is_file():
            raise UserError(f"--condition {asked.condition}: no such file")
        return
    classes = card_of(model).classes
    if asked.label is not None and classes is None:
        raise UserError(f"--class {asked.label}: {model} takes no classes", "Give a caption.")
    if asked.label is not None and classes is not None and asked.label >= classes:
        raise UserError(f"--class {asked.label}: {model} has {classes} classes", f"At most {classes - 1}.")
    family_of(model).check_prompt(_text(asked, model))


def _text(asked: _Asked, model: str) -> str:
    """The prompt that was typed; with random weights and none typed, the first of the family's own."""
    from lantern_bench.models.default_prompts import class_prompt
    from lantern_bench.models.registry import family_of

    if asked.label is not None:
        return class_prompt(asked.label)
    if asked.caption is not None:
        return asked.caption
    sets = family_of(model).prompt_sets()
    return next((prompts[0] for prompts in sets.values() if prompts), "anything")


def _loaded(resolved: ResolvedExperiment, random: bool, console: Console) -> tuple[Place, LoadedModel]:
    """The model, from its files or from random numbers; compiled where that was asked for."""
    from lantern_bench.runs.devices import choose_place, load_models

    settings = resolved.settings
    place = choose_place(settings.device, settings.dtype)
    name = settings.model[0]
    model = _random(name, place, settings.seed, console) if random else load_models(resolved, place)[name]
    # One picture is made sooner than its programs: compiled only when asked for, and then before it is timed.
    if settings.compile:
        compile_steps([model], place, console)
    return place, model


def _random(name: str, place: Place, seed: int, console: Console) -> LoadedModel:
    import torch

    from lantern_bench.models.random_model import random_model

    console.warn(
        f"the weights of {name} are random (seed {seed}, {place.dtype_name}), and random numbers stand for the text "
        "encoder: the picture means nothing"
    )
    return random_model(name, place.device, place.dtype, torch.Generator(place.device).manual_seed(seed))


def _check_pixels(loaded: LoadedModel, save_tokens: Path | None, console: Console) -> bool:
    """Whether there will be a picture; without one the tokens must be asked for."""
    from lantern_bench.models.loaded_model import NoPixels

    if not isinstance(loaded.pixels, NoPixels):
        return True
    if save_tokens is None:
        raise loaded.pixels.problem
    console.warn(loaded.pixels.problem.message)
    return False


def _prompts(asked: _Asked, loaded: LoadedModel) -> list[str]:
    """The prompts to make; features from a file are put into the model's own condition under names of theirs."""
    if asked.condition is None:
        return [_text(asked, loaded.name)]
    from lantern_bench.models.io.condition_file import read_condition
    from lantern_bench.models.io.files import file_sha256

    rows = read_condition(asked.condition, loaded)
    # By content: the same features have the same seeds wherever they lie.
    digest = file_sha256(asked.condition)[:12]
    named = {f"{asked.condition.name} {digest} row {number}": row for number, row in enumerate(rows)}
    loaded.condition = _chosen(named)
    return list(named)


def _chosen(named: dict[str, Any]) -> Callable[[Sequence[str]], Any]:
    def condition(prompts: Sequence[str]) -> Any:
        import torch

        rows = [named[text] for text in prompts]
        return type(rows[0])(*(torch.cat(parts) for parts in zip(*rows, strict=True)))

    return condition


def _columns(resolved: ResolvedExperiment, prompts: Sequence[str], images: int) -> list[list[Unit]]:
    """The images to make, a column for each cell; the same seeds in all."""
    from lantern_bench.config.plan import Prompt, Unit, record_seed

    subjects = [
        (prompt, n, record_seed(resolved.settings.seed, prompt.id, n))
        for prompt in map(Prompt, prompts)
        for n in range(images)
    ]
    return [
        [Unit(cell, prompt, n, seed, index, index) for index, (prompt, n, seed) in enumerate(subjects)]
        for cell in resolved.cells
    ]


def _make(
    model: LoadedModel,
    place: Place,
    columns: list[list[Unit]],
    keep_logits: bool,
    drawn: bool,
    console: Console,
) -> list[list[Made]]:
    """Decode every image; without a tokenizer (`drawn` False) their tokens alone."""
    from lantern_bench.runs.runner import make_images

    tokens = None if drawn else model.target.image_tokens
    made: list[list[Made]] = []
    with console.progress() as progress:
        progress.start(sum(map(len, columns)), "images")
        for units in columns:
            made.append([])
            if model.engine.compile:
                make_images(model, units[:1], place, tokens=_COMPILED_TOKENS, keep_logits=keep_logits)
            for unit in units:
                try:
                    made[-1] += make_images(model, [unit], place, tokens=tokens, keep_logits=keep_logits)
                except (RuntimeError, MemoryError) as error:
                    raise RecordsFailedError(f"{unit.cell.cell_id}: {type(error).__name__}: {error}") from error
                progress.advance()
    return made
