"""LlamaGen: the modules of a size, and key maps of its two layouts onto them, nothing else.

The official GPT has the names of `Transformer` itself; only its condition embedding stands beside them. The HF
conversion of the LANTERN authors uses Llama's names and keeps queries, keys and values apart; their rows are in the
same order in both (no rotary permutation).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from lantern_bench.models.conditioning import CaptionFeatures, ClassLabel
from lantern_bench.models.filling import KeyMap, plain
from lantern_bench.models.llama_names import AROUND, llama_key_map
from lantern_bench.models.llamagen_sizes import LlamaGenSize
from lantern_bench.models.target import TransformerTarget

__all__ = ["Layout", "build_target", "is_computed", "key_map", "layout_of"]

Layout = Literal["official", "hf"]

_HF = {**AROUND, "cls_embedding.": "model.cls_embedding."}
# Tables and caches that some files carry and every program computes anew.
_COMPUTED = re.compile(r"(^|\.)(freqs_cis|causal_mask|k_cache|v_cache|inv_freq|cos_cached|sin_cached)$")


def build_target(size: LlamaGenSize) -> TransformerTarget:
    """A target of this size with fresh weights (none under `torch.device("meta")`)."""
    condition: ClassLabel | CaptionFeatures
    if size.kind == "c2i":
        condition = ClassLabel(size.classes, size.dim)
    else:
        condition = CaptionFeatures(size.positions, size.width, size.dim)
    return TransformerTarget(size.transformer(), condition)


def layout_of(names: Iterable[str]) -> Layout:
    """The layout of a LlamaGen checkpoint with these names."""
    return "hf" if any(name.startswith(("model.", "lm_head.")) for name in names) else "official"


def key_map(target: TransformerTarget, layout: Layout) -> KeyMap:
    """The key map of a layout onto a target; the same one reads and writes."""
    if layout == "official":
        return plain(target, lambda name: name.removeprefix("transformer."))
    return llama_key_map(target, target.config, _HF)


def is_computed(name: str) -> bool:
    """Whether a file's tensor is a table or a cache that is computed anew."""
    return _COMPUTED.search(name) is not None
