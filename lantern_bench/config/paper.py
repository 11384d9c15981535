"""The `paper:` block of an experiment: published figures, each with its source and confidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lantern_bench.methods.catalog import METRICS, PARAMETERS

FIGURES = ("speedup", "step_compression", "mean_accepted_length", *METRICS)
"""The figures of a published table, by the names of our columns."""

FigureName: TypeAlias = Literal[FIGURES]  # type: ignore[valid-type]

_STRICT = ConfigDict(frozen=True, extra="forbid")


class Figure(BaseModel):
    """A published figure, and how it is known: read in the paper, in notes, derived, by definition, from a user."""

    model_config = _STRICT

    value: float
    source: str = Field(min_length=1)
    confidence: Literal["paper", "secondary", "derived", "definition", "user"]


class PaperRow(BaseModel):
    """One row of a published table, and the cells that it is compared with."""

    model_config = _STRICT

    name: str = Field(min_length=1)
    # The settings of those cells, by the names of an experiment file; None: no mode covers the method.
    match: dict[str, Any] | None = None
    # further settings for single models
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    best: bool = False  # the figures are best ones, and stand beside our best
    figures: dict[FigureName, Figure] = Field(default_factory=dict)
    note: str | None = None

    @model_validator(mode="after")
    def _check_keys(self) -> PaperRow:
        for key in [*(self.match or {}), *(key for block in self.models.values() for key in block)]:
            if key not in PARAMETERS:
                raise ValueError(f"{self.name}: match knows no parameter {key}")
        return self

    def matches(self, cell: Mapping[str, Any]) -> bool:
        """Return whether a cell (its columns) is this row's; the residual is not compared."""
        if self.match is None:
            return False
        wanted = self.match | self.models.get(str(cell["model"]), {})
        return all(cell.get(key) == value for key, value in wanted.items())


class Paper(BaseModel):
    """A published table or figure."""

    model_config = _STRICT

    title: str = Field(min_length=1)
    # What it was measured with; None: unknown.
    model: str | None = None
    hardware: str | None = None
    prompts: str | None = None
    images: int | None = None
    fid_features: str | None = None
    clip_model: str | None = None
    columns: tuple[FigureName, ...] = ("speedup", "mean_accepted_length")  # that the table has
    missing: str | None = None  # a note about figures that could not be had
    notes: tuple[str, ...] = ()
    rows: tuple[PaperRow, ...] = ()


def read_paper(block: Mapping[str, Any] | None) -> Paper | None:
    """Return the checked block, None without one; raises pydantic's `ValidationError`."""
    return Paper.model_validate(dict(block)) if block and "title" in block else None
