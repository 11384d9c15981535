"""Whether a LlamaGen checkpoint belongs to the picture size it is used for.

The weights of two stages have the same shapes, so the wrong one loads and paints noise. What a file tells of its grid
is gathered here and compared: its position table, the arguments of its training, the `block_size` beside it, and, for
the published files, their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lantern_bench.errors import UserError
from lantern_bench.models.checkpoint import Checkpoint
from lantern_bench.models.llamagen_sizes import PUBLISHED, LlamaGenSize
from lantern_bench.models.rotary import grid_rotary

__all__ = ["check_stage", "grid_of_table"]

_PUBLISHED_FILES = {
    "t2i_XL_stage1_256.pt": "llamagen-t2i-stage1",
    "t2i_XL_stage2_512.pt": "llamagen-t2i-stage2",
} | {
    f"c2i_{name.removeprefix('llamagen-c2i-').replace('-', '_')}.pt": name
    for name in PUBLISHED
    if name.startswith("llamagen-c2i-")
}
_TABLES = ("freqs_cis", "model.freqs_cis")
_DOWNSAMPLING = 16
# The HF conversion's table has ten rows of zeros behind the grid (finding B5).
_MARGINS = (0, 10)
_ROUNDING = 2e-2


class _Sign(NamedTuple):
    """Tokens of a picture, and what says so."""

    tokens: int
    source: str


def check_stage(checkpoint: Checkpoint, size: LlamaGenSize, config: Mapping[str, Any], advice: str) -> None:
    """Raise `UserError` when the checkpoint tells of another grid than `size.grid`, with the reason.

    `config` is what stands beside the weights (`block_size`); `advice` is shown with the error.
    """
    for sign in _signs(checkpoint, size, config):
        if sign.tokens != size.tokens:
            raise UserError(
                f"{checkpoint.path}: is of another stage: {sign.source} is for {_grid(sign.tokens)}, "
                f"and this model's grid is {size.grid[0]}x{size.grid[1]} ({size.tokens} tokens)",
                advice,
            )
    _check_values(checkpoint, size, advice)


def grid_of_table(checkpoint: Checkpoint, positions: int) -> tuple[int, int] | None:
    """The square grid that a checkpoint's position table is for; None without a table, or where it is not square."""
    name = next((name for name in _TABLES if name in checkpoint), None)
    if name is None or not checkpoint.shape(name):
        return None
    for margin in _MARGINS:
        tokens = checkpoint.shape(name)[0] - positions - margin
        if tokens > 0 and math.isqrt(tokens) ** 2 == tokens:
            return math.isqrt(tokens), math.isqrt(tokens)
    return None


def _signs(checkpoint: Checkpoint, size: LlamaGenSize, config: Mapping[str, Any]) -> Iterator[_Sign]:
    for name in _TABLES:
        if name in checkpoint:
            rows = checkpoint.shape(name)[0] - size.positions
            # With the margin or without it: either may be this grid's.
            fits = size.tokens if rows - size.tokens in _MARGINS else _nearest_square(rows)
            yield _Sign(fits, f"its position table ({name}, {rows + size.positions} rows)")
    settings = checkpoint.settings
    if isinstance(settings.get("image_size"), int):
        side = settings["image_size"] // int(settings.get("downsample_size") or _DOWNSAMPLING)
        yield _Sign(side * side, f"the training it records (image_size {settings['image_size']})")
    if isinstance(config.get("block_size"), int):
        yield _Sign(config["block_size"], f"its config (block_size {config['block_size']})")
    published = PUBLISHED.get(_PUBLISHED_FILES.get(checkpoint.path.name, ""))
    # Only where it really is that model: anybody may name a file so.
    if published is not None and (published.dim, published.layers) == (size.dim, size.layers):
        yield _Sign(published.tokens, f"the published file of that name ({checkpoint.path.name})")


def _nearest_square(rows: int) -> int:
    for margin in _MARGINS:
        if rows > margin and math.isqrt(rows - margin) ** 2 == rows - margin:
            return rows - margin
    return rows


def _check_values(checkpoint: Checkpoint, size: LlamaGenSize, advice: str) -> None:
    """The table itself must turn as ours does: another base, or rows and columns exchanged, are other positions."""
    name = next((name for name in _TABLES if name in checkpoint), None)
    if name is None:
        return
    ours = grid_rotary(size.transformer())[: size.positions + size.tokens]
    theirs = checkpoint[name].float()[: len(ours)]
    if theirs.shape != ours.shape:
        raise UserError(
            f"{checkpoint.path}: its position table turns {2 * theirs.shape[1] if theirs.dim() > 1 else 0} numbers a "
            f"head, and this model's heads have {2 * ours.shape[1]}",
            "The number of heads does not fit: see n_head of its config.",
        )
    if not torch.allclose(theirs[size.positions :], ours[size.positions :], atol=_ROUNDING):
        raise UserError(f"{checkpoint.path}: its position table is of another grid or another rope_base", advice)


def _grid(tokens: int) -> str:
    side = math.isqrt(max(tokens, 0))
    return f"a {side}x{side} grid ({tokens} tokens)" if side * side == tokens else f"{tokens} tokens"
