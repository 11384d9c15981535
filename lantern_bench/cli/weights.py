"""`lantern-bench weights`: fetch the files of a published model, check them, and say where they are.

Licences are shown before anything is fetched. Everything goes to one folder (`--dir`, else `LANTERN_BENCH_WEIGHTS`,
else the user's cache), and a second `get` only fetches what is missing, so it is also how a cut download continues.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lantern_bench.console import FORMATS, Console
from lantern_bench.errors import CheckFailedError, RefusedError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lantern_bench.models.download import HubClient, RemoteFile, Wanted
    from lantern_bench.models.sources import Licence
    from lantern_bench.models.weights import Found, Ledger

__all__ = ["weights"]

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
    from lantern_bench.models import download

    console: Console = ctx.obj
    root = _root(dir)
    files = download.wanted(_known(model), root)
    if not files:
        console.say(f"{model}: every file is here; `lantern-bench weights check {model}` verifies them")
        return
    _say_licences(download.licences(files), console)
    hub = _hub()
    remote = download.describe(files, hub)
    _fetch(files, remote, hub, root, console)
    console.say(f"{model}: complete in {root}")
    if dir is not None:
        console.say(f"So that it is found: export LANTERN_BENCH_WEIGHTS={root}")


def _fetch(files: list[Wanted], remote: list[RemoteFile], hub: HubClient, root: Path, console: Console) -> None:
    from lantern_bench.models import download

    with console.progress() as progress:
        progress.start(sum(facts.bytes or 0 for facts in remote) / _MB, "fetching (MB)")
        # More or fewer bytes than announced must not break the bar: they are counted and no more.
        for done in download.fetch(files, remote, hub, root, lambda count: progress.advance(count / _MB)):
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

    from lantern_bench.models.weights import Ledger, find_part, parts_of

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
    from lantern_bench.models.files import file_sha256
    from lantern_bench.models.weights import pinned

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

    from lantern_bench.models.sources import SOURCES
    from lantern_bench.models.weights import find_part

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
    from lantern_bench.models.download import HuggingFaceHub

    return HuggingFaceHub()


def _root(given: Path | None) -> Path:
    from lantern_bench.models.weights import weights_root

    root = given if given is not None else weights_root()
    if root.exists() and not root.is_dir():
        raise UserError(f"--dir {root}: is a file, not a folder", "Give a folder, there or to be made.")
    return root


def _known(model: str) -> str:
    """The name of a published model, also by another name of its card; raises `UserError` for any other."""
    from lantern_bench.models.sources import SOURCES
    from lantern_bench.spec.values import did_you_mean

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
