"""The commands `models` and `weights get`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.cli.console import Console
from lantern_bench.cli.options import Command, command_group, resolve_flags, with_format
from lantern_bench.models.checkpoints import hub
from lantern_bench.models.model import Model
from lantern_bench.models.model_file import is_model_file
from lantern_bench.models.registry import model_of
from lantern_bench.models.registry import models as all_models
from lantern_bench.utils.errors import RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd

    from lantern_bench.config.experiment import ResolvedExperiment

_ON_ONE_LINE = ["model", "tokens", "weights", "about"]  # columns of the list for people


@with_format
def models(
    console: Console,
    model: Annotated[
        str | None, typer.Argument(help="Show the parts of this model, and the memory it needs.")
    ] = None,
) -> None:
    """List the models: sizes, files, which files are found, and how to get the others."""
    import pandas as pd

    if model is None:
        rows = []
        for listed in all_models().values():
            try:
                rows.append(_row(listed))
            except RefusedError as error:
                rows.append({"model": listed.name, "about": f"unreadable: {error.message}"})
                console.warn(f"{listed.name} is unreadable: {error.message}", error.advice)
        table = pd.DataFrame(rows).astype({"tokens": "Int64"})
        if console.format not in ("csv", "json"):
            table = table[_ON_ONE_LINE]
        console.table(table)
        console.say(
            "`lantern-bench models NAME` shows one model, `weights get NAME` gets its files; "
            "--model also takes your own YAML file."
        )
        return
    described = model_of(model)
    parts = [part | _weights(described, part, console) for part in _parts(described)]
    console.table(parts, title=f"{described.name}: {described.description}")
    row = _row(described)
    if row["missing"]:
        console.say(": ".join(filter(None, ["missing", row["missing"], row["get"]])))
    # Without its files the sizes of a model may be unknown.
    with contextlib.suppress(UserError):
        show_memory(resolve_flags("models", {"model": [described.name]}, [described.mode]), console)


def _row(model: Model) -> dict[str, Any]:
    """Return a model as one row; no weights are opened."""
    parts = _parts(model)
    files: list[Path] = []
    for path in model.files().values():
        files += path.iterdir() if path.is_dir() else [path]
    missing = [part["part"] for part in parts if not part["found"]]
    get = f"lantern-bench weights get {model.name}" if missing and model.name in hub.PARTS else ""
    return {
        "model": model.name,
        "parameters_m": None if model.parameters is None else round(model.parameters / 1e6),
        "tokens": model.tokens,
        "weights": f"{len(parts) - len(missing)} of {len(parts)}" if parts else "not public",
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
    """Return one row per part of a model: its files, their path, and their repositories."""
    published = hub.PARTS.get(model.name, {})
    origin = "your model file" if is_model_file(model.name) else "this package"
    rows = []
    for part, path in model.files().items():
        sources = published.get(part, ())
        row = {
            "part": part,
            "files": path.name,
            "found": path.exists(),
            "place": str(path),
            "from": " or ".join(dict.fromkeys(source.repo for source in sources)) or origin,
            "licence": model.licence,
        }
        if sources:
            row["files"] = " ".join(sources[0].patterns)
            row["licence"] = sources[0].licence
        rows.append(row)
    return rows


def _weights(model: Model, part: dict[str, Any], console: Console) -> dict[str, Any]:
    """Return the hash of a part's weights and the published file that has it.

    Warns of weights that are zeros, and of what else is odd about the file.
    """
    from lantern_bench.models.checkpoints.checkpoint import open_checkpoint
    from lantern_bench.utils.hashes import hash_of

    hashed = {"sha256": "", "published_file": ""}
    if not part["found"] or part["part"] not in ("target", "tokenizer", "drafter"):
        return hashed
    try:
        entry = model.stated(part["part"], "weights")
        checkpoint = open_checkpoint(Path(part["place"]), entry=entry)
        checkpoint.check_hash(model.stated(part["part"], "sha256"))
    except UserError as error:
        console.warn(error.message, error.advice)
        return hashed
    checkpoint.note_zeros(checkpoint)
    for remark in checkpoint.remarks:
        console.warn(remark)
    hashed["sha256"] = hash_of(checkpoint.paths)
    hashed["published_file"] = hub.published_files().get(hashed["sha256"], "not known")
    return hashed


def show_memory(resolved: ResolvedExperiment, console: Console) -> pd.DataFrame:
    """Report the memory that a model needs, and on a CPU the free memory; return it by part."""
    import pandas as pd
    import psutil

    from lantern_bench.devices.compute import choose_compute
    from lantern_bench.models.random_weights import meta_model, sizes_of

    settings = resolved.settings
    decodings = [cell.decoding for cell in resolved.cells]
    compute = choose_compute(settings.device, settings.dtype)
    table = pd.DataFrame(
        sizes_of(
            meta_model(settings.model[0]),
            compute.dtype,
            guided=any(decoding.cfg_scale != 1 for decoding in decodings),
            nodes=max(1 + decoding.draft_nodes for decoding in decodings),
            batch=max(settings.batch),
        )
    )
    table["dtype"] = table["dtype"].astype(str).str.removeprefix("torch.")
    total = table["bytes"].sum()
    every = {"part": "all", "parameters": table["parameters"].sum(), "dtype": "", "bytes": total}
    table = pd.concat([table, pd.DataFrame([every])], ignore_index=True)
    table["parameters"] = table["parameters"].astype("Int64").where(table["parameters"] > 0)
    table["gigabytes"] = (table.pop("bytes") / 1e9).round(3)
    console.say(
        f"memory needed: {total / 1e9:.2f} GB on {compute.device.type}, "
        "without the activations of a forward"
    )
    if compute.device.type == "cpu":
        free = psutil.virtual_memory().available
        console.say(f"free here: {free / 1e9:.2f} GB" + ("" if free > total else ": not enough"))
    return table


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
    """Fetch the missing files of a model. The same command resumes an interrupted download."""
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
        note = hub.LICENCE_NOTES.get(licence)
        console.say("\n    ".join(filter(None, [f"  {licence}: {repos}", note])))
    bars = sys.stderr.isatty() and not console.quiet
    for source in missing:
        path = source.download(dir or hub.weights_folder(), bars=bars)
        pinned = source.revision[:12]
        if pinned == "main":
            pinned = "unpinned, moves with its repository"
        console.say(f"{source.repo} ({pinned}): {path}")
    console.say(f"{model}: complete")
    if dir is not None:
        console.say(f"To use this directory: export LANTERN_BENCH_WEIGHTS={dir}")
