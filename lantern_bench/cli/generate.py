"""`lantern-bench generate`: pictures of one caption, and the numbers of how they were decoded.

Several modes, or a grid of values, stand side by side in one picture, an image a row. The same flags and the same
checks as a sweep's; nothing is kept but the files that were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.flags import DECODING, PLACE, with_flags
from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import RecordsFailedError, RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.runs.runner import Made
    from lantern_bench.spec.experiment import ResolvedExperiment
    from lantern_bench.spec.plan import Unit

__all__ = ["generate"]

# What a relaxed mode takes where nothing is said; a sweep has no such values, since it is there to compare them.
_BOUNDS = {"delta": 0.02, "lambda": 2.0}
# Enough to run every program of a step more than once.
_COMPILED_TOKENS = 16


@with_flags(*DECODING, *PLACE)
def generate(
    ctx: typer.Context,
    caption: Annotated[str, typer.Argument(help="What the picture shows.")],
    model: Annotated[str, typer.Option(help="The model.")] = "lanterns",
    mode: Annotated[list[str] | None, typer.Option(help="ar, speculative, lantern, lantern++, or all.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Pictures of each mode, one below the other.")] = 1,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("picture.png"),
    save_tokens: Annotated[Path | None, typer.Option(help="Also write the tokens, int32 [n, N], to this .npz.")] = None,
    save_logits: Annotated[bool, typer.Option(help="Add guided float32 logits [n, N, V] to the .npz.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as for a sweep.")] = None,
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make pictures of a caption and show how they were decoded."""
    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    typed = {key: None if value == [] else value for key, value in flags.items()} | {"model": [model]}
    resolved = _resolved(typed, mode or ["lantern++"], settings or [])
    _check_caption(caption, model)
    if save_logits and save_tokens is None:
        raise UserError("--save-logits: needs the file to put them in", "Add --save-tokens FILE.npz.")
    if save_tokens is not None and len(resolved.cells) > 1:
        raise UserError(f"--save-tokens {save_tokens}: holds one way of decoding", f"These are {len(resolved.cells)}.")
    _check_file("--out", out, ".png", force)
    if save_tokens is not None:
        _check_file("--save-tokens", save_tokens, ".npz", force)

    columns = _columns(resolved, caption, images)
    made = _make(resolved, columns, save_logits, console)
    _write_picture(out, made)
    if save_tokens is not None:
        _write_tokens(save_tokens, made[0], save_logits)
    console.table(_numbers(columns, made), title=caption, format=chosen)
    console.say(f"picture: {out}" + (f", tokens: {save_tokens}" if save_tokens is not None else ""))


def _resolved(typed: dict[str, Any], mode: Sequence[str], settings: Sequence[str]) -> ResolvedExperiment:
    """Read the flags as the experiment they stand for; raises `UserError` for all that is wrong with them."""
    from lantern_bench.models.registry import card_of, cards
    from lantern_bench.runs.admission import check_neighbours
    from lantern_bench.spec.experiment import resolve
    from lantern_bench.spec.modes import MODES
    from lantern_bench.spec.overrides import Overrides
    from lantern_bench.spec.reading import read_experiment
    from lantern_bench.spec.source import Source
    from lantern_bench.spec.values import did_you_mean

    names = [name.strip() for text in mode for name in text.split(",") if name.strip()]
    names = list(MODES) if "all" in names else names
    for name in names:
        if name not in MODES:
            hint = did_you_mean(name, MODES)
            raise UserError(f"--mode {name}: unknown mode{hint}", f"The modes are {', '.join(MODES)}, or all.")
    card_of(typed["model"][0])
    data = {"name": "generate", "model": "?", "baseline": False, **_BOUNDS, "cells": [{"mode": m} for m in names]}
    overrides = Overrides.from_flags(typed, settings=settings)
    experiment, problems = read_experiment(Source("generate", Path(), data), overrides)
    problems.raise_all()
    resolved = resolve(experiment, {name: card.defaults for name, card in cards().items()})
    check_neighbours(resolved)
    return resolved


def _check_caption(caption: str, model: str) -> None:
    from lantern_bench.models.registry import family_of

    family_of(model).check_prompt(caption)


def _check_file(flag: str, path: Path, suffix: str, force: bool) -> None:
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


def _columns(resolved: ResolvedExperiment, caption: str, images: int) -> list[list[Unit]]:
    """The images to make, a column for each cell; the same seeds in all."""
    from lantern_bench.spec.plan import Prompt, Unit
    from lantern_bench.spec.seeds import record_seed

    prompt = Prompt(caption)
    seeds = [record_seed(resolved.settings.seed, prompt.id, number) for number in range(images)]
    return [[Unit(cell, prompt, n, seed, n, n) for n, seed in enumerate(seeds)] for cell in resolved.cells]


def _make(
    resolved: ResolvedExperiment, columns: list[list[Unit]], keep_logits: bool, console: Console
) -> list[list[Made]]:
    from lantern_bench.runs.local import choose_place, compile_models, load_models
    from lantern_bench.runs.runner import make_images

    place = choose_place(resolved.settings.device, resolved.settings.dtype)
    model = load_models(resolved, place)[resolved.settings.model[0]]
    # One picture is made sooner than its programs: compiled only when asked for, and then before it is timed.
    problem = compile_models([model], place) if resolved.settings.compile else None
    if problem is not None:
        console.warn(f"decoding is not compiled: {problem}")
    made: list[list[Made]] = []
    with console.progress() as progress:
        progress.start(sum(map(len, columns)), "images")
        for units in columns:
            made.append([])
            if model.engine.compile:
                make_images(model, units[:1], place, tokens=_COMPILED_TOKENS, keep_logits=keep_logits)
            for unit in units:
                try:
                    made[-1] += make_images(model, [unit], place, keep_logits=keep_logits)
                except (RuntimeError, MemoryError) as error:
                    raise RecordsFailedError(f"{unit.cell.cell_id}: {type(error).__name__}: {error}") from error
                progress.advance()
    return made


def _write_picture(path: Path, made: list[list[Made]]) -> None:
    import torch

    from lantern_bench.runs.jsonl import write_atomically
    from lantern_bench.runs.runner import png_bytes

    columns = [torch.cat([one.pixels for one in column], dim=0) for column in made]
    _written("--out", path, lambda: write_atomically(path, png_bytes(torch.cat(columns, dim=1))))


def _write_tokens(path: Path, made: list[Made], with_logits: bool) -> None:
    import io

    import numpy as np
    import torch

    from lantern_bench.runs.jsonl import write_atomically

    arrays: dict[str, Any] = {"tokens": torch.stack([one.tokens for one in made]).cpu().numpy().astype(np.int32)}
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


def _numbers(columns: list[list[Unit]], made: list[list[Made]]) -> pd.DataFrame:
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
