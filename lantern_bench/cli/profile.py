"""`lantern-bench profile`: what decode steps cost by part, what the device allows, and which trees pay off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import DEVICE_HELP, FormatOption, compile_steps
from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.console import Console

_TREES = "chain-5,small-7,eagle1-25,58n5d10b"
_NEIGHBOURS = 100


def profile(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="The model.")] = "lanterns",
    size: Annotated[
        str | None, typer.Option(help="Use a random model of this size: LAYERSxWIDTH[xVOCABULARY[xSIDE]].")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use the model's architecture with random weights.")
    ] = False,
    tree: Annotated[
        list[str] | None, typer.Option(help=f"Trees: static names, or NnDdBb for dynamic. Default: {_TREES}.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images decoded for each kind of step.")] = 4,
    tokens: Annotated[int | None, typer.Option(min=2, help="Decode only this many tokens per image.")] = None,
    cfg_scale: Annotated[float | None, typer.Option(min=0, help="Guidance scale; 1 is off.")] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the decode steps.")] = True,
    search: Annotated[bool, typer.Option("--search", help="Also search for the fastest static tree.")] = False,
    lambda_: Annotated[float | None, typer.Option("--lambda", help="Search for lantern++ with this lambda.")] = None,
    neighbours: Annotated[
        int | None, typer.Option(min=1, help=f"Nearest codes of lantern++ in the search. Default: {_NEIGHBOURS}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for profile.csv and profile.png.")] = None,
    format: FormatOption = None,
) -> None:
    """Measure what decode steps cost, and compare it with what the device allows."""
    if search and (random_weights or size is not None):
        raise UserError("--search: needs weights of a trained model", "Remove --random-weights and --size.")
    rule: dict[str, Any] = {"mode": "speculative"}
    if neighbours is not None and lambda_ is None:
        raise UserError(f"--neighbours {neighbours}: needs --search with --lambda")
    if lambda_ is not None:
        if not search or lambda_ <= 1:
            raise UserError(f"--lambda {lambda_:g}: needs --search, and a value above 1")
        rule = {"mode": "lantern++", "neighbours": neighbours or _NEIGHBOURS, "lambda": lambda_}
    names = [name.strip() for text in tree or [_TREES] for name in text.split(",") if name.strip()]

    import pandas as pd

    from lantern_bench.profile.run import load_subject, measure, step_settings, write_step_costs
    from lantern_bench.profile.steps import device_rates, dtype_error
    from lantern_bench.runs.devices import choose_place

    console: Console = ctx.obj
    steps = {"ar": {"mode": "ar"}} | {name: step_settings(name) for name in names}
    place = choose_place(device, dtype, fast=True)
    subject = load_subject(model, size, random_weights, place, images, seed, tokens)
    if cfg_scale is not None:
        subject = subject._replace(cfg_scale=cfg_scale)
    if compile:
        compile_steps([subject.model], place, console)
    target: Any = subject.model.target
    rates = device_rates(target, subject.guided)
    speeds = f"reads {rates.bytes_per_s / 1e9:.1f} GB/s, multiplies {rates.operations_per_s / 1e9:.0f} Gop/s"
    console.say(f"{place.device}: {speeds}, measured at the size of this model")
    with console.progress() as progress:
        rows = measure(subject, steps, rates, progress.share)
    table = pd.DataFrame(rows).round(4)
    console.table(table, title=f"{size or model}, {place.device}, {place.dtype_name}", format=format)
    if out is not None:
        console.say("written: " + ", ".join(map(str, write_step_costs(table, out))))
    if subject.trained and place.dtype_name != "float32":
        tv = dtype_error(model, subject.model, subject.prompts[:2], subject.cfg_scale)
        figures = f"mean {tv.mean():.4f}, 99th percentile {tv.quantile(0.99):.4f}, maximum {tv.max():.4f}"
        console.say(f"TV of {place.dtype_name} against float32, {len(tv)} positions: {figures}")
    if search:
        from lantern_bench.profile.tree_search import search_trees

        rule |= {"cfg_scale": subject.cfg_scale}
        found = search_trees(subject.model, rule, subject.prompts, rows, seed, console.say)
        shown = (f"{key}={value:g}" for key, value in rule.items() if isinstance(value, int | float))
        console.table(pd.DataFrame(found).round(3), title=" ".join(shown))
