"""The commands `profile` and `predict`: what decode steps cost here, and on other devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    MOST_SEED,
    RULE_FLAGS,
    DeviceOption,
    FormatOption,
    RunArgument,
    check_choice,
    resolve_flags,
    with_flags,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import split_words

if TYPE_CHECKING:
    from lantern_bench.cli.console import Console
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.profile.step_costs import ProfiledModel


_TREES = "chain-5,small-7,eagle1-25,58n5d10b"


@with_flags(RULE_FLAGS)
def profile(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="The model.")] = "lanterns",
    size: Annotated[
        str | None, typer.Option(help="Of a random model: LAYERSxWIDTH[xVOCABULARY[xSIDE]].")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights.")
    ] = False,
    tree: Annotated[
        list[str] | None,
        typer.Option(help=f"Trees: static names, or NnDdBb for dynamic. Default: {_TREES}."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="A mode; with --search several, by default all lossless ones."),
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, max=1000, help="Images decoded for each kind of step.")
    ] = 4,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Decode only this many tokens per image.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads on a CPU. Default: the fastest.")
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compile the decode steps.")] = True,
    search: Annotated[
        bool, typer.Option("--search", help="Search for the fastest trees instead.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory for profile.csv and profile.png.")
    ] = None,
    save_to: Annotated[
        Path | None,
        typer.Option(
            "--save-device", help="Write what steps cost here to a file for `predict --device`."
        ),
    ] = None,
    format: FormatOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Measure the cost of decode steps and compare it with the device, or search for trees."""
    if search:
        _refuse_with_search(
            {
                "tree": tree,
                "tokens": tokens,
                "out": out,
                "save-device": save_to,
                "size": size,
                "random-weights": random_weights or None,
            }
        )
    if save_to is not None and save_to.suffix not in (".yaml", ".yml"):
        raise UserError(f"--save-device {save_to}: must end in .yaml")
    decodings = _decodings(flags | {"model": [model]}, mode, search)

    import pandas as pd

    from lantern_bench.cli.console import show_events
    from lantern_bench.devices.compute import choose_compute, set_threads
    from lantern_bench.models.load import check_loaded, compile_models
    from lantern_bench.profile import step_costs as profiling

    names = [] if search else split_words(tree or [_TREES])
    trees = {name: profiling.step_of(name, decodings[0]) for name in names}
    console: Console = ctx.obj
    set_threads(threads)
    compute = choose_compute(device, dtype, fast=True)
    profiled = profiling.load_profiled_model(
        name=model,
        size=size,
        random=random_weights,
        compute=compute,
        cfg_scale=decodings[0].cfg_scale,
        images=images,
        seed=seed,
        tokens=tokens,
    )
    for decoding in (*trees.values(), *decodings):
        check_loaded(profiled.model, decoding, batch=1, compute=compute)
    note = compile_models([profiled.model], compute) if compile else None
    if note is not None:
        console.note(note)
    steps = {"ar": decodings[0].autoregressive(), **trees}
    if threads is None:
        from lantern_bench.sweeps.choose_threads import choose_threads

        kinds = list(islice(chain(steps.values(), decodings), 2))
        choose_threads(
            model=profiled.model,
            prompt=profiled.prompts[0],
            decodings=kinds,
            emit=console.note,
        )
    if search:
        return _search(profiled=profiled, decodings=decodings, console=console, format=format)
    target: Any = profiled.model.target
    rates = profiling.device_rates(target, guided=profiled.is_guided)
    reads = f"reads {rates.bytes_per_s / 1e9:.1f} GB/s"
    multiplies = f"multiplies {rates.operations_per_s / 1e9:.0f} Gop/s"
    console.say(f"{compute.device}: {reads}, {multiplies}, measured at the size of this model")
    with console.progress() as progress:
        rows = profiling.measure(
            profiled=profiled, steps=steps, rates=rates, emit=show_events(console, progress)
        )
    table = pd.DataFrame(rows).round(4)
    console.table(
        table, title=f"{size or model}, {compute.device}, {compute.dtype_name}", format=format
    )
    if out is not None:
        console.say("written: " + ", ".join(map(str, profiling.save_profile(table, out))))
    if profiled.is_trained and compute.dtype_name != "float32":
        tv = profiling.dtype_error(
            name=model,
            rounded=profiled.model,
            prompts=profiled.prompts[:2],
            cfg_scale=profiled.cfg_scale,
        )
        figures = (
            f"mean {tv.mean():.4f}, 99th percentile {tv.quantile(0.99):.4f}, maximum {tv.max():.4f}"
        )
        console.say(f"TV of {compute.dtype_name} against float32, {len(tv)} positions: {figures}")
    if save_to is not None:
        profiling.save_device(profiled=profiled, rows=rows, compute=compute, path=save_to)
        console.say(f"written: {save_to}")
    return None


def _decodings(flags: dict[str, Any], mode: list[str] | None, search: bool) -> list[Decoding]:
    """Return the decodings of the flags; a search of no method takes all lossless ones."""
    chosen: list[tuple[list[str], dict[str, Any]]] = [(mode or ["speculative"], {})]
    if search and not (mode or flags["rule"] or flags["drafting"]):
        from lantern_bench.profile.tree_search import searched_lossless

        methods = searched_lossless()
        chosen = [
            ([name], {"drafting": [drafting], "rule": [rule]}) for name, drafting, rule in methods
        ]
    resolved = [resolve_flags("profile", flags | values, modes).cells for modes, values in chosen]
    decodings: dict[Decoding, None] = {}
    for cells in resolved:
        decodings |= dict.fromkeys(cell.decoding for cell in cells)
    if not all(decoding.drafts for decoding in decodings):
        advice = "Every table has autoregressive decoding already."
        raise UserError("--mode ar: drafts nothing", advice)
    if not search and len(decodings) > 1:
        ids = ", ".join(decoding.cell_id for decoding in decodings)
        raise UserError(
            f"profile measures one mode and rule at a time, and these are {len(decodings)}: {ids}"
        )
    return list(decodings)


def _refuse_with_search(values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a flag that has a value and is not for `--search`."""
    for flag, value in values.items():
        if value is not None:
            raise UserError(
                f"--{flag}: not with --search, which takes a trained model and finds the trees"
            )


def _search(
    profiled: ProfiledModel, decodings: Sequence[Decoding], console: Console, format: str | None
) -> None:
    """Search for the fastest tree of each decoding, and print it as a line of an experiment."""
    import pandas as pd

    from lantern_bench.profile.tree_search import experiment_line, search_trees

    lines = []
    for decoding in decodings:
        measured = search_trees(
            model=profiled.model,
            decoding=decoding,
            prompts=profiled.prompts,
            seed=profiled.seed,
            emit=console.note,
        )
        table = pd.DataFrame([row for _, row in measured]).round(4)
        title = f"{decoding.mode}, {decoding.drafting}, {decoding.rule}, the fastest measured"
        console.table(table, title=title, format=format)
        lines.append(f"  {experiment_line(measured[0][0])}")
    console.say("\n".join(["the fastest, for the cells of an experiment:", *lines]))


def predict(
    ctx: typer.Context,
    run: RunArgument,
    device: Annotated[
        str | None,
        typer.Option(
            help="A device (a100, h100, ...) or its YAML file. With --prompts: the run's own."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Predict with this model's sizes, at the run's acceptance.")
    ] = None,
    stack: Annotated[
        str, typer.Option(help="compiled (this package) or eager (code as published).")
    ] = "compiled",
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Also show the hours of each cell for this many prompts."),
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="Number of devices that share the prompts.")
    ] = 1,
    format: FormatOption = None,
) -> None:
    """Predict the speedup of every cell on another device, and hours of a large run."""
    from lantern_bench.profile import cost_model, prediction
    from lantern_bench.storage.run_directory import load_runs

    console: Console = ctx.obj
    check_choice("--stack", stack, cost_model.KERNEL_COUNTS)
    if device is None and prompts is None:
        raise UserError(
            "--device is missing",
            "Give a device to predict for, or --prompts to plan with this one.",
        )
    if device is None and model is not None:
        raise UserError(
            f"--model {model}: only predictions take another model", "Give --device too."
        )
    target = None if device is None else cost_model.find_device(device)
    (data,) = load_runs([run]).values()
    if target is None:
        table = prediction.measured_times(data)
        terms = []
        title = data.folder.name
    else:
        table = prediction.predict_run(run=data, device=target, stack=stack, model=model)
        terms = prediction.terms_of(target, stack)
        terms += filter(
            None, [prediction.measured_elsewhere(run=data, device=target, stack=stack, model=model)]
        )
        title = f"{data.folder.name}, predicted for {target.name}"
    if prompts is not None:
        table = prediction.with_hours(table, prompts, devices)
        terms.append(prediction.hours_in_words(table, prompts, devices))
    console.table(table, "prediction", title=title, format=format)
    for term in terms:
        console.say(term)
