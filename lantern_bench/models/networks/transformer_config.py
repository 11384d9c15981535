"""Sizes of the transformer that all families of this package share, and how a config.json states them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lantern_bench.methods.parameters import LARGEST
from lantern_bench.utils.errors import UserError

Wrong: TypeAlias = Callable[[str, str], UserError]
"""Makes the error for a key of a config: `wrong(key, text)`."""

MOST = 2**20
"""The largest size that a config may state: four times the largest vocabulary there is."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder of image tokens, and where the families differ."""

    vocab_size: int  # of the image tokens, forced ones included
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    prefix: int  # positions of the condition before the image, at most
    grid: tuple[int, int]  # rows and columns of codes
    kv_heads: int | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    # The rotary embedding of a grid multiplies the prefix by 0 (LlamaGen) or leaves it as it is.
    prefix_rotary: Literal["zero", "identity"] = "zero"
    # Rotation by row and column, or by the position behind the padding.
    positions: Literal["grid", "sequence"] = "grid"
    # Which numbers rotate together: (2i, 2i + 1) or (i, i + head_dim / 2).
    pairs: Literal["interleaved", "halves"] = "interleaved"
    qk_norm: bool = False  # a LayerNorm of each head's queries and keys before rotation (Chameleon)
    # norms come after attention and feed-forward, not before (Chameleon's `swin_norm`)
    norm_after: bool = False
    # a layer with a GELU before the output head, and biases in both (Janus)
    head_layer: bool = False
    # Where image tokens are a share of a larger vocabulary: its size, and the number in it of each image token.
    text_vocab_size: int | None = None
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    line_ends: bool = False  # a forced token, the last of the vocabulary, ends each row of the grid

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def n_codes(self) -> int:
        """The number of tokens that can be chosen: all but a forced one."""
        return self.vocab_size - self.line_ends

    @property
    def embedded_tokens(self) -> int:
        """Rows of the token embedding."""
        return self.text_vocab_size or self.vocab_size

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture, forced ones included."""
        return self.grid[0] * self.line_length

    @property
    def line_length(self) -> int:
        """Tokens of one row of a picture, a forced one included."""
        return self.grid[1] + self.line_ends


def read_sizes(
    config: Mapping[str, Any],
    names: Mapping[str, tuple[str, ...]],
    wrong: Wrong,
    fractions: Collection[str] = (),
) -> dict[str, Any]:
    """Return the sizes that a `config` states, by our name; `names` maps it to its names in the config.

    All are whole numbers from 1 to `MOST` except `fractions`. Raises what `wrong` returns for all others.
    """
    sizes: dict[str, Any] = {}
    for size, keys in names.items():
        for key in keys:
            value = config.get(key)
            if value is None:
                continue
            fraction = size in fractions
            is_number = isinstance(value, int | float if fraction else int) and not isinstance(
                value, bool
            )
            noun, most = ("number", LARGEST) if fraction else ("whole number", MOST)
            if not (is_number and 0 < value <= most):  # NaN too
                raise wrong(
                    key, f"{str(value)[:40]}: must be a {noun} above 0 and at most {most:,}"
                )
            value = float(value) if fraction else value
            if sizes.setdefault(size, value) != value:
                raise wrong(key, f"is {value}, but another name of it says {sizes[size]}")
    return sizes


_LLAMA_NAMES: dict[str, tuple[str, ...]] = {
    "text_vocab_size": ("vocab_size",),
    "dim": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "ffn_dim": ("intermediate_size",),
    "kv_heads": ("num_key_value_heads",),
    "norm_eps": ("rms_norm_eps",),
    "rope_base": ("rope_theta",),
}
# Options of transformers' Llama and its kin that this transformer lacks.
_LLAMA_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),  # two names of one function
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}


def llama_sizes(
    config: Mapping[str, Any], wrong: Wrong, positions: str = "sequence"
) -> dict[str, Any]:
    """Return the sizes that a config.json of transformers' Llama and its kin states; raises what `wrong` returns."""
    for key, allowed in _LLAMA_ONLY.items():
        if config.get(key) not in allowed:
            raise wrong(key, f"is {config[key]}, and only {allowed[0]} is supported")
    rope = config.get("rope_parameters") or {}
    for key, scaling in (
        ("rope_scaling", config.get("rope_scaling") or {}),
        ("rope_parameters", rope),
    ):
        if (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
            raise wrong(
                key,
                f"is of the type {kind}, and only rotary positions without scaling are supported",
            )
    sizes = read_sizes(
        config={"rope_theta": rope.get("rope_theta"), **config},
        names=_LLAMA_NAMES,
        wrong=wrong,
        fractions=("norm_eps", "rope_base"),
    )
    if not {"dim", "heads"} <= sizes.keys():
        return sizes
    dim = sizes["dim"]
    heads = sizes["heads"]
    kv_heads = sizes.get("kv_heads")
    if dim % heads:
        raise wrong("num_attention_heads", f"{heads}: does not divide the width {dim}")
    if config.get("head_dim") not in (None, dim // heads):
        raise wrong(
            "head_dim",
            f"is {config['head_dim']}, and only hidden_size / num_attention_heads is supported",
        )
    # Rotation on a grid takes half the pairs of a head for the row and half for the column.
    if dim // heads % (step := 4 if positions == "grid" else 2):
        text = f"{heads}: gives heads of {dim // heads} numbers, and rotary positions need a multiple of {step}"
        raise wrong("num_attention_heads", text)
    if kv_heads is not None and heads % kv_heads:
        raise wrong("num_key_value_heads", f"{kv_heads}: does not divide the {heads} heads")
    return sizes
