"""The transformer that LlamaGen, Chameleon and the bundled family share; its sizes are here and need no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["TransformerConfig"]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder. `prefix` positions of condition (the most there are) come before `grid` (rows, columns).

    `prefix_rotary` is what the grid's rotary embedding does to the prefix: "zero" (LlamaGen: queries and keys there
    vanish) or "identity" (left as they are). `positions`: "grid" turns with row and column, "sequence" with the place
    behind the padding. `pairs` turn together: "interleaved" (2i, 2i + 1) or "halves" (i, i + head_dim / 2). `qk_norm`:
    a LayerNorm of each head's queries and keys before that. `norm_after`: norms stand behind attention and feed-forward
    instead of before them (Chameleon's `swin_norm`).

    `token_ids`: the number of each of the `vocab_size` tokens of an image in a larger vocabulary of `words` embeddings,
    where the two differ. `line_ends`: a token that is no code, the last of the vocabulary, ends each row of the grid.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    prefix: int
    grid: tuple[int, int]
    kv_heads: int | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    prefix_rotary: Literal["zero", "identity"] = "zero"
    positions: Literal["grid", "sequence"] = "grid"
    pairs: Literal["interleaved", "halves"] = "interleaved"
    qk_norm: bool = False
    norm_after: bool = False
    words: int | None = None
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    line_ends: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture, ends of lines included."""
        return self.grid[0] * self.line_length

    @property
    def line_length(self) -> int:
        """Tokens of one row of a picture, its end included."""
        return self.grid[1] + self.line_ends
