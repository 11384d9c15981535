"""Test whole images: every token against the target's own distribution p.

p comes from teacher forcing along the finished images, not from the decode steps
(docs/algorithms.md, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr, pdtrc
from torch import Tensor

from lantern_bench.analysis.tails import valid_p
from lantern_bench.analysis.token_distance import FeatureSums, p_value
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import record_seed
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.filter_edge import sure_tokens
from lantern_bench.decoding.loop import Decoded, decode, image_generators
from lantern_bench.decoding.sampling import broken_distributions, decoding_probabilities, guide
from lantern_bench.decoding.teacher_forcing import drafted_along, teacher_forced
from lantern_bench.metrics.token_sums import sums_along
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import Prompt
from lantern_bench.utils.errors import LogitsError
from lantern_bench.utils.progress import Emit, ProgressEvent, ignore_events

TESTS = 9
"""Largest number of p-values that `p_values` returns for a decoding."""
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""Margin between the two largest guided logits, by dtype, below which rounding may choose either
(docs/algorithms.md, section 6)."""
_STAKES = (0.005, 0.01, 0.02, 0.05)  # near the fractions of wrong tokens that small mistakes make
_VALUES = 2**24  # logits in memory at once


class Evidence(NamedTuple):
    """How the tokens x of images [B, N] compare with the distribution p that they must follow.

    The distributions p of the target and q of the drafter are restricted to the tokens that pass
    the filters whatever rounding does. Tokens of `edge` add nothing to the sums.
    """

    surprise: NDArray[np.float64]  # -log p(x) minus its mean, the entropy of p
    surprise_var: NDArray[np.float64]  # its variance under p
    surprise_above: NDArray[np.float64]  # its largest value of a possible token
    surprise_below: NDArray[np.float64]  # minus its smallest
    # (q - p) / (q + p) at x minus its mean; 0 without a drafter and at the first token
    lean: NDArray[np.float64]
    lean_var: NDArray[np.float64]
    lean_above: NDArray[np.float64]
    lean_below: NDArray[np.float64]
    # number of earlier images of the batch with the same token at this position, minus its mean
    alike: NDArray[np.float64]
    alike_var: NDArray[np.float64]
    alike_above: NDArray[np.float64]
    alike_below: NDArray[np.float64]
    ratio: NDArray[np.float64]  # q / p at x; 1 where `lean` is 0 and for tokens of `edge`
    at_edge: NDArray[np.float64]  # largest possible probability of a token of `edge`
    impossible: NDArray[np.bool_]  # the target cannot give the token
    edge: NDArray[np.bool_]  # rounding can change whether the token passes the filters
    starts: NDArray[np.bool_]  # a step starts with the token
    # [B, blocks m (m + 3) / 2]: sums of the m features of the distance (metrics/token_sums.py).
    # Empty under filters, at whose edge rounding would count.
    features: NDArray[np.float64]
    ranges: NDArray[np.float64]  # [B, 2 m] of the features, or empty

    def differences(self, name: str) -> Differences:
        """Return the columns of `surprise`, `lean` or `alike`."""
        endings = ("", "_var", "_above", "_below")
        return Differences(*[getattr(self, name + ending) for ending in endings])


class Differences(NamedTuple):
    """Values of tokens minus their means under p, with variances and ranges: arrays [B, N]."""

    values: NDArray[np.float64]
    variances: NDArray[np.float64]
    above: NDArray[np.float64]
    below: NDArray[np.float64]

    def where(self, mask: NDArray[np.bool_]) -> Differences:
        """Return the differences of some tokens."""
        return Differences(*[column[mask] for column in self])

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the sum of martingale differences."""
        variance = float(self.variances.sum())
        if variance <= 0:
            return 1.0
        z = abs(float(self.values.sum())) / variance**0.5
        sums, variances, above, below = (column.reshape(-1, 1) for column in self)
        return valid_p(
            float(2 * ndtr(-z)),
            sums=sums,
            variances=variances,
            above=above,
            below=below,
            counts=np.ones(sums.size),
        )


def evidence(
    logits: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    *,
    starts: Sequence[Sequence[int]],
    decoding: Decoding,
    tolerance: float,
) -> Evidence:
    """Compare the tokens of images with the logits of the target.

    Args:
        logits: Guided logits [B, N, V].
        q: The drafter's distributions [B, N - 1, V] of all tokens but the first, or None.
        tokens: int64 [B, N].
        starts: The positions in each image at which steps start.
        decoding: Temperature and filters.
        tolerance: See `edge_tolerance`.

    Raises:
        LogitsError: A distribution has NaN or no possible token.
    """
    p = decoding_probabilities(logits, decoding).double()
    for distributions in (p, q):
        if distributions is not None and broken_distributions(distributions).any():
            raise LogitsError("a forward over finished images gives logits that are no numbers")
    passes, fails = sure_tokens(logits, p, decoding, tolerance=tolerance)
    p = _restricted(p, passes)
    x = tokens[..., None]
    outside = ~passes.gather(-1, x)
    impossible = fails.gather(-1, x)

    drafted = p  # q = p without a drafter and at the first token: no lean, no gain
    if q is not None:
        drafted = torch.cat([p[:, :1], _restricted(q.double(), passes[:, 1:])], dim=1)
    chosen = torch.zeros_like(p).scatter_(-1, x, 1.0)
    functions = {
        "surprise": torch.where(p > 0, -p.log(), 0.0),
        "lean": torch.where(p > 0, (drafted - p) / (drafted + p), 0.0),
        "alike": chosen.cumsum(dim=0) - chosen,
    }
    columns = {
        "ratio": torch.where(outside, 1.0, (drafted / p).gather(-1, x)),
        "at_edge": _edge_probability(logits, passes, fails, decoding=decoding, tolerance=tolerance),
        "impossible": impossible,
        "edge": outside & ~impossible,
    }
    for name, values in functions.items():
        mean = (p * values).sum(dim=-1, keepdim=True)
        variance = (p * (values - mean).square()).sum(dim=-1, keepdim=True)
        columns[name] = torch.where(outside, 0.0, values.gather(-1, x) - mean)
        columns[f"{name}_var"] = torch.where(outside, 0.0, variance)
        possible = torch.where((p > 0) & ~outside, values - mean, 0.0)
        columns[f"{name}_above"] = possible.amax(dim=-1, keepdim=True)
        columns[f"{name}_below"] = -possible.amin(dim=-1, keepdim=True)
    positions = np.arange(tokens.shape[1])
    is_start = np.array([np.isin(positions, of_image) for of_image in starts])
    arrays: dict[str, Any] = {
        name: column.squeeze(-1).cpu().numpy() for name, column in columns.items()
    }
    empty = np.empty((len(tokens), 0))
    return Evidence(**arrays, starts=is_start, features=empty, ranges=empty)


def _restricted(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Distributions [..., V] restricted to `tokens` bool [..., V]; 0 where no token is left."""
    restricted = torch.where(tokens, probabilities, 0.0)
    tiny = torch.finfo(restricted.dtype).tiny
    return restricted / restricted.sum(dim=-1, keepdim=True).clamp_min(tiny)


def _edge_probability(
    logits: Tensor, passes: Tensor, fails: Tensor, *, decoding: Decoding, tolerance: float
) -> Tensor:
    """The largest probability [..., 1] of the tokens that rounding can let pass or fail."""
    possible = (logits.double() / decoding.temperature).masked_fill(fails, -torch.inf)
    unsure = torch.where(passes, 0.0, possible.softmax(dim=-1)).sum(dim=-1, keepdim=True)
    return unsure / (unsure + (1 - unsure) * math.exp(-tolerance))


@torch.inference_mode()
def decoded_evidence(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    images: int,
    *,
    tolerance: float,
    seed: int = 0,
    rule: ConfiguredRule | None = None,
) -> Iterator[Evidence]:
    """Decode images, cycling through the prompts, and yield the evidence of each batch.

    Two successive images have the same prompt, so that shared random numbers show as equal tokens.
    All batches have the same size, so that a compiled engine compiles once.

    Args:
        model: Decodes the images.
        prompts: Prompts of the images.
        decoding: The decoding under test.
        images: Lower limit of the number of images.
        tolerance: See `edge_tolerance`.
        seed: Seed of the run.
        rule: Replaces the rule of the decoding.
    """
    target = model.target
    batch = max(1, min(images, _VALUES // (target.image_tokens * target.vocab_size)))
    for start in range(0, images, batch):
        slots = []
        for index in range(start, start + batch):
            cycle, number = divmod(index // 2, len(prompts))
            slots.append((prompts[number], 2 * cycle + index % 2))
        condition = model.condition([prompt.text for prompt, _ in slots])
        seeds = [record_seed(seed, prompt.id, repeat) for prompt, repeat in slots]
        decoded = decode(
            model=model,
            condition=condition,
            decoding=decoding,
            generators=image_generators(model, seeds),
            engine=model.engine,
            rule=rule,
        )
        tokens = torch.stack([image.tokens for image in decoded]).long().to(target.device)
        forced = teacher_forced(
            target=target, condition=condition, tokens=tokens, guided=decoding.cfg_scale != 1
        )
        q = None if model.drafter is None else drafted_along(model.drafter, forced, decoding)
        shown = evidence(
            logits=guide(forced.logits.cond, forced.logits.uncond, decoding.cfg_scale),
            q=q,
            tokens=tokens,
            starts=[image.trace.start for image in decoded],
            decoding=decoding,
            tolerance=tolerance,
        )
        if not decoding.top_k and decoding.top_p >= 1:
            rows = sums_along(model=model, forced=forced, q=q, decoding=decoding)
            shown = shown._replace(
                features=np.array([row["feature_sums"] for row in rows]),
                ranges=np.array([row["feature_ranges"] for row in rows]),
            )
        yield shown


def joined(batches: Iterable[Evidence]) -> Evidence:
    """Return the evidence of several batches as one."""
    return Evidence(*[np.concatenate(column) for column in zip(*batches, strict=True)])


def p_values(images: Evidence, depth: int) -> dict[str, float]:
    """Return the p-value of each test, by the test's name.

    `edge` is one-sided and conservative: a Poisson distribution has a longer tail than the number
    of independent events with the same mean.

    Args:
        images: The evidence of images of one decoding.
        depth: Levels of its drafts.
    """
    sums = {"surprise": images.differences("surprise")}
    has_drafter = (images.lean_var > 0).any()
    if has_drafter:
        sums["bias toward the drafter"] = images.differences("lean")
    at_edge = images.edge.sum()
    tests = {
        "support": float(not images.impossible.any()),
        "edge": float(pdtrc(at_edge - 1, images.at_edge.sum())) if at_edge else 1.0,
    }
    for name, differences in sums.items():
        tests[name] = differences.p_value
    tests["alike in a batch"] = images.differences("alike").p_value
    count = images.ranges.shape[1] // 2
    if count:
        tests["distance"] = p_value(
            FeatureSums.of(images.features, count),
            ranges=list(images.ranges),
            tokens=[images.starts.shape[1]] * len(images.starts),
        )
    if has_drafter:
        tests["bets on the drafter"] = _wager(images.ratio)

    length = images.starts.shape[1]
    positions = np.arange(length)
    late = np.broadcast_to(positions >= length - depth - 1, images.starts.shape)
    tests["last positions"] = _smallest_p(sums.values(), [late])
    # The tokens at each distance behind the start of a step, whichever step commits them.
    depths = [
        np.roll(images.starts, offset, axis=1) & (positions >= offset)
        for offset in range(depth + 1)
    ]
    tests["depths"] = _smallest_p(sums.values(), depths)
    return tests


def _smallest_p(sums: Iterable[Differences], masks: Sequence[NDArray[np.bool_]]) -> float:
    """The smallest p-value of every sum under every mask, corrected for their number."""
    several = []
    for differences in sums:
        several += [differences.where(mask).p_value for mask in masks]
    return min(1.0, len(several) * min(several))


def _wager(ratios: NDArray[np.float64]) -> float:
    """The p-value of the gain of stakes (`_STAKES`) on q at the odds of p, token by token.

    Under p the expected capital does not grow, so 1 / capital is a p-value of any number of tokens
    (Ville's inequality).
    """
    gains = [float(np.log1p(stake * (ratios - 1.0)).sum()) for stake in _STAKES]
    log_capital = logsumexp(gains) - np.log(len(gains))
    return float(np.exp(min(0.0, -log_capital)))


# ---- Greedy identity: greedy speculation gives the tokens of greedy decoding, up to near-ties


def greedy_differences(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    decodings: Mapping[str, Decoding],
    *,
    emit: Emit = ignore_events,
) -> dict[str, list[tuple[int, float] | None]]:
    """Compare greedy speculation with greedy autoregressive decoding.

    Args:
        model: Decodes the images.
        prompts: One image is decoded for each, all together.
        decodings: Decodings at temperature 0 with the same guidance scale, by name.
        emit: Receives progress.

    Returns:
        For each decoding and prompt, the position of the first different token with the margin of
        greedy decoding there, or None.
    """
    decode_all = partial(
        decode,
        model=model,
        condition=model.condition([prompt.text for prompt in prompts]),
        generators=image_generators(model, [0] * len(prompts)),  # greedy decoding draws nothing
        engine=model.engine,
    )
    greedy = decode_all(decoding=next(iter(decodings.values())).autoregressive(), keep_logits=True)
    differences = {}
    for name, decoding in decodings.items():
        pairs = zip(greedy, decode_all(decoding=decoding), strict=True)
        differences[name] = [_first_difference(image, other) for image, other in pairs]
        emit(ProgressEvent("greedy identity", len(differences), len(decodings)))
    return differences


def _first_difference(greedy: Decoded, drafted: Decoded) -> tuple[int, float] | None:
    """The first different token, and the margin between the two largest logits there."""
    is_different = greedy.tokens != drafted.tokens
    if not is_different.any():
        return None
    assert greedy.logits is not None
    position = int(is_different.long().argmax())
    largest, second = greedy.logits[position].topk(2).values
    return position, float(largest - second)
