"""Sizes of the transformer that all families share, and how a config.json states them. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lantern_bench.methods.parameters import LARGEST
from lantern_bench.utils.errors import UserError

MakeError: TypeAlias = Callable[[str, str], UserError]
"""Makes the error for a key of a config: `error_at(key, text)`."""

MOST = 2**20
"""The largest size that a config may state: four times the largest published vocabulary."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder of image tokens, and where the families differ."""

    vocab_size: int  # of the image tokens, forced ones included
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    prefix: int  # maximum number of condition positions before the image
    grid: tuple[int, int]  # rows and columns of codes
    kv_heads: int | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    # The rotary embedding of a grid multiplies the prefix by 0 (LlamaGen) or leaves it as it is.
    prefix_rotary: Literal["zero", "identity"] = "zero"
    # Rotation by row and column, by the position after the padding, or by three axes: the first
    # position of a grid, the row and the column (GLM-Image).
    positions: Literal["grid", "sequence", "axes"] = "grid"
    axis_pairs: tuple[int, int, int] = (0, 0, 0)  # pairs that rotate with each of the three axes
    # Rows and columns of a coarser grid of codes, which comes before `grid` (GLM-Image).
    coarse_grid: tuple[int, int] | None = None
    # Which numbers rotate together: (2i, 2i + 1) or (i, i + head_dim / 2).
    pairs: Literal["interleaved", "halves"] = "interleaved"
    qkv_bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # LayerNorm of each head's queries and keys before rotation (Chameleon)
    # Norms come after attention and feed-forward, not before (Chameleon's `swin_norm`).
    norm_after: bool = False
    # Norms come before and after them (GLM-Image).
    norm_both: bool = False
    # A layer with a GELU comes before the output head, and both have biases (Janus).
    head_layer: bool = False
    # If the image tokens are part of a larger vocabulary: the size of that vocabulary, and the
    # number of each image token in it.
    text_vocab_size: int | None = None
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    line_ends: bool = False  # a forced token, the last of the vocabulary, ends each row of the grid

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def n_codes(self) -> int:
        """Number of tokens that can be chosen: all but a forced one."""
        return self.vocab_size - self.line_ends

    @property
    def embedded_tokens(self) -> int:
        """Rows of the token embedding."""
        return self.text_vocab_size or self.vocab_size

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of all grids of one picture, in the order of decoding."""
        return (self.grid,) if self.coarse_grid is None else (self.coarse_grid, self.grid)

    @property
    def coarse_tokens(self) -> int:
        """Tokens of the coarse grid."""
        return 0 if self.coarse_grid is None else math.prod(self.coarse_grid)

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture, with the tokens of a coarse grid and forced ones."""
        return self.coarse_tokens + self.grid[0] * self.line_length

    @property
    def line_length(self) -> int:
        """Tokens of one row of a picture, a forced one included."""
        return self.grid[1] + self.line_ends


# Keys of the numbers that need not be whole.
_FRACTIONS = ("rms_norm_eps", "rope_theta", "ffn_dim_multiplier", "partial_rotary_factor")


def read_number(key: str, value: Any, error_at: MakeError) -> Any:
    """Return a number above 0 that a config states.

    Args:
        key: Its key in the config.
        value: The stated value. A whole number is at most `MOST`.
        error_at: Makes the error that is raised for any other value.
    """
    kind: type = int
    most: float = MOST
    noun = "whole number"
    if key in _FRACTIONS:
        kind = float
        most = LARGEST
        noun = "number"
    # The comparison is false for NaN.
    if type(value) not in (int, kind) or not 0 < value <= most:
        raise error_at(key, f"{str(value)[:40]}: must be a {noun} above 0 and at most {most:,}")
    return kind(value)


_LLAMA_NAMES = {
    "text_vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
}
# Options of transformers' Llama that this package's transformer lacks, and their allowed values.
_LLAMA_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),  # two names of one function
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
# Names of keys that change what a network computes. Such a key is read, or has no effect, or is
# refused.
_CHANGES = re.compile(
    r"rope|rotary|alibi|position_(embedding|encoding)_|sliding|window|chunk|softcap|logits?_scal"
    r"|scal(e|ing)|multiplier|expert|moe|router|norm|(^|_)act(ivation)?(_|$)|gelu|bias|head_dim"
    r"|layer_types|attn_|attention_|residual|parallel|quant|lora|adapter|mlp_|ffn_|kv_|query_"
    r"|mamba|ssm|conv_|mup|prun|clip|spars|multi_query|embed_proj|nope"
)
# Those that change nothing in a trained transformer of this package.
_HARMLESS = re.compile(
    r"drop|dtype|attn_implementation|chunk_size_feed_forward|model_parallel|pretraining_tp"
    r"|use_cache|output_attentions"
)
_ROPE_READ = ("rope_type", "type", "rope_theta", "original_max_position_embeddings")
_NEUTRAL_WORDS = ("silu", "swish", "rope", "rotary", "default", "full_attention", "rmsnorm")
# Numbers that 1 leaves without effect.
_FACTORS = re.compile(r"factor|scal|multiplier|expert|pct|percent|parallel")
# Numbers that change nothing where they are the width of a head.
_HEAD_WIDTHS = re.compile(r"query_pre_attn_scalar|kv_channels|(rotary|head)_dim")


def with_one_rope_base(stated: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config whose `rope_theta` is what transformers takes, and remarks.

    The newer `rope_parameters` comes before a `rope_theta` beside it, also inside a section.
    """
    config: dict[str, Any] = {}
    remarks: list[str] = []
    for key, value in stated.items():
        config[key] = value
        if str(key).endswith("_config") and isinstance(value, Mapping):
            config[key], inner = with_one_rope_base(value)
            remarks += [f"{key}.{remark}" for remark in inner]
    for key in ("rope_parameters", "rope_scaling"):
        rope = stated.get(key)
        base = rope.get("rope_theta") if isinstance(rope, Mapping) else None
        if base is None:
            continue
        older = stated.get("rope_theta")
        if older not in (None, base):
            remarks.append(f"rope_theta: {older}, and {key} says {base}, which is taken")
        config["rope_theta"] = base
    return config, remarks


def _check_unread(
    config: Mapping[str, Any],
    error_at: MakeError,
    read: Collection[str],
    *,
    section: str = "",
    changes: re.Pattern[str] = _CHANGES,
    head_dim: int | None = None,
) -> None:
    """Raise for a key that changes the network, whose heads have `head_dim`, and is not read."""
    for key, value in config.items():
        name = str(key)
        may_change = changes.search(name) is not None and _HARMLESS.search(name) is None
        is_usual = head_dim == value and _HEAD_WIDTHS.search(name) is not None
        if is_usual or name in read or not may_change:
            continue
        if not _is_neutral(name, value, config):
            raise error_at(
                f"{section}{key}",
                f"is {str(value)[:60]}, which this package's transformer does not have",
            )


def _is_neutral(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a key has a value that changes nothing."""
    if "window" in key and config.get("use_sliding_window") is False:
        return True
    if isinstance(value, bool | None) or not value:
        return not value
    if isinstance(value, str | list):
        words = [value] if isinstance(value, str) else value
        return all(str(word).lower() in _NEUTRAL_WORDS for word in words)
    return value == 1 and _FACTORS.search(key) is not None


def check_options(
    config: Mapping[str, Any], options: Mapping[str, tuple[Any, ...]], error_at: MakeError
) -> None:
    """Raise unless each option has an allowed value.

    Args:
        config: The content of a config.json.
        options: The allowed values of each option, the usual one first.
        error_at: Makes the error that is raised for any other value.
    """
    for key, allowed in options.items():
        if config.get(key) not in allowed:
            raise error_at(key, f"is {config[key]}, and only {allowed[0]} is supported")


def llama_sizes(
    config: Mapping[str, Any],
    error_at: MakeError,
    *,
    positions: str = "sequence",
    read: Collection[str] = (),
) -> dict[str, Any]:
    """Read the sizes of a Llama, or of a model like it, as transformers states them.

    Args:
        config: The content of a config.json.
        error_at: Makes the error that is raised for an impossible or unsupported value.
        positions: As in `TransformerConfig`.
        read: Other keys that the caller reads, also inside the rotary parameters.

    Returns:
        The stated fields of `TransformerConfig`.
    """
    options = {key: allowed for key, allowed in _LLAMA_ONLY.items() if key not in read}
    check_options(config, options, error_at)
    ropes = ("rope_scaling", "rope_parameters")
    for key in ropes:
        scaling = config.get(key) or {}
        if not isinstance(scaling, Mapping):
            raise error_at(key, "must be a mapping")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise error_at(
                key,
                f"is of the type {kind}, and only rotary positions without scaling are supported",
            )

        _check_unread(
            scaling,
            error_at,
            (*_ROPE_READ, *read),
            section=f"{key}.",
            changes=re.compile(""),
        )

    rope = config.get("rope_parameters") or {}
    stated = {"rope_theta": rope.get("rope_theta"), **config}
    sizes = {
        name: read_number(key, stated[key], error_at)
        for name, key in _LLAMA_NAMES.items()
        if stated.get(key) is not None
    }
    head_dim = None
    if "dim" in sizes and "heads" in sizes:
        _check_heads(sizes, error_at, positions=positions)
        head_dim = sizes["dim"] // sizes["heads"]
        if config.get("head_dim") not in (None, head_dim):
            raise error_at(
                "head_dim",
                f"is {config['head_dim']}, and only hidden_size / num_attention_heads, "
                f"{head_dim}, is supported",
            )
    read = (*read, *ropes, *_LLAMA_NAMES.values(), *_LLAMA_ONLY, "head_dim")
    _check_unread(config, error_at, read, head_dim=head_dim)
    return sizes


def _check_heads(sizes: Mapping[str, Any], error_at: MakeError, *, positions: str) -> None:
    """Raise for heads that do not fit the width.

    A head of another width than `hidden_size / num_attention_heads` is found by the shapes of the
    checkpoint.
    """
    heads = sizes["heads"]
    head_dim, rest = divmod(sizes["dim"], heads)
    if rest:
        raise error_at("num_attention_heads", f"{heads}: does not divide the width {sizes['dim']}")
    # Rotation on a grid takes half the pairs of a head for the row and half for the column.
    step = 4 if positions == "grid" else 2
    if head_dim % step:
        raise error_at(
            "num_attention_heads",
            f"{heads}: gives heads of {head_dim} numbers, and rotary positions need a multiple of "
            f"{step}",
        )
    if heads % sizes.get("kv_heads", 1):
        raise error_at(
            "num_key_value_heads", f"{sizes['kv_heads']}: does not divide the {heads} heads"
        )
