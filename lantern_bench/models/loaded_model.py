"""A model in memory: what decoding, drawing pixels and keying a record need of it, in one object.

Families make it (`registry.Family.load`); what its parts can do is `decoding/interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lantern_bench.config.decoding import NeighbourMetric
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.interface import Drafter, PixelDecoder, Target
from lantern_bench.decoding.neighbours import Space, nearest_codes
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.neighbour_cache import neighbour_table
from lantern_bench.models.vq import VQModel

# ---- Tokens to pictures through a VQ decoder, as the `PixelDecoder` of `decoding.interface`, and pictures to tokens


@runtime_checkable
class ReadsPictures(Protocol):
    """A pixel decoder that knows the way back."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the pictures."""
        ...

    def tokens(self, pictures: Tensor) -> Tensor:
        """Pictures uint8 RGB [B, H, W, 3] of that size -> tokens int64 [B, N] on the CPU."""
        ...


class VQPixels:
    """A tokenizer's decoder for pictures of `grid` (rows, columns) tokens."""

    def __init__(self, model: VQModel, grid: tuple[int, int]) -> None:
        self._model, self._grid = model, grid

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens int [B, N] -> uint8 RGB [B, H, W, 3] on the CPU."""
        weight = self._model.quantize.embedding.weight
        decoded = self._model.decode_tokens(tokens.to(weight.device), self._grid).float()
        scaled = (decoded.clamp(-1, 1) + 1) * 127.5
        return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        side = self._model.config.downsampling
        return self._grid[0] * side, self._grid[1] * side

    @torch.inference_mode()
    def tokens(self, pictures: Tensor) -> Tensor:
        """Pictures uint8 RGB [B, H, W, 3] -> tokens int64 [B, N] on the CPU, row by row."""
        weight = self._model.quantize.embedding.weight
        pixels = pictures.to(weight.device).permute(0, 3, 1, 2).to(weight.dtype) / 127.5 - 1
        return self._model.encode(pixels).indices.flatten(1).cpu()


class NoPixels:
    """Stands where a model's tokens cannot be turned into pictures, and says why."""

    def __init__(self, model: str, reason: str) -> None:
        self.problem = UserError(
            f"{model}: no picture can be drawn: {reason}",
            "Name the tokenizer's checkpoint in the model's file; or ask for the tokens alone with "
            "`generate --save-tokens FILE.npz`.",
        )

    def pixels(self, tokens: Tensor) -> Tensor:  # noqa: ARG002
        """Raise the `UserError` that says why there is no picture."""
        raise self.problem


# ----


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


class Parts(NamedTuple):
    """Target, drafter and tokenizer; `TransformerTarget`, `EagleDrafter` and `VQModel` or their like, None if absent.

    The drafter must be built with the target's own output head.
    """

    target: nn.Module
    drafter: nn.Module | None
    tokenizer: nn.Module | None
