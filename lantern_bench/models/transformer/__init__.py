"""THE transformer, which all families of this package share; its sizes are here and need no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lantern_bench.errors import UserError

SHARED_SIZES = ("dim", "layers", "heads", "ffn_dim", "kv_heads", "norm_eps", "rope_base")
"""The fields that a family's own description of a size has in common with `TransformerConfig`."""

Wrong: TypeAlias = Callable[[str, str], UserError]
"""Makes the error for a key of a config: `wrong(key, text)`."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder. `prefix` positions of condition (the most there are) come before `grid` (rows, columns).

    `prefix_rotary`: a grid's rotary embedding multiplies the prefix by "zero" (LlamaGen) or leaves it as it is
    ("identity"). `positions`: rotation by row and column ("grid") or by the place behind the padding ("sequence").
    `pairs` that rotate together: "interleaved" (2i, 2i + 1) or "halves" (i, i + head_dim / 2). `qk_norm`: a LayerNorm
    of each head's queries and keys before rotation. `norm_after`: norms come after attention and feed-forward, not
    before (Chameleon's `swin_norm`). `head_layer`: a layer with a GELU stands between the final norm and the output
    head, and both have biases (Janus).

    `token_ids`: the numbers of the `vocab_size` image tokens in a larger vocabulary of `words` embeddings, where the
    two differ. `line_ends`: a forced token, the last of the vocabulary, ends each row of the grid.
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
    head_layer: bool = False
    words: int | None = None
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    line_ends: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture, forced ones included."""
        return self.grid[0] * self.line_length

    @property
    def line_length(self) -> int:
        """Tokens of one row of a picture, a forced one included."""
        return self.grid[1] + self.line_ends


def read_sizes(
    config: Mapping[str, Any], names: Mapping[str, tuple[str, ...]], wrong: Wrong, fractions: Collection[str] = ()
) -> dict[str, Any]:
    """The sizes that a `config` states, by our name; `names` maps it to the names it goes by.

    All are whole numbers above 0 except `fractions`. Raises what `wrong` returns for other values, and for two names
    of one size that disagree.
    """
    said: dict[str, Any] = {}
    for ours, theirs in names.items():
        for name in theirs:
            value = config.get(name)
            if value is None:
                continue
            fraction = ours in fractions
            number = isinstance(value, int | float if fraction else int) and not isinstance(value, bool)
            if not number or value <= 0:
                raise wrong(name, f"{value}: must be a {'' if fraction else 'whole '}number above 0")
            value = float(value) if fraction else value
            if said.setdefault(ours, value) != value:
                raise wrong(name, f"is {value}, but another name of it says {said[ours]}")
    return said


def heads_problem(dim: int, heads: int, kv_heads: int | None, positions: str) -> tuple[str, str] | None:
    """Why so many heads cannot be, as a key of config.json and a text; None where they can.

    Rotation on a grid takes half the pairs of a head for the row and half for the column (`positions` "grid").
    """
    if dim % heads:
        return "num_attention_heads", f"{heads}: does not divide the width {dim}"
    if dim // heads % (step := 4 if positions == "grid" else 2):
        text = f"{heads}: gives heads of {dim // heads} numbers, and rotary positions need a multiple of {step}"
        return "num_attention_heads", text
    if kv_heads is not None and heads % kv_heads:
        return "num_key_value_heads", f"{kv_heads}: does not divide the {heads} heads"
    return None


_LLAMA_NAMES: dict[str, tuple[str, ...]] = {
    "words": ("vocab_size",),
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
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}


def llama_sizes(config: Mapping[str, Any], wrong: Wrong) -> dict[str, Any]:
    """The sizes that a config.json of transformers' Llama and its kin states, by our names; `words` is its vocabulary.

    Raises what `wrong(key, text)` returns for impossible values, and for options that this transformer lacks.
    """
    for key, allowed in _LLAMA_ONLY.items():
        if config.get(key) not in allowed:
            raise wrong(key, f"is {config[key]}, and only {allowed[0]} is supported")
    rope = config.get("rope_parameters") or {}
    for key, scaling in (("rope_scaling", config.get("rope_scaling") or {}), ("rope_parameters", rope)):
        if (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
            raise wrong(key, f"is of the type {kind}, and only rotary positions without scaling are supported")
    said = read_sizes({"rope_theta": rope.get("rope_theta"), **config}, _LLAMA_NAMES, wrong, ("norm_eps", "rope_base"))
    head = config.get("head_dim")
    if {"dim", "heads"} <= said.keys() and head not in (None, said["dim"] // said["heads"]):
        raise wrong("head_dim", f"is {head}, and only hidden_size / num_attention_heads is supported")
    return said


def target_parameters(config: TransformerConfig) -> int:
    """The number of parameters of a target with prompts in its own vocabulary."""
    head_norms = 2 * config.head_dim * (config.heads + (config.kv_heads or config.heads)) if config.qk_norm else 0
    head_layer = config.dim * (config.dim + 1) + config.vocab_size if config.head_layer else 0
    embedded, written = config.words or config.vocab_size, config.vocab_size
    whole = transformer_parameters(config, 0) + (embedded + written) * config.dim
    return whole + config.layers * head_norms + head_layer


def transformer_parameters(size: Any, vocabulary: int) -> int:
    """The number of parameters of a transformer with `SHARED_SIZES`, head norms and condition excluded."""
    head = size.dim // size.heads
    attention = size.dim * head * (2 * size.heads + 2 * (size.kv_heads or size.heads))
    layer = attention + 3 * size.dim * size.ffn_dim + 2 * size.dim
    total: int = size.layers * layer + 2 * vocabulary * size.dim + size.dim
    return total
