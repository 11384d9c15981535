"""How much memory a model needs, told from modules that have shapes and no memory.

Everything is counted on the meta device: parameters, and the key/value caches that a decoding makes. What a forward
needs beside them depends on the device and is not in the sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lantern_bench.models.parts import Parts

__all__ = ["Size", "sizes_of"]


class Size(NamedTuple):
    """What a part of a model takes: how many parameters (0 for a cache), of what type, how many bytes."""

    part: str
    parameters: int
    dtype: torch.dtype
    bytes: int


def sizes_of(parts: Parts, dtype: torch.dtype, *, guided: bool, nodes: int, batch: int = 1) -> list[Size]:
    """The size of each part on the meta device, and of its cache for trees of at most `nodes` nodes, root included.

    Target and drafter are counted in `dtype`, the tokenizer in float32, which it always has.
    """
    found: list[Size] = []
    for name, module, kind in zip(parts._fields, parts, (dtype, dtype, torch.float32), strict=True):
        if module is not None:
            count = sum(parameter.numel() for parameter in module.parameters())
            found.append(Size(name, count, kind, count * kind.itemsize))
    for name, part in (("target", parts.target), ("drafter", parts.drafter if nodes > 1 else None)):
        if part is not None:
            found.append(Size(f"{name}'s cache", 0, dtype, _cache_bytes(part, dtype, guided, nodes, batch)))
    return found


def _cache_bytes(module: nn.Module, dtype: torch.dtype, guided: bool, nodes: int, batch: int) -> int:
    part: Any = module.to(dtype)
    with torch.device("meta"):
        session = part.session(batch, guided, nodes)
    size: int = session.cache.nbytes
    return size
