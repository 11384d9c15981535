"""The sizes of LlamaGen (arXiv 2406.06525, table 1): the published ones, and those a user's file states.

No torch: listings and plans need only sizes. A `config` names sizes as the official code, the HF conversion or this
package does; `checkpoint` reads from the shapes what a config leaves out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lantern_bench.models.transformer_config import (
    SHARED_SIZES,
    TransformerConfig,
    Wrong,
    read_sizes,
    transformer_parameters,
)

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
        """The number of parameters of the target."""
        caption = self.positions * self.width + self.width * self.dim + self.dim**2
        condition = caption if self.kind == "t2i" else (self.classes + 1) * self.dim
        return transformer_parameters(self, self.vocab_size) + condition

    def transformer(self) -> TransformerConfig:
        """The size as a `TransformerConfig`."""
        shared = {name: getattr(self, name) for name in SHARED_SIZES}
        return TransformerConfig(vocab_size=self.vocab_size, prefix=self.positions, grid=self.grid, **shared)


def ffn_width(dim: int, multiple_of: int = 256, multiplier: float | None = None) -> int:
    """The width of the feed-forward layer as the official code computes it."""
    hidden = int(8 * dim / 3)
    hidden = hidden if multiplier is None else int(multiplier * hidden)
    return -(-hidden // multiple_of) * multiple_of


# Width, layers and heads.
_SCALES = {"B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1280, 36, 20), "XXL": (1536, 48, 24), "3B": (3200, 24, 32)}
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
}
_KIND = ("kind", "input_type", "model_type")
_KINDS: dict[str, Kind] = {"t2i": "t2i", "t2i2": "t2i", "c2i": "c2i"}


def read_config(config: Mapping[str, Any], wrong: Wrong) -> dict[str, Any]:
    """The sizes that a `config` states, by our names; `multiple_of` and `ffn_dim_multiplier` become `ffn_dim`.

    `block_size` stays beside them. Names without a meaning here (dropout, token numbers of a language model) are
    ignored, unless they look like a misspelling. Raises what `wrong(name, text)` returns.
    """
    known = [*_KIND, *(name for names in _NAMES.values() for name in names)]
    for name in config:
        meant = difflib.get_close_matches(str(name), known, n=1, cutoff=0.82)
        if meant and name not in known:
            raise wrong(str(name), f"unknown; did you mean {meant[0]}?")
    if config.get("rope_base") is not None:
        # The HF conversion rotates by rope_base; its config.json also has the rope_theta of every Llama.
        config = {name: value for name, value in config.items() if name != "rope_theta"}
    said = read_sizes(config, _NAMES, wrong, fractions=("multiplier", "norm_eps", "rope_base"))
    for name in _KIND:
        value = config.get(name)
        # `model_type` also names the architecture of language models.
        if value is None or (name == "model_type" and value not in ("t2i", "c2i")):
            continue
        kind = _KINDS.get(str(value))
        if kind is None:
            raise wrong(name, f"{value}: must be t2i or c2i")
        if said.setdefault("kind", kind) != kind:
            raise wrong(name, f"is {value}, but another name of it says {said['kind']}")
    multiple, multiplier = said.pop("multiple_of", None), said.pop("multiplier", None)
    if "ffn_dim" not in said and "dim" in said and (multiple or multiplier):
        said["ffn_dim"] = ffn_width(said["dim"], multiple or 256, multiplier)
    return said
