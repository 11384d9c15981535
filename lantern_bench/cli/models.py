"""Commands about what can be decoded: `models`, `experiments`, `weights get/check/where` and `neighbours`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from lantern_bench.cli.options import DEVICE_HELP, FormatOption, command_group
from lantern_bench.console import Console
from lantern_bench.errors import CheckFailedError, RefusedError, UserError, did_you_mean
from lantern_bench.models.io import hub_files
from lantern_bench.models.io.files import cache_folder, file_sha256
from lantern_bench.models.io.hub_files import SOURCES
from lantern_bench.models.io.model_file import is_model_file
from lantern_bench.models.model import Model
from lantern_bench.models.registry import load_codes, model_of
from lantern_bench.models.registry import models as all_models

_MB = 1e6


def models(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Show the files of this model only.")] = None,
    format: FormatOption = None,
) -> None:
    """List the models: size, tokens, required files, which of them are here, and how to get the rest."""
    import pandas as pd

    console: Console = ctx.obj
    if model is not None:
        described = model_of(model)
        title = f"{described.name}: {described.description}"
        console.table(pd.DataFrame(_files(described)), title=title, format=format)
        return
    frame = pd.DataFrame([_row(described) for described in all_models().values()])
    console.table(frame.astype({"tokens": "Int64"}), format=format)
    console.say("`lantern-bench models NAME` lists the files of one model; --model also takes your own YAML file.")


def _row(model: Model) -> dict[str, Any]:
    """A model as one row; no weights are opened."""
    files = _files(model)
    here = [file for path in model.files().values() for file in (path.iterdir() if path.is_dir() else [path])]
    missing = [file["part"] for file in files if not file["found"]]
    get = f"lantern-bench weights get {model.name}" if missing and model.name in SOURCES else ""
    return {
        "model": model.name,
        "parameters_m": None if model.parameters is None else round(model.parameters / 1e6),
        "tokens": model.tokens,
        "files": "; ".join(f"{file['part']}: {file['files']}" for file in files),
        "found": ", ".join(file["part"] for file in files if file["found"]),
        "found_mb": round(sum(file.stat().st_size for file in here if file.is_file()) / _MB, 1),
        "missing": ", ".join(missing),
        "get": get if files else "not published; describe your own file in a model.yaml",
        "prompts": next(iter(model.prompt_sets)),
        "defaults": " ".join(f"{key}={value}" for key, value in model.defaults.items()),
        "licence": model.licence,
        "about": model.description,
    }


def _files(model: Model) -> list[dict[str, Any]]:
    """One row per part of a model: its files, their path here, and their repositories."""
    published = {part.name: part.choices for part in SOURCES.get(model.name, ())}
    own, home = "your model file" if is_model_file(model.name) else "this package", Path.home()
    rows = []
    for part, path in model.files().items():
        choices = published.get(part, ())
        needed = [file.path for file in choices[0].files if not file.optional] if choices else [path.name]
        row = {"part": part, "files": " ".join(needed), "found": path.exists()}
        row["place"] = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
        row["from"] = " or ".join(dict.fromkeys(choice.repo for choice in choices)) or own
        rows.append(row | {"licence": choices[0].licence.name if choices else model.licence})
    return rows


def experiments(ctx: typer.Context, format: FormatOption = None) -> None:
    """List the experiments that come with the package."""
    import pandas as pd

    from lantern_bench.config.experiment import load_experiment, shipped_experiments

    console: Console = ctx.obj
    rows = []
    for name, path in shipped_experiments().items():
        settings = load_experiment(path).settings
        about = " ".join((settings.description or "").split())
        rows.append({"experiment": name, "model": ", ".join(settings.model), "images": settings.images, "about": about})
    console.table(pd.DataFrame(rows), format=format)


# ---- `lantern-bench weights`

weights = command_group(name="weights", help="Fetch, check and locate the files of the published models.")
_Directory: TypeAlias = Annotated[Path | None, typer.Option("--dir", help="Default: LANTERN_BENCH_WEIGHTS.")]
_Model: TypeAlias = Annotated[str, typer.Argument(help="A published model; see `lantern-bench models`.")]


@weights.command()
def get(ctx: typer.Context, model: _Model, dir: _Directory = None) -> None:
    """Fetch the missing files of a model; repeat the command to resume an interrupted download."""
    console: Console = ctx.obj
    root = _root(dir)
    missing = hub_files.missing_files(_published(model), root)
    if not missing:
        console.say(f"{model}: every file is here; `lantern-bench weights check {model}` verifies them")
        return
    console.say("licences of what is fetched:")
    for licence, repos in hub_files.licences(missing).items():
        console.say(f"  {licence.name}: {', '.join(repos)}" + (f"\n    {licence.note}" if licence.note else ""))
    for done in hub_files.fetch(missing, root, bars=sys.stderr.isatty() and not console.quiet):
        pin = "pinned" if done.source.commit else "unpinned, moves with its repository"
        known = "as known before" if done.known else "recorded now"
        revision = f"revision {done.commit[:12]} ({pin}), SHA-256 {done.sha256[:12]}... {known}"
        console.say(f"{done.source.repo} {done.file}: {revision}")
    console.say(f"{model}: complete in {root}")
    if dir is not None:
        console.say(f"To use this directory: export LANTERN_BENCH_WEIGHTS={root}")


@weights.command()
def check(ctx: typer.Context, model: _Model, dir: _Directory = None, format: FormatOption = None) -> None:
    """Compare every file of a model with its SHA-256; record the hash of files seen for the first time."""
    import pandas as pd

    console: Console = ctx.obj
    root = _root(dir)
    ledger = hub_files.Ledger(root)
    rows: list[dict[str, Any]] = []
    for part in hub_files.parts_of(_published(model)):
        if (found := hub_files.find_part(model, part.name, root)) is not None:
            rows += _checked(found, ledger, console)
            continue
        source = part.choices[0]
        row = {"part": part.name, "repository": source.repo, "file": source.files[0].path}
        rows.append(row | {"revision": _revision(source.commit), "state": "missing"})
    columns = ["part", "repository", "file", "mb", "revision", "sha256", "state"]
    console.table(pd.DataFrame(rows, columns=columns), title=f"{model} in {root}", format=format)
    command = f"`lantern-bench weights get {model}`"
    if changed := [row["file"] for row in rows if row["state"] == "DIFFERS"]:
        message = f"{len(changed)} of {len(rows)} files have another SHA-256 than recorded: {', '.join(changed)}"
        raise CheckFailedError(message, f"Remove them and run {command}.")
    if missing := [row["part"] for row in rows if row["state"] == "missing"]:
        raise RefusedError(f"{model}: missing {', '.join(missing)}", f"Run {command}.")


def _checked(found: hub_files.Found, ledger: hub_files.Ledger, console: Console) -> list[dict[str, Any]]:
    """Hash the files of a part that is here; one row per file."""
    rows: list[dict[str, Any]] = []
    sizes = {file: path.stat().st_size for file, path in found.paths.items()}
    with console.progress() as progress:
        progress.start(sum(sizes.values()) / _MB, f"reading the {found.part.replace('_', ' ')} (MB)")
        for file, path in found.paths.items():
            sha256 = file_sha256(path, lambda count: progress.advance(count / _MB))
            pin, entry = found.source.pinned_sha256(file), ledger.entry(found.source.repo, file)
            expected = pin or entry.get("sha256")
            if expected is None:
                recorded = ledger.record(found.source.repo, file, sha256, sizes[file], None)
                state = "recorded now" if recorded else "not recorded: the folder cannot be written"
            else:
                state = "DIFFERS" if sha256 != expected else "pinned, same" if pin else "recorded, same"
            row = {"part": found.part, "repository": found.source.repo, "file": file, "mb": sizes[file] / _MB}
            row["revision"] = _revision(found.source.commit, entry.get("revision"))
            rows.append(row | {"sha256": sha256, "state": state})
    return rows


def _revision(pinned: str | None, fetched: str | None = None) -> str:
    return f"{pinned[:12]} (pinned)" if pinned else f"{fetched[:12] if fetched else 'unknown'} (unpinned)"


@weights.command()
def where(ctx: typer.Context, dir: _Directory = None, format: FormatOption = None) -> None:
    """Show where the weights of every model are."""
    import pandas as pd

    console: Console = ctx.obj
    root = _root(dir)
    rows = []
    for model, parts in SOURCES.items():
        for part in parts:
            found = hub_files.find_part(model, part.name, root)
            source = found.source if found else part.choices[0]
            row = {"model": model, "part": part.name, "repository": source.repo, "licence": source.licence.name}
            rows.append(row | {"place": str(found.path) if found else "missing"})
    console.say(f"weights: {root}")
    console.table(pd.DataFrame(rows), format=format)


def _root(given: Path | None) -> Path:
    root = given if given is not None else hub_files.weights_root()
    if root.exists() and not root.is_dir():
        raise UserError(f"--dir {root}: is a file, not a folder", "Give a folder; it is created if missing.")
    return root


def _published(model: str) -> str:
    """The name of a published model, also by an alias; raises `UserError` for any other model."""
    known = f"Published models: {', '.join(SOURCES)}."
    try:
        name = model if model in SOURCES else model_of(model).name
    except UserError as error:
        raise UserError(f"{model}: unknown model{did_you_mean(model, SOURCES)}", known) from error
    if name not in SOURCES:
        raise UserError(f"{model}: has no files to fetch", known)
    return name


# ---- `lantern-bench neighbours`


def neighbours(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model, or a model's YAML file.")],
    space: Annotated[
        str | None,
        typer.Option(help="raw (rows as stored) or normalised (unit length). Default: as published for the model."),
    ] = None,
    k_max: Annotated[int, typer.Option("--k-max", min=1, help="Columns of the table: the largest usable k.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="Directory of the table. Default: beside the weights.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write it as .npy, uint16 [V, k], as LANTERN does.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compute the table again even if it exists.")] = False,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    format: FormatOption = None,
) -> None:
    """Compute the table of nearest codes of a model before a sweep needs it, and describe it."""
    import pandas as pd

    from lantern_bench.decoding.neighbours import SPACES
    from lantern_bench.models.io.neighbour_cache import export_table, neighbour_table, table_path
    from lantern_bench.runs.devices import choose_place

    console: Console = ctx.obj
    if space is not None and space not in SPACES:
        raise UserError(f"--space {space}: unknown space", f"The spaces are {', '.join(SPACES)}.")
    if export is not None and export.suffix != ".npy":
        raise UserError(f"--export {export}: must end with .npy")
    place = choose_place(device, "float32")
    known = load_codes(model)
    chosen = next((one for one in SPACES if one == space), known.space)
    codes, folder = len(known.rows), out or known.folder or cache_folder() / "tables"
    path = table_path(folder, known.rows, chosen)
    if force:
        path.unlink(missing_ok=True)
    counted = 0
    with console.progress() as progress:

        def rows_done(count: int) -> None:
            nonlocal counted
            if not counted:
                progress.start(codes, "codes")
            counted += count
            progress.reach(counted)

        table = neighbour_table(known.rows, chosen, min(k_max, codes - 1), folder, k_max, place.device, rows_done)
    if not path.is_file():
        raise UserError(f"--out {folder}: cannot be written", "Give a folder that you may write to.")
    if export is not None:
        export_table(table, export)
    row = {"model": model, "space": chosen, "codes": codes, "k_max": table.shape[1], "type": str(table.dtype)[6:]}
    row |= {"mb": path.stat().st_size / _MB, "state": "made" if counted else "was there"}
    console.table(pd.DataFrame([row]), format=format)
    console.say(f"table: {path}" + (f", exported: {export}" if export is not None else ""))
