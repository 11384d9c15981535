"""Cool-SD (arXiv 2601.09212): every draft is accepted with w p / q, where w falls with the depth of the draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lantern_bench.methods.draft_view import DraftView


def annealed_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Give f = min(1, w p(x) / q(x)), w = strength exp(-decay (depth - 1)) (docs/algorithms.md, section 8.4)."""
    ratio: Tensor = draft.strict_ratio
    w: Tensor = values["strength"] * torch.exp(-values["decay"] * (draft.depth - 1).to(ratio.dtype))
    return w * ratio
