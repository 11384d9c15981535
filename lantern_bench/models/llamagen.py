"""LlamaGen: key map of the official checkpoints onto `TransformerTarget`, nothing else.

The official GPT has the names of `Transformer` itself; only its condition embedding stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["from_official"]


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of an official `model` state dict to those of `TransformerTarget`."""
    return {key if key.startswith("cls_embedding.") else f"transformer.{key}": value for key, value in state.items()}
