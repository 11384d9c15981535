"""`lantern-bench models`: what there is to decode with, from cards and file names alone; nothing is loaded.

Every model with its size, the files it needs, which of them are here, and where the rest comes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import CheckFailedError, RefusedError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from lantern_bench.decoding.neighbours import Space
    from lantern_bench.models.io.hub_files import Found, HubClient, Ledger, Licence, RemoteFile, Wanted
    from lantern_bench.plugins import ModelCard

_MILLION = 1e6


def models(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Only this one, a row for each of its files.")] = None,
    format: Annotated[str | None, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = None,
) -> None:
    """List the models: size, tokens, files needed, what was found, and where to get the rest."""
    import pandas as pd

    from lantern_bench.models.registry import card_of, cards

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    if model is not None:
        card = card_of(model)
        console.table(pd.DataFrame(_files(card)), title=f"{card.name}: {card.description}", format=chosen)
        return
    frame = pd.DataFrame([_row(card) for card in cards().values()])
    console.table(frame.astype({"tokens": "Int64"}), format=chosen)
    console.say("`lantern-bench models NAME` shows the files of one; --model also takes a YAML file of your own.")


def _row(card: ModelCard) -> dict[str, Any]:
    """A model in one row."""
    from lantern_bench.models.io.hub_files import SOURCES

    files = _files(card)
    there = [str(file["part"]) for file in files if file["found"]]
    missing = [str(file["part"]) for file in files if not file["found"]]
    get = ""
    if missing and card.name in SOURCES:
        get = f"lantern-bench weights get {card.name}"
    elif not files:
        get = "not published; describe your own file in a model.yaml"
    megabytes = sum(_bytes(path) for path in card.weights.values()) / _MILLION
    return {
        "model": card.name,
        "parameters_m": None if card.parameters is None else round(card.parameters / _MILLION),
        "tokens": card.tokens,
        "files": "; ".join(f"{file['part']}: {file['files']}" for file in files),
        "found": ", ".join(there),
        "found_mb": round(megabytes, 1),
        "missing": ", ".join(missing),
        "get": get,
        "prompts": card.prompt_set,
        "defaults": " ".join(f"{key}={value}" for key, value in card.defaults.items()),
        "licence": card.licence,
        "about": card.description,
    }


def _files(card: ModelCard) -> list[dict[str, Any]]:
    """The parts of a model: their files, where those are or would be, and where they come from."""
    from lantern_bench.models.io.hub_files import SOURCES
    from lantern_bench.models.io.model_file import is_model_file

    published = {part.name: part.choices for part in SOURCES.get(card.name, ())}
    own = "your model file" if is_model_file(card.name) else "this package"
    rows = []
    for part, path in card.weights.items():
        choices = published.get(part, ())
        needed = [file.path for file in choices[0].files if not file.optional] if choices else [path.name]
        rows.append(
            {
                "part": part,
                "files": " ".join(needed),
                "found": path.exists(),
                "place": _shown(path),
                "from": " or ".join(dict.fromkeys(choice.repo for choice in choices)) or own,
                "licence": choices[0].licence.name if choices else card.licence,
            }
        )
    return rows


def _shown(path: Path) -> str:
    """A path as a person writes it."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _bytes(path: Path) -> int:
    """The size of a file, or of a folder's files; 0 where there is nothing."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return path.stat().st_size if path.is_file() else 0


# ---- `lantern-bench experiments`: what can be swept by name


def experiments(
    ctx: typer.Context,
    format: Annotated[str | None, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = None,
) -> None:
    """List the experiments that come with the package."""
    import pandas as pd

    from lantern_bench.config.experiment import load_experiment, shipped_experiments

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    rows = []
    for name, path in shipped_experiments().items():
        settings = load_experiment(path).settings
        about = " ".join((settings.description or "").split())
        rows.append({"experiment": name, "model": ", ".join(settings.model), "images": settings.images, "about": about})
    console.table(pd.DataFrame(rows, columns=["experiment", "model", "images", "about"]), format=chosen)


# ---- `lantern-bench weights`: fetch the files of a published model, check them, and say where they are


weights = typer.Typer(
    name="weights",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Fetch, check and find the files of the published models.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_MB = 1e6
_DIR = Annotated[Path | None, typer.Option("--dir", help="Folder of the weights; default LANTERN_BENCH_WEIGHTS.")]
_MODEL = Annotated[str, typer.Argument(help="A published model; `lantern-bench models` lists them.")]
_FORMAT = Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")]


@weights.command()
def get(ctx: typer.Context, model: _MODEL, dir: _DIR = None) -> None:
    """Fetch the files of a model that are not here; the same command continues a download that was cut."""
    from lantern_bench.models.io import hub_files

    console: Console = ctx.obj
    root = _root(dir)
    files = hub_files.wanted(_known(model), root)
    if not files:
        console.say(f"{model}: every file is here; `lantern-bench weights check {model}` verifies them")
        return
    _say_licences(hub_files.licences(files), console)
    hub = _hub()
    remote = hub_files.describe(files, hub)
    _fetch(files, remote, hub, root, console)
    console.say(f"{model}: complete in {root}")
    if dir is not None:
        console.say(f"So that it is found: export LANTERN_BENCH_WEIGHTS={root}")


def _fetch(files: list[Wanted], remote: list[RemoteFile], hub: HubClient, root: Path, console: Console) -> None:
    from lantern_bench.models.io import hub_files

    with console.progress() as progress:
        progress.start(sum(facts.bytes or 0 for facts in remote) / _MB, "fetching (MB)")
        # More or fewer bytes than announced must not break the bar: they are counted and no more.
        for done in hub_files.fetch(files, remote, hub, root, lambda count: progress.advance(count / _MB)):
            one = done.wanted
            pin = "pinned" if one.source.revision else "unpinned, moves with its repository"
            known = "as known before" if done.pinned else "recorded now"
            console.say(
                f"{one.source.repo} {one.file.path}: revision {done.commit[:12]} ({pin}), "
                f"SHA-256 {done.sha256[:12]}... {known}"
            )


def _say_licences(found: Mapping[Licence, list[str]], console: Console) -> None:
    console.say("licences of what is fetched:")
    for licence, repos in found.items():
        console.say(f"  {licence.name}: {', '.join(repos)}" + (f"\n    {licence.note}" if licence.note else ""))


@weights.command()
def check(ctx: typer.Context, model: _MODEL, dir: _DIR = None, format: _FORMAT = None) -> None:
    """Compare every file of a model with its SHA-256; record those seen for the first time."""
    import pandas as pd

    from lantern_bench.models.io.hub_files import Ledger, find_part, parts_of

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    root = _root(dir)
    ledger = Ledger(root)
    rows: list[dict[str, object]] = []
    for part in parts_of(_known(model)):
        found = find_part(model, part.name, root)
        if found is None:
            source = part.choices[0]
            row: dict[str, object] = {"part": part.name, "repository": source.repo, "file": source.files[0].path}
            rows.append(row | {"revision": _revision(source.revision, None), "state": "missing"})
            continue
        rows += _checked(found, ledger, console)
    columns = ["part", "repository", "file", "mb", "revision", "sha256", "state"]
    console.table(pd.DataFrame(rows, columns=columns), title=f"{model} in {root}", format=chosen)
    wrong = [row for row in rows if row["state"] == "DIFFERS"]
    missing = [str(row["part"]) for row in rows if row["state"] == "missing"]
    if wrong:
        raise CheckFailedError(
            f"{len(wrong)} of {len(rows)} files are not what they were: {', '.join(str(row['file']) for row in wrong)}",
            f"Remove them and type `lantern-bench weights get {model}`.",
        )
    if missing:
        raise RefusedError(f"{model}: missing {', '.join(missing)}", f"Type `lantern-bench weights get {model}`.")


def _checked(found: Found, ledger: Ledger, console: Console) -> list[dict[str, object]]:
    """One row a file of a part that is here."""
    from lantern_bench.models.io.files import file_sha256
    from lantern_bench.models.io.hub_files import pinned

    rows: list[dict[str, object]] = []
    sizes = {file: path.stat().st_size for file, path in found.paths.items()}
    with console.progress() as progress:
        progress.start(sum(sizes.values()) / _MB, f"reading the {found.part.replace('_', ' ')} (MB)")
        for file, path in found.paths.items():
            sha256 = file_sha256(path, lambda count: progress.advance(count / _MB))
            pin, entry = pinned(found.source, file), ledger.entry(found.source.repo, file)
            expected = pin or entry.get("sha256")
            state = "recorded now" if expected is None else ("pinned, same" if pin else "recorded, same")
            if expected is None and not ledger.record(found.source.repo, file, sha256, sizes[file], None):
                state = "not recorded: the folder cannot be written"
            if expected is not None and sha256 != expected:
                state = "DIFFERS"
            row = {"part": found.part, "repository": found.source.repo, "file": file, "mb": sizes[file] / _MB}
            row["revision"] = _revision(found.source.revision, entry.get("revision"))
            rows.append(row | {"sha256": sha256, "state": state})
    return rows


def _revision(pinned: str | None, fetched: str | None) -> str:
    return f"{pinned[:12]} (pinned)" if pinned else f"{fetched[:12] if fetched else 'unknown'} (unpinned)"


@weights.command()
def where(ctx: typer.Context, dir: _DIR = None, format: _FORMAT = None) -> None:
    """Say where the weights are, model by model."""
    import pandas as pd

    from lantern_bench.models.io.hub_files import SOURCES, find_part

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    root = _root(dir)
    rows = []
    for model, parts in SOURCES.items():
        for part in parts:
            found = find_part(model, part.name, root)
            source = found.source if found else part.choices[0]
            row = {"model": model, "part": part.name, "repository": source.repo, "licence": source.licence.name}
            rows.append(row | {"place": str(found.path) if found else "missing"})
    console.say(f"weights: {root}")
    console.table(pd.DataFrame(rows), format=chosen)


def _hub() -> HubClient:
    from lantern_bench.models.io.hub_files import HuggingFaceHub

    return HuggingFaceHub()


def _root(given: Path | None) -> Path:
    from lantern_bench.models.io.hub_files import weights_root

    root = given if given is not None else weights_root()
    if root.exists() and not root.is_dir():
        raise UserError(f"--dir {root}: is a file, not a folder", "Give a folder, there or to be made.")
    return root


def _known(model: str) -> str:
    """The name of a published model, also by another name of its card; raises `UserError` for any other."""
    from lantern_bench.errors import did_you_mean
    from lantern_bench.models.io.hub_files import SOURCES

    if model in SOURCES:
        return model
    from lantern_bench.models.registry import card_of

    try:
        name = card_of(model).name
    except UserError as error:
        hint = did_you_mean(model, SOURCES)
        raise UserError(f"{model}: unknown model{hint}", f"Published: {', '.join(SOURCES)}.") from error
    if name not in SOURCES:
        raise UserError(f"{model}: has no files to fetch", f"Published models: {', '.join(SOURCES)}.")
    return name


# ---- `lantern-bench neighbours MODEL`: make or check a model's table of nearest codes before a sweep needs it


_SPACES = "raw (rows as stored, as published) or normalised (unit length, as LlamaGen looks codes up)"


def neighbours(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A model, or the YAML file of one.")],
    space: Annotated[str | None, typer.Option(help=f"{_SPACES}. Default: the model's published one.")] = None,
    k_max: Annotated[int, typer.Option("--k-max", min=1, help="Columns: the largest k that is read from disk.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="Folder of the table. Default: beside the weights.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write it as .npy, uint16 [V, k], as LANTERN does.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew even if it is there.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")] = "cpu",
    format: Annotated[str | None, typer.Option(help=f"Of the table: one of {', '.join(FORMATS)}.")] = None,
) -> None:
    """Make a model's table of nearest codes, and say what it is."""
    import pandas as pd

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    _check(space, export)

    from lantern_bench.models.io.neighbour_cache import export_table

    made = _make(model, space, k_max, out, force, device, console)
    if export is not None:
        export_table(made.table, export)
    codes, columns = made.table.shape
    row = {"model": model, "space": made.space, "codes": codes, "k_max": columns, "type": str(made.table.dtype)[6:]}
    row |= {"mb": made.path.stat().st_size / 1e6, "state": made.state}
    console.table(pd.DataFrame([row]), format=chosen)
    console.say(f"table: {made.path}" + (f", exported: {export}" if export is not None else ""))


class _Made(NamedTuple):
    """A table, the space it is of, its file, and whether it `was there` or was `made`."""

    table: Tensor
    space: Space
    path: Path
    state: str


def _check(space: str | None, export: Path | None) -> None:
    from lantern_bench.decoding.neighbours import SPACES

    if space is not None and space not in SPACES:
        raise UserError(f"--space {space}: unknown space", f"The spaces are {', '.join(SPACES)}.")
    if export is not None and export.suffix != ".npy":
        raise UserError(f"--export {export}: must end with .npy")


def _make(
    model: str, space: str | None, k_max: int, out: Path | None, force: bool, device: str, console: Console
) -> _Made:
    """Read or make the table of a model; `UserError` for one without codes, and where nothing can be written."""
    from lantern_bench.decoding.neighbours import SPACES
    from lantern_bench.models.io.files import cache_folder
    from lantern_bench.models.io.neighbour_cache import neighbour_table, table_path
    from lantern_bench.models.registry import load_codes
    from lantern_bench.runs.devices import choose_place

    place = choose_place(device, "float32")
    known = load_codes(model)
    chosen = next((one for one in SPACES if one == space), known.space)
    codes, folder = len(known.rows), out or known.folder or cache_folder() / "tables"
    path = table_path(folder, known.rows, chosen)
    if force:
        path.unlink(missing_ok=True)
    heard = 0
    with console.progress() as progress:

        def rows_done(count: int) -> None:
            nonlocal heard
            if not heard:
                progress.start(codes, "codes")
            heard += count
            progress.reach(heard)

        columns = min(k_max, codes - 1)
        table = neighbour_table(known.rows, chosen, columns, folder, k_max, place.device, rows_done)
    if not path.is_file():
        raise UserError(f"--out {folder}: cannot be written", "Give a folder that you may write to.")
    return _Made(table, chosen, path, "made" if heard else "was there")
