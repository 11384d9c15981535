"""A model in memory: what decoding, drawing pixels and keying a record need of it, in one object.

Families make it (`registry.Family.load`); what its parts can do is `decode/interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decode.engine import Engine
from lantern_bench.decode.interface import Drafter, PixelDecoder, Target
from lantern_bench.decode.neighbours import Space
from lantern_bench.models.tables import neighbour_table

__all__ = ["LoadedModel"]


def _nothing_to_prepare(prompts: Sequence[str]) -> None:
    """Most models read a prompt when its image is made."""


@dataclass
class LoadedModel:
    """A target, its drafter and what turns prompts into conditions and tokens into pictures.

    codebook: float [V, d], rows as stored; neighbour_space: in which space codes are near each other, as published.
    table_folder: where the table of nearest codes is kept; None keeps it in memory. prepare: hears all prompts that
    are to come, before the first is decoded, so that a text encoder can do its work and go.
    condition: prompts (one an image) -> what `Target.session(...).prefill` takes. weights: part -> SHA-256 of its
    file. grid: rows and columns of the image's tokens. engine: how its steps are run, as they stand unless told.
    """

    name: str
    target: Target
    drafter: Drafter | None
    pixels: PixelDecoder
    codebook: Tensor
    condition: Callable[[Sequence[str]], Any]
    weights: Mapping[str, str]
    grid: tuple[int, int]
    neighbour_space: Space = "raw"
    table_folder: Path | None = None
    prepare: Callable[[Sequence[str]], None] = _nothing_to_prepare
    engine: Engine = field(default_factory=Engine, repr=False)
    _table: Tensor | None = field(default=None, init=False, repr=False)

    def table(self, columns: int) -> Tensor:
        """The `columns` nearest codes of every code, int32 [V, columns], on the target's device, nearest first.

        Made once for the widest table asked for; a narrower one is its beginning, which the fixed order of ties
        guarantees. Raises `ValueError` for more columns than there are other codes, `RefusedError` for a damaged file.
        """
        if self._table is None or self._table.shape[1] < columns:
            with torch.inference_mode():
                table = neighbour_table(
                    self.codebook, self.neighbour_space, columns, self.table_folder, device=self.target.device
                )
                self._table = table.to(self.target.device, torch.int32)
        return self._table[:, :columns].contiguous()
