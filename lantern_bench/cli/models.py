"""`lantern-bench models`: what there is to decode with, from the cards alone; nothing is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from lantern_bench.console import FORMATS, Console

__all__ = ["models"]

_MEGABYTE = 1e6


def models(
    ctx: typer.Context,
    format: Annotated[str | None, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = None,
) -> None:
    """List the models with the size of their weights and their licence."""
    import pandas as pd

    from lantern_bench.models.registry import cards

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    rows = []
    for card in cards().values():
        there = [path.stat().st_size for path in card.weights.values() if path.is_file()]
        missing = [part for part, path in card.weights.items() if not path.is_file()]
        row = {"model": card.name, "family": card.family, "about": card.description, "licence": card.licence}
        row |= {"prompts": card.prompt_set, "defaults": " ".join(f"{k}={v}" for k, v in card.defaults.items())}
        rows.append(row | {"weights_mb": round(sum(there) / _MEGABYTE, 1), "missing": ", ".join(missing)})
    columns = ["model", "family", "about", "prompts", "defaults", "weights_mb", "missing", "licence"]
    console.table(pd.DataFrame(rows, columns=columns), format=chosen)
