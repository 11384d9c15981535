"""The command `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.models import show_memory
from lantern_bench.cli.options import (
    DECODING_FLAGS,
    SettingsOption,
    resolve_flags,
    with_flags,
)
from lantern_bench.methods.catalog import MODES
from lantern_bench.models.model import no_picture
from lantern_bench.models.registry import model_of
from lantern_bench.prompts.prompt import class_prompt
from lantern_bench.sweeps.request import check_cells
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import check_writable
from lantern_bench.utils.progress import ProgressEvent
from lantern_bench.utils.text import split_words

if TYPE_CHECKING:
    import torch

    from lantern_bench.config.experiment import Cell
    from lantern_bench.config.plan import ImageTask
    from lantern_bench.models.loaded_model import LoadedModel
    from lantern_bench.models.model import Model
    from lantern_bench.sweeps.decoded_image import DecodedImage

# Columns of the table.
_FIGURES = (
    "tokens",
    "target_forwards",
    "mean_accepted_length",
    "step_compression",
    "seconds",
    "pixel_seconds",
)


@with_flags(DECODING_FLAGS)
def generate(
    console: Console,
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
            help=f"{', '.join(MODES)}, or all. Default: lantern++, or scd without a drafter."
        ),
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, max=1000, help="Images per mode, one below the other.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="The PNG file.")] = Path("picture.png"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    settings: SettingsOption = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make pictures of a caption or a class, and show how they were decoded."""
    described = model_of(model)
    modes = split_words(mode or [described.mode])
    # Not compiled by default: compiling takes longer than an image.
    resolved = resolve_flags(
        name="generate",
        flags=flags | {"model": [model]},
        mode=modes,
        settings=settings,
        compile=False,
    )
    for remark in resolved.remarks:
        console.say(remark)
    if "all" not in modes and not random_weights:
        check_cells(resolved.cells, {model: described})
    if dry_run:
        return console.table(show_memory(resolved, console), title=model)
    chosen = resolved.settings
    prompt = _prompt(described, caption, label=label, is_needed=not random_weights)
    _check_out(out, force=force)
    if described.why_no_pixels and not random_weights:
        raise no_picture(model, described.why_no_pixels)

    import torch

    from lantern_bench.devices.compute import choose_compute, set_threads
    from lantern_bench.models.load import compile_models, load_models
    from lantern_bench.models.random_weights import random_model
    from lantern_bench.sweeps import decoder
    from lantern_bench.utils.files import write_file

    set_threads(chosen.threads)
    compute = choose_compute(chosen.device, chosen.dtype)
    if random_weights:
        console.warn(
            f"the weights of {model} are random (seed {chosen.seed}, {compute.dtype_name}), "
            "and so are its caption features: the picture means nothing"
        )
        generator = torch.Generator(compute.device).manual_seed(chosen.seed)
        loaded = random_model(
            model, device=compute.device, dtype=compute.dtype, generator=generator
        )
    else:
        with console.events() as emit:
            (loaded,) = load_models(resolved, compute, emit).values()
    loaded.pixel_decoder()
    cells: Sequence[Cell] = resolved.cells
    if "all" in modes:
        with console.events():
            cells = _decodable(cells, loaded, console)
    if chosen.compile:
        console.note(compile_models([loaded], compute))
    tasks = decoder.tasks_of(cells=cells, seed=chosen.seed, prompts=[prompt], images=images)
    decoded = []
    with console.events() as emit:
        emit(ProgressEvent("images", 0, len(tasks)))
        for image in decoder.decode_tasks(loaded, compute, tasks):
            decoded.append(image)
            emit(ProgressEvent("images", len(decoded), len(tasks)))
    write_file(out, decoder.picture_png(decoded, cells), flag="--out")
    console.table(
        [
            _row(task, image, loaded, device=compute.device)
            for task, image in zip(tasks, decoded, strict=True)
        ],
        title=prompt,
    )
    shown = "picture"
    if described.draws_maps:
        shown = "map of codes, because no decoder here makes pixels"
    console.say(f"{shown}: {out}")
    return None


def _check_out(out: Path, *, force: bool) -> None:
    """Raise the error of a picture file that cannot be written, or is there already."""
    if out.suffix.lower() != ".png":
        raise UserError(
            f"--out {out}: must end with .png", f"For example {out.stem or 'picture'}.png."
        )
    if out.exists() and not force:
        raise RefusedError(
            f"--out {out}: is there already", "Give another name, or --force to overwrite it."
        )
    check_writable(out.absolute().parent)


def _row(
    task: ImageTask, image: DecodedImage, model: LoadedModel, *, device: torch.device
) -> dict[str, Any]:
    """Return the row of an image in the table."""
    from lantern_bench.analysis.token_distance import distance_of_image, token_shares
    from lantern_bench.metrics.token_sums import token_sums

    [sums] = token_sums(
        model=model,
        condition=model.condition([task.prompt.text]),
        tokens=image.tokens[None].to(device).long(),
        decoding=task.cell.decoding,
    )
    columns = image.columns(1)
    return {
        "cell_id": task.cell.cell_id,
        "image": task.image_index,
        **{name: columns[name] for name in _FIGURES},
        "distance": distance_of_image(sums),
        **token_shares([sums]),
    }


def _decodable(cells: Sequence[Cell], model: LoadedModel, console: Console) -> list[Cell]:
    """Return the cells that the model can decode, and report the others."""
    from lantern_bench.decoding.loop import check_decodable

    decodable = []
    for cell in cells:
        try:
            check_decodable(model, cell.decoding)
            decodable.append(cell)
        except RefusedError as error:
            console.say(f"{cell.cell_id} is left out: {error.message}")
    return decodable


def _prompt(described: Model, caption: str | None, *, label: int | None, is_needed: bool) -> str:
    """Return the prompt of a caption or a class; if none is needed, one of the model's own."""
    if caption is not None and label is not None:
        raise UserError("a caption and --class: are mutually exclusive", "Give one of them.")
    classes = described.classes or 0
    if label is not None and label >= classes:
        raise UserError(
            f"--class {label}: {described.name} has {classes} classes",
            "Give a smaller number, or a caption.",
        )
    text = class_prompt(label) if label is not None else caption
    if text is None and is_needed:
        raise UserError("the prompt is missing", "Give a caption or --class N.")
    if text is None:
        text = next(iter(described.prompt_sets.values()))[0]
    described.check_prompt(text)
    return text
