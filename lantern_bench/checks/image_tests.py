"""Do whole images follow the target's distribution? Tests of every token against the target's own p.

p comes from teacher forcing over the finished images, not from the decode steps (docs/algorithms.md, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import norm, poisson
from torch import Tensor

from lantern_bench.analysis.token_distance import FeatureSums
from lantern_bench.checks.tabular_model import generators
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.acceptance.bound_rule import BoundRule
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.loop import decode, decode_altered
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import broken_distributions, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import drafted_along, teacher_forced
from lantern_bench.metrics.token_sums import sums_along
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.utils.errors import LogitsError
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

# of the difference of two logits without guidance
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.04}
TESTS = 9
"""How many tests `p_values` makes of a decoding, at most."""
_STAKES = (0.005, 0.01, 0.02, 0.05)  # near the shares of wrong tokens that a small mistake makes
_VALUES = 2**24  # logits in memory at once


class Evidence(NamedTuple):
    """What the tokens x of images [B, N] show of the distribution that they were drawn from.

    p and q, of target and drafter, are those of the tokens that pass the filters whatever rounding does. Tokens of
    `edge` add nothing to the sums.
    """

    surprise: NDArray[np.float64]  # -log p(x) minus its mean, the entropy of p
    surprise_var: NDArray[np.float64]  # its variance under p
    # (q - p) / (q + p) at x minus its mean; 0 without a drafter and at the first token
    lean: NDArray[np.float64]
    lean_var: NDArray[np.float64]
    # how many earlier images of the batch have the token at x's position, minus its mean
    alike: NDArray[np.float64]
    alike_var: NDArray[np.float64]
    ratio: NDArray[np.float64]  # q / p at x; 1 where `lean` is 0 and for tokens of `edge`
    at_edge: NDArray[np.float64]  # the most that the probability of a token of `edge` can be
    impossible: NDArray[np.bool_]  # the target cannot give the token
    edge: NDArray[np.bool_]  # rounding can change whether the token passes the filters
    starts: NDArray[np.bool_]  # a step starts with the token
    # [B, m (m + 3) / 2], of the m features of the distance (metrics/distance.py); nothing under a filter, at whose edge
    # rounding would count
    features: NDArray[np.float64]


def edge_tolerance(dtype: str, decoding: Decoding) -> float:
    """Return how far rounding may move the difference of two logits."""
    scale = decoding.cfg_scale
    return _ROUNDING[dtype] * (abs(scale) + abs(scale - 1)) / decoding.temperature


def evidence(
    logits: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    starts: Sequence[Sequence[int]],
    decoding: Decoding,
    tolerance: float,
) -> Evidence:
    """Compare `tokens` int64 [B, N] with guided `logits` [B, N, V] under the filters of `decoding`.

    `q` [B, N - 1, V]: the drafter's distributions of all tokens but the first. `starts`: where the steps of each image
    start. `tolerance`: see `edge_tolerance`.
    """
    p = decoding_probabilities(logits, decoding).double()
    x = tokens[..., None]
    if bool(broken_distributions(p).any()) or (
        q is not None and bool(broken_distributions(q).any())
    ):
        raise LogitsError("a forward over finished images gives logits that are no numbers")
    passes, fails = _sure(logits=logits, p=p, decoding=decoding, tolerance=tolerance)
    wide = (logits.double() / decoding.temperature).masked_fill(fails, -torch.inf).softmax(dim=-1)
    unsure = torch.where(passes, 0.0, wide).sum(dim=-1, keepdim=True)
    at_edge = unsure / (unsure + (1 - unsure) * math.exp(-tolerance))
    p = _restricted(p, passes)
    p_x = p.gather(-1, x)
    outside = ~passes.gather(-1, x)
    impossible = fails.gather(-1, x)
    minus_log = torch.where(p > 0, -p.log(), 0.0)
    lean = torch.zeros_like(p)
    ratio = torch.ones_like(p_x)
    if q is not None:
        drafted = _restricted(q.double(), passes[:, 1:])
        lean[:, 1:] = torch.where(p[:, 1:] > 0, (drafted - p[:, 1:]) / (drafted + p[:, 1:]), 0.0)
        ratio[:, 1:] = torch.where(outside[:, 1:], 1.0, drafted.gather(-1, x[:, 1:]) / p_x[:, 1:])
    chosen = torch.zeros_like(p).scatter_(-1, x, 1.0)
    differences = []
    for g in (minus_log, lean, chosen.cumsum(dim=0) - chosen):
        mean = (p * g).sum(dim=-1, keepdim=True)
        variance = (p * (g - mean).square()).sum(dim=-1, keepdim=True)
        differences += [
            torch.where(outside, 0.0, g.gather(-1, x) - mean),
            torch.where(outside, 0.0, variance),
        ]
    columns = (*differences, ratio, at_edge, impossible, outside & ~impossible)
    is_start = np.zeros(tuple(tokens.shape), dtype=bool)
    for image, positions in enumerate(starts):
        is_start[image, list(positions)] = True
    arrays: list[NDArray[Any]] = [column.squeeze(-1).cpu().numpy() for column in columns]
    return Evidence(*[*arrays, is_start, np.empty((len(tokens), 0))])


def _restricted(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return distributions [..., V] restricted to `tokens` bool [..., V]; 0 where there are none."""
    restricted = torch.where(tokens, probabilities, 0.0)
    return restricted / restricted.sum(dim=-1, keepdim=True).clamp_min(
        torch.finfo(restricted.dtype).tiny
    )


def _sure(logits: Tensor, p: Tensor, decoding: Decoding, tolerance: float) -> tuple[Tensor, Tensor]:
    """Which tokens pass the filters, and which do not, whatever rounding does: bool as p [..., V]."""
    if not decoding.top_k and decoding.top_p >= 1:
        return p > 0, p == 0
    # under a filter that is stricter, and under one that is looser
    strict_p = p
    loose_p = p
    if (top_p := decoding.top_p) < 1:
        # Logits that move by a tolerance move the odds of a set by at most its exponential.
        moved = [
            top_p / (top_p + (1 - top_p) * math.exp(change)) for change in (tolerance, -tolerance)
        ]
        strict_p, loose_p = (
            decoding_probabilities(logits, decoding.changed(top_p=share)) for share in moved
        )
    scaled = logits.double() / decoding.temperature
    excluded = scaled.masked_fill(strict_p > 0, -torch.inf).amax(dim=-1, keepdim=True)
    if 0 < decoding.top_k < logits.shape[-1]:
        # Of equal logits a step may keep one and not the other.
        excluded = excluded.maximum(scaled.topk(decoding.top_k + 1, dim=-1).values[..., -1:])
    lowest = scaled.masked_fill(loose_p == 0, torch.inf).amin(dim=-1, keepdim=True)
    passes = (strict_p > 0) & (scaled >= excluded + tolerance)
    return passes, (loose_p == 0) & (scaled <= lowest - tolerance)


@torch.inference_mode()
def decoded_evidence(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    images: int,
    *,
    tolerance: float,
    seed: int = 0,
    rule: BoundRule | None = None,
    drafting: Callable[[Decoding, Target, int], DraftMethod] | None = None,
) -> Iterator[Evidence]:
    """Decode at least `images` images, cycling through the prompts, and yield the evidence of each batch.

    `rule` and `drafting` replace those of the decoding. Two successive images have the same prompt, so that images
    which share random numbers are alike. All batches are equally large, so that a compiled engine compiles once.
    """
    target = model.target
    batch = max(1, min(images, _VALUES // (target.image_tokens * target.vocab_size)))
    for start in range(0, images, batch):
        pairs = [(index // 2, index % 2) for index in range(start, start + batch)]
        slots = [
            (prompts[pair % len(prompts)], 2 * (pair // len(prompts)) + second)
            for pair, second in pairs
        ]
        streams = generators(
            model, [record_seed(seed, prompt.id, repeat) for prompt, repeat in slots]
        )
        condition = model.condition([prompt.text for prompt, _ in slots])
        broken = None if drafting is None else drafting(decoding, target, batch)
        decoded = decode_altered(
            model=model,
            condition=condition,
            decoding=decoding,
            generators=streams,
            engine=model.engine,
            rule=rule,
            drafting=broken,
        )
        tokens = torch.stack([image.tokens for image in decoded]).long().to(target.device)
        forced = teacher_forced(
            target=target, condition=condition, tokens=tokens, guided=decoding.cfg_scale != 1
        )
        logits = guide(forced.logits.cond, forced.logits.uncond, decoding.cfg_scale)
        q = None if model.drafter is None else drafted_along(model.drafter, forced, decoding)
        has_filters = bool(decoding.top_k) or decoding.top_p < 1
        rows = (
            [] if has_filters else sums_along(target=target, forced=forced, q=q, decoding=decoding)
        )
        features = np.array([row["feature_sums"] for row in rows] or [()] * batch)
        starts = [image.trace.start for image in decoded]
        yield evidence(
            logits=logits, q=q, tokens=tokens, starts=starts, decoding=decoding, tolerance=tolerance
        )._replace(features=features)


def p_values(batches: Sequence[Evidence], depth: int) -> dict[str, float]:
    """Return the p-value of each test of images decoded with drafts of at most `depth` levels, by the test's name.

    `edge` is one-sided: a Poisson number has a longer tail than a number of independent events with the same mean.
    """
    images = Evidence(*(np.concatenate(column) for column in zip(*batches, strict=True)))
    everywhere = np.ones(images.starts.shape, dtype=bool)
    length = images.starts.shape[1]
    sums = {"surprise": (images.surprise, images.surprise_var)}
    if (images.lean_var > 0).any():
        sums["lean to the drafter"] = (images.lean, images.lean_var)
    tests = {
        "support": float(not images.impossible.any()),
        "edge": float(poisson.sf(int(images.edge.sum()) - 1, float(images.at_edge.sum()))),
        **{name: _martingale(*values, everywhere) for name, values in sums.items()},
        "alike in a batch": _martingale(images.alike, images.alike_var, everywhere),
    }
    if width := images.features.shape[1]:
        count = next(m for m in range(1, width) if m * (m + 3) == 2 * width)
        tests["distance"] = FeatureSums.of(images.features, count).total.p_value
    if "lean to the drafter" in sums:
        tests["wager on the drafter"] = _wager(images.ratio)
    # The tokens `offset` places behind the start of a step, whichever step commits them.
    positions = np.arange(length)
    depths = [
        np.roll(images.starts, offset, axis=1) & (positions >= offset)
        for offset in range(depth + 1)
    ]
    for name, masks in (
        ("last positions", [everywhere & (positions >= length - depth - 1)]),
        ("depths", depths),
    ):
        several = [_martingale(*values, mask) for values in sums.values() for mask in masks]
        tests[name] = min(1.0, len(several) * min(several))
    return tests


def _martingale(
    values: NDArray[np.float64], variances: NDArray[np.float64], mask: NDArray[np.bool_]
) -> float:
    """The two-sided p-value of a sum of martingale differences with these conditional variances, where `mask` holds."""
    variance = float(variances[mask].sum())
    return (
        float(2 * norm.sf(abs(float(values[mask].sum())) / variance**0.5)) if variance > 0 else 1.0
    )


def _wager(ratios: NDArray[np.float64]) -> float:
    """The p-value of what stakes (`_STAKES`) on q at the odds of p win, token by token.

    Under p the capital is not expected to grow, so 1 / capital is a p-value of however few tokens (Ville's inequality).
    """
    won = [float(np.log1p(stake * (ratios - 1.0)).sum()) for stake in _STAKES]
    return float(np.exp(min(0.0, np.log(len(won)) - logsumexp(won))))


# ---- Greedy identity: speculative greedy decoding gives the tokens of greedy decoding, or differs at a near-tie

NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""By dtype: top-1 minus top-2 guided logit below which rounding may choose either (docs/algorithms.md, section 6)."""


def greedy_differences(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decodings: Mapping[str, Decoding],
    emit: Emit = ignore_events,
    batch: int = 8,
) -> dict[str, list[tuple[int, float] | None]]:
    """Compare every decoding (temperature 0, one guidance scale) with greedy decoding, of every prompt.

    Returns position and margin (of greedy decoding) of the first token that differs, or None, by the decoding's name.
    """
    differences: dict[str, list[tuple[int, float] | None]] = {name: [] for name in decodings}
    plain = next(iter(decodings.values())).autoregressive()
    for start in range(0, len(prompts), batch):
        chosen = prompts[start : start + batch]
        condition = model.condition([prompt.text for prompt in chosen])
        seeds = [0] * len(chosen)
        decode_all = partial(decode, model, condition, engine=model.engine)
        greedy = decode_all(plain, generators(model, seeds), keep_logits=True)
        for number, (name, decoding) in enumerate(decodings.items(), start=1):
            for image, drafted in zip(
                greedy, decode_all(decoding, generators(model, seeds)), strict=True
            ):
                assert image.logits is not None
                top = image.logits.topk(2).values
                differing = (image.tokens != drafted.tokens).nonzero().flatten().tolist()
                margins = (top[:, 0] - top[:, 1]).tolist()
                differences[name].append(
                    (differing[0], margins[differing[0]]) if differing else None
                )
            done = start + len(chosen) * number / len(decodings)
            emit(ProgressEvent("greedy identity", done, len(prompts)))
    return differences
