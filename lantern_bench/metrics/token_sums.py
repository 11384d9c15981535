"""How far the tokens of finished images are from the target: sums over the tokens of an image.

One forward of the target scores a whole image. It shares no draft tree, no drafting code and no
earlier step with decoding, so it sees their mistakes. `analysis/token_distance.py` turns the sums
into figures; docs/algorithms.md, section 6.2, has the mathematics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import broken_logits, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import TeacherForced, drafted_along, teacher_forced
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.utils.errors import LogitsError

_VALUES = 2**22  # probabilities in float64 at once


@torch.inference_mode()
def token_sums(
    model: LoadedModel, condition: Any, tokens: Tensor, decoding: Decoding
) -> list[dict[str, Any]]:
    """Compute the columns that `scores.jsonl` has of each image (level `tokens`).

    Args:
        model: The model. Its drafter is used if `decoding` drafts with it.
        condition: What the tokens were decoded with.
        tokens: Tokens of B images, int64 [B, N].
        decoding: Guidance, filters and drafting.

    Raises:
        LogitsError: Target or drafter gives NaN or infinite logits.
    """
    forced = teacher_forced(
        target=model.target, condition=condition, tokens=tokens, guided=decoding.cfg_scale != 1
    )
    q = None
    if model.drafter is not None and decoding.drafting_row.needs_drafter and not decoding.greedy:
        q = drafted_along(model.drafter, forced, decoding)
    return sums_along(target=model.target, forced=forced, q=q, decoding=decoding)


def sums_along(
    target: Target, forced: TeacherForced, q: Tensor | None, decoding: Decoding
) -> list[dict[str, Any]]:
    """Compute the rows of `token_sums` from distributions that are known.

    Args:
        target: The target.
        forced: Its logits along the tokens of B images.
        q: Distributions of the drafter at all tokens but the first, [B, N - 1, V].
        decoding: Guidance and filters.
    """
    positions = torch.arange(forced.tokens.shape[1], device=forced.tokens.device)
    is_drawn = target.forced_tokens(positions) < 0
    uncond = forced.logits.uncond
    rows = []
    for image, tokens in enumerate(forced.tokens):
        row = _sums_of_image(
            tokens,
            cond=forced.logits.cond[image],
            uncond=None if uncond is None else uncond[image],
            q=None if q is None else q[image],
            is_drawn=is_drawn,
            decoding=decoding,
        )
        rows.append(row)
    return rows


def _sums_of_image(
    tokens: Tensor,
    *,
    cond: Tensor,
    uncond: Tensor | None,
    q: Tensor | None,
    is_drawn: Tensor,
    decoding: Decoding,
) -> dict[str, Any]:
    """Compute the row of one image from logits [N, V] and the drafter's q [N - 1, V]."""
    logits = guide(cond, uncond, decoding.cfg_scale)
    if bool(broken_logits(logits).any()):
        raise LogitsError(
            "a forward over a finished image gives NaN or infinite logits", "Check the weights."
        )
    if decoding.greedy:
        mismatches = (logits.argmax(dim=-1) != tokens) & is_drawn
        return {"tokens": int(is_drawn.sum()), "mismatched_tokens": int(mismatches.sum())}

    names = ["surprise", "squared_surprise"]
    if uncond is not None:
        names.append("prompt_information")
    if q is not None:
        names.append("drafter_tilt")
    chunks = []
    step = max(1, _VALUES // logits.shape[1])
    for start in range(0, len(logits), step):
        now = slice(start, start + step)
        p = decoding_probabilities(logits[now], decoding).double()
        further = []
        if uncond is not None:
            further.append(cond[now].log_softmax(dim=-1) - uncond[now].log_softmax(dim=-1))
        if q is not None:
            drafted = q[max(0, start - 1) : start + step - 1].double()
            if start == 0:
                # The first token is never drafted.
                drafted = torch.cat([p[:1], drafted])
            further.append((drafted - p) / (drafted + p))
        sums = _sums(p, tokens[now, None], further, is_drawn=is_drawn[now])
        chunks.append(sums)

    total = sum(chunks[1:], start=chunks[0])
    drawn, impossible, entropy, largest, ten_largest, *of_features = total.tolist()
    return {
        "tokens": int(drawn),
        "impossible_tokens": int(impossible),
        "entropy": entropy / drawn,
        "largest_p": largest / drawn,
        "ten_largest_p": ten_largest / drawn,
        "features": " ".join(names),
        "feature_sums": of_features,
    }


def _sums(p: Tensor, x: Tensor, further: list[Tensor], is_drawn: Tensor) -> Tensor:
    """Return sums over tokens `x` [N, 1] drawn from p [N, V], as one vector.

    First five sums over all drawn tokens: 1, p = 0, entropy, largest probability, ten largest
    probabilities. Then, over drawn tokens with p > 0, each feature minus its mean under p, and the
    upper triangle of the covariance of the features under p.
    """
    surprise = torch.where(p > 0, -p.log(), 0.0)
    entropy = (p * surprise).sum(dim=-1, keepdim=True)
    features = [surprise, (surprise - entropy).square()]
    features += [feature.double() for feature in further]
    f = torch.stack([torch.where(p > 0, feature, 0.0) for feature in features])
    centred = f - (p * f).sum(dim=-1, keepdim=True)

    is_possible = (p.gather(1, x) > 0).squeeze(1)
    used = (is_drawn & is_possible).double()
    differences = centred.gather(2, x.expand(len(f), -1, -1)).squeeze(2) @ used
    weighted = centred * (p * used[:, None])
    covariance = torch.einsum("inv,jnv->ij", weighted, centred)
    rows, columns = torch.triu_indices(len(f), len(f))

    largest = p.topk(min(10, p.shape[1]), dim=-1).values
    totals = [is_drawn, is_drawn & ~is_possible]
    of_tokens = [entropy[:, 0], largest[:, 0], largest.sum(dim=-1)]
    totals += [torch.where(is_drawn, values, 0.0) for values in of_tokens]
    sums = [values.double().sum() for values in totals]
    return torch.cat([torch.stack(sums), differences, covariance[rows, columns]])
