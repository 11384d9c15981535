"""What kind of checkpoint a file is, told from the names in it, for errors that say what was found.

A table of tell-tale names, the first that fits wins. Nothing is decided by it: it only makes a message useful when a
file of another family was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["what_is"]

_TELLS: tuple[tuple[str, str], ...] = (
    (r"model\.vqmodel\.|\.self_attn\.q_norm\.", "a Chameleon model (Anole, Lumina-mGPT)"),
    (r"model\.cls_embedding\.", "LlamaGen, text-conditional, in the layout of the HF conversion"),
    (r"cls_embedding\.uncond_embedding$", "LlamaGen, text-conditional, in the official layout"),
    (r"cls_embedding\.embedding_table\.", "LlamaGen, class-conditional, in the official layout"),
    (r"(encoder\.down|decoder\.up)\.\d+\.block\.", "a VQGAN, such as Chameleon's vqgan.ckpt"),
    (r"quantize\.embedding\.", "a VQ tokenizer"),
    (r"(encoder|shared)\.(block|weight)\b", "a T5 text encoder"),
    (r"fc\.weight$", "an EAGLE drafter"),
    (r"model\.layers\.\d+\.self_attn\.", "a Llama language model"),
)


def what_is(names: Iterable[str]) -> str | None:
    """Say what a checkpoint with these names is; None for one of no known kind."""
    known = list(names)
    for pattern, kind in _TELLS:
        if any(re.match(pattern, name) or re.search(rf"(^|\.){pattern}", name) for name in known):
            return kind
    return None
