"""`lantern-bench models`: what there is to decode with, from cards and file names alone; nothing is loaded.

Every model with its size, the files it needs, which of them are here, and where the rest comes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lantern_bench.console import FORMATS, Console

if TYPE_CHECKING:
    from lantern_bench.models.registry import ModelCard

__all__ = ["models"]

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
    from lantern_bench.models.sources import SOURCES

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
    from lantern_bench.models.model_file import is_model_file
    from lantern_bench.models.sources import SOURCES

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
