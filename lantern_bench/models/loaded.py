"""A model in memory: what decoding, drawing pixels and keying a record need of it, in one object.

Families make it (`registry.Family.load`); what its parts can do is `decode/interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decode.engine import Engine
from lantern_bench.decode.interface import Drafter, PixelDecoder, Target
from lantern_bench.decode.neighbours import Space, nearest_codes
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.tables import neighbour_table
from lantern_bench.spec.decoding import NeighbourMetric

__all__ = ["LoadedModel"]


def _nothing_to_prepare(_prompts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Most models read a prompt when its image is made."""
    yield from ()


@dataclass
class LoadedModel:
    """A target, its drafter and what turns prompts into conditions and tokens into pictures.

    codebook: float [V, d], rows as stored, None without a tokenizer; neighbour_space: in which space codes are near
    each other, as published. table_folder: where the table of nearest codes is kept; None keeps it in memory.
    given_table: nearest codes int [V, k] that the user has made, instead of the codebook's. prepare: hears all prompts
    that are to come, before the first is decoded, so that a text encoder can do its work and go. condition: prompts
    (one an image) -> what `Target.session(...).prefill` takes. weights: part -> SHA-256 of its file. grid: rows and
    columns of the image's tokens. engine: how its steps are run, as they stand unless told.
    """

    name: str
    target: Target
    drafter: Drafter | None
    pixels: PixelDecoder
    codebook: Tensor | None
    condition: Callable[[Sequence[str]], Any]
    weights: Mapping[str, str]
    grid: tuple[int, int]
    neighbour_space: Space = "raw"
    table_folder: Path | None = None
    prepare: Callable[[Sequence[str]], Iterator[tuple[int, int]]] = _nothing_to_prepare
    given_table: Tensor | None = None
    engine: Engine = field(default_factory=Engine, repr=False)
    _tables: dict[NeighbourMetric, Tensor] = field(default_factory=dict, init=False, repr=False)

    def table(self, columns: int, metric: NeighbourMetric = "l2") -> Tensor:
        """The `columns` nearest codes of every code, int32 [V, columns], on the target's device, nearest first.

        Made once for each metric and the widest table asked for; a narrower one is its beginning, which the fixed order
        of ties guarantees. Raises `RefusedError` for a damaged file and for a model whose codes nobody knows,
        `UserError` for more columns than there are other codes, or than the model's own table has.
        """
        if self.given_table is not None:
            return self._given(self.given_table, columns, metric)
        if self.codebook is None:
            raise RefusedError(
                f"{self.name}: relaxed rules need to know which codes are near each other, and it has no tokenizer",
                "Name the tokenizer's checkpoint, or a table of nearest codes, in the model's file.",
            )
        codes = len(self.codebook)
        if columns >= codes:
            raise UserError(f"--neighbours {columns}: the model {self.name} has {codes} codes", f"At most {codes - 1}.")
        if metric not in self._tables or self._tables[metric].shape[1] < columns:
            with torch.inference_mode():
                self._tables[metric] = self._made(self.codebook, columns, metric).to(self.target.device, torch.int32)
        return self._tables[metric][:, :columns].contiguous()

    def _made(self, codebook: Tensor, columns: int, metric: NeighbourMetric) -> Tensor:
        device = self.target.device
        if metric == "l2":
            return neighbour_table(codebook, self.neighbour_space, columns, self.table_folder, device=device)
        # Angles are the same in both spaces, and random neighbours have none: nothing of it is worth a file.
        return nearest_codes(codebook.to(device), columns, metric=metric)

    def _given(self, table: Tensor, columns: int, metric: NeighbourMetric) -> Tensor:
        if metric != "l2":
            raise UserError(
                f"--neighbour-metric {metric}: {self.name} names a table of its own", "Leave one of them out."
            )
        if table.shape[1] < columns:
            raise UserError(f"--neighbours {columns}: the model's own table names {table.shape[1]} for each code")
        return table[:, :columns].to(self.target.device, torch.int32).contiguous()
