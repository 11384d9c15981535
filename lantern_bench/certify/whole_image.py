"""Do whole images follow the target's distribution? Tests of every token against the target's own p.

p comes from teacher forcing over the finished images, not from the decode steps. The tests see the tokens and where
steps started, so they hold for any lossless rule. docs/algorithms.md, section 6, defines them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.certify.broken import Mistake
from lantern_bench.certify.relaxation import generators
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt, record_seed
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.sampling import decoding_probabilities, guide, is_broken
from lantern_bench.decoding.teacher_forcing import drafts_along, teacher_forced
from lantern_bench.errors import LogitsError
from lantern_bench.models.loaded_model import LoadedModel

_ROUNDING = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.04}  # of the difference of two logits without guidance
TESTS = 10
"""How many tests `p_values` makes of a decoding, at most."""
_BINS, _LAGS = 20, 8
_STAKES = (0.005, 0.01, 0.02, 0.05)  # near the shares of wrong tokens that a small mistake makes
_VALUES = 2**24  # logits in memory at once


class Evidence(NamedTuple):
    """What images [B, N] show of the distribution that their tokens were drawn from: float64, the last three bool.

    surprise: -log p(x) minus its mean, the entropy of p. lean: (q - p) / (q + p) at x, with the drafter's q, minus its
    mean under p; 0 without a drafter and at the first token. surprise_var, lean_var: their variances under p. ratio:
    q / p at x; 1 without a drafter, at the first token and for tokens of `edge`. by_rank, by_code: the probability
    integral transform, randomised within p(x), with tokens in order of descending p and of their numbers. impossible:
    the target cannot give the token. edge: rounding can change whether the token passes the filters. p is that of the
    tokens which pass whatever rounding does; tokens of `edge` add nothing to the sums, which stay those of martingale
    differences, given which tokens are of `edge`. at_edge: the probability of such a token is at most this, whatever
    rounding does. starts: a step starts with the token.
    """

    surprise: NDArray[np.float64]
    surprise_var: NDArray[np.float64]
    lean: NDArray[np.float64]
    lean_var: NDArray[np.float64]
    ratio: NDArray[np.float64]
    by_rank: NDArray[np.float64]
    by_code: NDArray[np.float64]
    at_edge: NDArray[np.float64]
    impossible: NDArray[np.bool_]
    edge: NDArray[np.bool_]
    starts: NDArray[np.bool_]


def edge_tolerance(dtype: str, decoding: Decoding) -> float:
    """Return how far rounding may move the difference of two logits after guidance and temperature."""
    scale = decoding.cfg_scale
    return _ROUNDING[dtype] * (abs(scale) + abs(scale - 1)) / decoding.temperature


def evidence(
    logits: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    starts: Sequence[Sequence[int]],
    decoding: Decoding,
    places: Tensor,
    tolerance: float,
) -> Evidence:
    """Compare `tokens` int64 [B, N] with guided `logits` [B, N, V] under the filters of `decoding`.

    `q` [B, N - 1, V]: the drafter's distributions of all tokens but the first. `starts`: where the steps of each image
    start. `places` [2, B, N] in [0, 1) place tokens within their probability. `tolerance`: see `edge_tolerance`.
    """
    found = []
    for image, row in enumerate(logits):  # one at a time: float64 over a vocabulary needs memory
        found.append(
            _of_image(row, None if q is None else q[image], tokens[image], decoding, places[:, image], tolerance)
        )
    columns: list[NDArray[Any]] = [torch.stack(column).cpu().numpy() for column in zip(*found, strict=True)]
    begun = np.zeros(tuple(tokens.shape), dtype=bool)
    for image, at in enumerate(starts):
        begun[image, list(at)] = True
    return Evidence(*[*columns, begun])


def _of_image(
    logits: Tensor, q: Tensor | None, tokens: Tensor, decoding: Decoding, places: Tensor, tolerance: float
) -> tuple[Tensor, ...]:
    p, x = decoding_probabilities(logits, decoding).double(), tokens[:, None]
    if bool(is_broken(p).any()) or (q is not None and bool(is_broken(q).any())):
        raise LogitsError("a forward over finished images gives logits that are no numbers")
    passes, fails = _sure(logits, p, decoding, tolerance)
    wide = (logits.double() / decoding.temperature).masked_fill(fails, -torch.inf).softmax(dim=-1)
    unsure = torch.where(passes, 0.0, wide).sum(dim=-1, keepdim=True)
    at_edge = unsure / (unsure + (1 - unsure) * math.exp(-tolerance))
    p = _on(passes, p)
    own, outside = p.gather(1, x), ~passes.gather(1, x)
    impossible = fails.gather(1, x)
    minus_log = torch.where(p > 0, -p.log(), 0.0)
    lean, ratio = torch.zeros_like(p), torch.ones_like(own)
    if q is not None:
        drafted = _on(passes[1:], q.double())
        lean[1:] = torch.where(p[1:] > 0, (drafted - p[1:]) / (drafted + p[1:]), 0.0)
        ratio[1:] = torch.where(outside[1:], 1.0, drafted.gather(1, x[1:]) / own[1:])
    scores = []
    for g in (minus_log, lean):
        mean = (p * g).sum(dim=-1, keepdim=True)
        variance = (p * (g - mean).square()).sum(dim=-1, keepdim=True)
        scores += [torch.where(outside, 0.0, g.gather(1, x) - mean), torch.where(outside, 0.0, variance)]
    above = torch.where(p > own, p, 0.0).sum(dim=-1, keepdim=True)
    alike = torch.where(p == own, p, 0.0).sum(dim=-1, keepdim=True)  # tokens of equal p share one interval
    before = p.cumsum(dim=-1).gather(1, x) - own
    transforms = [above + places[0, :, None] * alike, before + places[1, :, None] * own]
    transforms = [torch.where(outside, at[:, None], u) for at, u in zip(places, transforms, strict=True)]
    columns = (*scores, ratio, *transforms, at_edge, impossible, outside & ~impossible)
    return tuple(column.squeeze(1) for column in columns)


def _on(chosen: Tensor, probabilities: Tensor) -> Tensor:
    """Return the distributions [N, V] of the chosen tokens alone; 0 where there are none."""
    part = torch.where(chosen, probabilities, 0.0)
    return part / part.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)


def _sure(logits: Tensor, p: Tensor, decoding: Decoding, tolerance: float) -> tuple[Tensor, Tensor]:
    """Which tokens pass the filters, and which do not, whatever rounding does: bool as p [N, V]."""
    if not decoding.top_k and decoding.top_p >= 1:
        return p > 0, p == 0
    kept = [p, p]  # by a filter that is stricter, and by one that is looser
    if decoding.top_p < 1:
        # Logits that move by a tolerance move the odds of a set by at most its exponential.
        top_p, factors = decoding.top_p, (math.exp(tolerance), math.exp(-tolerance))
        moved = [{"top_p": top_p / (top_p + (1 - top_p) * factor)} for factor in factors]
        kept = [decoding_probabilities(logits, decoding.changed(**one)) for one in moved]
    scaled = logits.double() / decoding.temperature
    excluded = scaled.masked_fill(kept[0] > 0, -torch.inf).amax(dim=-1, keepdim=True)
    if 0 < decoding.top_k < logits.shape[-1]:
        # Of equal logits a step may keep one and not the other.
        excluded = excluded.maximum(scaled.topk(decoding.top_k + 1, dim=-1).values[..., -1:])
    lowest = scaled.masked_fill(kept[1] == 0, torch.inf).amin(dim=-1, keepdim=True)
    passes = (kept[0] > 0) & (scaled >= excluded + tolerance)
    return passes, (kept[1] == 0) & (scaled <= lowest - tolerance)


@torch.inference_mode()
def decoded_evidence(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    images: int,
    *,
    tolerance: float,
    seed: int = 0,
    mistake: Mistake | None = None,
) -> Iterator[Evidence]:
    """Decode at least `images` images, cycling through the prompts, and yield the evidence of each batch.

    All batches are equally large, so that a compiled engine compiles once. `mistake`: what is broken on purpose.
    """
    target = model.target
    batch = max(1, min(images, _VALUES // (target.image_tokens * target.vocab_size)))
    noise = torch.Generator().manual_seed(record_seed(seed, "places in probability", 0))
    for start in range(0, images, batch):
        slots = [(prompts[at % len(prompts)], at // len(prompts)) for at in range(start, start + batch)]
        streams = generators(model, [record_seed(seed, prompt.id, repeat) for prompt, repeat in slots])
        condition = model.condition([prompt.text for prompt, _ in slots])
        broken = mistake.arguments(decoding, target, batch) if mistake else {}
        made = decode(model, condition, decoding, streams, engine=model.engine, **broken)
        tokens = torch.stack([image.tokens for image in made]).long().to(target.device)
        forced = teacher_forced(target, condition, tokens, decoding.cfg_scale != 1)
        logits, q = guide(forced.logits.cond, forced.logits.uncond, decoding.cfg_scale), None
        if model.drafter is not None:
            drafts = [guide(one.cond, one.uncond, decoding.cfg_scale) for one in drafts_along(model.drafter, forced)]
            q = decoding_probabilities(torch.cat(drafts, dim=1), decoding)
        places = torch.rand(2, *tokens.shape, generator=noise, dtype=torch.float64).to(target.device)
        yield evidence(logits, q, tokens, [image.trace.start for image in made], decoding, places, tolerance)


def p_values(found: Sequence[Evidence], depth: int) -> dict[str, float]:
    """Return the p-value of each test of images decoded with drafts of at most `depth` levels, by the test's name.

    `support` is 1 without a token that the target cannot give, else 0. `edge` is one-sided: a Poisson number has a
    longer tail than a number of independent events with the same mean.
    """
    from scipy.stats import chi2, chisquare, poisson

    all_of = Evidence(*(np.concatenate(column) for column in zip(*found, strict=True)))
    everywhere, leans = np.ones(all_of.starts.shape, dtype=bool), bool((all_of.lean_var > 0).any())
    holds = not all_of.impossible.any()
    tests = {"support": float(holds), "surprise": _martingale(all_of.surprise, all_of.surprise_var, everywhere)}
    tests["edge"] = float(poisson.sf(int(all_of.edge.sum()) - 1, float(all_of.at_edge.sum())))
    if leans:
        tests["lean to the drafter"] = _martingale(all_of.lean, all_of.lean_var, everywhere)
        tests["wager on the drafter"] = _wager(all_of.ratio)
    for name, u in (("uniform by rank", all_of.by_rank), ("uniform by code", all_of.by_code)):
        tests[name] = float(chisquare(np.histogram(u, bins=_BINS, range=(0.0, 1.0))[0]).pvalue)
    length = all_of.starts.shape[1]
    standard = (all_of.by_rank - 0.5) * 12**0.5
    lags = [standard[:, :-lag] * standard[:, lag:] for lag in range(1, min(_LAGS, length - 1) + 1)]
    tests["lags"] = float(chi2.sf(sum(float(pairs.sum()) ** 2 / pairs.size for pairs in lags), len(lags)))
    # The tokens `offset` places behind the start of a step, whichever step commits them: a rule that decides on several
    # drafts at once owes its tokens nothing once it is known how many were accepted.
    last = everywhere.copy()
    last[:, : max(0, length - depth - 1)] = False
    places = {"last positions": [last]}
    places["depths"] = [np.roll(all_of.starts, offset, axis=1) & _from(offset, length) for offset in range(depth + 1)]
    for name, masks in places.items():
        parts = [(all_of.surprise, all_of.surprise_var), *([(all_of.lean, all_of.lean_var)] if leans else [])]
        several = [_martingale(*part, mask) for part in parts for mask in masks]
        tests[name] = min(1.0, len(several) * min(several))
    return tests


def _from(offset: int, length: int) -> NDArray[np.bool_]:
    """Which positions [N] are at least `offset`."""
    found: NDArray[np.bool_] = np.arange(length) >= offset
    return found


def _martingale(values: NDArray[np.float64], variances: NDArray[np.float64], mask: NDArray[np.bool_]) -> float:
    """The two-sided p-value of a sum of martingale differences with these conditional variances, where `mask` holds."""
    from scipy.stats import norm

    variance = float(variances[mask].sum())
    return float(2 * norm.sf(abs(float(values[mask].sum())) / variance**0.5)) if variance > 0 else 1.0


def _wager(ratios: NDArray[np.float64]) -> float:
    """The p-value of what a stake on q at the odds of p wins, token by token; the capital is shared between `_STAKES`.

    Under p the capital is not expected to grow, so 1 / capital is a p-value of however few tokens (Ville's inequality).
    """
    from scipy.special import logsumexp

    won = [float(np.log1p(stake * (ratios - 1.0)).sum()) for stake in _STAKES]
    return float(np.exp(min(0.0, np.log(len(won)) - logsumexp(won))))
