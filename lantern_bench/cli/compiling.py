"""Compiling the decode steps as a command asks for it, and saying so where it cannot be done.

Every command that decodes goes on without; what is compiled, and how, is `decode/engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lantern_bench.console import Console

if TYPE_CHECKING:
    from lantern_bench.models.loaded import LoadedModel
    from lantern_bench.runs.local import Place

__all__ = ["compile_steps"]


def compile_steps(models: Iterable[LoadedModel], place: Place, console: Console) -> None:
    """Have the models' steps compiled from their first use on; where that cannot be, say why and leave them."""
    from lantern_bench.runs.local import compile_models

    problem = compile_models(models, place)
    if problem is not None:
        console.warn(
            f"decoding is not compiled: {problem}",
            "It is slower so. Compiling needs torch 2.10 or newer and a C++ compiler; or leave it out.",
        )
