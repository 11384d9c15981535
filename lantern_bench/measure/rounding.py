"""What a narrower number type does to the distribution: TV against float32, position by position, same tokens before.

Tokens are decoded by the float32 model; both models then see them at once, as one chain (teacher forcing).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_bench.decode.emitted_tv import total_variation
from lantern_bench.decode.forcing import teacher_forced
from lantern_bench.decode.loop import decode
from lantern_bench.decode.sampling import greedy_probabilities, guide
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding

__all__ = ["rounding_tv"]


@torch.inference_mode()
def rounding_tv(
    exact: LoadedModel, rounded: LoadedModel, prompts: Sequence[str], cfg_scale: float, seed: int = 0
) -> Tensor:
    """TV float32 [images * tokens] between the guided distributions of two models at temperature 1, no filters."""
    found = []
    decoding = Decoding.model_validate({"mode": "ar", "cfg_scale": cfg_scale})
    for number, prompt in enumerate(prompts):
        noise = torch.Generator(exact.target.device).manual_seed(seed + number)
        condition = exact.condition([prompt])
        made = decode(exact, condition, decoding, [noise])[0].tokens.long()
        both = [_laws(model, condition, made, cfg_scale) for model in (exact, rounded)]
        found.append(total_variation(*both))
    return torch.cat(found)


def _laws(model: LoadedModel, condition: object, tokens: Tensor, cfg_scale: float) -> Tensor:
    """The distributions [N, V] of all tokens [N] of an image, each given those before it."""
    forced = teacher_forced(model.target, condition, tokens[None].to(model.target.device), cfg_scale != 1)
    return greedy_probabilities(guide(forced.scores.cond, forced.scores.uncond, cfg_scale))[0].cpu()
