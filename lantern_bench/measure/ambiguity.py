"""Token ambiguity: how sure the target is of each token, and how often an exact draft can be accepted at all.

One row a position of the model's own images: probability of the likeliest and the ten likeliest codes, entropy, and
what the strict rule accepts there of one sampled and of one deterministic draft. Nothing is drawn: all of it is exact
given the image. Means and intervals are made in `report/ambiguity.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_bench.decode.forcing import drafts_along
from lantern_bench.decode.sampling import decoding_probabilities, guide
from lantern_bench.measure.images import Made, lossless_images
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.spec.decoding import Decoding
from lantern_bench.spec.plan import Prompt
from lantern_bench.spec.progress import OnProgress, unheard

__all__ = ["AMBIGUOUS", "ambiguity_rows"]

_MOST = 10
AMBIGUOUS = 0.05
"""A token whose likeliest code is less probable than this counts as ambiguous."""


@torch.inference_mode()
def ambiguity_rows(
    model: LoadedModel,
    decoding: Decoding,
    prompts: Sequence[Prompt],
    images: int,
    *,
    seed: int = 0,
    batch: int = 16,
    on_progress: OnProgress = unheard,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `ambiguity_places` (`spec/schema.py`), one a token of each image.

    `decoding` says the sampling settings; its filters apply to p and q as in decoding. Without a drafter the figures
    of drafts are left out, as they are at the first token, which nobody drafts.
    """
    for made in lossless_images(model, prompts, images, decoding, seed=seed, batch=batch, on_progress=on_progress):
        scores = made.forced.scores
        p = decoding_probabilities(guide(scores.cond, scores.uncond, decoding.cfg_scale), decoding)
        figures = _certainty(p) | _acceptance(model, made, p, decoding)
        listed = {name: values.tolist() for name, values in figures.items()}
        for image, prompt in enumerate(made.prompts):
            who = {"model": model.name, "prompt_id": prompt.id, "repeat": made.repeats[image]}
            who |= {key: getattr(decoding, key) for key in ("temperature", "top_k", "top_p", "cfg_scale")}
            for position in range(p.shape[1]):
                here = {name: values[image][position] for name, values in listed.items()}
                # nan stands where there is no draft.
                yield {**who, "position": position, **{n: None if v != v else v for n, v in here.items()}}


def _certainty(p: Tensor) -> dict[str, Tensor]:
    """How sure p [B, N, V] is: each figure [B, N]."""
    top = p.topk(min(_MOST, p.shape[-1]), dim=-1).values
    figures = {"top1": top[..., 0], "top10": top.sum(-1), "entropy": torch.special.entr(p).sum(-1)}
    return figures | {"ambiguous": (top[..., 0] < AMBIGUOUS).float()}


def _acceptance(model: LoadedModel, made: Made, p: Tensor, decoding: Decoding) -> dict[str, Tensor]:
    """What the strict rule accepts of a first draft at each position of p [B, N, V], the drafter fed true features."""
    if model.drafter is None:
        return {}
    sampled = torch.full(p.shape[:2], torch.nan, device=p.device)
    best = sampled.clone()
    for position, drafts in enumerate(drafts_along(model.drafter, made.forced), start=1):
        q = decoding_probabilities(guide(drafts.cond, drafts.uncond, decoding.cfg_scale), decoding)[:, 0]
        here = p[:, position]
        sampled[:, position] = torch.minimum(here, q).sum(-1)
        best[:, position] = here.gather(1, q.argmax(dim=1, keepdim=True)).squeeze(1)
    return {"accepted_sampled": sampled, "accepted_best": best}
