"""A loaded model; `decoding/protocol.py` says what its parts must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.neighbours import Space, in_space, nearest_codes
from lantern_bench.decoding.protocol import Drafter, PixelDecoder, Target
from lantern_bench.methods.parameters import NeighbourMetric
from lantern_bench.models.networks.conditions import Prompts
from lantern_bench.models.networks.target import CachedTarget, with_line_ends, without_line_ends
from lantern_bench.models.networks.vq import VQModel
from lantern_bench.utils.errors import RefusedError, UserError


def to_bytes(pixels: Tensor) -> Tensor:
    """Pixels [B, H, W, 3] from -1 to 1, in any type -> uint8 on the CPU."""
    return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).contiguous().cpu()


class VQPixels:
    """A VQ tokenizer for pictures of `grid` (rows, columns) codes."""

    def __init__(self, model: VQModel, grid: tuple[int, int], line_ends: bool = False) -> None:
        self.model = model
        self._grid = grid
        self._line_ends = line_ends

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens int [B, N] -> uint8 RGB [B, H, W, 3] on the CPU."""
        codes = without_line_ends(tokens, self._grid) if self._line_ends else tokens
        weight = self.model.quantize.embedding.weight
        return to_bytes(
            self.model.decode_tokens(codes.to(weight.device), self._grid).permute(0, 2, 3, 1)
        )

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        side = 2 ** (len(self.model.config.channel_mult) - 1)
        return self._grid[0] * side, self._grid[1] * side

    @torch.inference_mode()
    def tokens(self, pictures: Tensor) -> Tensor:
        """Pictures uint8 RGB [B, H, W, 3] -> tokens int64 [B, N] on the CPU, row by row."""
        weight = self.model.quantize.embedding.weight
        pixels = pictures.to(weight.device).permute(0, 3, 1, 2).to(weight.dtype) / 127.5 - 1
        codes = self.model.encode(pixels).flatten(1).cpu()
        return (
            with_line_ends(codes, self._grid, self.model.config.codes) if self._line_ends else codes
        )


class NoPixels:
    """The pixel decoder of a model that cannot draw."""

    def __init__(self, model: str, reason: str) -> None:
        self.problem = UserError(
            f"{model}: no picture can be drawn: {reason}",
            "Name the tokenizer's checkpoint in the model's file; or ask for the tokens alone, from Python, with "
            "`lantern_bench.decode`.",
        )

    def pixels(self, tokens: Tensor) -> Tensor:  # noqa: ARG002
        """Raise `problem`."""
        raise self.problem


@dataclass
class LoadedModel:
    """A target, its drafter, and what turns prompts into conditions and tokens into pictures."""

    name: str
    target: Target
    drafter: Drafter | None
    pixels: PixelDecoder
    codebook: Tensor | None  # float [V, d], rows as stored; None without a tokenizer
    # prompts, one an image -> the argument of a session's `prefill`
    condition: Callable[[Sequence[str]], Any]
    weights: Mapping[str, str]  # part -> SHA-256
    grid: tuple[int, int]  # rows and columns of the image's codes
    neighbour_space: Space = "raw"  # in which published tables measure distances
    # Called once with all prompts before decoding, so that a text encoder can be freed; yields (done, total).
    prepare: Callable[[Sequence[str]], Iterator[tuple[int, int]]] = lambda _prompts: iter(())
    # the user's nearest codes int [V, k], used instead of the codebook
    given_table: Tensor | None = None
    # What `check-model` compares logits with. (condition, tokens int64 [B, N]) -> logits [B, N, V]
    # that predict the tokens, with and without the prompt, by other code than the sessions use.
    reference: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None
    compiles: bool = True  # whether the target's code can be compiled
    # runs the steps, uncompiled by default
    engine: Engine = field(default_factory=Engine, repr=False)
    _tables: dict[NeighbourMetric, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        drafter = "no drafter" if self.drafter is None else type(self.drafter).__name__
        return f"LoadedModel({self.name!r}: {type(self.target).__name__}, {drafter}, {self.grid[0]}x{self.grid[1]} codes)"

    @cached_property
    def codes(self) -> Tensor:
        """The codebook float32 [V, d] in the space of its neighbours; forced tokens: 0."""
        if self.codebook is None:
            raise RefusedError(
                f"{self.name}: this rule measures distances between codes, and the model has no tokenizer",
                "Name the tokenizer's checkpoint in the model's file, or choose another rule.",
            )
        rows = in_space(self.codebook.to(self.target.device), self.neighbour_space)
        forced = self.target.vocab_size - len(rows)
        return torch.cat([rows, rows.new_zeros(max(0, forced), rows.shape[1])])

    def table(self, columns: int, metric: NeighbourMetric = "l2") -> Tensor:
        """Return the nearest codes of every token, nearest first, int32 [V, columns]; `RefusedError` without codes."""
        if self.given_table is None:
            table = self._codes_table(columns, metric)
        elif metric != "l2":
            text = f"--neighbour-metric {metric}: {self.name} names a table of its own"
            raise UserError(text, "Leave one of them out.")
        elif (width := self.given_table.shape[1]) < columns:
            raise UserError(
                f"--neighbours {columns}: the model's own table has {width} for each code"
            )
        else:
            table = self.given_table.to(self.target.device, torch.int32)
        table = table[:, :columns].contiguous()
        forced = self.target.vocab_size - len(table)
        return table if forced <= 0 else torch.cat([table, table.new_zeros(forced, columns)])

    @torch.inference_mode()
    def _codes_table(self, columns: int, metric: NeighbourMetric) -> Tensor:
        """The table of a metric, as wide as the widest one asked for."""
        if self.codebook is None:
            raise RefusedError(
                f"{self.name}: relaxed rules need to know which codes are near each other, and it has no tokenizer",
                "Name the tokenizer's checkpoint, or a table of nearest codes, in the model's file.",
            )
        if columns >= (codes := len(self.codebook)):
            raise UserError(
                f"--neighbours {columns}: the model {self.name} has {codes} codes",
                f"At most {codes - 1}.",
            )
        if metric not in self._tables or self._tables[metric].shape[1] < columns:
            device = self.target.device
            # Angles are the same in both spaces, and random neighbours have none.
            rows = in_space(
                self.codebook.to(device), self.neighbour_space if metric == "l2" else "raw"
            )
            self._tables[metric] = nearest_codes(rows, columns, metric=metric)
        return self._tables[metric]


def assemble(
    name: str,
    target: Any,
    drafter: Any,
    tokenizer: VQModel | None,
    prompts: Prompts,
    weights: Mapping[str, str],
    space: Space = "raw",
    table: Tensor | None = None,
) -> LoadedModel:
    """Return a model of modules that have their weights, with a space of neighbours or the user's table."""
    pixels: PixelDecoder = NoPixels(name, "it has no tokenizer")
    codebook = None
    if tokenizer is not None and tokenizer.config.codes == target.n_codes:
        pixels = VQPixels(tokenizer, target.config.grid, target.config.line_ends)
        codebook = tokenizer.codebook()
    elif tokenizer is not None:
        pixels = NoPixels(
            name, f"the tokenizer has {tokenizer.config.codes} codes, the target {target.n_codes}"
        )
    if prompts.sha256 is not None:
        weights = {**weights, "text_encoder": prompts.sha256}
    condition = prompts.condition
    prepare = prompts.prepare
    grid = target.config.grid
    return LoadedModel(
        name=name,
        target=target,
        drafter=drafter,
        pixels=pixels,
        codebook=codebook,
        condition=condition,
        weights=weights,
        grid=grid,
        neighbour_space=space,
        prepare=prepare,
        given_table=table,
    )


def transformer_of(model: LoadedModel) -> CachedTarget:
    """The model's target; raises `UserError` where it is of a kind that has no EAGLE drafters."""
    if not isinstance(model.target, CachedTarget):
        raise UserError(
            f"{model.name}: EAGLE drafters need the features of a transformer",
            f"Its target is a {type(model.target).__name__}; choose a model of another family.",
        )
    return model.target
