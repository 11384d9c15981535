"""A loaded model. `decoding/protocol.py` defines the interfaces of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.neighbours import Space, in_space
from lantern_bench.decoding.protocol import Drafter, PixelDecoder, Target
from lantern_bench.methods.parameters import NeighbourMetric
from lantern_bench.models.model import NO_TOKENIZER, no_picture
from lantern_bench.models.neighbour_tables import kept_nearest_codes
from lantern_bench.models.networks.target import (
    CachedTarget,
    Prompts,
    with_line_ends,
    without_line_ends,
)
from lantern_bench.models.networks.vq import VQModel
from lantern_bench.utils.errors import RefusedError, UserError

_CELL = 8  # pixels of a side of a cell in a map of codes
# Added to red, green and blue from a code to the next; successive codes get unlike colours.
_COLOUR_STEPS = (73, 151, 199)


def to_bytes(pixels: Tensor) -> Tensor:
    """Convert pixels [B, H, W, 3] from -1 to 1, of any type, to uint8 on the CPU."""
    return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).contiguous().cpu()


@dataclass
class VQPixels:
    """A VQ tokenizer for pictures of one size."""

    model: VQModel
    grid: tuple[int, int]  # rows and columns of codes
    line_ends: bool = False  # as in `TransformerConfig`

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        rows, columns = self.grid
        side = 2 ** (len(self.model.config.channel_mult) - 1)
        return rows * side, columns * side

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> Tensor:
        """Decode tokens int [B, N] to uint8 RGB [B, H, W, 3] on the CPU."""
        if self.line_ends:
            tokens = without_line_ends(tokens, self.grid)
        tokens = tokens.to(self.model.quantize.embedding.weight.device)
        return to_bytes(self.model.decode_tokens(tokens, self.grid).permute(0, 2, 3, 1))

    @torch.inference_mode()
    def tokens(self, pictures: Tensor) -> Tensor:
        """Encode pictures uint8 RGB [B, H, W, 3] to tokens int64 [B, N] on the CPU, row by row."""
        weight = self.model.quantize.embedding.weight
        pixels = pictures.to(weight.device).permute(0, 3, 1, 2).to(weight.dtype) / 127.5 - 1
        codes = self.model.encode(pixels).flatten(1).cpu()
        if self.line_ends:
            return with_line_ends(codes, self.grid, self.model.config.codes)
        return codes


@dataclass
class CodeMap:
    """A map of the codes, for a model whose tokens no decoder here turns into pictures."""

    grid: tuple[int, int]  # rows and columns of codes
    skipped: int  # tokens before the grid

    def pixels(self, tokens: Tensor) -> Tensor:
        """Draw tokens int [B, N] as cells with a colour for each code, in the form of pixels."""
        rows, columns = self.grid
        # A forced token may end each row.
        codes = tokens[:, self.skipped :].unflatten(1, (rows, -1))[..., :columns].cpu().long()
        colours = codes[..., None] * torch.tensor(_COLOUR_STEPS) % 256
        cells = colours.repeat_interleave(_CELL, dim=1).repeat_interleave(_CELL, dim=2)
        return cells.to(torch.uint8)


@dataclass
class LoadedModel:
    """A target, its drafter, and what turns prompts into conditions and tokens into pictures."""

    name: str
    target: Target
    drafter: Drafter | None
    pixels: PixelDecoder | None  # None for a model that cannot draw
    codebook: Tensor | None  # float [V, d], rows as stored; None without a tokenizer
    # prompts, one an image -> the argument of a session's `prefill`
    condition: Callable[[Sequence[str]], Any]
    weights: Mapping[str, str]  # part -> SHA-256
    grid: tuple[int, int]  # rows and columns of the image's codes
    neighbour_space: Space = "raw"  # in which published tables measure distances
    # Called once with all prompts before decoding, so that a text encoder can be freed. Yields
    # (done, total).
    prepare: Callable[[Sequence[str]], Iterator[tuple[int, int]]] = lambda _prompts: iter(())
    # as in `Prompts`
    stand_in: Callable[[Sequence[str]], Any] | None = None
    # the user's nearest codes int [V, k], used instead of the codebook
    given_table: Tensor | None = None
    # Reference logits for `check-model`. (condition, tokens int64 [B, N]) -> logits [B, N, V]
    # that predict the tokens, with and without the prompt, by other code than the sessions use.
    reference: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None
    remarks: Sequence[str] = ()  # what the user should know of its files
    guided: bool = True  # as in `Model`
    compiles: bool = True  # whether the target's code can be compiled
    why_no_pixels: str = NO_TOKENIZER  # if `pixels` is None
    # runs the steps, uncompiled by default
    engine: Engine = field(default_factory=Engine, repr=False)
    _tables: dict[NeighbourMetric, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        return f"LoadedModel({self.name!r})"

    def pixel_decoder(self) -> PixelDecoder:
        """Return the pixel decoder. Raises `UserError` for a model without one."""
        if self.pixels is None:
            raise no_picture(self.name, self.why_no_pixels)
        return self.pixels

    def show_codes(self, codebook: Tensor | None) -> None:
        """Draw maps of the codes, and find near codes in `codebook` [codes, d]."""
        self.pixels = CodeMap(self.grid, self.target.coarse_tokens)
        self.codebook = codebook

    def draw(self, tokens: Tensor) -> Tensor:
        """Decode tokens int [B, N] to uint8 RGB [B, H, W, 3]. Raises as `pixel_decoder`."""
        return self.pixel_decoder().pixels(tokens)

    @cached_property
    def codes(self) -> Tensor:
        """The codebook float32 [V, d] in the space of its neighbours, with 0 for forced tokens."""
        return self._with_forced(in_space(self._rows_of_codes(), self.neighbour_space))

    def _rows_of_codes(self) -> Tensor:
        """Return the codebook on the target's device, as stored."""
        if self.codebook is None:
            raise RefusedError(
                f"{self.name}: this rule needs to know which codes are near each other, and the "
                "model has no tokenizer",
                "Name the tokenizer's checkpoint, or a table of nearest codes, in the model's "
                "file; or choose another rule.",
            )
        return self.codebook.to(self.target.device)

    def table(self, columns: int, metric: NeighbourMetric = "l2") -> Tensor:
        """Return the nearest codes of every token.

        Args:
            columns: Number k of codes for each token.
            metric: How distances between codes are measured.

        Returns:
            The codes, nearest first, int32 [V, k]. Forced tokens have zeros.

        Raises:
            RefusedError: The model has no codebook.
            UserError: There are fewer codes, or the user's own table does not fit.
        """
        table = self.given_table
        if table is None:
            table = self._table_of_codebook(columns, metric)
        elif metric != "l2":
            raise UserError(
                f"--neighbour-metric {metric}: {self.name} names a table of its own",
                "Leave one of them out.",
            )
        elif table.shape[1] < columns:
            raise UserError(
                f"--neighbours {columns}: the model's own table has {table.shape[1]} for each code"
            )
        table = table.to(self.target.device, torch.int32)
        return self._with_forced(table[:, :columns].contiguous())

    def _with_forced(self, rows: Tensor) -> Tensor:
        """Append a row of zeros for each forced token."""
        forced = self.target.vocab_size - len(rows)
        return rows if forced <= 0 else torch.cat([rows, rows.new_zeros(forced, rows.shape[1])])

    @torch.inference_mode()
    def _table_of_codebook(self, columns: int, metric: NeighbourMetric) -> Tensor:
        """Return the cached table of a metric, computed again if more columns are needed."""
        rows = self._rows_of_codes()
        if columns >= len(rows):
            raise UserError(
                f"--neighbours {columns}: the model {self.name} has {len(rows)} codes",
                f"At most {len(rows) - 1}.",
            )
        table = self._tables.get(metric)
        if table is None or table.shape[1] < columns:
            # Angles are the same in both spaces, and random neighbours have none.
            space = self.neighbour_space if metric == "l2" else "raw"
            table = kept_nearest_codes(in_space(rows, space), columns, metric)
            self._tables[metric] = table
        return table


def assemble(
    name: str,
    *,
    target: Any,
    drafter: Any,
    tokenizer: VQModel | None,
    prompts: Prompts,
    weights: Mapping[str, str],
    space: Space = "raw",
) -> LoadedModel:
    """Assemble a model from modules with their weights.

    A tokenizer with another number of codes than the target is left out.

    Args:
        name: Name of the model.
        target: A `CachedTarget`.
        drafter: The drafter, or None.
        tokenizer: The VQ tokenizer, or None.
        prompts: How the model takes prompts.
        weights: SHA-256 of each part, without the text encoder.
        space: Space in which neighbours are near.
    """
    config = target.config
    if prompts.sha256 is not None:
        weights = {**weights, "text_encoder": prompts.sha256}
    model = LoadedModel(
        name=name,
        target=target,
        drafter=drafter,
        pixels=None,
        codebook=None,
        condition=prompts.condition,
        weights=weights,
        grid=config.grid,
        neighbour_space=space,
        prepare=prompts.prepare,
        stand_in=prompts.stand_in,
    )
    if tokenizer is not None:
        codes = tokenizer.config.codes
        if codes == target.n_codes:
            model.pixels = VQPixels(tokenizer, config.grid, line_ends=config.line_ends)
            model.codebook = tokenizer.codebook()
        else:
            model.why_no_pixels = f"the tokenizer has {codes} codes, the target {target.n_codes}"
    return model


def transformer_of(model: LoadedModel) -> CachedTarget:
    """Return the model's target. Raises `UserError` if EAGLE drafters cannot work with it."""
    if not isinstance(model.target, CachedTarget):
        raise UserError(
            f"{model.name}: EAGLE drafters need the features of a transformer",
            f"Its target is a {type(model.target).__name__}; choose a model of another family.",
        )
    return model.target
