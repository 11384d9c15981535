"""A model as modules: what a family builds, and what its checkpoints are filled into.

Made under `torch.device("meta")` the modules have shapes and no memory: their parameters can be counted
(`sizes`), drawn (`random_weights`) or taken from files (`filling`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

__all__ = ["Parts"]


class Parts(NamedTuple):
    """Target, drafter and tokenizer; `TransformerTarget`, `EagleDrafter` and `VQModel` or their like, None if absent.

    The drafter must be built with the target's own output head.
    """

    target: nn.Module
    drafter: nn.Module | None
    tokenizer: nn.Module | None
