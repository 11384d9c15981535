"""The sizes of LlamaGen (arXiv 2406.06525, table 1): those that were published, and those a user's file describes.

No torch: a listing or a plan needs sizes and nothing else. A size is read from a `config` under the names of the
official code, of the HF conversion, or of this package; what it leaves out is told by the shapes in the checkpoint.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lantern_bench.errors import UserError
from lantern_bench.models.transformer import TransformerConfig

__all__ = ["PUBLISHED", "Kind", "LlamaGenSize", "ffn_width", "heads_of_published", "read_config"]


Kind = Literal["t2i", "c2i"]


@dataclass(frozen=True)
class LlamaGenSize:
    """A size. `grid`: rows and columns of tokens; `positions`: of the condition; `width`: of caption features."""

    kind: Kind
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    grid: tuple[int, int]
    positions: int
    kv_heads: int | None = None
    vocab_size: int = 16384
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    classes: int = 1000
    width: int = 2048

    @property
    def tokens(self) -> int:
        """Tokens of one picture."""
        return self.grid[0] * self.grid[1]

    @property
    def parameters(self) -> int:
        """How many numbers the target has."""
        head = self.dim // self.heads
        attention = self.dim * head * (2 * self.heads + 2 * (self.kv_heads or self.heads))
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        caption = self.positions * self.width + self.width * self.dim + self.dim**2
        condition = caption if self.kind == "t2i" else (self.classes + 1) * self.dim
        return self.layers * layer + 2 * self.vocab_size * self.dim + self.dim + condition

    def transformer(self) -> TransformerConfig:
        """The size as THE transformer takes it."""
        from lantern_bench.models.transformer import TransformerConfig

        return TransformerConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            ffn_dim=self.ffn_dim,
            prefix=self.positions,
            grid=self.grid,
            kv_heads=self.kv_heads,
            norm_eps=self.norm_eps,
            rope_base=self.rope_base,
        )


def ffn_width(dim: int, multiple_of: int = 256, multiplier: float | None = None) -> int:
    """The width of the feed-forward layer as the official code computes it."""
    hidden = int(8 * dim / 3)
    hidden = hidden if multiplier is None else int(multiplier * hidden)
    return -(-hidden // multiple_of) * multiple_of


_SCALES = {
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1280, 36, 20),
    "XXL": (1536, 48, 24),
    "3B": (3200, 24, 32),
}


_SIDES = {256: 16, 384: 24}


def _size(scale: str, kind: Kind, side: int) -> LlamaGenSize:
    dim, layers, heads = _SCALES[scale]
    return LlamaGenSize(kind, dim, layers, heads, ffn_width(dim), (side, side), 120 if kind == "t2i" else 1)


PUBLISHED: dict[str, LlamaGenSize] = {
    "llamagen-t2i-stage1": _size("XL", "t2i", 16),
    "llamagen-t2i-stage2": _size("XL", "t2i", 32),
} | {
    f"llamagen-c2i-{scale}-{pixels}": _size(scale, "c2i", side) for scale in _SCALES for pixels, side in _SIDES.items()
}
"""Every named model's size."""


def heads_of_published(dim: int, layers: int) -> int | None:
    """The heads of the published size of this width and depth: no checkpoint tells them."""
    return next((heads for d, n, heads in _SCALES.values() if (d, n) == (dim, layers)), None)


# Our name -> the names it goes by: here, in the official code, in the HF conversion.
_NAMES: dict[str, tuple[str, ...]] = {
    "dim": ("dim", "hidden_size"),
    "layers": ("layers", "n_layer", "num_hidden_layers"),
    "heads": ("heads", "n_head", "num_attention_heads"),
    "kv_heads": ("kv_heads", "n_kv_head", "num_key_value_heads"),
    "ffn_dim": ("ffn_dim", "intermediate_size"),
    "multiple_of": ("multiple_of",),
    "multiplier": ("ffn_dim_multiplier",),
    "vocab_size": ("vocab_size",),
    "norm_eps": ("norm_eps", "rms_norm_eps"),
    "rope_base": ("rope_base", "rope_theta"),
    "positions": ("positions", "cls_token_num"),
    "block_size": ("block_size",),
    "classes": ("classes", "num_classes"),
    "width": ("width", "caption_dim"),
    "kind": ("kind", "input_type", "model_type"),
}


# How alike an unknown name and a known one must be to be taken for a slip of the pen.
_A_SLIP = 0.82


_FRACTIONS = ("multiplier", "norm_eps", "rope_base")


def read_config(config: Mapping[str, Any], wrong: Callable[[str, str], UserError]) -> dict[str, Any]:
    """The sizes that a `config` states, by our names; `multiple_of` and `ffn_dim_multiplier` become `ffn_dim`.

    `block_size` stays beside them. Names that mean nothing here (dropout, token numbers of a language model) are
    passed over, unless they look like a slip. `wrong(name, text)` makes the `UserError` that is raised.
    """
    said: dict[str, Any] = {}
    known = {name: ours for ours, names in _NAMES.items() for name in names}
    for name, value in config.items():
        if name not in known:
            meant = difflib.get_close_matches(str(name), list(known), n=1, cutoff=_A_SLIP)
            if meant:
                raise wrong(str(name), f"unknown; did you mean {meant[0]}?")
            continue
        ours = known[name]
        if value is None or (name == "model_type" and value not in ("t2i", "c2i")):
            continue
        value = _checked(ours, str(name), value, wrong)
        if said.setdefault(ours, value) != value:
            raise wrong(str(name), f"is {value}, but another name of it says {said[ours]}")
    multiple, multiplier = said.pop("multiple_of", None), said.pop("multiplier", None)
    if "ffn_dim" not in said and "dim" in said and (multiple or multiplier):
        said["ffn_dim"] = ffn_width(said["dim"], multiple or 256, multiplier)
    return said


def _checked(ours: str, name: str, value: object, wrong: Callable[[str, str], UserError]) -> Any:
    if ours == "kind":
        kind = {"t2i": "t2i", "t2i2": "t2i", "c2i": "c2i"}.get(str(value))
        if kind is None:
            raise wrong(name, f"{value}: must be t2i or c2i")
        return kind
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if ours in _FRACTIONS:
        if not isinstance(value, int | float) or not number or value <= 0:
            raise wrong(name, f"{value}: must be a number above 0")
        return float(value)
    if not isinstance(value, int) or not number or value <= 0:
        raise wrong(name, f"{value}: must be a whole number above 0")
    return value
