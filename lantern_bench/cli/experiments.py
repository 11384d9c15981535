"""`lantern-bench experiments`: what can be swept by name.

Each is a YAML file that comes with the package; reading and checking them is `spec/experiment.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lantern_bench.console import FORMATS, Console

__all__ = ["experiments"]


def experiments(
    ctx: typer.Context,
    format: Annotated[str | None, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = None,
) -> None:
    """List the experiments that come with the package."""
    import pandas as pd

    from lantern_bench.spec.experiment import load_experiment, shipped_experiments

    console: Console = ctx.obj
    chosen = console.checked_format(format) if format is not None else None
    rows = []
    for name, path in shipped_experiments().items():
        settings = load_experiment(path).settings
        about = " ".join((settings.description or "").split())
        rows.append({"experiment": name, "model": ", ".join(settings.model), "images": settings.images, "about": about})
    console.table(pd.DataFrame(rows, columns=["experiment", "model", "images", "about"]), format=chosen)
