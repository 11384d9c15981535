"""Published EAGLE drafters for LlamaGen: key map of their files onto `EagleDrafter`, nothing else.

Their token embedding is their own (it equals the target's output head, finding B3) and is always loaded from the file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["from_published"]

_RENAMED = {
    "layers.0.self_attn.o_proj.weight": "layer.attention.wo.weight",
    "layers.0.mlp.gate_proj.weight": "layer.feed_forward.w1.weight",
    "layers.0.mlp.up_proj.weight": "layer.feed_forward.w3.weight",
    "layers.0.mlp.down_proj.weight": "layer.feed_forward.w2.weight",
    "layers.0.post_attention_layernorm.weight": "layer.ffn_norm.weight",
}


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a published drafter; query, key and value become one matrix (no rotary permutation).

    Raises `KeyError` for a file without one of the three.
    """
    parts = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    renamed = {"layer.attention.wqkv.weight": torch.cat([state[part] for part in parts])}
    return renamed | {_RENAMED.get(key, key): value for key, value in state.items() if key not in parts}
