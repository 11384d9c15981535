"""A Chameleon in memory, put together from its parts: prompts, pictures, nearest codes.

Where the parts come from (files, random numbers) makes no difference here. Ends of lines are tokens to the decoding and
nothing to anybody else: they are taken out before a picture is drawn, and no code is near them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lantern_bench.config.decoding import NeighbourMetric
from lantern_bench.decoding.interface import PixelDecoder
from lantern_bench.models.chameleon import PUBLISHED, Style, prompt_condition, published_vocabulary
from lantern_bench.models.chameleon.checkpoint import PUBLISHED_VQGAN, build_drafter
from lantern_bench.models.loaded_model import LoadedModel, NoPixels, Parts, VQPixels
from lantern_bench.models.transformer.conditioning import Condition
from lantern_bench.models.transformer.target import TransformerTarget, with_line_ends, without_line_ends
from lantern_bench.models.vq import VQModel

if TYPE_CHECKING:
    from lantern_bench.models.transformer.conditioning import Condition


# ---- Captions as Chameleon's prompts: text to tokens by the model's own tokenizer.json, then what stands around th


# ----


@dataclass
class ChameleonModel(LoadedModel):
    """A loaded model that also takes prompts as numbers."""

    style: Style | None = None
    words: int = 0

    def table(self, columns: int, metric: NeighbourMetric = "l2") -> Tensor:
        """As `LoadedModel.table`; ends of lines have a row too, of which nothing is ever asked.

        An end of line is drafted and accepted with certainty, so no rule looks for codes to lend it mass.
        """
        table = super().table(columns, metric)
        return torch.cat([table, table.new_zeros(self.target.vocab_size - len(table), columns)])

    def condition_of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Condition:
        """The condition of prompts given as numbers: `input_ids` int [P] or [n, P], `mask` of the same shape or none.

        `attention_mask` is another name of the mask. What is masked must stand on the left. Raises `ValueError` for
        anything else.
        """
        if self.style is None:
            raise ValueError(f"{self.name} takes no prompts as numbers")
        ids = _whole_rows("input_ids", arrays.get("input_ids"))
        masks = [_whole_rows(name, arrays[name]).astype(bool) for name in ("mask", "attention_mask") if name in arrays]
        kept = masks[0] if masks else np.ones(ids.shape, bool)
        words = self.words
        if kept.shape != ids.shape or (np.diff(kept.astype(int), axis=1) < 0).any() or not kept[:, -1].all():
            raise ValueError("mask must have the shape of input_ids, its zeros on the left")
        if ids.min() < 0 or ids.max() >= words:
            raise ValueError(f"input_ids must be from 0 to {words - 1}")
        if ids.shape[1] > self.style.positions:
            raise ValueError(f"input_ids has {ids.shape[1]} tokens, and at most {self.style.positions} are taken")
        return prompt_condition([row[use].tolist() for row, use in zip(ids, kept, strict=True)], self.style)


def _whole_rows(name: str, array: np.ndarray | None) -> np.ndarray:
    """An array of whole numbers as rows; raises `ValueError` for what is none."""
    if array is None or array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "iub":
        raise ValueError(f"{name} must be there, whole numbers [P] or [n, P]")
    return np.atleast_2d(array)


class _WithoutLineEnds:
    """Pictures of tokens whose lines have ends."""

    def __init__(self, decoder: VQPixels, grid: tuple[int, int], end: int) -> None:
        self._decoder, self._grid, self._end = decoder, grid, end

    def pixels(self, tokens: Tensor) -> Tensor:
        return self._decoder.pixels(without_line_ends(tokens, self._grid))

    @property
    def size(self) -> tuple[int, int]:
        return self._decoder.size

    def tokens(self, pictures: Tensor) -> Tensor:
        return with_line_ends(self._decoder.tokens(pictures), self._grid, self._end)


def build(style: Style) -> Parts:
    """Fresh modules: target, a drafter of the published shape, Chameleon's tokenizer."""
    config = PUBLISHED.transformer(style, published_vocabulary().token_ids(style))
    target = TransformerTarget(config)
    return Parts(target, build_drafter(config, target), VQModel(PUBLISHED_VQGAN))


def loaded_model(
    name: str,
    style: Style,
    parts: Parts,
    weights: Mapping[str, str],
    condition: Callable[[Sequence[str]], Any],
    *,
    table: Tensor | None = None,
    table_folder: Path | None = None,
) -> ChameleonModel:
    """Put parts together; `table` and `table_folder` as for `LoadedModel`."""
    target: Any = parts.target
    drafter: Any = parts.drafter
    tokenizer: Any = parts.tokenizer
    wanted = target.vocab_size - style.line_ends
    codes = tokenizer.config.codes if tokenizer is not None else 0
    pixels: PixelDecoder = NoPixels(name, "it has no tokenizer")
    if codes == wanted:
        drawn = VQPixels(tokenizer, style.grid)
        pixels = _WithoutLineEnds(drawn, style.grid, codes) if style.line_ends else drawn
    elif codes:
        pixels = NoPixels(name, f"the tokenizer has {codes} codes, the target {wanted}")
    return ChameleonModel(
        name=name,
        target=target,
        drafter=drafter,
        pixels=pixels,
        codebook=tokenizer.codebook() if codes == wanted else None,
        condition=condition,
        weights=dict(weights),
        grid=style.grid,
        neighbour_space="raw",
        table_folder=table_folder,
        given_table=table,
        style=style,
        words=target.config.words or target.vocab_size,
    )
