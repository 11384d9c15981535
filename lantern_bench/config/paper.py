"""The `paper:` block of an experiment: published figures with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from lantern_bench.methods.catalog import METRICS, PARAMETERS

FIGURES = ("speedup", "step_compression", "mean_accepted_length", *METRICS)
"""Figures that a published table may hold, by the names of our columns."""

FigureName: TypeAlias = Literal[FIGURES]  # type: ignore[valid-type]
ParameterName: TypeAlias = Literal[tuple(PARAMETERS)]  # type: ignore[valid-type]

_STRICT = ConfigDict(frozen=True, extra="forbid")


class Figure(BaseModel):
    """A published figure."""

    model_config = _STRICT

    value: float
    source: str = Field(min_length=1)
    # Read in the paper, read elsewhere, derived from other figures, true by definition, or given
    # by a user.
    confidence: Literal["paper", "secondary", "derived", "definition", "user"]


class PaperRow(BaseModel):
    """One row of a published table, and the cells that it is compared with."""

    model_config = _STRICT

    name: str = Field(min_length=1)
    # Settings of these cells, by the keys of an experiment file. None: no mode covers the method.
    match: dict[ParameterName, Any] | None = None
    # Further settings, by model.
    models: dict[str, dict[ParameterName, Any]] = Field(default_factory=dict)
    # The figures are the best of several configurations, and are compared with our best.
    best: bool = False
    figures: dict[FigureName, Figure] = Field(default_factory=dict)
    note: str | None = None

    def matches(self, cell: Mapping[str, Any]) -> bool:
        """Whether the row describes a cell, given by its columns. The residual is not compared."""
        if self.match is None:
            return False
        wanted = self.match | self.models.get(str(cell["model"]), {})
        return all(cell.get(key) == value for key, value in wanted.items())


class Paper(BaseModel):
    """A published table or figure."""

    model_config = _STRICT

    title: str = Field(min_length=1)
    # What the figures were measured with; None if unknown.
    model: str | None = None
    hardware: str | None = None
    prompts: str | None = None
    images: int | None = None
    fid_features: str | None = None
    clip_model: str | None = None
    # Columns of the table.
    columns: tuple[FigureName, ...] = ("speedup", "mean_accepted_length")
    # A note about figures that are not available.
    missing: str | None = None
    notes: tuple[str, ...] = ()
    rows: tuple[PaperRow, ...] = ()


def read_paper(block: Mapping[str, Any] | None) -> Paper | None:
    """Return the checked block, None without a title; raises pydantic's `ValidationError`."""
    if not block or "title" not in block:
        return None
    return Paper.model_validate(dict(block))
