"""The names of transformers' Llama, mapped onto THE transformer: LlamaGen's conversion, Chameleon, published drafters.

All of them name the parts of a layer alike; what a model's layers and the things around them are called as a whole is
for its own key map to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lantern_bench.models.filling import Piece, plain
from lantern_bench.models.transformer import TransformerConfig

__all__ = ["AROUND", "llama_key_map"]

AROUND: Mapping[str, str] = {
    "transformer.tok_embeddings.": "model.embed_tokens.",
    "transformer.layers.": "model.layers.",
    "transformer.norm.": "model.norm.",
    "transformer.output.": "lm_head.",
}
"""Where a `TransformerTarget` keeps its parts -> where a Llama for causal language modelling does."""

_INSIDE = {
    "attention.wo.": "self_attn.o_proj.",
    "attention.q_norm.": "self_attn.q_norm.",
    "attention.k_norm.": "self_attn.k_norm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
}
_MIXED = "attention.wqkv.weight"


def llama_key_map(
    module: nn.Module, config: TransformerConfig, around: Mapping[str, str] = AROUND
) -> dict[str, tuple[Piece, ...]]:
    """The key map of a module with layers of `config`; `around` renames what its names begin with.

    Query, key and value are three matrices there and one here, their rows in the same order: which pairs of them the
    rotary embedding turns together is the config's to say (`pairs`).
    """

    def rename(name: str) -> str:
        for ours, theirs in around.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        for ours, theirs in _INSIDE.items():
            name = name.replace(f".{ours}", f".{theirs}")
        return name

    rows = dict.fromkeys("qkv", (config.kv_heads or config.heads) * config.head_dim)
    rows["q"] = config.heads * config.head_dim
    pieces = plain(module, rename)
    for name in pieces:
        if name.endswith(_MIXED):
            layer = rename(name).removesuffix(_MIXED)
            pieces[name] = tuple(Piece(f"{layer}self_attn.{part}_proj.weight", count) for part, count in rows.items())
    return pieces
