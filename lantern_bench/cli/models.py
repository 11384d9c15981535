"""Commands about what can be decoded: `models`, `generate`, `experiments` and `weights get`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.options import (
    DECODING_FLAGS,
    Command,
    FormatOption,
    SettingsOption,
    command_group,
    resolve_flags,
    split_words,
    with_flags,
)
from lantern_bench.console import Console
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.catalog import MODES
from lantern_bench.models import hub
from lantern_bench.models.io.model_file import is_model_file
from lantern_bench.models.model import Model, class_prompt
from lantern_bench.models.registry import model_of
from lantern_bench.models.registry import models as all_models
from lantern_bench.runs.request import check_drafters
from lantern_bench.runs.store import check_writable
from lantern_bench.runs.threads import set_threads

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.config.experiment import ResolvedExperiment


def models(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Show the parts of this model, and the memory it needs.")
    ] = None,
    format: FormatOption = None,
) -> None:
    """List the models: size, tokens, required files, which of them are here, and how to get the rest."""
    import pandas as pd

    console: Console = ctx.obj
    if model is None:
        frame = pd.DataFrame([_row(described) for described in all_models().values()])
        console.table(frame.astype({"tokens": "Int64"}), format=format)
        console.say(
            "`lantern-bench models NAME` shows one model; --model also takes your own YAML file."
        )
        return
    described = model_of(model)
    parts = _parts(described)
    console.table(
        pd.DataFrame(parts), title=f"{described.name}: {described.description}", format=format
    )
    missing = [part["part"] for part in parts if not part["found"]]
    if missing:
        get = f": lantern-bench weights get {described.name}" if described.name in hub.PARTS else ""
        console.say(f"missing: {', '.join(missing)}{get}")
    # Only its files may tell the architecture.
    with contextlib.suppress(UserError):
        _show_memory(
            resolve_flags("models", {"model": [described.name]}, [described.mode]), console
        )


def _row(model: Model) -> dict[str, Any]:
    """Return a model as one row; no weights are opened."""
    parts = _parts(model)
    files = [
        file
        for path in model.files().values()
        for file in (path.iterdir() if path.is_dir() else [path])
    ]
    missing = [part["part"] for part in parts if not part["found"]]
    get = f"lantern-bench weights get {model.name}" if missing and model.name in hub.PARTS else ""
    return {
        "model": model.name,
        "parameters_m": None if model.parameters is None else round(model.parameters / 1e6),
        "tokens": model.tokens,
        "files": "; ".join(f"{part['part']}: {part['files']}" for part in parts),
        "found": ", ".join(part["part"] for part in parts if part["found"]),
        "found_mb": round(sum(file.stat().st_size for file in files if file.is_file()) / 1e6, 1),
        "missing": ", ".join(missing),
        "get": get if parts else "not published; describe your own file in a model.yaml",
        "prompts": next(iter(model.prompt_sets)),
        "defaults": " ".join(f"{key}={value}" for key, value in model.defaults.items()),
        "licence": model.licence,
        "about": model.description,
    }


def _parts(model: Model) -> list[dict[str, Any]]:
    """Return one row per part of a model: its files, their path here, and their repositories."""
    published = hub.PARTS.get(model.name, {})
    origin = "your model file" if is_model_file(model.name) else "this package"
    home = Path.home()
    rows = []
    for part, path in model.files().items():
        sources = published.get(part, ())
        files = sources[0].patterns if sources else [path.name]
        row = {"part": part, "files": " ".join(files), "found": path.exists()}
        row["place"] = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
        row["from"] = " or ".join(dict.fromkeys(source.repo for source in sources)) or origin
        rows.append(row | {"licence": sources[0].licence.name if sources else model.licence})
    return rows


def _show_memory(resolved: ResolvedExperiment, console: Console) -> pd.DataFrame:
    """Say how much memory the model needs, and how much is free on a CPU; return it by part."""
    import pandas as pd
    import psutil

    from lantern_bench.models.random_model import meta_model, sizes_of
    from lantern_bench.runs.devices import choose_compute

    settings = resolved.settings
    decodings = [cell.decoding for cell in resolved.cells]
    compute = choose_compute(settings.device, settings.dtype)
    model = meta_model(settings.model[0])
    nodes = max(1 + decoding.draft_nodes for decoding in decodings)
    guided = any(decoding.cfg_scale != 1 for decoding in decodings)
    sizes = sizes_of(model, compute.dtype, guided=guided, nodes=nodes, batch=max(settings.batch))
    total = sum(size.bytes for size in sizes)
    parameters = sum(size.parameters for size in sizes)
    rows = [
        (size.part, size.parameters or None, str(size.dtype).removeprefix("torch."), size.bytes)
        for size in sizes
    ]
    table = pd.DataFrame(
        [*rows, ("all", parameters, "", total)],
        columns=["part", "parameters", "dtype", "gigabytes"],
    )
    table["gigabytes"] = (table["gigabytes"] / 1e9).round(3)
    console.say(
        f"memory needed: {total / 1e9:.2f} GB on {compute.device.type}, without the activations of a forward"
    )
    if compute.device.type == "cpu":
        free = psutil.virtual_memory().available
        console.say(f"free here: {free / 1e9:.2f} GB" + ("" if free > total else ": not enough"))
    return table.astype({"parameters": "Int64"})


# ---- Pictures of one prompt


@with_flags(DECODING_FLAGS)
def generate(
    ctx: typer.Context,
    caption: Annotated[str | None, typer.Argument(help="The caption.")] = None,
    model: Annotated[
        str, typer.Option(help="The model, or the YAML file that describes one.")
    ] = "lanterns",
    label: Annotated[
        int | None, typer.Option("--class", min=0, help="A class instead of a caption.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use random weights and features.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show sizes and memory only.")] = False,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(MODES)}, or all. Default: lantern++; without a drafter scd."
        ),
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, max=1000, help="Images per mode, one below the other.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("picture.png"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    settings: SettingsOption = None,
    format: FormatOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make pictures of a caption or a class and show how they were decoded."""
    console: Console = ctx.obj
    modes = mode or [model_of(model).mode]
    # Not compiled by default: compiling takes longer than an image.
    resolved = resolve_flags(
        name="generate",
        flags=flags | {"model": [model]},
        mode=modes,
        settings=settings or [],
        compile=False,
    )
    if "all" not in split_words(modes) and not random_weights:
        check_drafters(resolved.cells)
    if dry_run:
        return console.table(_show_memory(resolved, console), title=model, format=format)
    prompt = _prompt(caption=caption, label=label, random=random_weights, model=model)
    if out.suffix.lower() != ".png":
        raise UserError(
            f"--out {out}: must end with .png", f"For example {out.stem or 'picture'}.png."
        )
    if out.exists() and not force:
        raise RefusedError(
            f"--out {out}: is there already", "Give another name, or --force to overwrite it."
        )
    check_writable(out.absolute().parent)
    set_threads(resolved.settings.threads)

    import pandas as pd
    import torch

    from lantern_bench.decoding.loop import drafter_and_rule
    from lantern_bench.files import write_atomically
    from lantern_bench.metrics.distance import token_sums
    from lantern_bench.models.loaded_model import NoPixels
    from lantern_bench.models.random_model import random_model
    from lantern_bench.report.distance import distance_of_image
    from lantern_bench.runs import runner
    from lantern_bench.runs.devices import choose_compute, compile_models, load_models

    compute = choose_compute(resolved.settings.device, resolved.settings.dtype)
    seed = resolved.settings.seed
    if random_weights:
        weights = f"the weights of {model} are random (seed {seed}, {compute.dtype_name})"
        console.warn(f"{weights}, and so are its caption features: the picture means nothing")
        loaded = random_model(model, *compute, torch.Generator(compute.device).manual_seed(seed))
    else:
        (loaded,) = load_models(resolved, compute).values()
    if isinstance(loaded.pixels, NoPixels):
        raise loaded.pixels.problem
    cells = list(resolved.cells)
    for cell in resolved.cells if "all" in split_words(modes) else ():
        try:
            if cell.decoding.drafts:
                drafter_and_rule(loaded, cell.decoding)
        except RefusedError as error:
            cells.remove(cell)
            console.say(f"{cell.cell_id} is left out: {error.message}")
    if resolved.settings.compile and (note := compile_models([loaded], compute)) is not None:
        console.note(*note)
    tasks = runner.tasks_of(cells=cells, seed=seed, prompts=[prompt], images=images)
    decoded = []
    with console.progress() as progress:
        progress.share("images", 0, len(tasks))
        for image in runner.decode_tasks(loaded, compute, tasks):
            decoded.append(image)
            progress.share("images", len(decoded), len(tasks))
    try:
        write_atomically(out, runner.picture_png(decoded, cells))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    names = (
        "tokens",
        "target_forwards",
        "mean_accepted_length",
        "step_compression",
        "seconds",
        "pixel_seconds",
    )
    rows = []
    for task, image in zip(tasks, decoded, strict=True):
        tokens = image.tokens[None].to(compute.device).long()
        (sums,) = token_sums(
            model=loaded,
            condition=loaded.condition([prompt]),
            tokens=tokens,
            decoding=task.cell.decoding,
        )
        columns = image.columns(1)
        row = {
            "cell_id": task.cell.cell_id,
            "image": task.image_index,
            **{name: columns[name] for name in names},
        }
        rows.append(row | {"distance": distance_of_image(sums)})
    console.table(pd.DataFrame(rows), title=prompt, format=format)
    console.say(f"picture: {out}")


def _prompt(caption: str | None, label: int | None, random: bool, model: str) -> str:
    """Return the prompt; random weights need none."""
    described = model_of(model)
    if caption is not None and label is not None:
        raise UserError("a caption and --class: are mutually exclusive", "Give one of them.")
    classes = described.classes or 0
    if label is not None and label >= classes:
        raise UserError(
            f"--class {label}: {model} has {classes} classes",
            "Give a smaller number, or a caption.",
        )
    text = class_prompt(label) if label is not None else caption
    if text is None and not random:
        raise UserError("the prompt is missing", "Give a caption or --class N.")
    if text is None:
        text = next(
            (prompts[0] for prompts in described.prompt_sets.values() if prompts), "anything"
        )
    described.check_prompt(text)
    return text


def experiments(ctx: typer.Context, format: FormatOption = None) -> None:
    """List the experiments that come with the package."""
    import pandas as pd

    from lantern_bench.config.experiment import shipped_experiments
    from lantern_bench.config.parse_experiment import ExperimentReader, Overrides
    from lantern_bench.config.yaml_source import read_source

    console: Console = ctx.obj
    rows = []
    for name, path in shipped_experiments().items():
        settings = ExperimentReader(read_source(path), Overrides()).settings()
        about = " ".join((settings.description or "").split())
        rows.append(
            {
                "experiment": name,
                "model": ", ".join(settings.model),
                "images": settings.images,
                "about": about,
            }
        )
    console.table(pd.DataFrame(rows), format=format)


# ---- `lantern-bench weights`

weights = command_group(name="weights", help="Fetch the files of the published models.")


@weights.command(cls=Command)
def get(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A published model; see `lantern-bench models`.")],
    dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Default: LANTERN_BENCH_WEIGHTS.")
    ] = None,
) -> None:
    """Fetch the missing files of a model; repeat the command to resume an interrupted download."""
    console: Console = ctx.obj
    name = model if model in hub.PARTS else model_of(model).name  # it may be an alias
    if name not in hub.PARTS:
        raise UserError(
            f"{name}: has no files to fetch", f"Published models: {', '.join(hub.PARTS)}."
        )
    missing = hub.missing_sources(name, dir)
    if not missing:
        console.say(f"{model}: every file is here")
        return
    console.say("licences of what is fetched:")
    for licence in dict.fromkeys(source.licence for source in missing):
        repos = ", ".join(source.repo for source in missing if source.licence == licence)
        console.say(
            f"  {licence.name}: {repos}" + (f"\n    {licence.note}" if licence.note else "")
        )
    for source in missing:
        path = source.download(
            dir or hub.weights_folder(), bars=sys.stderr.isatty() and not console.quiet
        )
        pinned = (
            "unpinned, moves with its repository"
            if source.revision == "main"
            else source.revision[:12]
        )
        console.say(f"{source.repo} ({pinned}): {path}")
    console.say(f"{model}: complete")
    if dir is not None:
        console.say(f"To use this directory: export LANTERN_BENCH_WEIGHTS={dir}")
