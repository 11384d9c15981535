"""A model in memory: what decoding, drawing pixels and keying a record need of it, in one object.

Families make it (`registry.Family.load`); what its parts can do is `decode/interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decode.interface import Drafter, PixelDecoder, Target
from lantern_bench.decode.neighbours import nearest_codes
from lantern_bench.spec.decoding import NeighbourMetric

__all__ = ["LoadedModel"]


@dataclass
class LoadedModel:
    """A target, its drafter and what turns prompts into conditions and tokens into pictures.

    codebook: float [V, d], the space in which codes are near each other, prepared as the family wants distances.
    condition: prompts (one an image) -> what `Target.session(...).prefill` takes. weights: part -> SHA-256 of its
    file. grid: rows and columns of the image's tokens.
    """

    name: str
    target: Target
    drafter: Drafter | None
    pixels: PixelDecoder
    codebook: Tensor
    condition: Callable[[Sequence[str]], Any]
    weights: Mapping[str, str]
    grid: tuple[int, int]
    _tables: dict[NeighbourMetric, Tensor] = field(default_factory=dict, init=False, repr=False)

    def table(self, columns: int, metric: NeighbourMetric = "l2") -> Tensor:
        """The `columns` nearest codes of every code, int32 [V, columns], on the target's device, nearest first.

        Made once for each metric and the widest table asked for; a narrower one is its beginning, which the fixed order
        of ties guarantees. Raises `ValueError` for more columns than there are other codes.
        """
        if metric not in self._tables or self._tables[metric].shape[1] < columns:
            with torch.inference_mode():
                self._tables[metric] = nearest_codes(self.codebook.to(self.target.device), columns, metric=metric)
        return self._tables[metric][:, :columns].contiguous()
