"""The commands `profile` and `predict`: what decode steps cost here, and on other devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import (
    MOST_SEED,
    RULE_FLAGS,
    DeviceOption,
    RunArgument,
    check_choice,
    resolve_flags,
    with_flags,
    with_format,
)
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.text import split_words

if TYPE_CHECKING:
    from lantern_bench.config.decoding import Decoding
    from lantern_bench.config.experiment import Cell
    from lantern_bench.profile.step_costs import ProfiledModel


_TREES = "chain-5,small-7,eagle1-25,58n5d10b"


@with_flags(RULE_FLAGS)
def profile(
    ctx: typer.Context,
    console: Console,
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
    save_device: Annotated[
        Path | None,
        typer.Option(help="Write what steps cost here to a file for `predict --device`."),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Measure the cost of decode steps and compare it with the device, or search for trees."""
    _check_flags(ctx.params)
    decodings = _decodings(flags | {"model": [model]}, mode, search)

    import pandas as pd

    from lantern_bench.devices.compute import choose_compute, set_threads
    from lantern_bench.models.load import check_loaded, compile_models
    from lantern_bench.profile import step_costs as profiling
    from lantern_bench.sweeps.choose_threads import choose_threads

    names = [] if search else split_words(tree or [_TREES])
    steps = {"ar": decodings[0].autoregressive()}
    steps |= {name: profiling.step_of(name, decodings[0]) for name in names}
    every = [*steps.values(), *decodings]
    set_threads(threads)
    compute = choose_compute(device, dtype, fast=True)
    with console.events():
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
    for decoding in every:
        check_loaded(profiled.model, decoding, batch=1, compute=compute)
    if compile:
        console.note(compile_models([profiled.model], compute))
    if threads is None:
        choose_threads(
            model=profiled.model,
            prompt=profiled.prompts[0],
            decodings=every,
            emit=console.note,
        )
    if search:
        return _search(profiled=profiled, decodings=decodings, console=console)
    target: Any = profiled.model.target
    rates = profiling.device_rates(target, guided=profiled.is_guided)
    console.say(
        f"{compute.device}: reads {rates.bytes_per_s / 1e9:.1f} GB/s, multiplies "
        f"{rates.operations_per_s / 1e9:.0f} Gop/s, measured at the size of this model"
    )
    with console.events() as emit:
        rows = profiling.measure(profiled=profiled, steps=steps, rates=rates, emit=emit)
    table = pd.DataFrame(rows).round(4)
    console.table(table, title=f"{size or model}, {compute.device}, {compute.dtype_name}")
    if out is not None:
        console.say("written: " + ", ".join(map(str, profiling.save_profile(table, out))))
    if profiled.is_trained and compute.dtype_name != "float32":
        tv = profiling.dtype_error(
            name=model,
            rounded=profiled.model,
            prompts=profiled.prompts[:2],
            cfg_scale=profiled.cfg_scale,
        )
        console.say(
            f"TV of {compute.dtype_name} against float32, {len(tv)} positions: mean "
            f"{tv.mean():.4f}, 99th percentile {tv.quantile(0.99):.4f}, maximum {tv.max():.4f}"
        )
    if save_device is not None:
        profiling.save_device(profiled=profiled, rows=rows, compute=compute, path=save_device)
        console.say(f"written: {save_device}")
    return None


def _check_flags(typed: Mapping[str, Any]) -> None:
    """Raise `UserError` for a flag that `--search` cannot take, and for the file of a device."""
    if typed["search"]:
        for flag in ("tree", "tokens", "out", "save_device", "size", "random_weights"):
            if typed[flag]:
                raise UserError(
                    f"--{flag.replace('_', '-')}: not with --search, "
                    "which takes a trained model and finds the trees"
                )
    file = typed["save_device"]
    if file is not None and file.suffix not in (".yaml", ".yml"):
        raise UserError(f"--save-device {file}: must end in .yaml")


def _decodings(flags: dict[str, Any], mode: list[str] | None, search: bool) -> list[Decoding]:
    """Return the decodings of the flags; a search of no method takes all lossless ones."""
    cells: list[Cell] = []
    if search and not (mode or flags["rule"] or flags["drafting"]):
        from lantern_bench.profile.tree_search import searched_lossless

        for name, drafting, rule in searched_lossless():
            cells += resolve_flags(
                name="profile",
                flags=flags | {"drafting": [drafting], "rule": [rule]},
                mode=[name],
            ).cells
    else:
        cells += resolve_flags("profile", flags, mode or ["speculative"]).cells
    decodings = list(dict.fromkeys(cell.decoding for cell in cells))
    for decoding in decodings:
        if not decoding.drafts:
            raise UserError(
                f"--mode {decoding.mode}: drafts nothing",
                "Every table has autoregressive decoding already. A sweep times other modes.",
            )
    if not search and len(decodings) > 1:
        ids = ", ".join(decoding.cell_id for decoding in decodings)
        raise UserError(
            f"profile measures one mode and rule at a time, and these are {len(decodings)}: {ids}"
        )
    return decodings


def _search(profiled: ProfiledModel, decodings: Sequence[Decoding], console: Console) -> None:
    """Search for the fastest tree of each decoding, and print it as a line of an experiment."""
    import pandas as pd

    from lantern_bench.profile.tree_search import experiment_line, search_trees

    lines = ["the fastest, for the cells of an experiment:"]
    for decoding in decodings:
        measured = search_trees(
            model=profiled.model,
            decoding=decoding,
            prompts=profiled.prompts,
            seed=profiled.seed,
            emit=console.note,
        )
        table = pd.DataFrame([row for _, row in measured]).round(4)
        console.table(
            table,
            title=f"{decoding.mode}, {decoding.drafting}, {decoding.rule}, the fastest measured",
        )
        lines.append(f"  {experiment_line(measured[0][0])}")
    console.say("\n".join(lines))


@with_format
def predict(
    console: Console,
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
) -> None:
    """Predict the speedup of every cell on another device, and hours of a large run."""
    from lantern_bench.profile import cost_model, prediction
    from lantern_bench.storage.run_directory import load_runs

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
    (data,) = load_runs([run]).values()
    terms = []
    title = data.folder.name
    if device is None:
        table = prediction.measured_times(data)
    else:
        target = cost_model.find_device(device)
        table = prediction.predict_run(run=data, device=target, stack=stack, model=model)
        terms += prediction.terms_of(target, stack)
        measured = prediction.measured_elsewhere(run=data, device=target, stack=stack, model=model)
        if measured:
            terms.append(measured)
        title += f", predicted for {target.name}"
    if prompts is not None:
        table = prediction.with_hours(table, prompts, devices)
        terms.append(prediction.hours_in_words(table, prompts, devices))
    console.table(table, "prediction", title=title)
    for term in terms:
        console.say(term)
